"""Tensors and views: shapes, strides, what they share, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_ops.simulator import NkiAmbiguityWarning, NkiValidationError, nki, simulate

nl, nisa = nki.language, nki.isa


def inside(check):
    """Runs `check()` inside a kernel."""
    simulate(check)()


def test_layout_of_a_new_tensor(chip):
    def check():
        t = chip.sb(128, 64)
        assert (t.shape, t.strides, t.offset, t.ndim, t.size) == ((128, 64), (64, 1), 0, 2, 8192)
        assert t.dtype == nl.float32 and t.buffer == nl.sbuf and t.is_contiguous() and not t.is_indirect()
        assert t.slice(dim=1, start=8, end=24).get_pattern() == [[64, 128], [1, 16]]
        assert t.slice(1, 8, 24).offset == 8
        assert not t[:, ::2].is_contiguous()
        assert t[3:7].is_contiguous()

    inside(check)


def test_on_chip_indexing_keeps_two_dimensions(chip):
    def check():
        t = chip.sb(64, 64, 64)
        assert t[0, 0, 10].shape == (1, 1)
        assert t[:, 0].shape == (64, 64)
        assert t[:, 0, 10].shape == (64, 1)
        assert t[0:64, 0, 0:64].shape == (64, 64)
        assert t[:, :, ::2].shape == (64, 64, 32)
        assert t[...].shape == t.shape
        assert t[0, ..., :].shape == (1, 64, 64)
        assert t[..., -1].shape == (64, 64)
        assert t[nl.ds(8, 4), :, 1:3].shape == (4, 64, 2)
        assert t[0:64, :, :].permute((0, 2, 1))[:, 0, :].shape == (64, 64)

    inside(check)


def test_hbm_indexing_drops_dimensions(chip):
    def check():
        h = chip.hbm(4, 128, 32)
        assert h[0, :, :].shape == (128, 32)
        assert h[1, 2].shape == (32,)
        assert h[1, 2, 3].shape == (1,)

    inside(check)


def test_views_share_storage(chip):
    def kernel():
        t = chip.sb(8, 64, value=0.0)
        nisa.memset(t.reshape((8, 8, 8))[:, 2, :], 1.0)
        return chip.down(t)

    out = simulate(kernel)()
    assert out[:, 16:24].min() == 1.0 and out.sum() == 64


def test_assignment_copies_and_fills(chip, rng):
    x = rng.standard_normal((8, 16)).astype(np.float32)

    def kernel(a):
        t = chip.sb(8, 32)
        t[...] = 2.0
        t[:, 0:16] = nl.load(a)
        t[:, 16:24] = t[:, 0:8]
        return chip.down(t)

    want = np.concatenate([x, x[:, :8], np.full((8, 8), 2.0)], 1)
    np.testing.assert_array_equal(simulate(kernel)(x), want)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_view_chains_equal_numpy(data, seed):
    """Random chains of views of an HBM tensor address what numpy's do."""
    x = np.random.default_rng(seed).standard_normal((4, 6, 8)).astype(np.float32)
    view, steps = x, []
    for _ in range(data.draw(st.integers(1, 4))):
        dim = data.draw(st.integers(0, view.ndim - 1))
        size = view.shape[dim]
        kind = data.draw(st.sampled_from(["slice", "permute", "split", "select", "expand"]))
        if kind == "slice" and size > 1:
            start = data.draw(st.integers(0, size - 1))
            step = data.draw(st.integers(1, 3))
            steps.append(lambda t, d=dim, a=start, b=size, s=step: t.slice(d, a, b, s))
            view = view[(slice(None),) * dim + (slice(start, size, step),)]
        elif kind == "permute":
            order = tuple(data.draw(st.permutations(range(view.ndim))))
            steps.append(lambda t, o=order: t.permute(o))
            view = view.transpose(order)
        elif kind == "split" and size % 2 == 0:
            steps.append(lambda t, d=dim: t.reshape_dim(d, (2, -1)))
            view = view.reshape(*view.shape[:dim], 2, size // 2, *view.shape[dim + 1 :])
        elif kind == "select" and view.ndim > 1:
            index = data.draw(st.integers(0, size - 1))
            steps.append(lambda t, d=dim, i=index: t.select(d, i))
            view = np.take(view, index, axis=dim)
        elif kind == "expand":
            steps.append(lambda t, d=dim: t.expand_dim(d).broadcast(d, 3))
            view = np.broadcast_to(np.expand_dims(view, dim), (*view.shape[:dim], 3, *view.shape[dim:]))

    def kernel(h):
        for step in steps:
            h = step(h)
        assert h.shape == view.shape
        out = nl.ndarray(view.shape, nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, h)
        return out

    np.testing.assert_array_equal(simulate(kernel)(x), view)


def test_reshape_works_where_no_copy_is_needed(chip):
    def check():
        h = chip.hbm(4, 6, 8)
        assert h.reshape((24, 8)).strides == (8, 1)
        assert h[:, :, 0:8].reshape((4, 48)).strides == (48, 1)
        assert h[:, 0:3, :].reshape((4, -1)).strides == (48, 1)
        assert h.flatten_dims(0, 1).shape == (24, 8)
        assert h.rearrange(("a", ("b", "c"), "d"), ("d", ("a", "b"), "c"), {"c": 3}).shape == (8, 8, 3)
        assert chip.sb(128, 24).rearrange(("b", ("h", "w")), ("b", "w", "h"), {"h": 4}).shape == (128, 6, 4)
        assert chip.sb(8, 1, 4).squeeze_dim(1).shape == (8, 4)

    inside(check)


def test_ap_addresses_the_storage(chip, rng):
    x = rng.standard_normal((16, 32)).astype(np.float32)

    def kernel(a):
        t = chip.up(a)
        out = chip.sb(8, 2, 4)
        nisa.tensor_copy(out, t.ap([[32, 8], [16, 2], [3, 4]], offset=5))
        return chip.down(out)

    p, i, j = np.mgrid[:8, :2, :4]
    np.testing.assert_array_equal(simulate(kernel)(x), x[p, 5 + 16 * i + 3 * j])


def test_ap_on_a_view_warns_that_the_documents_disagree(chip):
    def check():
        view = chip.sb(16, 32)[:, 8:16]
        with pytest.warns(NkiAmbiguityWarning, match="starts at element 8"):
            assert view.ap([[32, 16], [1, 4]], offset=2).offset == 10

    inside(check)


def test_view_reinterprets_bits(chip):
    x = np.arange(8, dtype=np.float32).reshape(2, 4)

    def kernel(a):
        t = chip.up(a)
        assert t.view(nl.uint8).shape == (2, 16)
        assert t.view(nl.uint8).view(nl.float32).shape == (2, 4)
        words = chip.sb(2, 8, dtype="uint16")
        nisa.tensor_copy(words, t.ap([[8, 2], [1, 8]], dtype=nl.uint16))
        return chip.down(t.view(nl.int32)), chip.down(words)

    ints, words = simulate(kernel)(x)
    np.testing.assert_array_equal(ints, x.view(np.int32))
    np.testing.assert_array_equal(words, x.view(np.uint16))


def test_dynamic_select_and_scalar_offset(chip, rng):
    """The index scales by the stride of `indirect_dim` in the base tensor, not in the pattern."""
    x = rng.standard_normal((8, 4, 16)).astype(np.float32)
    where = np.array([[3]], np.int32)

    def kernel(a, index):
        i = chip.up(index)
        outs = [chip.sb(4, 16), chip.sb(2, 16), chip.sb(4, 8)]
        nisa.dma_copy(outs[0], a.select(0, i))
        nisa.dma_copy(outs[1], a.ap([[16, 2], [1, 16]], offset=64, scalar_offset=i, indirect_dim=1))
        t = chip.sb(4, 128)
        nisa.dma_copy(t, a[0:8, 0:4, 0:16].reshape((4, 128)))
        nisa.tensor_copy(outs[2], t.ap([[128, 4], [1, 8]], scalar_offset=i, indirect_dim=1))
        assert a.select(0, i).is_indirect() and a[i].get_pattern() == a.select(0, i).get_pattern()
        assert a[1:3, i, 0:4].shape == (2, 4)
        return tuple(chip.down(o) for o in outs)

    first, second, third = simulate(kernel)(x, where)
    np.testing.assert_array_equal(first, x[3])
    np.testing.assert_array_equal(second, x.reshape(32, 16)[4 + 3 : 4 + 5])
    np.testing.assert_array_equal(third, x.reshape(4, 128)[:, 3:11])


def test_vector_offset_gathers_and_scatters_rows(chip, rng):
    x = rng.standard_normal((10, 16)).astype(np.float32)
    rows = np.array([[7], [0], [9], [7]], np.uint32)

    def kernel(a, index, sink):
        i = chip.up(index)
        tile, other = chip.sb(4, 16), chip.sb(4, 16)
        nisa.dma_copy(tile, a.ap([[16, 4], [1, 16]], vector_offset=i))
        nisa.dma_copy(other, a.vector_select(0, i))
        nisa.dma_copy(sink.ap([[16, 2], [1, 16]], vector_offset=i[0:2]), tile[0:2])
        return chip.down(tile), chip.down(other), sink

    sink = np.zeros((10, 16), np.float32)
    tile, other, _ = simulate(kernel)(x, rows, sink)
    np.testing.assert_array_equal(tile, x[rows[:, 0]])
    np.testing.assert_array_equal(other, tile)
    assert np.array_equal(sink[[7, 0]], x[[7, 0]]) and np.count_nonzero(sink.any(1)) == 2


def test_fresh_memory_holds_nan_or_four(chip):
    def kernel():
        return tuple(chip.down(chip.sb(4, 4, dtype=d)) for d in ("float32", "bfloat16", "int32", "uint8"))

    floats = simulate(kernel)()
    assert all(np.isnan(np.asarray(x, np.float32)).all() for x in floats[:2])
    assert all((x == 4).all() for x in floats[2:])


VIEW_RULES = {
    "bool": (lambda c: bool(c.sb(4, 4)), "cannot be a Python condition"),
    "partition step": (lambda c: c.sb(8, 4)[::2], "partition dimension has no stride"),
    "index outside": (lambda c: c.sb(8, 4)[8], "index 8 of dimension 0 is outside"),
    "slice outside": (lambda c: c.sb(8, 4)[:, 2:6], "empty or outside"),
    "empty slice": (lambda c: c.sb(8, 4)[:, 2:2], "empty or outside"),
    "bad index": (lambda c: c.sb(8, 4)[:, "a"], "no integer, slice or nl.ds"),
    "too many indices": (lambda c: c.sb(8, 4)[0, 0, 0], "index has 3 entries"),
    "permute partition": (lambda c: c.sb(8, 4).permute((1, 0)), "permute cannot act on the partition"),
    "permute": (lambda c: c.sb(8, 4).permute((0, 0)), "no permutation"),
    "broadcast partition": (lambda c: c.sb(1, 4).broadcast(0, 8), "broadcast cannot act on the partition"),
    "broadcast size": (lambda c: c.sb(8, 4).broadcast(1, 8), "has size 4, not 1"),
    "expand partition": (lambda c: c.sb(8, 4).expand_dim(0), "expand_dim cannot act on the partition"),
    "expand position": (lambda c: c.sb(8, 4).expand_dim(5), "expand_dim 5 is not a position"),
    "squeeze": (lambda c: c.sb(8, 4).squeeze_dim(1), "has size 4, not 1"),
    "reshape count": (lambda c: c.sb(8, 4).reshape((8, 5)), "does not hold the 32 elements"),
    "reshape partition": (lambda c: c.sb(8, 4).reshape((4, 8)), "changes the partition dimension"),
    "reshape copy": (lambda c: c.sb(8, 4, 6)[:, :, 0:3].reshape((8, 12)), "would need a copy"),
    "reshape_dim": (lambda c: c.sb(8, 6).reshape_dim(1, (4, -1)), "does not multiply to 6"),
    "flatten": (lambda c: c.sb(8, 4, 6)[:, :, 0:3].flatten_dims(1, 2), "are no one run"),
    "rearrange": (lambda c: c.sb(8, 4).rearrange(("a", "b"), ("a", "c")), "does not name the same"),
    "slice bounds": (lambda c: c.sb(8, 4).slice(1, 2, 6), "is not within dimension 1"),
    "select bounds": (lambda c: c.sb(8, 4).select(1, 4), "select index 4 is outside"),
    "dimension": (lambda c: c.sb(8, 4).slice(2, 0, 1), "is not one of the 2 dimensions"),
    "dynamic partition": (lambda c: c.sb(8, 4).select(0, c.sb(1, 1, dtype="int32")), "cannot act on the partition"),
    "two dynamic": (
        lambda c: c.hbm(4, 4, 4).select(0, c.sb(1, 1, dtype="int32")).select(0, c.sb(1, 1, dtype="int32")),
        "only one dynamic index",
    ),
    "vector on chip": (lambda c: c.sb(8, 4).vector_select(0, c.sb(4, 1, dtype="int32")), "HBM tensors"),
    "cut rows": (lambda c: c.hbm(8, 4).vector_select(0, c.sb(4, 1, dtype="int32"))[1:3], "cuts the indirect"),
    "ap partition stride": (lambda c: c.sb(16, 32).ap([[64, 8], [1, 32]]), "steps 64 elements between partitions"),
    "ap bounds": (lambda c: c.hbm(4, 4).ap([[4, 4], [1, 4]], offset=1), "out of bounds"),
    "ap partition bounds": (lambda c: c.sb(4, 8).ap([[8, 3], [1, 8]], offset=2), "runs out of a partition"),
    "ap pattern": (lambda c: c.hbm(4, 4).ap([[4, 0]]), "positive counts"),
    "ap both offsets": (
        lambda c: c.hbm(4, 4).ap([[4, 2]], scalar_offset=c.sb(1, 1), vector_offset=c.sb(1, 1)),
        "scalar_offset or vector_offset",
    ),
    "ap vector on chip": (lambda c: c.sb(4, 4).ap([[4, 4], [1, 1]], vector_offset=c.sb(4, 1)), "needs an HBM tensor"),
    "view size": (lambda c: c.sb(4, 3, dtype="uint8").view(nl.float32), "no whole number of float32"),
    "view strides": (lambda c: c.hbm(4, 3, dtype="uint8")[:, 0:2].view(nl.uint16), "strides .* no whole number"),
    "view indirect": (lambda c: c.hbm(4, 4).select(0, c.sb(1, 1, dtype="int32")).view(nl.int32), "indirect view"),
    "tensor indirection": (lambda c: c.sb(4, 4).indirect(c.sb(4, 1)), "NeuronCore-v4"),
    "partitions": (lambda c: c.sb(256, 4), "ndarray partition dimension 256 exceeds maximum 128"),
    "one dimension": (lambda c: c.sb(4), "at least 2 dimensions"),
    "shape": (lambda c: c.hbm(4, 0), "must be positive integers"),
    "buffer name": (lambda c: nl.ndarray((4, 4), nl.float32, "sbuf"), "must be nl.sbuf, nl.psum"),
    "trn3 dtype": (lambda c: c.sb(4, 4, dtype=nl.float8_e4m3fn_x4), "needs NeuronCore-v4"),
    "unknown dtype": (lambda c: c.sb(4, 4, dtype="float64"), "is not an NKI type"),
}


@pytest.mark.parametrize("rule", VIEW_RULES)
def test_view_rules(chip, rule):
    breaks, message = VIEW_RULES[rule]
    error = TypeError if rule == "bool" else NkiValidationError
    with pytest.raises(error, match=message):
        simulate(lambda: breaks(chip) and None)()


def test_nki_objects_take_fields_like_dataclasses():
    class Config(nl.NKIObject):
        size: int
        step: int = 2
        count = 3

    assert Config(1).count == 3
    assert (Config(1).size, Config(1, count=5).count, Config(size=4).step) == (1, 5, 2)
    with pytest.raises(TypeError, match="has the fields"):
        Config(1, width=2)

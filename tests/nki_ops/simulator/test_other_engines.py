"""What instructions of ScalarE, GpSimdE, TensorE and the DMA compute, against numpy."""

import math

import ml_dtypes
import numpy as np
import pytest

from nki_ops.simulator import NkiRangeWarning, NkiValidationError, nki, simulate

nl, nisa = nki.language, nki.isa
BF16 = ml_dtypes.bfloat16


def close(got, want, tol=1e-6):
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol)


@pytest.fixture
def x(rng):
    return rng.standard_normal((32, 64)).astype(np.float32)


ACTIVATIONS = {
    "copy": lambda x: x,
    "square": np.square,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "exp": np.exp,
    "sin": np.sin,
    "arctan": np.arctan,
    "abs": np.abs,
    "sign": np.sign,
    "erf": np.vectorize(math.erf),
    "erf_dx": lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_apprx_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_apprx_sigmoid": lambda x: x / (1 + np.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.log1p(np.exp(x)),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
}
DERIVATIVES = {"gelu_dx": "gelu", "silu_dx": "silu", "gelu_apprx_sigmoid_dx": "gelu_apprx_sigmoid"}
POSITIVE = {"log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: x**-0.5, "reciprocal": lambda x: 1 / x}


@pytest.mark.parametrize("name", [*ACTIVATIONS, *POSITIVE, *DERIVATIVES])
def test_activation_functions(chip, name):
    x = np.linspace(-1.5, 1.5, 64, dtype=np.float32).reshape(4, 16)
    x = np.abs(x) + 0.1 if name in POSITIVE else x
    got = chip.run(lambda a, d: nisa.activation(d, getattr(nl, name), a), x, out=(x.shape, "float32"))
    wide = x.astype(np.float64)
    if name in DERIVATIVES:
        f = ACTIVATIONS[DERIVATIVES[name]]
        want = (f(wide + 1e-5) - f(wide - 1e-5)) / 2e-5
    else:
        want = (ACTIVATIONS | POSITIVE)[name](wide)
    close(got, want, 2e-6)


def test_activation_scale_bias_and_sum(chip, x):
    bias = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
    scale = np.linspace(0.5, 2, 32, dtype=np.float32)[:, None]

    def body(a, bias, scale, d):
        total = chip.sb(32, 1)
        nisa.activation_reduce(d, nl.exp, a, nl.add, total, bias=bias, scale=scale)
        nisa.tensor_scalar(d, d, nl.multiply, 1.0, op1=nl.subtract, operand1=total)

    want = np.exp(x * scale + bias)
    close(chip.run(body, x, bias, scale, out=(x.shape, "float32")), want - want.sum(1, keepdims=True), 1e-4)


def test_activation_registers_live_from_call_to_call(chip, x):
    cmd = nisa.reduce_cmd

    def body(a, d):
        scratch = chip.sb(32, 32)
        nisa.activation(scratch, nl.square, a[:, :32], reduce_op=nl.add, reduce_cmd=cmd.reset_reduce)
        nisa.activation(scratch, nl.exp, a[:, :32])  # idle leaves them alone
        nisa.activation(scratch, nl.square, a[:, 32:], reduce_op=nl.add, reduce_res=d, reduce_cmd=cmd.reduce)

    close(chip.run(body, x, out=((32, 1), "float32"))[:, 0], (x**2).sum(1), 1e-5)


def test_sum_into_a_dummy_destination(chip, x):
    """A stride-0 destination takes the results nobody wants."""

    def body(a, d):
        dummy = chip.sb(32, 1)
        nisa.activation_reduce(dummy.broadcast(1, 64), nl.square, a, nl.add, d)

    close(chip.run(body, x, out=((32, 1), "float32"))[:, 0], (x**2).sum(1), 1e-5)


def test_sin_outside_pi_follows_the_cubic_of_the_hardware(chip):
    x = np.array([[9.0, -9.0, 3.0]], np.float32)
    with pytest.warns(NkiRangeWarning, match="sin got 2 values outside"):
        got = chip.run(lambda a, d: nisa.activation(d, nl.sin, a), x, out=((1, 3), "float32"))
    close(got, [[27.65, -27.65, math.sin(3.0)]], 1e-3)
    close(chip.run(lambda a: nl.sin(a), x), np.sin(x), 1e-5)  # the wrapper reduces its range first


@pytest.mark.parametrize("name, value", [("log", 0.0), ("rsqrt", 0.0), ("reciprocal", 2.0**43), ("sqrt", 2.0**119)])
def test_limited_activations_give_nan_outside(chip, name, value):
    x = np.array([[value, 1.0]], np.float32)
    with pytest.warns(NkiRangeWarning, match=f"{name} got 1 values"):
        got = chip.run(lambda a, d: nisa.activation(d, getattr(nl, name), a), x, out=((1, 2), "float32"))
    assert np.isnan(got[0, 0]) and np.isfinite(got[0, 1])


def test_reciprocal_of_vector_engine_has_no_range(chip):
    x = np.array([[2.0**60, 0.0, -4.0]], np.float32)
    close(chip.run(lambda a, d: nisa.reciprocal(d, a), x, out=((1, 3), "float32")), [[2.0**-60, np.inf, -0.25]])


def test_iota_and_affine_select(chip, x):
    got = chip.run(
        lambda a, d: nisa.iota(d, [[8, 4], [1, 2]], offset=3, channel_multiplier=100), x, out=((16, 4, 2), "int32")
    )
    p, i, j = np.mgrid[:16, :4, :2]
    np.testing.assert_array_equal(got, 3 + 100 * p + 8 * i + j)
    causal = chip.run(
        lambda a, d: nisa.affine_select(d, [[-1, 64]], 1, a, -9.0, cmp_op=nl.greater_equal, offset=10),
        x,
        out=(x.shape, "float32"),
    )
    p, j = np.mgrid[:32, :64]
    np.testing.assert_array_equal(causal, np.where(10 + p - j >= 0, x, np.float32(-9)))


def test_stream_shuffle(chip, x):
    y = np.concatenate([x, x + 100])
    mask = [31] + [255] + [5] * 30

    def body(a, d):
        nisa.memset(d, -1.0)
        nisa.nc_stream_shuffle(d, a, mask)

    got = chip.run(body, y, out=(y.shape, "float32"))
    for first in (0, 32):
        np.testing.assert_array_equal(got[first], y[first + 31])
        assert (got[first + 1] == -1).all()
        np.testing.assert_array_equal(got[first + 2 : first + 32], np.repeat(y[first + 5 : first + 6], 30, 0))


def test_gathers(chip, rng):
    x = rng.standard_normal((32, 24)).astype(np.float32)
    index = rng.integers(0, 24, (32, 6)).astype(np.uint32)
    got = chip.run(lambda a, i, d: nisa.nc_n_gather(d, a, i), x, index, out=((32, 6), "float32"))
    np.testing.assert_array_equal(got, np.take_along_axis(x, index.astype(int), 1))
    local = rng.integers(0, 12, (32, 1)).astype(np.uint16)
    got = chip.run(
        lambda a, i, d: nisa.local_gather(d, a, i, num_elem_per_idx=2, num_valid_indices=5),
        x,
        local,
        out=((32, 10), "float32"),
    )
    for core in (0, 16):
        columns = np.concatenate([[2 * i, 2 * i + 1] for i in local[core : core + 5, 0].astype(int)])
        np.testing.assert_array_equal(got[core : core + 16], x[core : core + 16][:, columns])


def test_top_eight(chip):
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    vals = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    got = chip.run(lambda a, d: nisa.max8(d, a), data, out=((1, 8), "float32"))
    np.testing.assert_array_equal(got, [[8] * 7 + [4]])
    got = chip.run(lambda a, v, d: nisa.nc_find_index8(d, a, v), data, vals, out=((1, 8), "uint32"))
    np.testing.assert_array_equal(got, [[2, 4, 5, 6, 7, 8, 9, 10]])
    absent = np.array([[9] + [1] * 7], np.float32)
    got = chip.run(lambda a, v, d: nisa.nc_find_index8(d, a, v), data, absent, out=((1, 8), "uint16"))
    np.testing.assert_array_equal(got[0, :2], [0xFFFF, 0])

    def replace(a, v, d):
        where = chip.sb(1, 8, dtype="uint32")
        nisa.nc_match_replace8(d[:, :11], a, v, -1.0, dst_idx=where)
        nisa.tensor_copy(d[:, 11:], where)

    got = chip.run(replace, data, vals, out=((1, 19), "float32"))
    np.testing.assert_array_equal(got, [[1, 2, -1, 4] + [-1] * 7 + [2, 10, 9, 8, 7, 6, 5, 4]])


def test_nonzero_with_count_works_on_every_sixteenth_partition(chip):
    x = np.zeros((32, 8), np.float32)
    x[:, [1, 2, 5]] = 1

    def body(a, d):
        nisa.memset(d, 7)
        nisa.nonzero_with_count(d, a, index_offset=16)

    got = chip.run(body, x, out=((32, 9), "int32"))
    np.testing.assert_array_equal(got[16], [17, 18, 21, -1, -1, -1, -1, -1, 3])
    assert (got[1:16] == 7).all()


def test_matmul_and_transposes(chip, rng):
    s, m = rng.standard_normal((64, 32)).astype(BF16), rng.standard_normal((64, 100)).astype(BF16)
    got = chip.run(lambda s, m: (p := chip.ps(32, 100), nisa.nc_matmul(p, s, m))[0], s, m)
    close(got, s.astype(np.float32).T @ m.astype(np.float32), 1e-4)

    def transpose(a):
        out = chip.ps(32, 64, dtype="bfloat16")
        nisa.nc_transpose(out, a)
        return out

    np.testing.assert_array_equal(chip.run(transpose, s), s.T.astype(np.float64))

    def by_identity(a):
        out = chip.ps(32, 64, dtype="bfloat16")
        nisa.nc_matmul(out, a, nl.shared_identity_matrix(64, nl.bfloat16), is_transpose=True)
        return out

    s[3, 4] = np.nan
    np.testing.assert_array_equal(chip.run(by_identity, s), s.T.astype(np.float64))
    small = rng.standard_normal((32, 16)).astype(np.float32)
    got = chip.run(lambda a, d: nisa.nc_transpose(d, a), small, out=((16, 32), "float32"))
    np.testing.assert_array_equal(got, small.T)


def test_double_row_contracts_two_rows_a_partition(chip, rng):
    f8 = ml_dtypes.float8_e4m3
    s, m = rng.standard_normal((64, 2, 8)).astype(f8), rng.standard_normal((64, 2, 16)).astype(f8)

    def body(s, m):
        out = chip.ps(8, 16)
        nisa.nc_matmul(out, s, m, perf_mode=nisa.matmul_perf_mode.double_row)
        return out

    close(chip.run(body, s, m), np.einsum("kim,kin->mn", s.astype(np.float32), m.astype(np.float32)), 1e-4)


def test_psum_accumulates_where_matmuls_overlap(chip, rng):
    s, m = rng.standard_normal((32, 16)).astype(np.float32), rng.standard_normal((32, 64)).astype(np.float32)
    product = s.T @ m

    def body(s, m):
        p = chip.ps(16, 96)
        nisa.nc_matmul(p[:, 0:64], s, m)
        nisa.nc_matmul(p[:, 32:96], s, m)  # half new, half on top
        return p

    want = np.zeros((16, 96), np.float32)
    want[:, :64] += product
    want[:, 32:] += product
    close(chip.run(body, s, m), want, 1e-4)

    def flags(s, m):
        p = chip.ps(16, 64)
        for i in range(3):
            nisa.nc_matmul(p, s, m, accumulate=i > 0)
        nisa.nc_matmul(p[:, :8], s, m[:, :8], accumulate=False)
        return p

    want = 3 * product
    want[:, :8] = product[:, :8]
    close(chip.run(flags, s, m), want, 1e-4)

    def zeroed(s, m):  # as public kernels do: overwriting zeros and adding to them agree
        p = chip.ps(16, 64)
        nisa.memset(p, 0.0)
        nisa.nc_matmul(p, s, m)
        nisa.nc_matmul(p, s, m)
        return p

    close(chip.run(zeroed, s, m), 2 * product, 1e-4)


def test_dma_copy_reorders_and_casts(chip, rng):
    x = rng.standard_normal((4, 8, 6)).astype(np.float32)

    def kernel(a):
        tile = chip.sb(6, 32, dtype="bfloat16")
        nisa.dma_copy(tile, a.permute((2, 0, 1)))
        return chip.down(tile)

    np.testing.assert_array_equal(simulate(kernel)(x), x.transpose(2, 0, 1).reshape(6, 32).astype(BF16))


def test_dma_transpose(chip, rng):
    for shape, axes in [((48, 32), (1, 0)), ((6, 4, 16), (2, 1, 0)), ((6, 2, 3, 16), (3, 1, 2, 0))]:
        x = rng.standard_normal(shape).astype(BF16)
        want = x.transpose(axes)
        got = simulate(lambda a, w=want, s=axes: _transposed(chip, a, w.shape, s))(x)
        np.testing.assert_array_equal(got, want)
    table = rng.standard_normal((40, 64)).astype(BF16)
    rows = rng.integers(0, 40, (16, 1)).astype(np.uint32)

    def gathered(a, index):
        return _transposed(chip, a.ap([[64, 16], [1, 64]], vector_offset=chip.up(index)), (64, 16), (1, 0))

    np.testing.assert_array_equal(simulate(gathered)(table, rows), table[rows[:, 0]].T)


def _transposed(chip, source, shape, axes):
    tile = chip.sb(*shape, dtype="bfloat16")
    nisa.dma_transpose(tile, source, axes=axes)
    return chip.down(tile)


def test_out_of_bounds_indices_skip_or_raise(chip, rng):
    x = rng.standard_normal((4, 8)).astype(np.float32)
    rows, far = np.array([[1], [9], [3]], np.int32), np.array([[7]], np.int32)

    def kernel(a, rows, far):
        tile, same = chip.sb(3, 8, value=-1.0), chip.sb(2, 8, value=-2.0)
        skip = nisa.oob_mode.skip
        nisa.dma_copy(tile, a.ap([[8, 3], [1, 8]], vector_offset=chip.up(rows)), oob_mode=skip)
        nisa.dma_copy(same, a.ap([[8, 2], [1, 8]], scalar_offset=chip.up(far), indirect_dim=0), oob_mode=skip)
        return chip.down(tile), chip.down(same)

    tile, same = simulate(kernel)(x, rows, far)
    np.testing.assert_array_equal(tile, [x[1], np.full(8, -1), x[3]])
    assert (same == -2).all()


def test_skipping_leaves_the_destination_alone(chip, rng):
    x = rng.standard_normal((4, 8)).astype(np.float32)
    rows, far = np.array([[1], [9]], np.int32), np.array([[7]], np.int32)
    table = rng.standard_normal((20, 16)).astype(BF16)
    picks = np.arange(10, 26, dtype=np.uint32)[:, None]  # the last six are beyond the table

    def kernel(a, rows, far, table, picks):
        skip, tile = nisa.oob_mode.skip, chip.up(a[0:2])
        target, other = nl.ndarray((4, 8), nl.float32, nl.shared_hbm), nl.ndarray((4, 8), nl.float32, nl.shared_hbm)
        for t in (target, other):
            nisa.dma_copy(t, chip.sb(4, 8, value=-1.0))
        nisa.dma_copy(target.ap([[8, 2], [1, 8]], vector_offset=chip.up(rows)), tile, oob_mode=skip)
        nisa.dma_copy(other.ap([[8, 2], [1, 8]], scalar_offset=chip.up(far)), tile, oob_mode=skip)
        turned = chip.sb(16, 16, dtype="bfloat16", value=5.0)
        nisa.dma_transpose(turned, table.ap([[16, 16], [1, 16]], vector_offset=chip.up(picks)), oob_mode=skip)
        return target, other, chip.down(turned)

    target, other, turned = simulate(kernel)(x, rows, far, table, picks)
    np.testing.assert_array_equal(target[1], x[0])
    assert (target[[0, 2, 3]] == -1).all() and (other == -1).all()
    np.testing.assert_array_equal(turned[:, :10], table[10:].T)
    assert (turned[:, 10:].astype(np.float32) == 5).all()


def test_dma_compute_sums_gathers_and_scatters(chip, rng):
    x, y = (rng.standard_normal((8, 4)).astype(np.float32) for _ in "xy")
    rows = np.array([[5], [2]], np.uint32)

    def kernel(a, b, rows, table):
        i, total = chip.up(rows), chip.sb(8, 4)
        nisa.dma_compute(total, [a, b, a], nl.add)
        picked = chip.up(b[0:2])
        nisa.dma_compute(picked, [a.ap([[4, 2], [1, 4]], vector_offset=i), picked], nl.add)
        at = table.ap([[4, 2], [1, 4]], vector_offset=i)
        nisa.dma_compute(at, [at, chip.up(b[0:2])], nl.add)
        return chip.down(total), chip.down(picked), table

    table = x.copy()
    total, picked, _ = simulate(kernel)(x, y, rows, table)
    close(total, 2 * x + y)
    close(picked, y[:2] + x[[5, 2]])
    want = x.copy()
    want[[5, 2]] += y[:2]
    close(table, want)


def test_broadcast_to_repeats_partitions_by_matmul(chip, rng):
    x = rng.standard_normal((1, 2, 300)).astype(np.float32)

    def kernel(a):
        return chip.down(nl.copy(nl.broadcast_to(nl.load(a), (16, 2, 300))))

    np.testing.assert_array_equal(simulate(kernel)(x), np.broadcast_to(x, (16, 2, 300)))
    with pytest.raises(NkiValidationError, match="needs a tile of one"):
        simulate(lambda: nl.broadcast_to(chip.sb(2, 4), (4, 4)) and None)()


def test_tensor_creation(chip, capsys, tmp_path):
    np.save(tmp_path / "table.npy", np.arange(6, dtype=np.int32).reshape(2, 3))

    def kernel():
        like = nl.zeros_like(chip.sb(2, 3, dtype="int32"))
        table = nl.shared_constant(str(tmp_path / "table.npy"))
        assert nl.empty_like(like, dtype=nl.float32).dtype == nl.float32
        assert nl.is_hbm(table.buffer) and nl.is_on_chip(like.buffer) and nl.is_sbuf(like.buffer)
        assert not nl.is_psum(like.buffer) and nl.ds(2, 3) == slice(2, 5)
        nl.device_print("table", table)
        ones = nl.ones((2, 3), nl.float32, nl.shared_hbm)
        return ones, chip.down(like), chip.down(chip.up(table)), chip.down(nl.shared_identity_matrix(2, nl.float32))

    ones, zeros, table, eye = simulate(kernel)()
    assert (ones == 1).all() and (zeros == 0).all() and (eye == np.eye(2)).all()
    np.testing.assert_array_equal(table, np.arange(6).reshape(2, 3))
    assert "table [[0 1 2]" in capsys.readouterr().out


def test_tile_sizes(monkeypatch):
    sizes = nl.tile_size
    assert (sizes.pmax, sizes.gemm_stationary_fmax, sizes.gemm_moving_fmax) == (128, 128, 512)
    assert (sizes.psum_bank_fmax, sizes.psum_bank_fmax_bytes, sizes.psum_num_banks) == (512, 2048, 8)
    assert (sizes.sbuf_fmax_bytes, sizes.bn_stats_fmax) == (212728, 512)
    with pytest.warns(DeprecationWarning, match="psum_bank_fmax"):
        assert sizes.psum_fmax == 512
    with pytest.warns(DeprecationWarning, match="sbuf_fmax_bytes"):
        assert sizes.total_available_sbuf_size == 212728
    monkeypatch.setenv("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE", "true")
    assert sizes.psum_num_banks == 7


def test_wrappers_of_the_language(chip, rng):
    x, y = (rng.standard_normal((16, 32)).astype(np.float32) for _ in "xy")

    def kernel(a, b):
        a, b = nl.load(a), nl.load(b)
        flat = nl.ndarray((32, 16), nl.float32, nl.shared_hbm)
        nl.store(flat, nl.load_transpose2d(nl.store(nl.zeros((16, 32), nl.float32, nl.hbm), a)))
        outs = [
            nl.load(flat),
            nl.rsqrt(nl.square(a)),
            nl.multiply(nl.add(a, b), 2.0),
            nl.subtract(1.0, a),
            nl.exp(a),
            nl.softmax(a),
            nl.where(nl.greater(a, b), a, b),
            nl.copy(nl.matmul(a, b, transpose_x=True)),
            nl.copy(nl.transpose(a)),
            nl.mean(a, 1, keepdims=True),
            nl.max(a, 1),
            nl.reciprocal(nl.full((16, 2), 4.0, nl.float32)),
            nl.copy(nl.broadcast_to(nl.expand_dims(nl.sum(a, 1), 1), (16, 1, 1)), dtype=nl.bfloat16),
            nl.min(a, 1),
            nl.prod(a, 1),
        ]
        return tuple(chip.down(o) for o in outs)

    soft = np.exp(x - x.max(1, keepdims=True))
    want = [
        x.T,
        1 / np.abs(x),
        2 * (x + y),
        1 - x,
        np.exp(x),
        soft / soft.sum(1, keepdims=True),
        np.maximum(x, y),
        x.T @ y,
        x.T,
        x.mean(1, keepdims=True),
        x.max(1)[:, None],
        np.full((16, 2), 0.25),
        x.sum(1)[:, None, None].astype(BF16).astype(np.float32),
        x.min(1)[:, None],
        x.prod(1)[:, None],
    ]
    for got, expected in zip(simulate(kernel)(x, y), want, strict=True):
        close(np.asarray(got, np.float32), expected, 1e-5)

"""attention against a float64 oracle: tables, valid counts, tails, garbage, order of keys, range of scores."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_ops.kernels import attention

VARIANTS = ["shift", "online"]
TOLERANCE = {np.float32: 1e-5, ml_dtypes.bfloat16: 2e-2}


def oracle(q, pools, table, n_valid):
    k, v = (np.concatenate([pool[i] for pool in pools])[table[:n_valid]].astype(np.float64) for i in (0, 1))
    q = q.astype(np.float64) / np.sqrt(q.shape[-1])
    scores = np.einsum("btnd,pbnsd->bntps", q, k)
    weights = np.exp(scores - scores.max((-2, -1), keepdims=True))
    weights /= weights.sum((-2, -1), keepdims=True)
    return np.einsum("bntps,pbnsd->btnd", weights, v)


def draw(rng, sizes, queries, batch=1, heads=2, tokens=5, dim=8, dtype=np.float32):
    pools = [[rng.standard_normal((n, batch, heads, tokens, dim)).astype(dtype) for _ in "kv"] for n in sizes]
    return rng.standard_normal((batch, queries, heads, dim)).astype(dtype), pools


def flat(pools):
    return [array for pool in pools for array in pool]


def count(n):
    return np.array([n], np.int32)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    shape=st.fixed_dictionaries(
        {
            "batch": st.integers(1, 2),
            "heads": st.integers(1, 3),
            "tokens": st.sampled_from([1, 5, 127, 128, 129, 300]),
            "dim": st.sampled_from([2, 8, 31]),
            "dtype": st.sampled_from(list(TOLERANCE)),
        }
    ),
    queries=st.sampled_from([1, 2, 7, 128, 131]),
    places=st.integers(1, 5),
    cores=st.sampled_from([1, 2]),
    variant=st.sampled_from(VARIANTS),
    data=st.data(),
)
def test_output_equals_the_oracle(run_kernel, error, seed, sizes, shape, queries, places, cores, variant, data):
    rng = np.random.default_rng(seed)
    q, pools = draw(rng, sizes, queries, **shape)
    table = rng.integers(0, sum(sizes), places).astype(np.int32)
    n_valid = data.draw(st.integers(1, places))
    out = run_kernel(attention, q, table, count(n_valid), *flat(pools), cores=cores, variant=variant)
    assert out.dtype == q.dtype
    assert error(out, oracle(q, pools, table, n_valid)) < TOLERANCE[shape["dtype"]]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "queries, tokens, dim, dtype, cores",
    [
        (1100, 130, 128, ml_dtypes.bfloat16, 1),
        (1027, 40, 16, np.float32, 1),
        (1301, 3, 4, np.float32, 2),
        (2, 8400, 2, np.float32, 1),
    ],
)
def test_many_tiles_of_queries_and_keys(run_kernel, error, rng, queries, tokens, dim, dtype, cores, variant):
    q, pools = draw(rng, [2, 1], queries, tokens=tokens, dim=dim, dtype=dtype)
    table = np.array([2, 0, 1], np.int32)
    out = run_kernel(attention, q, table, count(3), *flat(pools), cores=cores, variant=variant)
    assert error(out, oracle(q, pools, table, 3)) < TOLERANCE[dtype]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_garbage_beyond_the_valid_blocks_never_reaches_the_output(run_kernel, rng, garbage, variant):
    q, pools = draw(rng, [3, 1, 2], 130, tokens=140)
    table = np.array([1, 4, 0, 2, 3, 5], np.int32)
    clean = run_kernel(attention, q, table, count(2), *flat(pools), variant=variant)
    for pool, blocks in zip(pools, ([0, 2], [0], [1]), strict=True):
        for array in pool:
            array[blocks] = garbage
    assert run_kernel(attention, q, table, count(2), *flat(pools), variant=variant).tobytes() == clean.tobytes()


@pytest.mark.parametrize("entry", [99, -1])
def test_entries_beyond_the_valid_ones_may_be_anything(run_kernel, rng, entry):
    q, pools = draw(rng, [2], 3)
    outs = [run_kernel(attention, q, np.array([1, e], np.int32), count(1), *flat(pools)) for e in (0, entry)]
    assert outs[0].tobytes() == outs[1].tobytes()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_order_of_blocks_and_pools_changes_nothing(run_kernel, error, rng, variant):
    q, pools = draw(rng, [2, 2], 131, tokens=129)
    table = np.array([3, 0, 2], np.int32)
    joined = [np.concatenate(arrays) for arrays in zip(*pools, strict=True)]
    first, *others = (
        run_kernel(attention, q, order, count(3), *arrays, variant=variant)
        for order, arrays in [
            (table, flat(pools)),
            (table[[1, 2, 0]], flat(pools)),
            ((table + 2) % 4, flat(pools[::-1])),
            (table, joined),
        ]
    )
    assert all(error(other, first) < 1e-6 for other in others)


def test_two_cores_equal_one(run_kernel, error, rng):
    q, pools = draw(rng, [2, 1], 259, tokens=30)
    one, two = (
        run_kernel(attention, q, np.arange(3, dtype=np.int32), count(3), *flat(pools), cores=n) for n in (1, 2)
    )
    assert error(two, one) < 1e-6


def test_row_sums_are_those_of_the_weights(run_kernel, error, rng):
    q, pools = draw(rng, [2], 300, tokens=30)
    table = np.array([0, 1], np.int32)
    out, sums = run_kernel(attention, q, table, count(2), *flat(pools), row_sums=True)
    k = np.concatenate([pools[0][0][i] for i in (0, 1)], axis=2).astype(np.float64)
    weights = np.exp(np.einsum("btnd,bnsd->btns", q.astype(np.float64), k) / np.sqrt(8))  # scores this small: no shift
    assert error(sums, weights.sum(-1)) < 1e-5
    assert out.tobytes() == run_kernel(attention, q, table, count(2), *flat(pools)).tobytes()


def rows_at(bound, gap, dim=8):
    """One query and two keys whose bound is `bound` and whose best score is `gap` below it."""
    q = np.zeros((1, 1, 1, dim), np.float32)
    q[..., 0] = np.sqrt(bound * np.sqrt(dim))
    k = np.zeros((1, 1, 1, 2, dim), np.float32)
    k[..., 0] = q[..., 0] * (bound - gap) / bound
    k[..., 1, 0] -= 1 / q[..., 0].item()
    k[..., 0, 1] = np.sqrt(max(0.0, q[..., 0].item() ** 2 - k[..., 0, 0].item() ** 2))
    v = np.random.default_rng(0).standard_normal(k.shape).astype(np.float32)
    return q, [[k, v]]


@pytest.mark.parametrize("bound, gap", [(10, 0), (69, 69), (300, 0), (5000, 0), (300, 100), (1000, 138)])
def test_scores_within_the_safe_range(run_kernel, error, bound, gap):
    """However large the scores: a row whose best score is less than 140 below the bound keeps its weights."""
    q, pools = rows_at(bound, gap)
    table = np.zeros(1, np.int32)
    out, sums = run_kernel(attention, q, table, count(1), *flat(pools), row_sums=True)
    assert 1e-30 < sums.item() < 1e38
    assert error(out, oracle(q, pools, table, 1)) < 1e-3  # float32 scores of 5000 are good to 5e-4


@pytest.mark.parametrize("gap, lost", [(150, False), (165, True), (300, True)])
def test_scores_beyond_the_safe_range_show(run_kernel, gap, lost):
    q, pools = rows_at(1000, gap)
    out, sums = run_kernel(attention, q, np.zeros(1, np.int32), count(1), *flat(pools), row_sums=True)
    assert sums.item() < 1e-30
    assert np.isfinite(out).all() != lost


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-3), (ml_dtypes.bfloat16, 2e-2)])
@pytest.mark.parametrize("bound, gap", [(10, 0), (5000, 0), (1000, 300), (9000, 8000)])
def test_the_online_variant_takes_scores_of_any_range(run_kernel, error, bound, gap, dtype, tolerance):
    q, pools = rows_at(bound, gap)
    q, pools = q.astype(dtype), [[x.astype(dtype) for x in pools[0]]]
    table = np.zeros(1, np.int32)
    out, sums = run_kernel(attention, q, table, count(1), *flat(pools), variant="online", row_sums=True)
    assert 1e-3 < sums.item() < 1e3
    assert error(out, oracle(q, pools, table, 1)) < tolerance


def test_the_online_maximum_may_rise_and_fall_from_block_to_block(run_kernel, error, rng):
    q, pools = draw(rng, [4], 130, tokens=140)
    pools[0][0] *= np.array([1, 300, 0, 40], np.float32).reshape(-1, 1, 1, 1, 1)
    table = np.arange(4, dtype=np.int32)
    out = run_kernel(attention, q, table, count(4), *flat(pools), variant="online")
    assert error(out, oracle(q, pools, table, 4)) < 1e-4


def test_an_unknown_variant_is_refused(run_kernel, rng):
    q, pools = draw(rng, [1], 1)
    with pytest.raises(AssertionError, match="is exact"):
        run_kernel(attention, q, np.zeros(1, np.int32), count(1), *flat(pools), variant="exact")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": ((1, 4, 2, 8), np.float16)}, "float32 or bfloat16"),
        ({"q": ((1, 4, 3, 8), np.float32)}, "must hold blocks"),
        ({"k": ((2, 1, 2, 5, 8), ml_dtypes.bfloat16)}, "dtype of the queries"),
        ({"v": ((3, 1, 2, 5, 8), np.float32)}, "shape of keys"),
        ({x: ((1, 4, 2, 130) if x == "q" else (2, 1, 2, 5, 130), np.float32) for x in "qkv"}, "exceeds 128"),
    ],
)
def test_inputs_that_the_kernel_cannot_take_are_refused(run_kernel, change, message):
    kinds = {"q": ((1, 4, 2, 8), np.float32)} | dict.fromkeys("kv", ((2, 1, 2, 5, 8), np.float32)) | change
    q, k, v = (np.ones(*kinds[x]) for x in "qkv")
    with pytest.raises(AssertionError, match=message):
        run_kernel(attention, q, np.zeros(1, np.int32), count(1), k, v)


@pytest.mark.parametrize("sizes", [[2], [1, 1]])
def test_a_valid_entry_beyond_the_pools_means_the_last_block(run_kernel, rng, sizes):
    q, pools = draw(rng, sizes, 3)
    last, beyond = (run_kernel(attention, q, np.array([e], np.int32), count(1), *flat(pools)) for e in (1, 2))
    assert last.tobytes() == beyond.tobytes()

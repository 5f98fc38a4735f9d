"""update_cache: one slot gets the block, and nothing else changes."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_ops.kernels import update_cache


def draw(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    block=st.tuples(*(st.integers(1, n) for n in (2, 3, 200, 16))),
    slots=st.integers(1, 5),
    cores=st.sampled_from([1, 2]),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
    data=st.data(),
)
def test_one_slot_is_written_and_the_others_stay_bit_identical(run_kernel, seed, block, slots, cores, dtype, data):
    rng = np.random.default_rng(seed)
    slot = data.draw(st.integers(0, slots - 1))
    pools = [draw(rng, (slots, *block), dtype) for _ in "kv"]
    blocks = [draw(rng, block, dtype) for _ in "kv"]
    before = [pool.copy() for pool in pools]
    written = run_kernel(update_cache, *pools, *blocks, np.array([[slot]], np.int32), cores=cores)
    for pool, old, values, out in zip(pools, before, blocks, written, strict=True):
        assert out is pool  # in place
        assert pool[slot].tobytes() == values.tobytes()
        assert np.delete(pool, slot, 0).tobytes() == np.delete(old, slot, 0).tobytes()


def test_a_slot_beyond_the_pool_is_refused(run_kernel, rng):
    pools, blocks = ([draw(rng, s, np.float32) for _ in "kv"] for s in ((2, 1, 1, 4, 8), (1, 1, 4, 8)))
    with pytest.raises(AssertionError, match="out of bounds"):
        run_kernel(update_cache, *pools, *blocks, np.array([[2]], np.int32))


@pytest.mark.parametrize(
    "change, message",
    [({"shape": (1, 1, 5, 8)}, "shape of a slot"), ({"dtype": ml_dtypes.bfloat16}, "dtype of the pool")],
)
def test_a_block_that_does_not_fit_the_pool_is_refused(run_kernel, rng, change, message):
    pools = [draw(rng, (2, 1, 1, 4, 8), np.float32) for _ in "kv"]
    block = {"shape": (1, 1, 4, 8), "dtype": np.float32} | change
    with pytest.raises(AssertionError, match=message):
        run_kernel(update_cache, *pools, *(draw(rng, **block) for _ in "kv"), np.zeros((1, 1), np.int32))

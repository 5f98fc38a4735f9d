"""The kernels keep to the kernel language, and to their budgets as modelled at the real shapes."""

import numpy as np
import pytest

from nki_ops import kernels
from nki_ops.simulator import TensorSpec, check_subset, profile
from nki_ops.simulator import nki as simulated

if kernels.nki is not simulated:
    pytest.skip("with AWS's package the kernels are compiled, and nothing is modelled", allow_module_level=True)

SLOT = np.zeros((1, 1), np.int32)


def bf16(*shape):
    return TensorSpec(shape, "bfloat16")


@pytest.mark.parametrize("name", [name for name in kernels.__all__ if name != "nki"])
def test_sources_keep_to_the_kernel_language(name):
    assert check_subset(getattr(kernels, name)) == []


@pytest.mark.parametrize("cores", [1, 2])
def test_cache_update_of_a_layer_takes_less_than_50_us(cores):
    """A block of 3 heads in a pool for 30 layers of 8 slots."""
    pool, block = bf16(240, 1, 3, 4680, 128), bf16(1, 3, 4680, 128)
    _, report = profile(kernels.update_cache[cores], cost_only=True)(pool, pool, block, block, SLOT)
    assert report.seconds < 50e-6
    assert set(report.engine_seconds) == {"dma", "hbm", "dge"}  # no compute engine
    # Nothing moves but the block (and the slot's number): no rolled bytes.
    assert report.dma_bytes == {"hbm->sbuf": 4, "hbm->hbm": 2 * 3 * 4680 * 128 * 2 // cores}
    assert min(run for run, size in report.dma_runs.items() if size > 4) >= 4096


def test_norm_and_rotation_of_a_layer_stay_under_half_of_their_budget():
    """28,080 tokens on 8 cores; the budget is 0.6 ms. No descriptor is short but those of the last few tokens."""
    x, scale, table = bf16(1, 3510, 1536), bf16(1536), TensorSpec((3510, 64), "float32")
    _, report = profile(kernels.rms_norm_rope_3d, cost_only=True)(x, x, scale, scale, table, table)
    assert report.seconds < 300e-6
    assert report.bound == "vector"
    assert report.engine_seconds["gpsimd"] < report.seconds / 2  # there is room if GpSimdE is slower than modelled
    assert report.dma_efficiency > 0.9
    assert report.small_run_share < 0.01


def test_the_sink_is_rotated_within_50_us():
    table = TensorSpec((1, 64), "float32")
    _, report = profile(kernels.rotate, cost_only=True)(bf16(1, 1, 3, 4680, 128), table, table)
    assert report.seconds < 50e-6


def attention_inputs(queries, pools, dtype="bfloat16"):
    """3 heads of a core, 7 blocks of 4680 keys."""
    arrays = [TensorSpec((blocks, 1, 3, 4680, 128), dtype) for blocks in pools for _ in "kv"]
    table = np.arange(7, dtype=np.int32)
    return TensorSpec((1, queries, 3, 128), dtype), table, np.array([7], np.int32), *arrays


@pytest.mark.parametrize("queries, pools", [(11700, (240, 1, 5)), (2340, (240,))], ids=["window", "clean block"])
def test_attention_reaches_nine_tenths_of_the_bound(queries, pools):
    """153.6 G scores/s a core is what TensorE (two products) and ScalarE (one exp) can do at best."""
    _, report = profile(kernels.attention, cost_only=True)(*attention_inputs(queries, pools))
    scores = 3 * queries * 7 * 4680
    assert scores / report.seconds > 0.9 * 153.6e9
    # Nothing is transposed but keys and queries, once a head: 1 % of the window's time.
    tiles = 3 * (7 * 37 + queries / 128)
    assert report.instructions["nc_transpose"] < 1.2 * tiles
    assert report.engine_seconds["vector"] < 0.15 * report.seconds


def test_attention_takes_half_of_the_queries_on_each_of_two_cores():
    _, one = profile(kernels.attention, cost_only=True)(*attention_inputs(2340, (240,)))
    _, two = profile(kernels.attention[2], cost_only=True)(*attention_inputs(4680, (240,)))
    assert two.seconds == pytest.approx(one.seconds, rel=0.01)


def test_what_does_not_fit_is_refused_with_its_size():
    with pytest.raises(AssertionError, match="keys and values of one head need .* use bfloat16"):
        profile(kernels.attention, cost_only=True)(*attention_inputs(128, (8,), "float32"))

"""rms_norm_rope_3d and rotate against a float64 oracle."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nki_ops.kernels import rms_norm_rope_3d, rotate

TOLERANCE = {np.float32: 1e-6, ml_dtypes.bfloat16: 2e-3}  # one rounding of the result
DTYPES = st.sampled_from(list(TOLERANCE))
CORES = st.sampled_from([1, 2])


def turned(x, cos, sin):
    """Pairs of the last axis of float64 x turned by tables that broadcast."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def normed(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * scale


def draw_table(rng, rows, half):
    angles = rng.uniform(-np.pi, np.pi, (rows, half))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 2),
    tokens=st.integers(1, 300),
    heads=st.integers(1, 3),
    half=st.sampled_from([1, 3, 8, 16]),
    dtype=DTYPES,
    cores=CORES,
)
@example(seed=0, batch=1, tokens=401, heads=12, half=64, dtype=ml_dtypes.bfloat16, cores=1)  # the real widths
@example(seed=0, batch=1, tokens=3, heads=40, half=64, dtype=np.float32, cores=1)  # more heads than fit at once
@example(seed=0, batch=1, tokens=8400, heads=1, half=1, dtype=np.float32, cores=1)  # more tokens than a tile holds
def test_norm_and_rotation_equal_the_oracle(run_kernel, error, seed, batch, tokens, heads, half, dtype, cores):
    rng = np.random.default_rng(seed)
    channels = heads * 2 * half
    q, k = (rng.standard_normal((batch, tokens, channels)).astype(dtype) for _ in "qk")
    scales = [rng.uniform(0.5, 2, channels).astype(dtype) for _ in "qk"]
    cos, sin = draw_table(rng, tokens, half)
    outputs = run_kernel(rms_norm_rope_3d, q, k, *scales, cos, sin, cores=cores)
    for x, scale, out in zip((q, k), scales, outputs, strict=True):
        x, scale = (a.astype(np.float64) for a in (x, scale))
        heads_first = normed(x, scale, 1e-6).reshape(batch, tokens, heads, 2 * half)
        assert out.dtype == dtype
        assert error(out, turned(heads_first, cos[:, None], sin[:, None])) < TOLERANCE[dtype]


def test_eps_bounds_the_norm_of_a_vanishing_token(run_kernel, error):
    x = np.full((1, 2, 8), 1e-3, np.float32)
    still = np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32)
    out, _ = run_kernel(rms_norm_rope_3d, x, x, *(np.ones(8, np.float32),) * 2, *still, eps=1e-2)
    assert error(out.reshape(x.shape), normed(x.astype(np.float64), 1, 1e-2)) < 1e-5


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    tokens=st.integers(1, 300),
    half=st.sampled_from([1, 3, 8, 16]),
    shared=st.booleans(),
    dtype=DTYPES,
    cores=CORES,
)
@example(seed=0, lead=[3], tokens=400, half=64, shared=False, dtype=ml_dtypes.bfloat16, cores=1)
@example(seed=0, lead=[1], tokens=8400, half=1, shared=False, dtype=np.float32, cores=1)
@example(seed=0, lead=[30], tokens=130, half=64, shared=True, dtype=np.float32, cores=1)
def test_rotation_equals_the_oracle(run_kernel, error, seed, lead, tokens, half, shared, dtype, cores):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*lead, tokens, 2 * half)).astype(dtype)
    cos, sin = draw_table(rng, 1 if shared else tokens, half)
    out = run_kernel(rotate, x, cos, sin, cores=cores)
    assert out.dtype == dtype
    assert error(out, turned(x.astype(np.float64), cos, sin)) < TOLERANCE[dtype]


def test_two_cores_give_the_bits_of_one(run_kernel, rng):
    q, k = (rng.standard_normal((1, 131, 32)).astype(ml_dtypes.bfloat16) for _ in "qk")
    arrays = q, k, *(np.ones(32, np.float32),) * 2, *draw_table(rng, 131, 8)
    for one, two in zip(*(run_kernel(rms_norm_rope_3d, *arrays, cores=n) for n in (1, 2)), strict=True):
        assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize(
    "q, k, table, message",
    [
        ((1, 4, 16), (1, 5, 16), (4, 4), "must be as q"),
        ((1, 4, 12), (1, 4, 12), (4, 4), "no whole number of heads of 8"),
        ((1, 4, 16), (1, 4, 16), (3, 4), "3 rows for 4 tokens"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(run_kernel, q, k, table, message):
    arrays = [np.ones(shape, np.float32) for shape in (q, k, q[-1:], k[-1:], table, table)]
    with pytest.raises(AssertionError, match=message):
        run_kernel(rms_norm_rope_3d, *arrays)


@pytest.mark.parametrize(
    "cos, sin, dtype, message",
    [
        ((4, 3), (4, 3), np.float32, "3 columns"),
        ((2, 4), (2, 4), np.float32, "give 1 or 4"),
        ((4, 4), (1, 4), np.float32, "shape of cos"),
        ((4, 4), (4, 4), ml_dtypes.bfloat16, "must be float32"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(run_kernel, cos, sin, dtype, message):
    with pytest.raises(AssertionError, match=message):
        run_kernel(rotate, np.ones((2, 4, 8), np.float32), np.ones(cos, dtype), np.ones(sin, dtype))

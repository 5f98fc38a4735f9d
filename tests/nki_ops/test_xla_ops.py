"""The kernels' contract, on their XLA form: block tables, valid counts, in-place writes, rotations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nki_ops


def softmax_attention(q, k, v):
    """float64 oracle; q [B T N D], k and v [B N S D]."""
    scores = np.einsum("btnd,bnsd->bnts", q, k, dtype=np.float64) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bnsd->btnd", weights / weights.sum(-1, keepdims=True), v)


def draw_pools(rng, sizes, batch=1, heads=2, tokens=5, dim=8):
    return [tuple(rng.standard_normal((n, batch, heads, tokens, dim)).astype(np.float32) for _ in "kv") for n in sizes]


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    batch=st.integers(1, 2),
    places=st.integers(1, 5),
    queries=st.integers(1, 7),
    data=st.data(),
)
def test_attention_reads_the_blocks_of_its_table(seed, sizes, batch, places, queries, data):
    rng = np.random.default_rng(seed)
    pools = draw_pools(rng, sizes, batch=batch)
    table = rng.integers(0, sum(sizes), places).astype(np.int32)
    n_valid = data.draw(st.integers(1, places))
    q = rng.standard_normal((batch, queries, 2, 8)).astype(np.float32)
    out = nki_ops.attention(jnp.asarray(q), pools, table, np.int32(n_valid))
    k, v = (np.concatenate([pool[i] for pool in pools])[table[:n_valid]] for i in (0, 1))
    k, v = (x.transpose(1, 2, 0, 3, 4).reshape(batch, 2, -1, 8) for x in (k, v))
    np.testing.assert_allclose(out, softmax_attention(q, k, v), rtol=0, atol=2e-6)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_blocks_beyond_the_valid_ones_never_reach_the_output(garbage):
    rng = np.random.default_rng(0)
    pools = draw_pools(rng, [4])
    q = jnp.asarray(rng.standard_normal((1, 3, 2, 8)), jnp.float32)
    table = np.array([2, 0, 1, 3], np.int32)
    clean = nki_ops.attention(q, pools, table, np.int32(2))
    for pool in pools[0]:
        pool[[1, 3]] = garbage
    np.testing.assert_array_equal(clean, nki_ops.attention(q, pools, table, np.int32(2)))


def test_the_number_of_valid_blocks_is_not_a_shape():
    rng = np.random.default_rng(1)
    pools = draw_pools(rng, [7])
    q = jnp.ones((1, 3, 2, 8))
    run = jax.jit(nki_ops.attention)
    outs = [run(q, pools, np.arange(7, dtype=np.int32), np.int32(n)) for n in range(1, 8)]
    assert run._cache_size() == 1
    assert len({float(out.sum()) for out in outs}) == 7


def test_cut_queries_equal_whole_queries(monkeypatch):
    rng = np.random.default_rng(2)
    pools = draw_pools(rng, [3])
    q = jnp.asarray(rng.standard_normal((1, 12, 2, 8)), jnp.float32)
    table = np.arange(3, dtype=np.int32)
    whole = nki_ops.attention(q, pools, table, np.int32(3))
    monkeypatch.setattr("nki_ops.xla._MAX_SCORES", 40)  # two queries at a time
    np.testing.assert_allclose(nki_ops.attention(q, pools, table, np.int32(3)), whole, rtol=0, atol=1e-6)


def test_update_cache_writes_one_slot_and_no_other():
    rng = np.random.default_rng(3)
    cache = tuple(jnp.asarray(x) for x in draw_pools(rng, [4])[0])
    block = tuple(rng.standard_normal((1, 2, 5, 8)).astype(np.float32) for _ in "kv")
    written = jax.jit(nki_ops.update_cache)(cache, block, np.int32(2))
    for old, new, values in zip(cache, written, block, strict=True):
        np.testing.assert_array_equal(new[2], values)
        np.testing.assert_array_equal(np.delete(new, 2, 0), np.delete(old, 2, 0))


def test_update_cache_works_in_place():
    cache = tuple(jnp.zeros((4, 1, 2, 5, 8)) for _ in "kv")
    pointers = [x.unsafe_buffer_pointer() for x in cache]
    block = tuple(jnp.ones((1, 2, 5, 8)) for _ in "kv")
    written = jax.jit(nki_ops.update_cache, donate_argnums=0)(cache, block, np.int32(1))
    assert [x.unsafe_buffer_pointer() for x in written] == pointers


def test_rotations_add_up():
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((3, 8)), jnp.float32)
    a, b = rng.uniform(-3, 3, (2, 4))
    turned = nki_ops.rotate(nki_ops.rotate(x, np.cos(a), np.sin(a)), np.cos(b), np.sin(b))
    np.testing.assert_allclose(turned, nki_ops.rotate(x, np.cos(a + b), np.sin(a + b)), rtol=0, atol=1e-6)


def test_norm_spans_all_heads():
    rng = np.random.default_rng(5)
    q, k = (jnp.asarray(rng.standard_normal((1, 3, 16)), jnp.float32) for _ in "qk")
    scales = tuple(jnp.asarray(rng.uniform(0.5, 2, 16), jnp.float32) for _ in "qk")
    still = np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32)
    for x, scale, out in zip((q, k), scales, nki_ops.rms_norm_rope_3d(q, k, scales, *still), strict=True):
        expected = np.asarray(x) / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6) * scale
        np.testing.assert_allclose(out.reshape(1, 3, 16), expected, rtol=1e-6, atol=1e-6)

"""The operations in plain XLA: right on every backend, shaped for speed on the CPU.

Heads come first in the key and value blocks and attention runs as one 2-D product per head: on the CPU backend
that is about twice as fast as a batched einsum. Key blocks are addressed through a table, as in paged attention,
so one compiled function serves every window.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

# Attention cuts its queries so that one head's scores stay below this many elements (64 MiB in float32).
_MAX_SCORES = 2**24


def rms_norm(x: Float[Array, "*b c"], scale: Float[Array, " c"], eps: float) -> Float[Array, "*b c"]:
    """Root-mean-square norm over the last axis, computed in float32 and returned in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale).astype(x.dtype)


def rotate(
    x: Float[Array, "*b d"], cos: Float[Array, "*r half"], sin: Float[Array, "*r half"]
) -> Float[Array, "*b d"]:
    """Rotates the adjacent channel pairs (2i, 2i+1) of `x` by the angles of `cos` and `sin` (RoFormer, eq. 34).

    Args:
        x: any array whose last axis is the head dim.
        cos, sin: float32, half the head dim wide; the axes before broadcast against those of `x`.

    Returns:
        The rotated array in the dtype of `x`; the arithmetic is float32.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def rms_norm_rope_3d(
    q: Float[Array, "B T C"],
    k: Float[Array, "B T C"],
    weights: tuple[Float[Array, " C"], Float[Array, " C"]],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    eps: float = 1e-6,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B T N D"]]:
    """Queries and keys as attention takes them: RMS norm over all heads at once, heads split, pairs rotated.

    Args:
        q, k: projections, all heads side by side.
        weights: norm scales of q and of k.
        cos, sin: float32 rotary table of each token; its width fixes the head dim to twice as much.
        eps: added to the mean square.

    Returns:
        Normed and rotated q and k, split into heads, in the dtype they came in.
    """
    head_dim = 2 * cos.shape[-1]

    def norm_rotate(x: Array, scale: Array) -> Array:
        heads = rms_norm(x, scale, eps).reshape(*x.shape[:2], -1, head_dim)
        return rotate(heads, cos[:, None], sin[:, None])

    return norm_rotate(q, weights[0]), norm_rotate(k, weights[1])


def update_cache(
    cache: tuple[Float[Array, "P B N T D"], Float[Array, "P B N T D"]],
    block_kv: tuple[Float[Array, "B N T D"], Float[Array, "B N T D"]],
    slot: Int[Array, ""],
) -> tuple[Float[Array, "P B N T D"], Float[Array, "P B N T D"]]:
    """Writes one block's keys and values into slot `slot` of the pool; in place where the pool is donated."""
    k_pool, v_pool = cache
    k, v = block_kv
    write = jax.lax.dynamic_update_index_in_dim
    return write(k_pool, _narrowed(k, k_pool.dtype), slot, 0), write(v_pool, _narrowed(v, v_pool.dtype), slot, 0)


def _narrowed(x: Array, dtype: DTypeLike) -> Array:
    """`x` in the dtype of a pool; what is too large for 8 bits becomes the largest number instead of NaN."""
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


@jax.named_scope("attention")
def attention(
    q: Float[Array, "B T N D"],
    pools: Sequence[tuple[Float[Array, "_ B N S D"], Float[Array, "_ B N S D"]]],
    table: Int[Array | np.ndarray, " P"],
    n_valid: Int[Array | np.ndarray, ""],
) -> Float[Array, "B T N D"]:
    """Softmax attention of every query over the key blocks that `table` names.

    Args:
        q: queries, normed and rotated.
        pools: (keys, values) arrays of blocks. Blocks are numbered through all pools in order.
        table: block numbers, the valid ones first.
        n_valid: how many entries of `table` are valid, at least 1. A traced value: no shape depends on it.

    Returns:
        Attention output in the dtype of `q`. Scores are scaled by 1 / sqrt(D), softmax is float32. Blocks beyond
        `n_valid` are never read.
    """
    batch, tokens, heads, head_dim = q.shape
    places = table.shape[0]
    block_tokens = pools[0][0].shape[3]
    valid = jnp.arange(places) < n_valid
    table = jnp.where(valid, table, table[0])
    keys = gather_blocks([k for k, _ in pools], table, q.dtype).transpose(1, 2, 4, 0, 3)  # B N D P S
    values = gather_blocks([v for _, v in pools], table, q.dtype).transpose(1, 2, 0, 3, 4)  # B N P S D
    keys = keys.reshape(batch * heads, head_dim, -1)
    values = values.reshape(batch * heads, -1, head_dim)
    bias = jnp.repeat(jnp.where(valid, 0.0, -jnp.inf), block_tokens)

    n_cuts = _query_cuts(tokens, places * block_tokens)
    queries = (q.astype(jnp.float32) * head_dim**-0.5).astype(q.dtype).transpose(0, 2, 1, 3)
    queries = queries.reshape(batch * heads, n_cuts, tokens // n_cuts, head_dim)

    def one_head(qkv: tuple[Array, Array, Array]) -> Array:
        q_head, k_head, v_head = qkv
        return jax.lax.map(lambda q_cut: _softmax_product(q_cut, k_head, v_head, bias), q_head)

    out = jax.lax.map(one_head, (queries, keys, values))
    return out.reshape(batch, heads, tokens, head_dim).transpose(0, 2, 1, 3)


def _softmax_product(q: Array, k: Array, v: Array, bias: Array) -> Array:
    scores = jnp.dot(q, k, preferred_element_type=jnp.float32) + bias
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (out / total).astype(q.dtype)


def gather_blocks(pools: Sequence[Array], table: Array, dtype: DTypeLike) -> Array:
    """The blocks that `table` names, stacked in its order, out of pools that stay where they are, in one dtype."""

    def pick(index: Array) -> Array:
        block = jax.lax.dynamic_index_in_dim(pools[0], index, 0, keepdims=False).astype(dtype)
        first = pools[0].shape[0]
        for pool in pools[1:]:
            other = jax.lax.dynamic_index_in_dim(pool, index - first, 0, keepdims=False)
            block = jnp.where(index >= first, other.astype(dtype), block)
            first += pool.shape[0]
        return block

    return jnp.stack([pick(table[i]) for i in range(table.shape[0])])


def _query_cuts(tokens: int, keys: int) -> int:
    """The smallest number of equal cuts that keeps one head's scores within bounds."""
    cuts = 1
    while tokens % cuts or tokens // cuts * keys > _MAX_SCORES and cuts < tokens:
        cuts += 1
    return cuts

"""Self-attention of tokens that are cut over a mesh.

Between the layers every device holds some tokens of each block, all heads of them. Attention wants all keys for some
heads: one all-to-all over "head" trades tokens for heads, and the keys and values, now of one seq part's tokens, are
gathered over "seq". The result goes back by the same all-to-all (DeepSpeed-Ulysses, section 3, within each seq part).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from rfjax.config import RollingConfig
from rfjax.parallel.mesh import SHARE
from rfjax.rolling.plan import StepPlan
from rfjax.rolling.step import KV, WindowAttention


class MeshAttention(NamedTuple):
    """`WindowAttention` on the local tokens of a `jax.shard_map` over `SHARE`.

    Attributes:
        cuts_cached_tokens: the cache is cut over "seq" by tokens, too, and gathered a layer at a time; else only over
            "head", and each device of a seq group keeps a copy.
    """

    config: RollingConfig
    plan: StepPlan
    cuts_cached_tokens: bool

    def __call__(self, q: Array, k: Array, v: Array, layer: Array, carry: KV) -> tuple[Array, KV]:
        groups = self.config.window_blocks + 1
        qkv = rearrange(jnp.stack([q, k, v]), "i b (g t) n d -> i b g t n d", g=groups)
        qkv = jax.lax.all_to_all(qkv, "head", split_axis=4, concat_axis=3, tiled=True)
        attention = _CutCacheAttention(self.config, self.plan)
        kv = qkv[1:]
        if not self.cuts_cached_tokens:
            attention = WindowAttention(self.config, self.plan)
            kv = jax.lax.all_gather(kv, "seq", axis=3, tiled=True)
        q, k, v = (rearrange(x, "b g t n d -> b (g t) n d") for x in (qkv[0], kv[0], kv[1]))
        out, carry = attention(q, k, v, layer, carry)
        out = rearrange(out, "b (g t) n d -> b g t n d", g=groups)
        out = jax.lax.all_to_all(out, "head", split_axis=2, concat_axis=3, tiled=True)
        return rearrange(out, "b g t n d -> b (g t) n d"), carry


class _CutCacheAttention(WindowAttention):
    """`WindowAttention` on one seq part of all tokens: it stores this part, and reads that of the others, too."""

    def readable(self, pool: KV, blocks: list[KV], layer: Array) -> tuple[KV, list[KV], Array]:
        held = self.config.cache_slots * self.plan.rows
        pool = tuple(jax.lax.dynamic_slice_in_dim(x, layer * held, held) for x in pool)  # pyright: ignore
        pool, blocks = jax.tree.map(lambda x: jax.lax.all_gather(x, "seq", axis=3, tiled=True), (pool, blocks))
        return pool, blocks, jnp.zeros_like(layer)


def own_part(x: Array, axis: int) -> Array:
    """This device's part of an array that all of them have, cut along an axis as tokens are."""
    size = x.shape[axis] // jax.lax.axis_size(SHARE)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(SHARE) * size, size, axis)


def gathered(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """All devices' parts of an array, on each of them."""
    return jax.lax.all_gather(x, SHARE, axis=axis, tiled=True)

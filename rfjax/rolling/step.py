"""The one step: a static function that serves ramp-up, steady state and ramp-down of any length.

One forward of [clean block | window] does two things at once (phase batching): it computes the clean keys and values
of the block that the step before finished, and it denoises the window, which reads them. All per-token work is
shared; self-attention runs once for each group, since the two see other keys. That is exact: in each layer the clean
block's keys depend on its own stream alone.

Nothing here depends on the step number: what varies comes in as the arrays of a `StepPlan`, and the noise. Nor does
anything depend on where a token stands in its block, so a mesh may hand in any part of each block's tokens.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Float

import nki_ops
from rfjax.config import ModelConfig, RollingConfig
from rfjax.dit.model import Attend, DiT, TextKV, timestep_features
from rfjax.dit.rope import spatial_table, token_table
from rfjax.rolling.plan import HostOrDevice, StepPlan
from rfjax.rolling.schedule import noise_levels


class RollingState(NamedTuple):
    """What a stream carries from step to step, besides its prompt.

    Attributes:
        x0: the window's latest clean estimates, front block first, as tokens (`patchify`): float32. Its front block
            is final.
        k_cache, v_cache: one pool for all layers, `cache_slots` blocks a layer. Keys are rotated at their own
            positions, the sink's too; at use, the sink is rotated on by the difference.
    """

    x0: Float[Array | np.ndarray, "B W T Z"]
    k_cache: Float[Array | np.ndarray, "P B N T D"]
    v_cache: Float[Array | np.ndarray, "P B N T D"]


def token_grid(config: ModelConfig, latent_height: int, latent_width: int) -> tuple[int, int]:
    """Rows and columns of patches of a latent frame."""
    _, patch_h, patch_w = config.dit.patch_size
    return latent_height // patch_h, latent_width // patch_w


def init_state(
    config: ModelConfig, batch: int, latent_height: int, latent_width: int, dtype: DTypeLike
) -> RollingState:
    """The state before the first step: zeros, on the host; `dtype` is that of the cache."""
    rolling, dit = config.rolling, config.dit
    tokens = rolling.block_frames * math.prod(token_grid(config, latent_height, latent_width))
    blocks = dit.num_layers * rolling.cache_slots
    window = (batch, rolling.window_blocks, tokens, dit.in_dim * math.prod(dit.patch_size))
    cache = (blocks, batch, dit.num_heads, tokens, dit.head_dim)
    k_cache, v_cache = (np.zeros(cache, jnp.dtype(dtype)) for _ in "kv")
    return RollingState(np.zeros(window, np.float32), k_cache, v_cache)


def rotary_of(config: ModelConfig, plan: StepPlan, grid: tuple[int, int]) -> tuple[Array, Array]:
    """cos and sin of all tokens of a step: [R, G, T, half] for the clean block and the blocks of the window."""
    spatial = spatial_table(*grid, config.dit.head_dim, config.dit.rope_theta)
    cos, sin = (token_table(t, s) for t, s in zip(plan.temporal_rotary, spatial, strict=True))
    groups = "r (g t) half -> r g t half"
    return tuple(rearrange(x, groups, g=config.rolling.window_blocks + 1) for x in (cos, sin))  # pyright: ignore


def rolling_step(
    config: ModelConfig,
    dit: DiT,
    state: RollingState,
    text_kv: TextKV,
    plan: StepPlan,
    noise: Float[Array, "B W T Z"],
    rotary: tuple[Float[Array, "R G T half"], Float[Array, "R G T half"]],
    attention: Callable[[RollingConfig, StepPlan], Attend] | None = None,
) -> RollingState:
    """Moves the window on by one block and denoises it (Rolling Forcing, algorithm of the inference section).

    Args:
        config: static.
        dit: the model.
        state: from the step before; donate it, and the caches are written in place.
        text_kv: the prompt's cross-attention keys and values.
        plan: from `plan_step`.
        noise: for every place of the window, the draw that takes its block to the place's noise level. Where the plan
            takes a given block, the front place, which is empty then, holds that block instead.
        rotary: from `rotary_of`.
        attention: makes the self-attention; None is `WindowAttention`.

    Returns:
        The new state. Its `x0` holds the estimates of this step's window.
    """
    rolling = config.rolling
    levels = noise_levels(rolling)
    sigmas = levels.sigmas[::-1, None, None]  # by place: front is cleanest
    timesteps = np.concatenate([[0.0], levels.timesteps[::-1]])[None]

    takes_given = jnp.repeat(jnp.asarray(plan.takes_given), state.x0.shape[0] // plan.rows)[:, None, None, None]
    clean = jnp.where(takes_given, noise[:, :1], state.x0[:, :1])
    entering = jnp.concatenate([state.x0[:, 1:], jnp.zeros_like(clean)], axis=1)
    window = (1 - sigmas) * entering + sigmas * noise
    flow, (k_cache, v_cache) = dit.flow_of_tokens(
        rearrange(jnp.concatenate([clean, window], axis=1), "b g t z -> b (g t) z"),
        jnp.asarray(timestep_features(timesteps, config.dit.freq_dim)),
        tuple(rearrange(table, "r g t half -> r (g t) half") for table in rotary),  # pyright: ignore
        text_kv,
        (attention or WindowAttention)(rolling, plan),
        carry=(state.k_cache, state.v_cache),
    )
    flow = rearrange(flow, "b (g t) z -> b g t z", g=rolling.window_blocks + 1)[:, 1:]
    x0 = flow if rolling.prediction == "clean" else window - sigmas * flow
    return RollingState(x0, k_cache, v_cache)


KV = tuple[Array, Array]


class WindowAttention(NamedTuple):
    """Self-attention of the clean block and the window over the cache, for one step."""

    config: RollingConfig
    plan: StepPlan

    def __call__(self, q: Array, k: Array, v: Array, layer: Array, carry: KV) -> tuple[Array, KV]:
        rows = range(self.plan.rows)
        blocks = [(self.blocks(k, row), self.blocks(v, row)) for row in rows]
        # One pool holds the blocks of all layers, slots and rows, in this order.
        k_pool, v_pool = (rearrange(x, "p (r b) n t d -> (p r) b n t d", r=len(rows)) for x in carry)
        pool = k_pool, v_pool
        # All rows are written before any is read, so that no older version of the pool is kept.
        for row, (keys, values) in enumerate(blocks):
            slot = self.in_pool(self.plan.row(row).write_slot, layer, row)
            pool = nki_ops.update_cache(pool, (keys[0], values[0]), slot)
        read, blocks, layer = self.readable(pool, blocks, layer)
        out = [self.attend_row(self.queries(q, row), blocks[row], read, layer, row) for row in rows]
        k_pool, v_pool = (rearrange(x, "(p r) b n t d -> p (r b) n t d", r=len(rows)) for x in pool)
        return jnp.concatenate(out), (k_pool, v_pool)

    def readable(self, pool: KV, blocks: list[KV], layer: Array) -> tuple[KV, list[KV], Array]:
        """The pool and the step's own blocks as attention reads them, and which of the pool's layers to read."""
        return pool, blocks, layer

    def attend_row(self, queries: Float[Array, "G b T N D"], blocks: KV, pool: KV, layer: Array, row: int) -> Array:
        """Attention of the streams that share a row of the plan: [b, (G T), N, D]."""
        plan, slots = self.plan.row(row), self.config.cache_slots
        clean = nki_ops.attention(
            queries[0], [pool], self.in_pool(plan.clean_keys.blocks, layer, row), plan.clean_keys.n_valid
        )
        # The plan numbers one layer's slots, then the sink and the window; the pool has more blocks before those.
        table = plan.window_keys.blocks
        table = jnp.where(table < slots, self.in_pool(table, layer, row), table - slots + pool[0].shape[0])
        pools = [
            pool,
            turned_sink(pool, self.in_pool(0, layer, row), plan, queries.dtype),
            (blocks[0][1:], blocks[1][1:]),
        ]
        window = rearrange(queries[1:], "w b t n d -> b (w t) n d")
        return jnp.concatenate([clean, nki_ops.attention(window, pools, table, plan.window_keys.n_valid)], axis=1)

    def in_pool(self, slot: HostOrDevice | int, layer: Array, row: int) -> Array:
        return (layer * self.config.cache_slots + slot) * self.plan.rows + row

    def queries(self, x: Array, row: int) -> Float[Array, "G b T N D"]:
        groups = rearrange(x, "(r b) (g t) n d -> r g b t n d", r=self.plan.rows, g=self.config.window_blocks + 1)
        return jax.lax.index_in_dim(groups, row, keepdims=False)

    def blocks(self, x: Array, row: int) -> Float[Array, "G b N T D"]:
        return rearrange(self.queries(x, row), "g b t n d -> g b n t d")


def turned_sink(pool: KV, slot: Array, plan: StepPlan, dtype: DTypeLike) -> KV:
    """The sink in `slot` as the window sees it: right before the working blocks. Only time turns; rotations add up."""
    k, v = (jax.lax.dynamic_index_in_dim(x, slot, 0).astype(dtype) for x in pool)
    cos, sin = plan.sink_rotary
    still = k.shape[-1] // 2 - cos.shape[-1]
    cos = jnp.concatenate([cos, jnp.ones((1, still))], axis=-1)
    sin = jnp.concatenate([sin, jnp.zeros((1, still))], axis=-1)
    return nki_ops.rotate(k, cos, sin), v

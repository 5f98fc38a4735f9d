"""The one step: a static function that serves ramp-up, steady state and ramp-down of any length.

One forward of [clean block | window] does two things at once (phase batching): it computes the clean keys and values
of the block that the step before finished, and it denoises the window, which reads them. All per-token work is
shared; self-attention runs once for each group, since the two see other keys. That is exact: in each layer the clean
block's keys depend on its own stream alone.

Nothing here depends on the step number: what varies comes in as the arrays of a `StepPlan`, and the noise.
"""

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
from rfjax.rolling.plan import StepPlan
from rfjax.rolling.schedule import noise_levels


class RollingState(NamedTuple):
    """What a stream carries from step to step, besides its prompt.

    Attributes:
        x0: the window's latest clean estimates, front block first: float32. Its front block is final.
        k_cache, v_cache: one pool for all layers, `cache_slots` blocks a layer. Keys are rotated at their own
            positions, the sink's too; at use, the sink is rotated on by the difference.
    """

    x0: Float[Array | np.ndarray, "B W f C h w"]
    k_cache: Float[Array | np.ndarray, "P B N T D"]
    v_cache: Float[Array | np.ndarray, "P B N T D"]


def init_state(
    config: ModelConfig, batch: int, latent_height: int, latent_width: int, dtype: DTypeLike
) -> RollingState:
    """The state before the first step: zeros, on the host."""
    rolling, dit = config.rolling, config.dit
    tokens = rolling.block_frames * latent_height * latent_width // (dit.patch_size[1] * dit.patch_size[2])
    blocks = dit.num_layers * rolling.cache_slots
    window = (batch, rolling.window_blocks, rolling.block_frames, dit.in_dim, latent_height, latent_width)
    cache = (blocks, batch, dit.num_heads, tokens, dit.head_dim)
    k_cache, v_cache = (np.zeros(cache, jnp.dtype(dtype)) for _ in "kv")
    return RollingState(np.zeros(window, np.float32), k_cache, v_cache)


def rolling_step(
    config: ModelConfig,
    dit: DiT,
    state: RollingState,
    text_kv: TextKV,
    plan: StepPlan,
    noise: Float[Array, "B W f C h w"],
    attention: Callable[..., Attend] | None = None,
) -> RollingState:
    """Moves the window on by one block and denoises it (Rolling Forcing, algorithm of the inference section).

    Args:
        config: static.
        dit: the model.
        state: from the step before; donate it, and the caches are written in place.
        text_kv: the prompt's cross-attention keys and values.
        plan: from `plan_step`.
        noise: for every place of the window, the draw that takes its block to the place's noise level.
        attention: makes the self-attention from (rolling config, plan, block_tokens); None is `WindowAttention`.

    Returns:
        The new state. Its `x0` holds the estimates of this step's window.
    """
    rolling = config.rolling
    levels = noise_levels(rolling)
    sigmas = levels.sigmas[::-1, None, None, None, None]  # by place: front is cleanest
    timesteps = np.concatenate([[0.0], levels.timesteps[::-1]])[None]

    entering = jnp.concatenate([state.x0[:, 1:], jnp.zeros_like(state.x0[:, :1])], axis=1)
    window = (1 - sigmas) * entering + sigmas * noise
    latents = jnp.concatenate([state.x0[:, :1], window], axis=1)

    latents = rearrange(latents, "b w f c h x -> b (w f) c h x")
    patch_h, patch_w = config.dit.patch_size[1:]
    grid = latents.shape[3] // patch_h, latents.shape[4] // patch_w
    spatial = spatial_table(*grid, config.dit.head_dim, config.dit.rope_theta)
    cos, sin = (token_table(t, s) for t, s in zip(plan.temporal_rotary, spatial, strict=True))
    output, (k_cache, v_cache) = dit(
        latents,
        jnp.asarray(timestep_features(timesteps, config.dit.freq_dim)),
        (cos, sin),
        text_kv,
        attend=(attention or WindowAttention)(rolling, plan, block_tokens=rolling.block_frames * grid[0] * grid[1]),
        carry=(state.k_cache, state.v_cache),
    )
    output = rearrange(output, "b (w f) c h x -> b w f c h x", f=rolling.block_frames)[:, 1:]
    x0 = output if rolling.prediction == "clean" else window - sigmas * output
    return RollingState(x0, k_cache, v_cache)


class WindowAttention(NamedTuple):
    """Self-attention of the clean block and the window over the cache, for one step."""

    config: RollingConfig
    plan: StepPlan
    block_tokens: int

    def __call__(
        self, q: Array, k: Array, v: Array, layer: Array, carry: tuple[Array, Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        plan, slots = self.plan, self.config.cache_slots
        first_slot = layer * slots
        k_blocks, v_blocks = (rearrange(x, "b (w t) n d -> w b n t d", t=self.block_tokens) for x in (k, v))
        cache = nki_ops.update_cache(carry, (k_blocks[0], v_blocks[0]), first_slot + plan.write_slot)
        pools = [cache, self.sink(cache, first_slot), (k_blocks[1:], v_blocks[1:])]

        # The plan numbers the blocks of one layer; the pool holds those of all layers.
        table = plan.window_keys.blocks
        in_pool = jnp.where(table < slots, table + first_slot, table - slots + cache[0].shape[0])
        clean = nki_ops.attention(
            q[:, : self.block_tokens], [cache], plan.clean_keys.blocks + first_slot, plan.clean_keys.n_valid
        )
        window = nki_ops.attention(q[:, self.block_tokens :], pools, in_pool, plan.window_keys.n_valid)
        return jnp.concatenate([clean, window], axis=1), cache

    def sink(self, cache: tuple[Array, Array], slot: Array) -> tuple[Array, Array]:
        """The sink as the window sees it: right before the working blocks. Only time turns; rotations add up."""
        k, v = (jax.lax.dynamic_index_in_dim(pool, slot, 0) for pool in cache)
        cos, sin = self.plan.sink_rotary
        still = k.shape[-1] // 2 - cos.shape[-1]
        cos = jnp.concatenate([cos, jnp.ones((1, still))], axis=-1)
        sin = jnp.concatenate([sin, jnp.zeros((1, still))], axis=-1)
        return nki_ops.rotate(k, cos, sin), v

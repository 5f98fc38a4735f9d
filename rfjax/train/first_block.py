"""Training the DiT and its text encoder on the first blocks of videos alone, before they learn to roll.

What a prompt means, and where a thing starts, is all that there is to learn from a first block. It passes through the
noise levels, one an update, and then another video takes its row; the rows stand at different levels. So an update
sees many more prompts than one of a roll does, at a sixth of the work for each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from rfjax.config import ModelConfig
from rfjax.dit.model import DiT, timestep_features
from rfjax.dit.rope import axis_pairs, axis_table, spatial_table, token_table
from rfjax.rolling.schedule import noise_levels
from rfjax.text.model import UMT5Encoder
from rfjax.train.attention import attention
from rfjax.train.latents import LatentSet
from rfjax.train.loop import Metrics, Stage
from rfjax.train.optimizer import averaged, optimizer
from rfjax.train.rollout import PROMPT_PLACE, ramp, root, scattered
from rfjax.train.start import noise_for_start


@dataclass(frozen=True)
class FirstBlockRecipe:
    """How first blocks are trained on.

    Attributes:
        steps: updates.
        batch: videos.
        own, start_boost, own_steps: as in `RolloutRecipe`.
    """

    steps: int
    batch: int = 40
    learning_rate: float = 0.02
    adam_learning_rate: float = 0.002
    average: float = 0.99
    own: tuple[float, float] = (0.0, 0.9)
    start_boost: float = 0.0
    own_steps: tuple[int, int] = (0, 1)


class FirstBlockState(NamedTuple):
    """Everything the next step depends on."""

    params: Any  # {"dit": ..., "text": ...}
    average: Any
    optimizer: Any
    x0: Float[Array, "B f C h w"]  # what is re-noised next


class _Batch(NamedTuple):
    target: Float[np.ndarray, "B f C h w"]
    tokens: Int[np.ndarray, "B S"]
    lengths: Int[np.ndarray, " B"]
    start: Int[np.ndarray, "B N 2"]


def first_block_stage(
    config: ModelConfig,
    recipe: FirstBlockRecipe,
    data: LatentSet,
    tokens: tuple[Int[np.ndarray, "P S"], Int[np.ndarray, " P"]],
    params: dict[str, Any],
    show: Callable[[Any, int, Path], Metrics],
    seed: int = 0,
) -> Stage:
    """The stage that trains a DiT and its text encoder on first blocks; arguments as those of `rollout_stage`."""
    frames, patch = config.rolling.block_frames, config.dit.patch_size[1:]
    levels = noise_levels(config.rolling)
    sigmas, features = jnp.asarray(levels.sigmas), timestep_features(levels.timesteps, config.dit.freq_dim)
    rotary = _rotary(config, data.latents.shape[-2:])
    tx = optimizer(recipe.learning_rate, recipe.adam_learning_rate, recipe.steps)
    graphs = {"dit": nnx.graphdef(DiT(config.dit, rngs=nnx.Rngs(0))),
              "text": nnx.graphdef(UMT5Encoder(config.text, rngs=nnx.Rngs(0)))}  # fmt: skip

    def loss(params: Any, batch: _Batch, noisy: Array, level: Array) -> tuple[Array, Any]:
        text = nnx.merge(graphs["text"], params["text"])
        dit = nnx.merge(graphs["dit"], params["dit"])
        text_kv = dit.text_keys_values(text(batch.tokens, batch.lengths))
        output, _ = dit(noisy, jnp.asarray(features)[level][:, None], rotary, text_kv, attend=_attend)
        x0 = output if config.rolling.prediction == "clean" else noisy - _column(sigmas[level]) * output
        error = jnp.mean(jnp.square(x0 - batch.target), axis=(1, 2, 3, 4))
        return jnp.mean(root(error)), (x0, error)

    @partial(jax.jit, donate_argnums=(0,))
    def update(
        state: FirstBlockState, batch: _Batch, level: Array, done: Array, number: Array
    ) -> tuple[FirstBlockState, Array]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), 4)
        own_share = recipe.own[0] + (recipe.own[1] - recipe.own[0]) * done
        own = jax.random.bernoulli(keys[0], own_share, level.shape)
        told = level <= len(sigmas) - 1 - PROMPT_PLACE  # levels at which the noise says where things start
        sigma, boost = sigmas[level], recipe.start_boost * (1 - done)
        before = jnp.where(_column(told), scattered(keys[1], state.x0, patch), state.x0)
        say = jax.vmap(partial(noise_for_start, patch=patch, boost=boost))
        said = say(jax.random.split(keys[2], recipe.batch), before, sigma, jnp.asarray(batch.start))
        noise = jnp.where(_column(told), said, jax.random.normal(keys[3], before.shape))
        noisy = (1 - _column(sigma)) * before + _column(sigma) * noise
        (_, (x0, error)), grads = jax.value_and_grad(loss, has_aux=True)(state.params, batch, noisy, level)
        updates, opt = tx.update(grads, state.optimizer, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        average = averaged(state.average, params, number, recipe.average)
        return FirstBlockState(params, average, opt, jnp.where(_column(own), x0, batch.target)), error

    def init(number: int) -> FirstBlockState:
        begun, average = (jax.tree.map(jnp.copy, params) for _ in range(2))  # both are donated
        x0 = jnp.zeros((recipe.batch, frames, *data.latents.shape[2:]))
        return FirstBlockState(begun, average, tx.init(begun), x0)

    def step(state: FirstBlockState, number: int) -> tuple[FirstBlockState, Metrics]:
        turn, level = np.divmod(number + np.arange(recipe.batch), len(sigmas))
        draws = (np.random.default_rng([seed, row, n]) for row, n in enumerate(turn))
        chosen = np.array([draw.integers(len(data)) for draw in draws])
        ids, target = data.prompt_ids[chosen, 0], data.latents[chosen, :frames].astype(np.float32)
        batch = _Batch(target, tokens[0][ids], tokens[1][ids], data.start[chosen])
        done = jnp.float32(ramp(number, recipe.own_steps))
        state, error = update(state, batch, jnp.asarray(level), done, jnp.int32(number))
        return state, {f"level{i}": float(np.asarray(error)[level == i].mean()) for i in np.unique(level)}

    return Stage(init, step, lambda state, number, folder: show(state.average, number, folder))


def _rotary(config: ModelConfig, sides: tuple[int, ...]) -> tuple[Array, Array]:
    head_dim, theta = config.dit.head_dim, config.dit.rope_theta
    rows, columns = (side // patch for side, patch in zip(sides, config.dit.patch_size[1:], strict=True))
    space = spatial_table(rows, columns, head_dim, theta)
    time = axis_table(np.arange(config.rolling.block_frames), axis_pairs(head_dim)[0], theta)
    cos, sin = (token_table(t[None], s) for t, s in zip(time, space, strict=True))
    return cos, sin


def _attend(q: Array, k: Array, v: Array, layer: Array, carry: None) -> tuple[Array, None]:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    return attention(q, k, v, jnp.zeros(k.shape[2])).transpose(0, 2, 1, 3), carry


def _column(values: Float[Array, " B"]) -> Float[Array, "B 1 1 1 1"]:
    return values[:, None, None, None, None]

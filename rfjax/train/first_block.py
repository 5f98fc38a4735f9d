"""Training the DiT and its text encoder on the first blocks of videos alone, before they learn to roll.

What a prompt means, and where a thing starts, is all that there is to learn from a first block; every update sees a
whole batch of other prompts, at a sixth of a window's work. A roll keeps its prompts for all of its steps.
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
from rfjax.train.latents import LatentSet
from rfjax.train.loop import Metrics, Stage
from rfjax.train.optimizer import averaged, optimizer
from rfjax.train.rollout import PROMPT_PLACE, scattered
from rfjax.train.start import noise_for_start


@dataclass(frozen=True)
class FirstBlockRecipe:
    """How first blocks are trained on.

    Attributes:
        steps: updates.
        batch: videos.
        start_boost: how much louder the noise says at first where things start; it goes to 0 over half of the steps.
    """

    steps: int
    batch: int = 32
    learning_rate: float = 0.02
    adam_learning_rate: float = 0.002
    average: float = 0.99
    start_boost: float = 0.0


class FirstBlockState(NamedTuple):
    """Everything the next step depends on."""

    params: Any  # {"dit": ..., "text": ...}
    average: Any
    optimizer: Any


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
    # Half of the steps at pure noise, where nothing but prompt and noise says what to draw.
    share = jnp.where(jnp.arange(len(sigmas)) == 0, 0.5, 0.5 / (len(sigmas) - 1))

    def loss(params: Any, batch: _Batch, noisy: Array, level: Array) -> tuple[Array, Array]:
        text = nnx.merge(graphs["text"], params["text"])
        dit = nnx.merge(graphs["dit"], params["dit"])
        text_kv = dit.text_keys_values(text(batch.tokens, batch.lengths))
        output, _ = dit(noisy, jnp.asarray(features)[level][:, None], rotary, text_kv, attend=_attend)
        x0 = output if config.rolling.prediction == "clean" else noisy - _column(sigmas[level]) * output
        error = jnp.mean(jnp.square(x0 - batch.target), axis=(1, 2, 3, 4))
        return jnp.mean(error), error

    @partial(jax.jit, donate_argnums=(0,))
    def update(state: FirstBlockState, batch: _Batch, number: Array) -> tuple[FirstBlockState, dict[str, Array]]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), 4)
        level = jax.random.choice(keys[0], len(sigmas), (recipe.batch,), p=share)
        told = level <= len(sigmas) - 1 - PROMPT_PLACE  # levels at which the noise says where things start
        before = jnp.where(_column(told), scattered(keys[1], batch.target, patch), batch.target)
        say = partial(
            noise_for_start, patch=patch, boost=recipe.start_boost * jnp.maximum(0, 1 - 2 * number / recipe.steps)
        )
        said = jax.vmap(say)(jax.random.split(keys[2], recipe.batch), before, sigmas[level], jnp.asarray(batch.start))
        noise = jnp.where(_column(told), said, jax.random.normal(keys[3], before.shape))
        noisy = (1 - _column(sigmas[level])) * before + _column(sigmas[level]) * noise
        (_, error), grads = jax.value_and_grad(loss, has_aux=True)(state.params, batch, noisy, level)
        updates, opt = tx.update(grads, state.optimizer, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        new = FirstBlockState(params, averaged(state.average, params, number, recipe.average), opt)
        return new, {"error": error, "level": level}

    def init(number: int) -> FirstBlockState:
        begun, average = (jax.tree.map(jnp.copy, params) for _ in range(2))  # both are donated
        return FirstBlockState(begun, average, tx.init(params))

    def step(state: FirstBlockState, number: int) -> tuple[FirstBlockState, Metrics]:
        chosen = np.random.default_rng([seed, number]).integers(len(data), size=recipe.batch)
        ids = data.prompt_ids[chosen, 0]
        target = data.latents[chosen, :frames].astype(np.float32)
        batch = _Batch(target, tokens[0][ids], tokens[1][ids], data.start[chosen])
        state, numbers = update(state, batch, jnp.int32(number))
        error, level = np.asarray(numbers["error"]), np.asarray(numbers["level"])
        return state, {f"level{i}": float(error[level == i].mean()) for i in np.unique(level)}

    return Stage(init, step, lambda state, number, folder: show(state.average, number, folder))


def _rotary(config: ModelConfig, sides: tuple[int, ...]) -> tuple[Array, Array]:
    head_dim, theta = config.dit.head_dim, config.dit.rope_theta
    grid = [side // patch for side, patch in zip(sides, config.dit.patch_size[1:], strict=True)]
    time = axis_table(np.arange(config.rolling.block_frames), axis_pairs(head_dim)[0], theta)
    cos, sin = (token_table(t, s) for t, s in zip(time, spatial_table(*grid, head_dim, theta), strict=True))
    return cos, sin


def _attend(q: Array, k: Array, v: Array, layer: Array, carry: None) -> tuple[Array, None]:
    """Plain attention, which differentiates faster than that of `nki_ops`."""
    weights = jax.nn.softmax(jnp.einsum("bqnd,bknd->bnqk", q * q.shape[-1] ** -0.5, k))
    return jnp.einsum("bnqk,bknd->bqnd", weights, v), carry


def _column(values: Float[Array, " B"]) -> Float[Array, "B 1 1 1 1"]:
    return values[:, None, None, None, None]

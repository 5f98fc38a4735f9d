"""Training the DiT and its text encoder in the rolling setting, by the engine's own step.

A batch of videos runs through the very process of inference: ramp-up, steady state and ramp-down, the cache filled by
clean passes, the window re-noised with fresh noise. Each step is an update: the loss compares the window's clean
estimates with the video. What goes on to the next step is either the video itself (teacher) or what the network said
(its own roll-out), drawn anew at every step: the longer the roll-outs get, the rarer they are set right. Gradients do
not reach back into earlier steps.

What the network is to do in each place of the window follows from what it can know:
  - blocks in front of place `PROMPT_PLACE` carry enough signal to be read off their own noisy latents;
  - from there on, signal is too weak, and a block continues the one before it as the prompt says. A new prompt
    therefore acts on the block that stands at `PROMPT_PLACE` when it comes;
  - the first block of a video, which continues nothing, starts where its noise says (`rfjax.train.start`). Its
    estimates of the first steps are forgotten: whatever they showed is moved to a random place before it is re-noised.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from rfjax.config import ModelConfig
from rfjax.dit.model import DiT, patchify, unpatchify
from rfjax.rolling.plan import KeyTable, Roll, StepPlan, plan_step
from rfjax.rolling.schedule import noise_levels
from rfjax.rolling.step import (
    KV,
    RollingState,
    WindowAttention,
    init_state,
    rolling_step,
    rotary_of,
    token_grid,
    turned_sink,
)
from rfjax.text.model import UMT5Encoder
from rfjax.train.attention import attention
from rfjax.train.latents import LatentSet
from rfjax.train.loop import Metrics, Stage
from rfjax.train.optimizer import averaged, optimizer
from rfjax.train.start import noise_for_start

PROMPT_PLACE = 2  # of 0 .. 4, front to back


@dataclass(frozen=True)
class RolloutRecipe:
    """How the DiT is trained.

    Attributes:
        steps: updates.
        batch: videos of a lane.
        lanes: batches that take turns, each at another step of its videos.
        own: chance that a video goes on from the network's own estimates, at the start and at the end of a ramp.
        start_boost: how much louder the noise says at first where things start; it goes to 0 with the ramp.
        own_steps: the updates between which the ramp goes.
    """

    steps: int
    batch: int = 8
    lanes: int = 16
    learning_rate: float = 0.02
    adam_learning_rate: float = 0.002
    average: float = 0.998
    own: tuple[float, float] = (0.0, 0.9)
    start_boost: float = 0.0
    own_steps: tuple[int, int] = (0, 1)


class RolloutState(NamedTuple):
    """Everything the next step depends on."""

    params: Any  # {"dit": ..., "text": ...}
    average: Any
    optimizer: Any
    lanes: tuple[RollingState, ...]  # batches of videos on their way


class Batch(NamedTuple):
    """What a step needs of its videos."""

    target: Float[np.ndarray, "B W T Z"]
    weight: Float[np.ndarray, "B W"]
    tokens: Int[np.ndarray, "B S"]
    lengths: Int[np.ndarray, " B"]
    start: Int[np.ndarray, "B N 2"]


class DenseAttention(WindowAttention):
    """`WindowAttention` as one batched product over all heads, which differentiates faster; the cache is constant.

    All videos of a batch are at the same step.
    """

    def __call__(self, q: Array, k: Array, v: Array, layer: Array, carry: KV) -> tuple[Array, KV]:
        slots, plan = self.config.cache_slots, self.plan.row(0)
        k_blocks, v_blocks = self.blocks(k, 0), self.blocks(v, 0)
        pool, after = [], []
        for cache, blocks in zip(carry, (k_blocks, v_blocks), strict=True):
            past = jax.lax.dynamic_slice_in_dim(cache, layer * slots, slots)
            pool.append(jax.lax.dynamic_update_index_in_dim(past, blocks[0], plan.write_slot, 0))
            constant = jax.lax.stop_gradient(blocks[0])
            after.append(jax.lax.dynamic_update_index_in_dim(cache, constant, layer * slots + plan.write_slot, 0))
        sink = turned_sink((pool[0], pool[1]), jnp.int32(0), plan, k.dtype)
        pool = [jnp.concatenate(x) for x in zip(pool, sink, (k_blocks[1:], v_blocks[1:]), strict=True)]
        block_tokens = k_blocks.shape[3]
        clean = _attend(q[:, :block_tokens], pool, plan.clean_keys)
        window = _attend(q[:, block_tokens:], pool, plan.window_keys)
        return jnp.concatenate([clean, window], axis=1), (after[0], after[1])


def _attend(q: Array, pool: list[Array], keys: KeyTable) -> Array:
    """Softmax attention over the blocks of a pool that a key table names.

    Blocks are picked by a product, whose gradient is one too; a gather's is a slow scatter.
    """
    places, tokens = keys.blocks.shape[0], pool[0].shape[3]
    pick = jax.nn.one_hot(keys.blocks, pool[0].shape[0])
    k, v = (jnp.einsum("pw,wbntd->bnptd", pick, x) for x in pool)
    k, v = (x.reshape(*x.shape[:2], places * tokens, -1) for x in (k, v))
    bias = jnp.repeat(jnp.where(jnp.arange(places) < keys.n_valid, 0.0, -1e9), tokens)
    return attention(q.transpose(0, 2, 1, 3), k, v, bias).transpose(0, 2, 1, 3)


class Clock(NamedTuple):
    """Where an update stands: whose turn it is, and at which step of which videos."""

    lane: int
    episode: int
    step: int


def clock(number: int, lanes: int, length: int) -> Clock:
    """Lanes take turns and run out of step with one another; the first episode of each is cut short for that."""
    turn, lane = divmod(number, lanes)
    offset = lane * length // lanes
    episode, step = divmod(turn + offset, length)
    return Clock(lane, episode, step - offset if episode == 0 else step)


def rollout_stage(
    config: ModelConfig,
    recipe: RolloutRecipe,
    data: LatentSet,
    tokens: tuple[Int[np.ndarray, "P S"], Int[np.ndarray, " P"]],
    params: dict[str, Any],
    show: Callable[[Any, int, Path], Metrics],
    seed: int = 0,
) -> Stage:
    """The stage that trains a DiT and its text encoder.

    Args:
        config: of the model.
        recipe: how.
        data: encoded videos.
        tokens: ids and lengths of each of the data's prompts.
        params: to start from, "dit" and "text".
        show: (averaged params, step number, folder) -> metrics.
        seed: of all randomness.
    """
    rolling, shape = config.rolling, data.latents.shape
    blocks, window = shape[1] // rolling.block_frames, rolling.window_blocks
    length = blocks + window - 1  # steps of one video, ramp-down included
    roll, patch, sides = Roll(0, blocks - 1), config.dit.patch_size[1:], shape[-2:]
    videos = rearrange(data.latents, "s (b f) c h w -> s b f c h w", f=rolling.block_frames)
    tx = optimizer(recipe.learning_rate, recipe.adam_learning_rate, recipe.steps)
    graphs = {"dit": nnx.graphdef(DiT(config.dit, rngs=nnx.Rngs(0))),
              "text": nnx.graphdef(UMT5Encoder(config.text, rngs=nnx.Rngs(0)))}  # fmt: skip
    sigmas = jnp.asarray(noise_levels(rolling).sigmas[::-1].copy())

    def batch_of(at: Clock) -> Batch:
        rng = np.random.default_rng([seed, at.lane, at.episode])
        chosen = rng.integers(len(data), size=recipe.batch)
        index = at.step - window + 1 + np.arange(window)  # block at each place
        inside = (index >= 0) & (index < blocks)
        index = np.clip(index, 0, blocks - 1)
        shown = int(np.clip(min(at.step, blocks - 1) - (window - 1 - PROMPT_PLACE), 0, blocks - 1))
        ids = data.prompt_ids[chosen]
        # A change that the prompt does not tell yet cannot be foreseen.
        told = (index <= shown) | (ids[:, index] == ids[:, shown, None])
        return Batch(
            target=patchify(videos[chosen[:, None], index].astype(np.float32), patch),
            weight=(inside & told).astype(np.float32),
            tokens=tokens[0][ids[:, shown]],
            lengths=tokens[1][ids[:, shown]],
            start=data.start[chosen],
        )

    def loss(params: Any, state: RollingState, batch: Batch, plan: StepPlan, noise: Array) -> tuple[Array, Any]:
        text = nnx.merge(graphs["text"], params["text"])
        dit = nnx.merge(graphs["dit"], params["dit"])
        text_kv = dit.text_keys_values(text(batch.tokens, batch.lengths))
        rotary = rotary_of(config, plan, token_grid(config, *sides))
        state = rolling_step(config, dit, state, text_kv, plan, noise, rotary, DenseAttention)
        error = jnp.mean(jnp.square(state.x0 - batch.target), axis=(2, 3))
        by_place = jnp.sum(error * batch.weight, axis=0)
        return jnp.mean(root(error) * batch.weight), (state, by_place, jnp.sum(batch.weight, axis=0))

    @partial(jax.jit, donate_argnums=(0,))
    def update(
        state: RolloutState, batch: Batch, plan: StepPlan, step: Array, done: Array, number: Array, lane: RollingState
    ) -> tuple[RolloutState, RollingState, dict[str, Array]]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), 4)
        own_share = recipe.own[0] + (recipe.own[1] - recipe.own[0]) * done
        own = jax.random.bernoulli(keys[0], own_share, (recipe.batch, 1, 1, 1))
        x0 = jnp.where(step == 0, 0, unpatchify(jnp.asarray(lane.x0), patch, sides))
        x0 = jnp.where((step == 1) | (step == 2), scattered(keys[1], x0, patch), x0)
        noise = jax.random.normal(keys[2], x0.shape)
        boost = (1 - done) * recipe.start_boost
        said = _started(keys[3], x0, noise, jnp.asarray(batch.start), step, sigmas, patch, boost)
        noise = jnp.where(step <= window - 1 - PROMPT_PLACE, said, noise)
        rolled = jax.tree.map(jax.lax.stop_gradient, lane._replace(x0=patchify(x0, patch)))
        noise = patchify(noise, patch)
        (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(state.params, rolled, batch, plan, noise)
        after, by_place, weight = aux
        updates, opt = tx.update(grads, state.optimizer, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        kept = jnp.where(own, after.x0, batch.target)
        new = state._replace(
            params=params, optimizer=opt, average=averaged(state.average, params, number, recipe.average)
        )
        return new, after._replace(x0=kept), {"error": by_place, "weight": weight}

    def init(number: int) -> RolloutState:
        state = init_state(config, recipe.batch, *shape[-2:], dtype=jnp.float32)
        lanes = tuple(jax.tree.map(jnp.array, state) for _ in range(recipe.lanes))
        begun, average = (jax.tree.map(jnp.copy, params) for _ in range(2))  # both are donated
        return RolloutState(begun, average, tx.init(params), lanes)

    def step(state: RolloutState, number: int) -> tuple[RolloutState, Metrics]:
        at = clock(number, recipe.lanes, length)
        plan = plan_step(at.step, roll, rolling, config.dit.head_dim, config.dit.rope_theta)
        done = ramp(number, recipe.own_steps)
        lanes, lane = state.lanes, state.lanes[at.lane]
        new, lane, metrics = update(
            state._replace(lanes=()),
            batch_of(at),
            plan,
            jnp.int32(at.step),
            jnp.float32(done),
            jnp.int32(number),
            lane,
        )
        lanes = tuple(lane if i == at.lane else old for i, old in enumerate(lanes))
        return new._replace(lanes=lanes), _metrics(metrics, at.step, window, blocks)

    return Stage(init, step, lambda state, number, folder: show(state.average, number, folder))


def root(error: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """What is made small, of the mean squared error of each block.

    A thing that differs little from its background counts as much as one that differs a lot; and where the right
    answer cannot be known, the best is a likely one, not the mean of all.
    """
    return jnp.sqrt(error + 1e-4)


def ramp(number: int, steps: tuple[int, int]) -> float:
    """0 until the first of `steps`, 1 from the last on, and straight in between."""
    first, last = steps
    return float(np.clip((number - first) / max(1, last - first), 0, 1))


def scattered(key: Array, x0: Float[Array, "B *_ h w"], patch: tuple[int, int]) -> Float[Array, "B *_ h w"]:
    """Every video's latents moved on the torus by a random number of patches."""

    def move(key: Array, x: Array) -> Array:
        patches = jnp.array(x.shape[-2:]) // jnp.array(patch)
        return jnp.roll(x, jax.random.randint(key, (2,), 0, patches) * jnp.array(patch), axis=(-2, -1))

    return jax.vmap(move)(jax.random.split(key, x0.shape[0]), x0)


def _started(
    key: Array, x0: Array, noise: Array, start: Array, step: Array, sigmas: Array, patch: tuple[int, int], boost: Array
) -> Array:
    """The noise of a ramp-up step, with that of the first block saying where things start."""
    window = x0.shape[1]
    place = window - 1 - step
    entering = jnp.concatenate([x0[:, 1:], jnp.zeros_like(x0[:, :1])], axis=1)
    first = jax.lax.dynamic_index_in_dim(entering, place, 1, keepdims=False)
    keys = jax.random.split(key, x0.shape[0])
    say = partial(noise_for_start, patch=patch, boost=boost)
    said = jax.vmap(say, in_axes=(0, 0, None, 0))(keys, first, sigmas[place], start)
    return jax.lax.dynamic_update_index_in_dim(noise, said, place, 1)


def _metrics(numbers: dict[str, Array], step: int, window: int, blocks: int) -> Metrics:
    """Mean squared error at each place, apart for the ramp-up and for windows with context."""
    kind = "ramp" if step < window else "roll"
    error, weight = np.asarray(numbers["error"]), np.asarray(numbers["weight"])
    return {f"{kind}{i}": float(error[i] / weight[i]) for i in range(window) if weight[i] > 0}

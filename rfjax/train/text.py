"""Training the text encoder on prompts alone, before it serves a DiT.

The features of a word must tell the words around it. So "red" before "background" becomes another thing than "red"
before "circle", which a DiT would take long to find out by itself: until then, a prompt is to it a bag of words.
(umT5 comes pre-trained, too, by other means.)
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from rfjax.config import TextConfig
from rfjax.text.model import UMT5Encoder
from rfjax.train.loop import Metrics, Stage
from rfjax.train.optimizer import averaged, optimizer

_OFFSETS = (-4, -3, -2, -1, 1, 2, 3, 4)  # of the words around, in tokens


@dataclass(frozen=True)
class TextRecipe:
    """How the text encoder is trained: `batch` prompts an update."""

    steps: int
    batch: int = 64
    learning_rate: float = 0.02
    adam_learning_rate: float = 0.002
    average: float = 0.99


class TextState(NamedTuple):
    """Everything the next step depends on; parameters are {"text": ..., "around": [offsets, C, vocabulary]}."""

    params: Any
    average: Any
    optimizer: Any


def text_stage(
    config: TextConfig,
    recipe: TextRecipe,
    tokens: tuple[Int[np.ndarray, "P S"], Int[np.ndarray, " P"]],
    params: nnx.State,
    seed: int = 0,
) -> Stage:
    """The stage that trains a text encoder.

    Args:
        config: of the encoder.
        recipe: how.
        tokens: ids and lengths of the prompts.
        params: to start from.
        seed: of all randomness.
    """
    ids, lengths = tokens
    graph = nnx.graphdef(UMT5Encoder(config, rngs=nnx.Rngs(0)))
    tx = optimizer(recipe.learning_rate, recipe.adam_learning_rate, recipe.steps)

    def loss(params: Any, ids: Array, lengths: Array) -> tuple[Array, Array]:
        features = nnx.merge(graph, params["text"])(ids, lengths)
        logits = jnp.einsum("bsc,ocv->obsv", features, params["around"])
        wanted = jnp.stack([_shifted(ids, offset) for offset in _OFFSETS])
        valid = jnp.arange(ids.shape[1]) < lengths[:, None]
        weight = jnp.broadcast_to(valid, wanted.shape) / (len(_OFFSETS) * jnp.sum(valid))
        told = jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[..., None], axis=-1)[..., 0]
        return -jnp.sum(told * weight), jnp.sum((jnp.argmax(logits, axis=-1) == wanted) * weight)

    @partial(jax.jit, donate_argnums=(0,))
    def update(state: TextState, ids: Array, lengths: Array, number: Array) -> tuple[TextState, dict[str, Array]]:
        (value, right), grads = jax.value_and_grad(loss, has_aux=True)(state.params, ids, lengths)
        updates, opt = tx.update(grads, state.optimizer, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        new = TextState(params, averaged(state.average, params, number, recipe.average), opt)
        return new, {"surprise": value, "told": right}

    def init(number: int) -> TextState:
        begun, average = (jax.tree.map(jnp.copy, with_heads(config, params)) for _ in range(2))  # both are donated
        return TextState(begun, average, tx.init(begun))

    def step(state: TextState, number: int) -> tuple[TextState, Metrics]:
        chosen = np.random.default_rng([seed, number]).integers(len(ids), size=recipe.batch)
        state, numbers = update(state, ids[chosen], lengths[chosen], jnp.int32(number))
        return state, {name: float(value) for name, value in numbers.items()}

    def show(state: TextState, number: int, folder: Path) -> Metrics:
        return {"told_by_average": float(jax.jit(loss)(state.average, ids, lengths)[1])}

    return Stage(init, step, show)


def with_heads(config: TextConfig, params: nnx.State) -> dict[str, Any]:
    """What is trained: the encoder, and the matrices that read the words around off its features."""
    return {"text": params, "around": jnp.zeros((len(_OFFSETS), config.dim, config.vocab_size))}


def _shifted(ids: Int[Array, "B S"], offset: int) -> Int[Array, "B S"]:
    """The token that stands `offset` places on; padding beyond both ends."""
    padded = jnp.pad(ids, ((0, 0), (max(0, -offset), max(0, offset))))
    return padded[:, max(0, offset) : max(0, offset) + ids.shape[1]]

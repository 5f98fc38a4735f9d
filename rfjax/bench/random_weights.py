"""Models with random weights of the right size: enough to measure speed, made quickly."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rfjax.config import ModelConfig
from rfjax.dit.model import DiT
from rfjax.engine import Engine
from rfjax.pipeline import RollingForcingPipeline
from rfjax.text import TokenizedText, Tokenizer
from rfjax.text.model import UMT5Encoder
from rfjax.vae.model import VAE


def random_model(make: Callable[[], nnx.Module]) -> tuple[nnx.GraphDef, nnx.State]:
    """The model that `make` builds, without running its own initialisers: normal kernels that keep the variance."""
    graph, abstract = nnx.split(nnx.eval_shape(make))
    pool = np.random.default_rng(0).standard_normal(1 << 20, np.float32)

    def fill(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "kernel" in name:
            values = pool / math.sqrt(max(1, math.prod(leaf.shape[:-1])))
        else:
            values = ("norm" in name) + 0.02 * pool
        return _repeated(jnp.asarray(values, leaf.dtype), leaf.shape)

    return graph, jax.tree_util.tree_map_with_path(fill, abstract)


@partial(jax.jit, static_argnums=1)
def _repeated(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`values` over and over, made in place: the largest parameter has gigabytes."""
    size = math.prod(shape)
    rows = jnp.broadcast_to(values, (-(-size // values.size), values.size))
    return rows.reshape(-1)[:size].reshape(shape)


def random_pipeline(config: ModelConfig, dtype: str) -> RollingForcingPipeline:
    """A pipeline whose model has random weights."""
    models = {
        "dit": random_model(lambda: DiT(config.dit, dtype=dtype, rngs=nnx.Rngs(0))),
        "vae": random_model(lambda: VAE(config.vae, dtype=dtype, rngs=nnx.Rngs(0))),
        "text": random_model(lambda: UMT5Encoder(config.text, dtype=dtype, rngs=nnx.Rngs(0))),
    }
    graphs = {part: graph for part, (graph, _) in models.items()}
    params = {part: params for part, (_, params) in models.items()}
    return RollingForcingPipeline(Engine(config, graphs, params, dtype), cast(Tokenizer, _any_tokens))


def _any_tokens(prompts: Sequence[str], text_len: int) -> TokenizedText:
    """In place of a tokenizer, which a model without a checkpoint has not: each prompt as many tokens as words."""
    lengths = np.array([min(len(prompt.split()), text_len) for prompt in prompts], np.int32)
    n = len(prompts)
    return TokenizedText(np.full((n, text_len), 1, np.int32), lengths, (0,) * n, ((),) * n)

"""The three parts of a model that have weights: how each is built, filled and loaded."""

from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import rfjax.dit.params
import rfjax.text.params
import rfjax.vae.params
from rfjax.config import ModelConfig
from rfjax.dit.model import DiT
from rfjax.keymap import Source
from rfjax.text.model import UMT5Encoder
from rfjax.vae.model import VAE
from rfjax.weights import store

_KEY_MAPS = {
    "dit": rfjax.dit.params.key_map,
    "vae": rfjax.vae.params.key_map,
    "text": rfjax.text.params.key_map,
}


def key_map(part: str, config: ModelConfig) -> dict[str, Source]:
    """Where each parameter of a part ("dit", "vae" or "text") comes from in the release."""
    return _KEY_MAPS[part](getattr(config, part))


def abstract_part(
    part: str, config: ModelConfig, dtype: DTypeLike, encoder_dtype: DTypeLike = jnp.float32
) -> tuple[nnx.GraphDef, nnx.State]:
    """A part's graph definition and the shapes and dtypes of its parameters, without making them.

    Args:
        part: "dit", "vae" or "text".
        config: of the whole model.
        dtype: of the part's matmuls and convolutions.
        encoder_dtype: likewise, of the VAE's encoder.
    """

    def build() -> nnx.Module:
        rngs = nnx.Rngs(0)
        if part == "dit":
            return DiT(config.dit, dtype=dtype, rngs=rngs)
        if part == "vae":
            return VAE(config.vae, dtype=dtype, encoder_dtype=encoder_dtype, rngs=rngs)
        return UMT5Encoder(config.text, dtype=dtype, rngs=rngs)

    return nnx.split(nnx.eval_shape(build))


def abstract_parts(config: ModelConfig, dtype: DTypeLike) -> tuple[dict[str, nnx.GraphDef], dict[str, nnx.State]]:
    """`abstract_part` of all parts: graph definitions and parameters, by part. The VAE's encoder is float32."""
    parts = {part: abstract_part(part, config, dtype) for part in store.PARTS}
    return {part: graph for part, (graph, _) in parts.items()}, {part: params for part, (_, params) in parts.items()}


def load_parts(
    path: str | PathLike[str],
    *,
    dtypes: Mapping[str, str],
    sharding: jax.sharding.Sharding | None = None,
    text_sharding: jax.sharding.Sharding | None = None,
) -> tuple[ModelConfig, dict[str, nnx.GraphDef], dict[str, nnx.State]]:
    """Loads a whole checkpoint.

    Args:
        path: the checkpoint.
        dtypes: of "dit", "vae" (its decoder), "vae_encoder" and "text".
        sharding: of every parameter; None is the default device.
        text_sharding: of the text encoder's; None is `sharding`.

    Returns:
        The configuration and, by part, graph definitions and parameters.

    Raises:
        InputError: the checkpoint is missing, damaged, or not of this model.
    """
    path = Path(path)
    config = store.load_config(path)
    graphs, params = {}, {}
    for part in store.PARTS:
        graphs[part], abstract = abstract_part(part, config, dtypes[part], dtypes["vae_encoder"])
        place = text_sharding if part == "text" and text_sharding is not None else sharding
        placed = jax.tree.map(partial(_placed, place), abstract)
        params[part] = store.load_params(path, part, placed)
    return config, graphs, params


def _placed(sharding: jax.sharding.Sharding | None, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

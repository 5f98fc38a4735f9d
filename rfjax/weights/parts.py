"""The three parts of a model that have weights: how each is built and where its weights come from."""

from flax import nnx
from jax.typing import DTypeLike

import rfjax.dit.params
import rfjax.text.params
import rfjax.vae.params
from rfjax.config import ModelConfig
from rfjax.dit.model import DiT
from rfjax.text.model import UMT5Encoder
from rfjax.vae.model import VAE
from rfjax.weights.keymap import Source

_MODELS = {"dit": DiT, "vae": VAE, "text": UMT5Encoder}
_KEY_MAPS = {
    "dit": rfjax.dit.params.key_map,
    "vae": rfjax.vae.params.key_map,
    "text": rfjax.text.params.key_map,
}


def abstract_state(part: str, config: ModelConfig, dtype: DTypeLike) -> nnx.State:
    """The shapes and dtypes of a part's parameters ("dit", "vae" or "text") when its matmuls run in `dtype`."""
    model = _MODELS[part]
    return nnx.state(nnx.eval_shape(lambda: model(getattr(config, part), dtype=dtype, rngs=nnx.Rngs(0))))


def key_map(part: str, config: ModelConfig) -> dict[str, Source]:
    """Where the parameters of a part come from."""
    return _KEY_MAPS[part](getattr(config, part))

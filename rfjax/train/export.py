"""From trained parameters to a checkpoint that the pipeline loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rfjax.config import ModelConfig
from rfjax.errors import InputError
from rfjax.weights.fill import flatten
from rfjax.weights.parts import abstract_part
from rfjax.weights.store import PARTS, save

Storage = Literal["float32", "float16", "bfloat16"]


def export(
    path: Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    tokenizer_dir: Path,
    provenance: Mapping[str, Any],
    storage: Storage,
) -> None:
    """Writes a checkpoint; one that stands at `path` is replaced.

    Args:
        path: the folder to make.
        config: of the model.
        params: float32, of "dit", "vae" and "text".
        tokenizer_dir: the folder with the tokenizer's files.
        provenance: where the weights came from, as JSON values.
        storage: dtype of the matrices; norms, and both ends of the DiT, are stored in float32 always.

    Raises:
        InputError: a weight is not finite, or beyond the range of `storage`; `path` is something else.
    """
    stored = {part: _stored(part, config, params[part], storage) for part in PARTS}
    save(path, config, stored, tokenizer_dir, provenance, overwrite=path.exists())


def _stored(part: str, config: ModelConfig, params: Any, storage: Storage) -> Any:
    dtype = jnp.dtype(storage)
    _, abstract = abstract_part(part, config, dtype, encoder_dtype=dtype)
    arrays = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), params, abstract)
    bad = [name for name, leaf in flatten(arrays).items() if not np.isfinite(np.asarray(leaf, np.float32)).all()]
    if bad:
        raise InputError(f"{part} has weights that are not finite in {storage}, such as {bad[0]}; store float32")
    return arrays

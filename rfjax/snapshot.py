"""A running stream as one file: safetensors, with what is not an array as JSON in its metadata."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rfjax.engine import Shape
from rfjax.errors import InputError
from rfjax.stream import StreamState

if TYPE_CHECKING:
    from rfjax.pipeline import RollingForcingPipeline

FORMAT = "rfjax-stream-1"


def save_snapshot(path: str | Path, state: StreamState, details: dict[str, Any]) -> None:
    """Writes a stream's state; the file appears whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    arrays = {f"{i:04d}": np.asarray(leaf, order="C") for i, leaf in enumerate(jax.tree.leaves(state))}
    try:
        save_file(arrays, partial, {"format": FORMAT, "details": json.dumps(details)})
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write the stream to {path}: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


def load_snapshot(path: str | Path, pipeline: "RollingForcingPipeline") -> tuple[dict[str, Any], StreamState]:
    """Reads what `save_snapshot` wrote: the details, and the state on the host.

    Raises:
        InputError: the file is missing, broken, or of another model or dtype.
    """
    if not Path(path).is_file():
        raise InputError(f"{path}: there is no such file")
    try:
        with safe_open(str(path), "numpy") as file:
            metadata = file.metadata() or {}
            leaves = [file.get_tensor(name) for name in sorted(file.keys())]
    except SafetensorError as error:
        raise InputError(f"{path} is not a saved stream, or is damaged ({error})") from None
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path} is not a saved stream")
    details = json.loads(metadata["details"])
    for name, value in model_identity(pipeline).items():
        if details.pop(name) != value:
            raise InputError(f"{path} was saved by a pipeline of another {name}; load that one to resume it")
    shape = Shape(*details["shape"])
    decoded = details["decode"] and details["next_block"] > 0
    empty = StreamState(
        rolling=jax.eval_shape(lambda: pipeline.engine.init_state(shape)),
        text_kv=pipeline.engine.text_kv_shape(shape),
        decoder=pipeline.engine.decoder_state_shape(shape) if decoded else None,
        step=np.array(0),
        given=np.zeros(0),
    )
    return details, jax.tree.unflatten(jax.tree.structure(empty), leaves)


def model_identity(pipeline: "RollingForcingPipeline") -> dict[str, Any]:
    """What a stream must find again to go on bit for bit (the weights themselves are the user's to keep)."""
    return {"model": json.loads(json.dumps(pipeline.config.to_json())), "dtype": str(pipeline.engine.dtype)}

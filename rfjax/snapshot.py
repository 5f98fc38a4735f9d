"""A running stream as one file: safetensors, with what is not an array as JSON in its metadata."""

import contextlib
import json
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rfjax.engine import EIGHT_BITS, Shape, checksum
from rfjax.errors import InputError
from rfjax.inputs import check_path
from rfjax.rolling.plan import Roll
from rfjax.stream import StreamState

if TYPE_CHECKING:
    from rfjax.pipeline import RollingForcingPipeline

FORMAT = "rfjax-stream-4"


def save_snapshot(
    path: str | Path, state: StreamState, details: dict[str, Any], pipeline: "RollingForcingPipeline"
) -> None:
    """Writes a stream's state; the file appears whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    target = check_path(path, "the stream").resolve()  # a link goes on pointing at the file it names
    partial = target.with_name(f".{secrets.token_hex(8)}.partial")
    # numpy knows no floats of 8 bits, so the file has them as plain bytes.
    leaves = [np.asarray(leaf, order="C") for leaf in jax.tree.leaves(state)]
    leaves = [leaf.view(np.uint8) if leaf.dtype in EIGHT_BITS else leaf for leaf in leaves]
    text = json.dumps({"pipeline": model_identity(pipeline), "stream": details})
    metadata = {"format": FORMAT, "details": text, "crc32": checksum(leaves, text)}
    try:
        partial.touch(exist_ok=False)
        mode = partial.stat().st_mode  # as the umask has it; safetensors makes its files private
        save_file({f"{i:04d}": leaf for i, leaf in enumerate(leaves)}, partial, metadata)
        partial.chmod(mode)
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write the stream to {path}: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def load_snapshot(path: str | Path, pipeline: "RollingForcingPipeline") -> tuple[dict[str, Any], StreamState]:
    """Reads what `save_snapshot` wrote: the details, and the state on the host.

    Raises:
        InputError: the file is missing, broken, or of another model, dtype or set of weights.
    """
    file = check_path(path, "the stream")
    if os.path.isdir(file):
        raise InputError(f"{path} is a folder, no saved stream")
    if not os.path.isfile(file):
        raise InputError(f"{path}: there is no such file")
    try:
        with safe_open(str(file), "numpy") as content:
            metadata = content.metadata() or {}
            leaves = [content.get_tensor(name) for name in sorted(content.keys())]
    except SafetensorError as error:
        raise InputError(f"{path} is not a saved stream, or is damaged ({error})") from None
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path} is not a saved stream of this version of rfjax")
    text = metadata.get("details", "")
    if metadata.get("crc32") != checksum(leaves, text):
        raise InputError(f"{path} is damaged: its checksum differs; take another copy")
    content = json.loads(text)
    for name, value in model_identity(pipeline).items():
        saved = content["pipeline"].get(name)
        if saved != value:
            raise InputError(
                f"{path} was saved by a pipeline with {name} {saved}, this one has {value}; load that one to resume it"
            )
    details = content["stream"]
    expected = _expected(details, pipeline)
    wanted = jax.tree.leaves(expected)
    leaves = [x.view(like.dtype) if like.dtype in EIGHT_BITS else x for x, like in zip(leaves, wanted, strict=False)]
    forms = [[(leaf.shape, leaf.dtype) for leaf in tree] for tree in (wanted, leaves)]
    if forms[0] != forms[1]:
        raise InputError(f"{path} does not hold the state of such a stream")
    return details, jax.tree.unflatten(jax.tree.structure(expected), leaves)


def saved_stream(path: Path) -> dict[str, Any] | None:
    """What a file says of the stream in it and of the pipeline that saved it; None if it is no saved stream."""
    try:
        with safe_open(str(path), "numpy") as content:
            metadata = content.metadata() or {}
        return json.loads(metadata["details"]) if metadata.get("format") == FORMAT else None
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def _expected(details: dict[str, Any], pipeline: "RollingForcingPipeline") -> StreamState:
    """The abstract state of a stream."""
    shape, engine = Shape(*details["shape"]), pipeline.engine
    block = pipeline.config.rolling.block_frames, pipeline.config.dit.in_dim, *shape[1:]
    decoded = details["decode"] and details["next_block"] > 0
    return StreamState(
        rolling=engine.host_state(shape),
        text_kv=engine.text_kv_shape(shape),
        decoder=engine.decoder_state_shape(shape) if decoded else None,
        step=np.array(0),
        given=jax.ShapeDtypeStruct((shape.batch, Roll(*details["roll"]).first, *block), np.float32),  # pyright: ignore
    )


def model_identity(pipeline: "RollingForcingPipeline") -> dict[str, Any]:
    """What a stream must find again to go on bit for bit, by name."""
    engine = pipeline.engine
    sections = json.loads(json.dumps(replace(pipeline.config, use=None).to_json()))
    sizes = {f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()}
    return sizes | {
        "dtype": str(engine.dtype),
        "cache dtype": str(engine.cache_dtype),
        "text dtype": str(engine.text_dtype),
        "weights": engine.fingerprint,
    }

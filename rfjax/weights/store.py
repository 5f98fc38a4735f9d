"""The checkpoint that rfjax runs from: a folder written whole or not at all.

    config.json     format and version, the model's configuration, where the weights came from, a stamp of each file
    dit/ vae/ text/ one Orbax checkpoint each, so that a part can be read alone
    tokenizer/      the tokenizer's files as the release has them

Arrays are stored uncompressed: trained weights shrink by 7 %, and reading them would take twice as long.
"""

import contextlib
import errno
import glob
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from rfjax.config import ModelConfig
from rfjax.errors import InputError
from rfjax.weights.fill import flatten, nest

PARTS = ("text", "dit", "vae")  # largest first: it needs the most room while it is loaded
FORMAT, FORMAT_VERSION = "rfjax", 1
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model")
_STAMPED_BYTES = 1 << 20
_BATCH_BYTES = 1 << 30  # restored at a time; Orbax holds every array of a restore twice


def save(
    path: Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    tokenizer_dir: Path,
    provenance: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint from parameters in memory.

    Args:
        path: the folder to make.
        config: of the model.
        params: for each of `PARTS` its parameters, an NNX state or nested dicts.
        tokenizer_dir: the folder with the tokenizer's files.
        provenance: where the weights came from, as JSON values.
        overwrite: replace a checkpoint that stands at `path`.

    Raises:
        InputError: `path` is taken, or there is no space.
    """
    if set(params) != set(PARTS):
        raise ValueError(f"a checkpoint has the parts {PARTS}, not {tuple(params)}")
    flat = {part: flatten(state) for part, state in params.items()}
    needed = sum(leaf.nbytes for leaves in flat.values() for leaf in leaves.values())
    with staged(path, needed, overwrite=overwrite) as folder:
        for part, leaves in flat.items():
            save_part(folder, part, leaves)
        save_rest(folder, config, tokenizer_dir, provenance)


@contextlib.contextmanager
def staged(path: Path, needed: int, *, overwrite: bool) -> Iterator[Path]:
    """A folder to write a checkpoint into, which takes its place at `path` only when all went well.

    Args:
        path: where the checkpoint will stand.
        needed: bytes that it will take.
        overwrite: replace a checkpoint that stands there (nothing else is ever replaced).

    Raises:
        InputError: `path` is taken, or there is no space.
    """
    path = path.absolute()
    taken = os.path.exists(path)
    if taken and not overwrite:
        raise InputError(f"{path} exists; choose another place, or overwrite it (--force, overwrite=True)")
    if taken and not is_checkpoint(path):
        raise InputError(f"{path} exists and is no rfjax checkpoint; it is not overwritten, choose another place")
    writing = f".{path.name}.writing-"
    folder = path.parent / f"{writing}{os.getpid()}"
    replaced = path.parent / f".{path.name}.replaced-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"cannot write in {path.parent}: {error.strerror}") from None
    try:
        for other in path.parent.glob(f"{glob.escape(writing)}*"):
            if not _runs(other.name.removeprefix(writing)):
                _remove(other)  # left by a process that was killed
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise InputError(f"no space: the checkpoint takes {_gb(needed)}, {path.parent} has {_gb(free)} free")
        yield folder
        if path.exists():
            path.rename(replaced)
        folder.rename(path)
        _remove(replaced)
    except (OSError, ValueError) as error:  # tensorstore reports a full disk as ValueError
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise InputError(f"no space left at {path.parent} while writing {_gb(needed)}; nothing kept") from error
        raise
    finally:
        _remove(folder)


def _runs(pid: str) -> bool:
    """Whether a process runs; True where that cannot be known."""
    if os.name != "posix" or not pid.isdecimal():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _remove(folder: Path) -> None:
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)  # tensorstore's threads may still be writing into it after one of them failed


def save_part(folder: Path, part: str, params: Mapping[str, Any]) -> None:
    """Writes one part's arrays (by dotted path) into a folder that `staged` gave."""
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        checkpointer.save(folder / part, ocp.args.PyTreeSave(nest(params)))


def save_rest(folder: Path, config: ModelConfig, tokenizer_dir: Path, provenance: Mapping[str, Any]) -> None:
    """Writes all but the arrays into a folder that `staged` gave."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    for name in _TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, tokenizer / name)
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": config.to_json(),
        "provenance": dict(provenance),
        "files": {file.relative_to(folder).as_posix(): _stamp(file) for file in _files(folder)},
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _stamp(file: Path) -> dict[str, int]:
    """Tells a file that was cut, lost or overwritten, without reading all of it; Orbax does not notice every case."""
    if not file.is_file():
        return {"bytes": 0, "crc32": 0}
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "crc32": zlib.crc32(content.read(_STAMPED_BYTES))}


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is an rfjax checkpoint, of any version."""
    try:
        return json.loads((path / "config.json").read_bytes()).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def load_json(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's config.json: "model", "provenance", "files" and the format.

    Raises:
        InputError: `path` is no checkpoint, or one of a newer version.
    """
    if not os.path.exists(path):
        raise InputError(f"{path}: no such checkpoint")
    if not is_checkpoint(path):
        raise InputError(f"{path} is no rfjax checkpoint; make one from a release with: rfjax convert SRC DST")
    content = json.loads((path / "config.json").read_bytes())
    if content.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{path} has format version {content.get('format_version')}, this rfjax reads {FORMAT_VERSION}; "
            "convert the release again"
        )
    lacking = [section for section in ("model", "files") if not isinstance(content.get(section), dict)]
    if lacking:
        raise InputError(f"{path / 'config.json'} lacks {' and '.join(lacking)}; convert the release again")
    return content


def load_config(path: Path) -> ModelConfig:
    """The configuration of the model in a checkpoint.

    Raises:
        InputError: `path` is no checkpoint, or its configuration is damaged.
    """
    return ModelConfig.from_json(load_json(path)["model"])


def check_files(path: Path, folder: str) -> None:
    """Compares the files in a folder of a checkpoint with the stamps taken when they were written.

    Raises:
        InputError: a file is missing or another one.
    """
    for name, stamp in load_json(path)["files"].items():
        if name.startswith(f"{folder}/") and (found := _stamp(path / name)) != stamp:
            written = stamp.get("bytes") if isinstance(stamp, dict) else None
            change = "other content" if found["bytes"] == written else f"{found['bytes']} bytes of {written}"
            raise InputError(f"{path} is damaged: {name} has {change}; convert the release again")


def stored_arrays(path: Path, part: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and dtype of each array of a part, by dotted path, without reading the arrays.

    Raises:
        InputError: the part is missing or damaged.
    """
    folder = path.absolute() / part
    check_files(path, part)
    with _reading(path, part), _checkpointer() as checkpointer:
        arrays = flatten(checkpointer.metadata(folder).item_metadata.tree)
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}


def load_params(path: Path, part: str, abstract_state: nnx.State) -> nnx.State:
    """Reads one part's parameters straight to their devices.

    Args:
        path: the checkpoint.
        part: "dit", "vae" or "text".
        abstract_state: shapes, dtypes and (if not None) shardings, as `nnx.state(nnx.eval_shape(...))` gives them;
            arrays are cast to these dtypes as they are read.

    Returns:
        A state of the same structure, with arrays. On the way, host memory holds 1 GB of them or the largest one.

    Raises:
        InputError: the part is missing or damaged, or its arrays are not those that `abstract_state` has.
    """
    wanted, stored = flatten(abstract_state), stored_arrays(path, part)
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is unknown" for name in stored if name not in wanted]
    problems += [
        f"{name} is {list(stored[name].shape)}, expected {list(leaf.shape)}"
        for name, leaf in wanted.items()
        if name in stored and tuple(stored[name].shape) != tuple(leaf.shape)
    ]
    if problems:
        more = f" and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise InputError(f"{path} does not fit the model in {part}: {'; '.join(problems[:20])}{more}")
    arrays: dict[str, jax.Array] = {}
    with _reading(path, part), _checkpointer() as checkpointer:
        for batch in _batches(wanted):
            arrays |= _restore(checkpointer, path.absolute() / part, batch)
    return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted])


def _restore(checkpointer: Any, folder: Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    args = {
        name: ocp.ArrayRestoreArgs(dtype=leaf.dtype, sharding=leaf.sharding or default)
        for name, leaf in wanted.items()
    }
    request = ocp.args.PyTreeRestore(item=nest(wanted), restore_args=nest(args), partial_restore=True)
    return jax.block_until_ready(flatten(checkpointer.restore(folder, request)))


def _batches(leaves: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    batch: dict[str, Any] = {}
    size = 0
    for name, leaf in leaves.items():
        nbytes = leaf.size * np.dtype(leaf.dtype).itemsize
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[name] = leaf
        size += nbytes
    yield batch


@contextlib.contextmanager
def _reading(path: Path, part: str) -> Iterator[None]:
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError):  # the device's or the host's trouble, not the file's
        raise
    except Exception as error:  # Orbax and tensorstore tell of damaged files by exceptions of every type
        reason = str(error).split("\n")[0][:200]
        raise InputError(f"{path} is damaged in {part}/ ({reason}); convert the release again") from error


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # here, not above: it takes 0.2 s, which `import rfjax` need not

    handlers = ocp.type_handlers
    registry = handlers.create_type_handler_registry(
        (np.ndarray, handlers.NumpyHandler(deepcopy_host_arrays=False)),  # a save copies each array otherwise
        (jax.Array, handlers.ArrayHandler()),
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry))


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"

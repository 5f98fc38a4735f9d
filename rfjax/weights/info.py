"""What a checkpoint, a release or a weights file is, read off it without loading a weight."""

from collections import Counter
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from rfjax.errors import InputError
from rfjax.snapshot import saved_stream
from rfjax.weights import store
from rfjax.weights.bundled import find_checkpoint
from rfjax.weights.names import TITLES, identify
from rfjax.weights.release import find_release, read_state_dicts


def info(path: str | PathLike[str]) -> dict[str, Any]:
    """Describes a checkpoint, the folder of a PyTorch release, one file of weights or a saved stream.

    Args:
        path: of it, or the name of a checkpoint that comes with rfjax.

    Returns:
        JSON values: "what" it is, its "path" and size in "bytes"; for a checkpoint its "model" config and
        "provenance"; for each of its "parts" the number of "parameters" and how many there are of each dtype.
        A file of weights says which "part" it holds and which sets of "weights"; a saved stream what it makes and
        by which "pipeline".

    Raises:
        InputError: it is none of these, or damaged.
    """
    path = find_checkpoint(Path(path))
    if not path.exists():
        raise InputError(f"there is no {path}")
    if (details := saved_stream(path)) is not None:
        return {"what": "saved stream", "path": str(path), "bytes": path.stat().st_size, **details}
    if path.is_file():
        return _file(path)
    if path.is_dir() and not store.is_checkpoint(path):
        files = find_release(path).weights
        return {"what": "PyTorch release", "path": str(path), "parts": {part: _file(f) for part, f in files.items()}}
    content = store.load_json(path)
    store.load_config(path)
    return {
        "what": "rfjax checkpoint",
        "path": str(path),
        "bytes": _size(path),
        "model": content["model"],
        "provenance": content.get("provenance", {}),
        "parts": {
            part: {"bytes": _size(path / part), **_counts(store.stored_arrays(path, part))} for part in store.PARTS
        },
    }


def describe(info: Mapping[str, Any]) -> str:
    """The result of `info` as lines of text."""
    lines = [f"{info['path']}: {info['what']}"]
    if "stream" in info:
        stream, pipeline = info["stream"], info["pipeline"]
        lines += [f"  {name}: {stream[name]}" for name in ("prompt", "seed", "next_block", "total_frames")]
        return "\n".join([*lines, f"  {pipeline['dtype']}, weights {pipeline['weights']}, {info['bytes']:,} bytes"])
    provenance = info.get("provenance", {})
    if "weights" in provenance:
        lines.append(f"  weights: {provenance['weights']}")
    for part, about in info.get("parts", {info.get("part"): info}).items():
        dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in about["dtypes"].items())
        sets = f", {' and '.join(about['weights'])} weights" if "weights" in about else ""
        title = TITLES.get(part, "an unknown model")
        lines.append(f"  {title}: {about['parameters']:,} parameters ({dtypes}){sets}, {about['bytes']:,} bytes")
    for section, fields in info.get("model", {}).items():
        plain = ", ".join(f"{name} {value}" for name, value in fields.items() if isinstance(value, int | float | str))
        lines.append(f"  {section}: {plain}")
    return "\n".join(lines)


def _file(path: Path) -> dict[str, Any]:
    sets = read_state_dicts(path)
    tensors = next(iter(sets.values())).tensors
    is_index = path.suffix == ".json"
    return {
        "what": "weights file",
        "path": str(path),
        "bytes": sum(t.nbytes for t in tensors.values()) if is_index else path.stat().st_size,
        "part": identify(tensors),
        "weights": list(sets),
        **_counts(tensors),
    }


def _counts(arrays: Mapping[str, Any]) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    for array in arrays.values():
        dtypes[str(array.dtype)] += array.size
    return {"parameters": dtypes.total(), "dtypes": dict(dtypes)}


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

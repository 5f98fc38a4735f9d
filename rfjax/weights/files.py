"""Opens a weights file of any kind that the release and its peers use, and says what is wrong with one that is not.

Tensors come back as read-only NumPy views of the memory-mapped file: nothing is read until it is used, and
tensors that share storage share memory.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rfjax.errors import InputError
from rfjax.weights.torch_file import ZIP_MAGIC, read_torch

_SAFETENSORS_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # the limit of the safetensors format
_PICKLE_MAGIC = b"\x80"
_LFS_MAGIC = b"version https://git-lfs.github.com/spec"
_INDEX_SUFFIX = ".safetensors.index.json"


def read_weights(path: Path) -> Any:
    """Reads a torch zip file, a safetensors file or the index of a sharded one, told apart by content.

    Returns:
        Dicts (and other plain containers) of arrays, nested as in the file.

    Raises:
        InputError: the file is missing, incomplete, damaged or of another kind.
    """
    if path.name.endswith(_INDEX_SUFFIX):
        return _read_index(path)
    data = _map(path)
    if data[:4].tobytes() == ZIP_MAGIC:
        return read_torch(path, data)
    if data[8] == ord("{") and _header_size(data) <= _MAX_HEADER:
        return _read_safetensors(path, data)
    raise InputError(f"{path} {_what_else(data)}")


def _map(path: Path) -> np.ndarray:
    """The bytes of a file [n] uint8, memory-mapped; at least 16."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; name the weights file in it")
    if not path.exists():
        raise InputError(f"{path}: no such file")
    size = path.stat().st_size
    if size == 0:
        raise InputError(f"{path} is empty (0 bytes); download it again")
    if size < 16:
        raise InputError(f"{path} has only {size} bytes: an incomplete download; download it again")
    return np.memmap(path, np.uint8, mode="r").view(np.ndarray)


def _what_else(data: np.ndarray) -> str:
    """What a file that holds no weights seems to be, and what to do."""
    head = data[:512].tobytes()
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page, not weights; download the file itself"
    if head.startswith(_LFS_MAGIC):
        return "is a git-lfs pointer, not the weights; run: git lfs pull"
    if head.startswith(_PICKLE_MAGIC):
        return "is a torch file of the old format (before torch 1.6); load it in torch and torch.save it again"
    return "is neither a torch file nor a safetensors file"


def _read_safetensors(path: Path, data: np.ndarray) -> dict[str, np.ndarray]:
    start = 8 + _header_size(data)
    if start > data.size:
        raise InputError(f"incomplete download: {path} has {data.size} bytes, its header alone ends at {start}")
    header = _json_object(path, data[8:start].tobytes())
    header.pop("__metadata__", None)
    try:
        end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end > data.size:
            raise InputError(f"incomplete download: {path} has {data.size} bytes of {end}; download it again")
        return {name: _safetensor(path, name, entry, data[start:]) for name, entry in header.items()}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged: bad safetensors header; download it again") from error


def _header_size(data: np.ndarray) -> int:
    return int(data[:8].view("<u8")[0])


def _safetensor(path: Path, name: str, entry: Mapping[str, Any], data: np.ndarray) -> np.ndarray:
    if entry["dtype"] not in _SAFETENSORS_DTYPES:
        raise InputError(
            f"{path}: {name} is stored as {entry['dtype']}; quantized weights are not supported, "
            "use the float32 or bfloat16 file"
        )
    dtype = np.dtype(_SAFETENSORS_DTYPES[entry["dtype"]])
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {end - start} bytes for shape {shape}")
    return np.ndarray(shape, dtype, buffer=data[start:end])


def _read_index(path: Path) -> dict[str, np.ndarray]:
    """The tensors of all shards that `*.safetensors.index.json` names."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    weight_map = _json_object(path, path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{path} has no weight_map: not the index of a sharded safetensors file")
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (path.parent / shard).is_file()]
    if absent:
        raise InputError(f"{path.parent} lacks {len(absent)} of {len(shards)} shards: {', '.join(absent)}")
    tensors: dict[str, np.ndarray] = {}
    for shard in shards:
        content = read_weights(path.parent / shard)
        lacking = [name for name, file in weight_map.items() if file == shard and name not in content]
        if lacking:
            raise InputError(f"{path.parent / shard} lacks {lacking[0]}, which {path.name} promises")
        tensors |= content
    return tensors


def _json_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{path} is damaged: its JSON does not parse; download it again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object")
    return value

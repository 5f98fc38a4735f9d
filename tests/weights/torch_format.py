"""Writes torch's zip format without torch, valid or broken in any way a test needs."""

import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

STORAGE_NAMES = {
    np.dtype(np.float64): "DoubleStorage", np.dtype(np.float32): "FloatStorage", np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage", np.dtype(np.int64): "LongStorage",
    np.dtype(np.int32): "IntStorage", np.dtype(np.int16): "ShortStorage", np.dtype(np.int8): "CharStorage",
    np.dtype(np.uint8): "ByteStorage", np.dtype(np.bool_): "BoolStorage",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Storage:
    """A flat array that tensors may share."""

    values: np.ndarray


@dataclass(frozen=True, eq=False)
class Tensor:
    """A strided view of a storage; offset and strides in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Global:
    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """What a pickle would call on loading."""

    function: Global
    args: tuple


def write_torch(path: Path, value: Any, *, root: str = "archive", byteorder: str | None = "little") -> None:
    """Saves a value as `torch.save` would: arrays become tensors, each on a storage of its own.

    The file is replaced, not rewritten: the arrays may be views of the old one.
    """
    storages: list[Storage] = []
    pickled = dump_pickle(value, storages)
    new = path.with_name(f"{path.name}.new")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", pickled)
        if byteorder is not None:
            archive.writestr(f"{root}/byteorder", byteorder)
        for i, storage in enumerate(storages):
            values = storage.values
            size = values.dtype.itemsize
            swapped = values.view(f"u{size}").astype(f">u{size}") if byteorder == "big" else values
            archive.writestr(f"{root}/data/{i}", swapped.tobytes())
        archive.writestr(f"{root}/version", "3\n")
    new.replace(path)


def dump_pickle(value: Any, storages: list[Storage]) -> bytes:
    """A protocol 2 pickle of a value; storages are appended in the order of their keys."""

    def emit(value: Any) -> bytes:
        match value:
            case None:
                return b"N"
            case bool():
                return b"\x88" if value else b"\x89"
            case int():
                return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
            case float():
                return b"F" + repr(value).encode() + b"\n"
            case str():
                return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()
            case tuple():
                return b"(" + b"".join(map(emit, value)) + b"t"
            case list():
                return b"](" + b"".join(map(emit, value)) + b"e"
            case OrderedDict():
                return emit(Call(Global("collections", "OrderedDict"), ())) + emit_items(value, emit)
            case dict():
                return b"}" + emit_items(value, emit)
            case Global(module, name):
                return f"c{module}\n{name}\n".encode()
            case Call(function, args):
                return emit(function) + emit(args) + b"R"
            case Storage(values):
                if value not in storages:
                    storages.append(value)
                name = STORAGE_NAMES[values.dtype]
                return emit(("storage", Global("torch", name), str(storages.index(value)), "cpu", values.size)) + b"Q"
            case Tensor(storage, offset, shape, strides):
                args = (storage, offset, shape, strides, False, OrderedDict())
                return emit(Call(Global("torch._utils", "_rebuild_tensor_v2"), args))
            case np.ndarray():
                return emit(tensor(value))
        raise TypeError(type(value))

    return b"\x80\x02" + emit(value) + b"."


def emit_items(items: dict, emit: Callable[[Any], bytes]) -> bytes:
    return b"(" + b"".join(emit(k) + emit(v) for k, v in items.items()) + b"u"


def tensor(values: np.ndarray) -> Tensor:
    values = np.ascontiguousarray(values)
    strides = tuple(s // values.itemsize for s in values.strides)
    return Tensor(Storage(values.reshape(-1)), 0, values.shape, strides)

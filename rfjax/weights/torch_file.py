"""Reads the files that `torch.save` writes, without torch and without running anything in them.

A `.pt` or `.pth` file is a zip archive: `data.pkl` says how tensors lie in storages, `data/0`, `data/1`, ... are
those storages, uncompressed. Storages are memory-mapped. The pickle is read by an unpickler that knows the few
names a state dict needs and refuses every other, so a file cannot run code.
"""

import io
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rfjax.errors import InputError

ZIP_MAGIC = b"PK\x03\x04"

_STORAGES = {
    "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32,
    "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8, "BoolStorage": np.bool_,
}  # fmt: skip
_OPCODES = frozenset(
    "PROTO FRAME STOP MARK POP POP_MARK DUP GLOBAL STACK_GLOBAL REDUCE BUILD NEWOBJ BINPERSID "
    "BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 "
    "LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS".split()
)
_LOCAL_HEADER = 30  # bytes of a zip local file header before the name
_MAX_PICKLE = 1 << 26  # of a truncated file; that of the 1.3B model has 0.2 MB

OpenStorage = Callable[[str, np.dtype, int], np.ndarray | None]


def read_torch(path: Path, data: np.ndarray) -> Any:
    """Reads the object saved in a torch zip file.

    Args:
        path: the file, for messages and for its zip directory.
        data: its bytes [n] uint8, memory-mapped.

    Returns:
        The saved containers, with each tensor as a read-only view of `data`.

    Raises:
        InputError: the file is incomplete, damaged, compressed, or refers to anything but tensors and containers.
    """
    records = _records(path, data)
    pickles = [name for name in records if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise InputError(f"{path} is a zip archive but not a torch file: it has {len(pickles)} data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    byteorder = records.get(f"{root}byteorder", np.frombuffer(b"little", np.uint8)).tobytes()
    if byteorder not in (b"little", b"big"):
        raise InputError(f"{path} is damaged: unknown byte order {byteorder[:16]!r}")

    def open_storage(key: str, dtype: np.dtype, size: int) -> np.ndarray:
        return _native(records[f"{root}data/{key}"], byteorder == b"big", dtype)[:size]

    try:
        return _Unpickler(path, records[pickles[0]].tobytes(), open_storage).load()
    except InputError:
        raise
    except Exception as error:  # a damaged pickle can fail in any opcode, with any exception
        reason = f"its list of tensors does not load ({type(error).__name__})"
        raise InputError(f"{path} is damaged: {reason}; download it again") from error


def _native(record: np.ndarray, swap: bool, dtype: np.dtype) -> np.ndarray:
    if not swap:
        return record.view(dtype)
    # bfloat16 has no big-endian NumPy type, so bytes are swapped as integers, in a copy.
    return record.view(f">u{dtype.itemsize}").astype(f"<u{dtype.itemsize}").view(dtype)


def _records(path: Path, data: np.ndarray) -> dict[str, np.ndarray]:
    """The bytes of each record of the archive, by name."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError):
        raise InputError(_incomplete(path, data)) from None
    records = {}
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise InputError(f"{path}: {entry.filename!r} is compressed or encrypted, as torch never writes it")
        start = _content_start(data, entry.header_offset)
        if start is None or start + entry.file_size > data.size:
            raise InputError(f"{path} is damaged at {entry.filename!r}; download it again")
        records[entry.filename] = data[start : start + entry.file_size]
    return records


def _content_start(data: np.ndarray, header_offset: int) -> int | None:
    """Where the content of the record with this local header starts; the zip directory does not say."""
    header = data[header_offset : header_offset + _LOCAL_HEADER].tobytes()
    if len(header) < _LOCAL_HEADER or header[:4] != ZIP_MAGIC:
        return None
    name_size, extra_size = struct.unpack_from("<HH", header, 26)
    return header_offset + _LOCAL_HEADER + name_size + extra_size


def _incomplete(path: Path, data: np.ndarray) -> str:
    """What to say of an archive without a directory, which stands at the end; the pickle stands at the start."""
    sizes: dict[str, int] = {}

    def count(key: str, dtype: np.dtype, size: int) -> None:
        sizes[key] = size * dtype.itemsize

    start = _content_start(data, 0)
    try:
        _Unpickler(path, data[start:][:_MAX_PICKLE].tobytes(), count).load()
    except Exception:  # cut within the pickle: nothing more is known
        sizes.clear()
    expected = sum(sizes.values())
    needs = f" of at least {expected}" if expected > data.size else " and no end"
    return f"incomplete download: {path} has {data.size} bytes{needs}; download it again"


class _Unpickler(pickle.Unpickler):
    """Unpickles tensors and plain containers, and refuses every other name.

    Names resolve to strings, immutable types or bound methods, so that the pickle can neither call nor change
    anything outside this object.
    """

    def __init__(self, path: Path, content: bytes, open_storage: OpenStorage):
        for opcode, argument, _ in pickletools.genops(content):
            # The others, and memo numbers that do not count up, serve only to exhaust memory.
            if opcode.name not in _OPCODES or (opcode.name == "LONG_BINPUT" and int(argument or 0) > len(content)):
                raise pickle.UnpicklingError(opcode.name)
        super().__init__(io.BytesIO(content))
        self._path, self._open_storage = path, open_storage

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return name
        match f"{module}.{name}":
            case "collections.OrderedDict":
                return OrderedDict
            case "torch.Size":
                return tuple
            case "torch._utils._rebuild_tensor_v2":
                return self._tensor
            case "torch._utils._rebuild_parameter":
                return self._parameter
        raise InputError(
            f"{self._path} refers to {f'{module}.{name}'[:100]!r}, which is no plain tensor or container; "
            "rfjax runs no code from a file: save the state dict alone"
        )

    def persistent_load(self, pid: Any) -> Any:
        _, storage_type, key, _, size = pid
        return self._open_storage(key, np.dtype(_STORAGES[storage_type]), size)

    def _tensor(self, storage, offset, shape, strides, requires_grad, hooks, metadata=None) -> np.ndarray | None:
        if storage is None:
            return None
        if metadata:
            raise InputError(f"{self._path} holds a tensor with flags {metadata}; save it contiguous")
        if 0 in shape:
            return np.empty(shape, storage.dtype)
        item = storage.itemsize
        return np.ndarray(shape, storage.dtype, storage, offset * item, tuple(s * item for s in strides))

    def _parameter(self, tensor, requires_grad, hooks) -> np.ndarray | None:
        return tensor

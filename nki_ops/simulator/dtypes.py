"""NKI data types: names, numpy equivalents, and the casts that the engines make.

An NKI dtype is a string (`nl.float32 == "float32"`). Low-precision types are stored with ml_dtypes; arithmetic is
float32. Sources: nki.api.shared (supported data types), nki_simulator.rst (precise floating point, casts).
"""

from typing import Any

import ml_dtypes
import numpy as np

from nki_ops.simulator.errors import NkiValidationError

_NUMPY: dict[str, Any] = {
    "bool": np.uint8,  # "boolean stored as uint8"
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "tfloat32": np.float32,
    "float32": np.float32,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
NAMES = tuple(_NUMPY)
# Types of Trainium3 alone: a kernel may name them, and may not make tensors of them on Trainium2.
GEN4_ONLY = ("float8_e4m3fn", "float8_e8m0fnu", "float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4")

INTEGERS = frozenset(n for n in NAMES if n.startswith(("int", "uint")) or n == "bool")
FLOATS = frozenset(NAMES) - INTEGERS
FP8 = frozenset(("float8_e4m3", "float8_e5m2"))
TWO_BYTE_FLOATS = frozenset(("bfloat16", "float16"))

_SIZES = {name: np.dtype(kind).itemsize for name, kind in _NUMPY.items()}
PRECISE = {name: np.dtype(kind) for name, kind in _NUMPY.items()}
# NKI_PRECISE_FP=0: bf16 and fp8 are kept as float32, to tell rounding from wrong logic.
WIDE = PRECISE | {name: np.dtype(np.float32) for name in ("bfloat16", *FP8)}


def canonical(dtype: Any) -> str:
    """The NKI name of a dtype given as NKI string, numpy dtype or type, ml_dtypes type or JAX scalar type.

    Raises:
        NkiValidationError: an unknown type, or one that Trainium2 does not have.
    """
    name = dtype if isinstance(dtype, str) else _numpy_name(dtype)
    if name in GEN4_ONLY:
        raise NkiValidationError(f"dtype {name} needs NeuronCore-v4 (trn3); the simulator models Trainium2")
    if name not in _NUMPY:
        raise NkiValidationError(f"dtype {dtype!r} is not an NKI type; use one of {', '.join(NAMES)}")
    return name


def _numpy_name(dtype: Any) -> str:
    held = getattr(dtype, "dtype", None)  # JAX's scalar types hold their numpy dtype
    try:
        return np.dtype(held if isinstance(held, np.dtype) else dtype).name
    except TypeError:
        return repr(dtype)


def itemsize(name: str) -> int:
    """Bytes of one element on the device."""
    return _SIZES[name]


def sentinel(name: str) -> float | int:
    """What fresh memory holds: NaN for floats, 4 for integers (nki_simulator.rst)."""
    return 4 if name in INTEGERS else float("nan")


def to_float32(values: np.ndarray) -> np.ndarray:
    """The value an engine computes with."""
    return values if values.dtype == np.float32 else values.astype(np.float32)


def from_float32(values: np.ndarray, name: str, stored: np.dtype) -> np.ndarray:
    """The value an engine writes: round to nearest even; integers saturate; NaN becomes integer 0.

    Args:
        values: what the engine computed.
        name: NKI name of the destination's dtype.
        stored: numpy dtype that holds it.
    """
    if name in INTEGERS:
        if values.dtype.kind in "iub":
            return _saturate(values, stored)
        return _saturate(np.rint(np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=2e19, neginf=-2e19)), stored)
    if name == "tfloat32":
        return _round_mantissa(values.astype(np.float32), kept_bits=10)
    return values if values.dtype == stored else values.astype(stored)


def _saturate(values: np.ndarray, stored: np.dtype) -> np.ndarray:
    limits = np.iinfo(stored)
    return np.clip(values, limits.min, limits.max).astype(stored)


def _round_mantissa(values: np.ndarray, kept_bits: int) -> np.ndarray:
    drop = 23 - kept_bits
    bits = np.ascontiguousarray(values).view(np.uint32)
    half = np.uint32((1 << (drop - 1)) - 1) + ((bits >> np.uint32(drop)) & np.uint32(1))
    rounded = ((bits + half) & np.uint32(~((1 << drop) - 1) & 0xFFFFFFFF)).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)

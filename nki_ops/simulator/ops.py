"""The operators that `nki.language` names and instructions take as `op=`: `nl.add`, `nl.exp`, and so on.

An operator computes on float32 arrays (integer arrays for bit operations). Called as a function on tiles
(`nl.add(a, b)`), it is NKI's experimental wrapper: see `tile_math`.
Source: nki.api.shared (math operators; activation functions with their valid input ranges).
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nki_ops.simulator.errors import NkiRangeWarning

Array = np.ndarray
_PI = np.float32(math.pi)


@dataclass(frozen=True, eq=False)
class Op:
    """One operator.

    Attributes:
        binary: as an operation of two operands; None if it has no such form.
        unary: as an operation of one operand on VectorE or GpSimdE.
        activation: as a function of ScalarE.
        bitvec: works on bits; operands and results are integers.
        reduce: the numpy ufunc that reduces with it, where reducing is legal.
        start: what a reduction starts from.
        valid: for limited activations, the magnitudes (lo, hi) between which ScalarE is right.
        either_sign: whether `valid` holds for negative values too.
    """

    name: str
    binary: Callable[[Any, Any], Array] | None = None
    unary: Callable[[Array], Array] | None = None
    activation: Callable[[Array], Array] | None = None
    bitvec: bool = False
    reduce: np.ufunc | None = None
    start: float = 0.0
    valid: tuple[float, float] | None = None
    either_sign: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from nki_ops.simulator import tile_math  # it is written with instructions, which take operators

        return tile_math.apply(self, *args, **kwargs)

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def activate(self, x: Array) -> Array:
        """ScalarE's result for float32 `x`. Outside the valid range it is NaN, and a warning says so."""
        assert self.activation is not None
        if self.valid is None:
            return self.activation(x)
        lo, hi = self.valid
        magnitude = np.abs(x) if self.either_sign else x
        outside = (magnitude < lo) | (magnitude > hi)
        if not outside.any():
            return self.activation(x)
        warnings.warn(
            f"activation {self.name} got {int(outside.sum())} values outside [{lo:.3g}, {hi:.3g}]; "
            "ScalarE gives wrong results there",
            NkiRangeWarning,
            stacklevel=4,
        )
        if self is sin:
            return self.activation(x)
        return np.where(outside, np.float32(np.nan), self.activation(np.where(outside, np.float32(1), x)))


def _truth(function: Callable[[Any, Any], Array]) -> Callable[[Any, Any], Array]:
    """Comparisons and logic give 1 and 0."""
    return lambda x, y: function(x, y).astype(np.float32)


def _sigmoid(x: Array) -> Array:
    return np.float32(1) / (np.float32(1) + np.exp(-x))


_erf = np.vectorize(math.erf, otypes=[np.float32])


def _erf_dx(x: Array) -> Array:
    return np.float32(2 / math.sqrt(math.pi)) * np.exp(-x * x)


def _gelu(x: Array) -> Array:
    return np.float32(0.5) * x * (1 + _erf(x / np.float32(math.sqrt(2))))


def _gelu_dx(x: Array) -> Array:
    density = np.exp(-x * x / 2) * np.float32(1 / math.sqrt(2 * math.pi))
    return np.float32(0.5) * (1 + _erf(x / np.float32(math.sqrt(2)))) + x * density


def _gelu_tanh(x: Array) -> Array:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def _gelu_sigmoid(x: Array) -> Array:
    return x * _sigmoid(np.float32(1.702) * x)


def _gelu_sigmoid_dx(x: Array) -> Array:
    s = _sigmoid(np.float32(1.702) * x)
    return s * (1 + np.float32(1.702) * x * (1 - s))


def _silu_dx(x: Array) -> Array:
    s = _sigmoid(x)
    return s * (1 + x * (1 - s))


def _softplus(x: Array) -> Array:
    return np.logaddexp(np.float32(0), x)


def _sin(x: Array) -> Array:
    """Exact within +-pi. Outside, ScalarE runs on along the cubic of its last piece: sin(9.0) is 27.65 there."""
    past = np.where(x > 0, x - _PI, x + _PI)
    return np.where(np.abs(x) > _PI, past**3 / 6 - past, np.sin(x))


def _rsqrt(x: Array) -> Array:
    return np.float32(1) / np.sqrt(x)


def _shift_right(x: Any, y: Any) -> Array:
    """Logical shift: zeros come in from the left, whatever the sign."""
    x = np.asarray(x)
    unsigned = x.view(np.dtype(f"u{x.dtype.itemsize}"))
    return np.right_shift(unsigned, np.asarray(y).astype(unsigned.dtype)).view(x.dtype)


# Arithmetic: operands are cast to float32.
add = Op("add", np.add, reduce=np.add)
subtract = Op("subtract", np.subtract, reduce=np.subtract)
multiply = Op("multiply", np.multiply, reduce=np.multiply, start=1.0)
divide = Op("divide", np.divide)
maximum = Op("maximum", np.maximum, reduce=np.maximum, start=-math.inf)
minimum = Op("minimum", np.minimum, reduce=np.minimum, start=math.inf)
abs_max, abs_min = Op("abs_max"), Op("abs_min")  # trn3 only
power = Op("power", np.power)
fmod = Op("fmod", np.fmod)
mod = Op("mod", np.mod)
equal = Op("equal", _truth(np.equal))
not_equal = Op("not_equal", _truth(np.not_equal))
less = Op("less", _truth(np.less))
less_equal = Op("less_equal", _truth(np.less_equal))
greater = Op("greater", _truth(np.greater))
greater_equal = Op("greater_equal", _truth(np.greater_equal))
logical_and = Op("logical_and", _truth(np.logical_and), reduce=np.logical_and, start=1.0)
logical_or = Op("logical_or", _truth(np.logical_or), reduce=np.logical_or)
logical_xor = Op("logical_xor", _truth(np.logical_xor), reduce=np.logical_xor)
logical_not = Op("logical_not", unary=lambda x: np.logical_not(x).astype(np.float32))

# Bits: operands and results are integers of any width.
bitwise_and = Op("bitwise_and", np.bitwise_and, bitvec=True, reduce=np.bitwise_and, start=-1)
bitwise_or = Op("bitwise_or", np.bitwise_or, bitvec=True, reduce=np.bitwise_or)
bitwise_xor = Op("bitwise_xor", np.bitwise_xor, bitvec=True, reduce=np.bitwise_xor)
left_shift = Op("left_shift", np.left_shift, bitvec=True)
right_shift = Op("right_shift", _shift_right, bitvec=True)
invert = Op("invert", unary=np.invert, bitvec=True)

# Functions of ScalarE; some are unary operators of VectorE too.
copy = Op("copy", activation=lambda x: x)
square = Op("square", activation=np.square)
abs = Op("abs", unary=np.abs, activation=np.abs)
sign = Op("sign", activation=np.sign)
relu = Op("relu", activation=lambda x: np.maximum(x, np.float32(0)))
prelu = Op("prelu")  # needs the slope that only activate2 (trn3) takes
bypass = Op("bypass")
exp = Op("exp", activation=np.exp)
log = Op("log", activation=np.log, valid=(2.0**-64, 2.0**64))
sqrt = Op("sqrt", activation=np.sqrt, valid=(2.0**-116, 2.0**118))
rsqrt = Op("rsqrt", unary=_rsqrt, activation=_rsqrt, valid=(2.0**-87, 2.0**97))
reciprocal = Op(
    "reciprocal",
    unary=lambda x: np.float32(1) / x,
    activation=lambda x: np.float32(1) / x,
    valid=(2.0**-42, 2.0**42),
    either_sign=True,
)
sigmoid = Op("sigmoid", activation=_sigmoid)
tanh = Op("tanh", activation=np.tanh)
gelu = Op("gelu", activation=_gelu)
gelu_dx = Op("gelu_dx", activation=_gelu_dx)
gelu_apprx_tanh = Op("gelu_apprx_tanh", activation=_gelu_tanh)
gelu_apprx_sigmoid = Op("gelu_apprx_sigmoid", activation=_gelu_sigmoid)
gelu_apprx_sigmoid_dx = Op("gelu_apprx_sigmoid_dx", activation=_gelu_sigmoid_dx)
silu = Op("silu", activation=lambda x: x * _sigmoid(x))
silu_dx = Op("silu_dx", activation=_silu_dx)
softplus = Op("softplus", activation=_softplus)
mish = Op("mish", activation=lambda x: x * np.tanh(_softplus(x)))
erf = Op("erf", activation=_erf)
erf_dx = Op("erf_dx", activation=_erf_dx)
sin = Op("sin", activation=_sin, valid=(0.0, float(_PI)), either_sign=True)
arctan = Op("arctan", activation=np.arctan, valid=(0.0, float(_PI) / 2), either_sign=True)

"""NKI's experimental wrappers: `nl.add(a, b)` and the like make a new tile and call instructions.

No broadcasting, as documented; division and modulo do not exist on the device.
"""

from typing import Any

from nki_ops.simulator import dtypes, ops
from nki_ops.simulator.core import current
from nki_ops.simulator.enums import MemoryRegion
from nki_ops.simulator.errors import NkiValidationError
from nki_ops.simulator.isa_dma import dma_copy, dma_transpose
from nki_ops.simulator.isa_reduce import tensor_reduce
from nki_ops.simulator.isa_scalar import activation
from nki_ops.simulator.isa_tensor import MAX_MOVING, nc_matmul, nc_transpose
from nki_ops.simulator.isa_vector import (
    memset,
    reciprocal,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
)
from nki_ops.simulator.memory import NkiTensor
from nki_ops.simulator.ops import Op

_TAU = 6.283185307179586


def _tile(shape: tuple[int, ...], dtype: Any, region: MemoryRegion = MemoryRegion.sbuf) -> NkiTensor:
    return current().allocate(region, dtypes.canonical(dtype), shape, "", None)


def apply(op: Op, *args: Any, dtype: Any = None) -> NkiTensor:
    """`op` on one tile, or on two, of which one may be a number."""
    first = next((a for a in args if isinstance(a, NkiTensor)), None)
    if first is None:
        raise TypeError(f"{op} needs a tile, got {args}")
    out = _tile(first.shape, first.dtype if dtype is None else dtype)
    if len(args) == 1:
        _unary(op, out, first)
    elif len(args) == 2:
        _binary(op, out, *args)
    else:
        raise TypeError(f"{op} takes one or two operands, got {len(args)}")
    return out


def _unary(op: Op, out: NkiTensor, x: NkiTensor) -> None:
    if op is ops.reciprocal:
        reciprocal(out, x)
    elif op is ops.sin:
        activation(out, op, _within_pi(x))
    elif op.unary is not None and (op.activation is None or op is ops.rsqrt):
        tensor_scalar(out, x, op)
    elif op.activation is not None:
        activation(out, op, x)
    else:
        raise NkiValidationError(f"{op} is no function of one tile")


def _within_pi(x: NkiTensor) -> NkiTensor:
    """x - 2 pi round(x / 2 pi): an integer cast rounds to nearest."""
    turns, whole, rest = (_tile(x.shape, kind) for kind in ("int32", "float32", "float32"))
    tensor_scalar(turns, x, ops.multiply, 1 / _TAU)
    tensor_scalar(whole, turns, ops.multiply, -_TAU)
    tensor_tensor(rest, x, whole, ops.add)
    return rest


def _binary(op: Op, out: NkiTensor, x: Any, y: Any) -> None:
    if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
        if x.shape != y.shape:
            raise NkiValidationError(f"{op} of shapes {x.shape} and {y.shape}: broadcasting is not supported")
        tensor_tensor(out, x, y, op)
    elif op is ops.power:
        raise NkiValidationError("nl.power does not support scalar exponents")
    elif isinstance(x, NkiTensor):
        tensor_scalar(out, x, op, y)
    else:
        tensor_scalar(out, y, op, x, reverse0=True)


def assign(target: NkiTensor, value: Any) -> None:
    """`target[...] = value`: a copy within the chip, a DMA, or a fill."""
    if not isinstance(value, NkiTensor):
        memset(target, value)
    elif target.buffer.on_chip and value.buffer.on_chip:
        tensor_copy(target, value)
    else:
        dma_copy(target, value)


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """An HBM tensor in a new SBUF tile."""
    out = _tile(src.shape if src.ndim > 1 else (1, *src.shape), src.dtype if dtype is None else dtype)
    dma_copy(out, src)
    return out


def store(dst: NkiTensor, value: NkiTensor) -> NkiTensor:
    """An SBUF tile into HBM."""
    dma_copy(dst, value)
    return dst


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """An HBM matrix, transposed, in a new SBUF tile."""
    out = _tile(src.shape[::-1], src.dtype)
    dma_transpose(out, src)
    return out if dtype is None or dtypes.canonical(dtype) == out.dtype else apply(ops.copy, out, dtype=dtype)


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """x.T @ y in PSUM."""
    if not transpose_x:
        raise NkiValidationError("nl.matmul is supported with transpose_x=True only")
    out = _tile((x.shape[1], y.shape[1]), "float32", MemoryRegion.psum)
    nc_matmul(out, x, y)
    return out


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """x.T in PSUM."""
    out = _tile(x.shape[::-1], x.dtype if dtype is None else dtype, MemoryRegion.psum)
    nc_transpose(out, x)
    return out


def _reduce(op: Op, x: NkiTensor, axis: Any, dtype: Any, keepdims: bool) -> NkiTensor:
    axes = [a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis)]
    kept = tuple(1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes)
    out = _tile(kept if len(kept) > 1 else (*kept, 1), x.dtype if dtype is None else dtype)
    tensor_reduce(out, op, x, axes)
    return out


def sum(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Sum over trailing free dimensions."""
    return _reduce(ops.add, x, axis, dtype, keepdims)


def max(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Maximum over trailing free dimensions."""
    return _reduce(ops.maximum, x, axis, dtype, keepdims)


def min(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Minimum over trailing free dimensions."""
    return _reduce(ops.minimum, x, axis, dtype, keepdims)


def prod(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Product over trailing free dimensions."""
    return _reduce(ops.multiply, x, axis, dtype, keepdims)


def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Mean over trailing free dimensions."""
    total = _reduce(ops.add, x, axis, "float32", keepdims)
    out = _tile(total.shape, x.dtype if dtype is None else dtype)
    tensor_scalar(out, total, ops.multiply, total.size / x.size)
    return out


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Softmax of a 2-D tile along its free axis."""
    if x.ndim != 2 or axis not in (1, -1, (1,), [1]):
        raise NkiValidationError(f"nl.softmax is simulated along axis 1 of 2-D tiles, got {x.shape}, axis {axis}")
    lowest, total, inverse = (_tile((x.shape[0], 1), "float32") for _ in range(3))
    tensor_reduce(lowest, ops.maximum, x, 1, negate=True)
    weights = _tile(x.shape, "float32")
    activation(weights, ops.exp, x, bias=lowest)
    tensor_reduce(total, ops.add, weights, 1)
    reciprocal(inverse, total)
    out = _tile(x.shape, x.dtype if dtype is None else dtype)
    tensor_scalar(out, weights, ops.multiply, inverse)
    return out


def where(condition: NkiTensor, x: NkiTensor, y: NkiTensor, dtype: Any = None) -> NkiTensor:
    """x where condition is not 0, else y."""
    out = _tile(x.shape, x.dtype if dtype is None else dtype)
    chosen, wanted = _tile(x.shape, "uint8"), _tile(x.shape, out.dtype)
    tensor_scalar(chosen, condition, ops.not_equal, 0.0)
    tensor_copy(wanted, x)
    tensor_copy(out, y)
    tensor_copy_predicated(out, wanted, chosen)
    return out


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """A view with a new axis."""
    return x.expand_dim(axis % (x.ndim + 1))


def broadcast_to(x: NkiTensor, shape: tuple[int, ...], dtype: Any = None) -> NkiTensor:
    """Dimensions of size 1 repeated: free dimensions as a view, partitions by TensorE; a copy if the dtype changes."""
    view = x if x.shape[0] == shape[0] else _across_partitions(x, shape[0])
    for dim, size in enumerate(shape):
        view = view if view.shape[dim] == size else view.broadcast(dim, size)
    return view if dtype is None or dtypes.canonical(dtype) == x.dtype else apply(ops.copy, view, dtype=dtype)


def _across_partitions(x: NkiTensor, partitions: int) -> NkiTensor:
    """ones[1, partitions].T @ x, a PSUM bank at a time."""
    if x.shape[0] != 1:
        raise NkiValidationError(f"broadcast_to {partitions} partitions needs a tile of one, got {x.shape}")
    row, ones = x.reshape((1, -1)), _tile((1, partitions), x.dtype)
    memset(ones, 1.0)
    out = _tile((partitions, x.size), x.dtype)
    for start in range(0, x.size, MAX_MOVING):
        part = slice(*slice(start, start + MAX_MOVING).indices(x.size)[:2])
        bank = _tile((partitions, part.stop - start), "float32", MemoryRegion.psum)
        nc_matmul(bank, ones, row[:, part], is_stationary_onezero=True)
        tensor_copy(out[:, part], bank)
    return out.reshape((partitions, *x.shape[1:]))

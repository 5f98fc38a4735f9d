"""`nki.language`: tensors, loops and operators, as `import nki.language as nl` gives them."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from nki_ops.simulator import accounting, dtypes
from nki_ops.simulator.core import current
from nki_ops.simulator.enums import MemoryRegion
from nki_ops.simulator.errors import NkiValidationError
from nki_ops.simulator.instruction import OTHER_MARK
from nki_ops.simulator.memory import PARTITIONS, NKIObject, NkiTensor
from nki_ops.simulator.ops import (
    abs,
    abs_max,
    abs_min,
    add,
    arctan,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    bypass,
    copy,
    divide,
    equal,
    erf,
    erf_dx,
    exp,
    fmod,
    gelu,
    gelu_apprx_sigmoid,
    gelu_apprx_sigmoid_dx,
    gelu_apprx_tanh,
    gelu_dx,
    greater,
    greater_equal,
    invert,
    left_shift,
    less,
    less_equal,
    log,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    mish,
    mod,
    multiply,
    not_equal,
    power,
    prelu,
    reciprocal,
    relu,
    right_shift,
    rsqrt,
    sigmoid,
    sign,
    silu,
    silu_dx,
    sin,
    softplus,
    sqrt,
    square,
    subtract,
    tanh,
)
from nki_ops.simulator.registers import VirtualRegister
from nki_ops.simulator.tile_math import (
    broadcast_to,
    expand_dims,
    load,
    load_transpose2d,
    matmul,
    max,
    mean,
    min,
    prod,
    softmax,
    store,
    sum,
    transpose,
    where,
)

DType = str
bool_ = "bool"
int8, int16, int32 = "int8", "int16", "int32"
uint8, uint16, uint32 = "uint8", "uint16", "uint32"
float16, bfloat16, float32, tfloat32 = "float16", "bfloat16", "float32", "tfloat32"
float8_e4m3, float8_e5m2 = "float8_e4m3", "float8_e5m2"
float8_e4m3fn, float8_e8m0fnu = "float8_e4m3fn", "float8_e8m0fnu"
float8_e5m2_x4, float8_e4m3fn_x4, float4_e2m1fn_x4 = "float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4"

sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm, shared_hbm = MemoryRegion.private_hbm, MemoryRegion.shared_hbm
hbm = private_hbm


class _TileSize(NKIObject):
    """Hardware tile sizes of Trainium2."""

    pmax = PARTITIONS
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    psum_bank_fmax_bytes = accounting.PSUM_BANK_BYTES
    psum_bank_fmax = accounting.PSUM_BANK_BYTES // 4
    bn_stats_fmax = 512
    psum_min_align = 4
    sbuf_min_align = 1
    sbuf_fmax_bytes = accounting.SBUF_BYTES
    sbuf_fmax = accounting.SBUF_BYTES // 4
    sbuf_size_bytes = PARTITIONS * 224 * 1024

    @property
    def psum_num_banks(self) -> int:
        """One bank less where DMA transposes are lowered to TensorE."""
        as_matmul = os.environ.get("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE", "").lower() == "true"
        return accounting.PSUM_BANKS - 1 if as_matmul else accounting.PSUM_BANKS

    @property
    def psum_fmax(self) -> int:
        _deprecated("tile_size.psum_fmax", "tile_size.psum_bank_fmax")
        return self.psum_bank_fmax

    @property
    def total_available_sbuf_size(self) -> int:
        _deprecated("tile_size.total_available_sbuf_size", "tile_size.sbuf_fmax_bytes")
        return self.sbuf_fmax_bytes


tile_size = _TileSize()


def _deprecated(old: str, new: str) -> None:
    warnings.warn(f"nl.{old} is deprecated; use {new}", DeprecationWarning, stacklevel=3)


# ---- tensors


def ndarray(
    shape: Sequence[int],
    dtype: Any,
    buffer: MemoryRegion = sbuf,
    name: str = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:
    """A new tensor; its memory holds NaN, or 4 for integers, until something is written.

    Args:
        shape: on chip the partition comes first (at most 128), and there are at least two dimensions.
        buffer: nl.sbuf, nl.psum, nl.hbm, nl.private_hbm or nl.shared_hbm.
        address: (partition, byte within the partition) for on-chip tensors placed by hand.
    """
    sizes = tuple(shape)
    if not sizes or any(not isinstance(n, (int, np.integer)) or n < 1 for n in sizes):
        raise NkiValidationError(f"ndarray shape {sizes} must be positive integers")
    if not isinstance(buffer, MemoryRegion):
        raise NkiValidationError(f"ndarray buffer {buffer!r} must be nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm")
    if buffer.on_chip and len(sizes) < 2:
        raise NkiValidationError(f"ndarray shape {sizes} in {buffer.value} must have at least 2 dimensions")
    if buffer.on_chip and sizes[0] > PARTITIONS:
        raise NkiValidationError(f"ndarray partition dimension {sizes[0]} exceeds maximum {PARTITIONS}")
    if address is not None:
        _check_address(address, sizes, buffer)
    sizes = tuple(int(n) for n in sizes)
    return current().allocate(buffer, dtypes.canonical(dtype), sizes, name or "", address)


def _check_address(address: tuple[int, int], shape: tuple[int, ...], buffer: MemoryRegion) -> None:
    if not buffer.on_chip:
        raise NkiValidationError(f"ndarray address {address} is for SBUF and PSUM, not {buffer.value}")
    partition, byte = address
    if buffer is psum and byte % accounting.PSUM_BANK_BYTES:
        raise NkiValidationError(
            f"ndarray PSUM address {byte} must start on a bank, a multiple of {accounting.PSUM_BANK_BYTES}"
        )
    if partition < 0 or partition + shape[0] > PARTITIONS:
        raise NkiValidationError(f"ndarray address {address} with {shape[0]} partitions exceeds {PARTITIONS}")


def full(shape: Sequence[int], fill_value: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new tensor holding `fill_value`."""
    from nki_ops.simulator.isa_vector import memset

    tensor = ndarray(shape, dtype, buffer, name)
    value = int(fill_value) if tensor.dtype in dtypes.INTEGERS else float(fill_value)
    if buffer.on_chip:
        memset(tensor, value)
    else:
        _preset(tensor, value)
    return tensor


def zeros(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Sequence[int], dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> NkiTensor:
    """A new tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """A new tensor of the shape of `x`, and of its dtype and buffer unless given."""
    return ndarray(x.shape, x.dtype if dtype is None else dtype, x.buffer if buffer is None else buffer, name)


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """A new tensor of zeros of the shape of `x`."""
    return zeros(x.shape, x.dtype if dtype is None else dtype, x.buffer if buffer is None else buffer, name)


def shared_constant(constant: np.ndarray | str) -> NkiTensor:
    """A constant that comes with the program, in shared HBM; an array or the path of a .npy file."""
    values = np.load(constant) if isinstance(constant, str) else np.asarray(constant)
    tensor = ndarray(values.shape, values.dtype, shared_hbm)
    _preset(tensor, values)
    return tensor


def shared_identity_matrix(n: int, dtype: Any = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """The identity matrix in SBUF; programs share one per dtype, so it costs nothing here."""
    tensor = ndarray((n, n), dtype) if dst is None else dst
    _preset(tensor, np.eye(n))
    current().touch(tensor.storage)
    return tensor


def _preset(tensor: NkiTensor, values: Any) -> None:
    """Contents that are there before the kernel starts."""
    if tensor.storage.data is not None:
        tensor.array()[...] = np.asarray(values).astype(tensor.storage.kinds[tensor.dtype])
        if tensor.storage.marks is not None:
            tensor.storage.marks[:] = OTHER_MARK


def ds(start: int, size: int) -> slice:
    """The slice of `size` elements from `start` on."""
    return slice(start, start + size)


def is_hbm(buffer: MemoryRegion) -> bool:
    return buffer in (private_hbm, shared_hbm)


def is_on_chip(buffer: MemoryRegion) -> bool:
    return buffer in (sbuf, psum)


def is_sbuf(buffer: MemoryRegion) -> bool:
    return buffer is sbuf


def is_psum(buffer: MemoryRegion) -> bool:
    return buffer is psum


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Prints a tensor's values."""
    values = tensor.array() if tensor.storage.data is not None else "(no data)"
    print(print_prefix, values)


# ---- launch grid


def program_id(axis: int = 0) -> int:
    """Number of the core that runs this."""
    return current().rank


def num_programs(axes: int = 0) -> int:
    """How many cores the kernel was launched on."""
    return current().launch.cores


def program_ndim() -> int:
    """1 if the kernel was launched with a grid, `kernel[n](...)`, else 0."""
    return 1 if current().launch.has_grid else 0


# ---- loops


def fori_loop(
    lower: int | VirtualRegister,
    upper: int | VirtualRegister,
    body_fun: Callable[[VirtualRegister], None],
    step: int = 1,
) -> None:
    """A loop of the device: body_fun(i) for i in lower, lower + step, ... below upper; `i` is read-only.

    Where costs are modelled without data, the body runs once and counts as often as the loop would.
    """
    for i in _dynamic_loop("fori_loop", lower, upper, step):
        if body_fun(i) is not None:
            raise NkiValidationError("fori_loop body_fun must return None; carry state through SBUF or HBM")


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """A loop of the device: r = body_fun(r) while r is not 0."""
    core = current()
    _refuse_no_reorder("while_loop")
    if not core.launch.with_data:
        raise NkiValidationError("while_loop has no trip count; it cannot be modelled without data")
    condition, trips = init, 0
    with core.loop(1, folded=False):
        while _known(condition, "while_loop condition") != 0:
            with core.loop_pass():
                condition = body_fun(VirtualRegister(condition.value))
            if not isinstance(condition, VirtualRegister):
                raise NkiValidationError("while_loop body_fun must return the register of the next condition")
            trips += 1
    core.loop_trips.append(trips)


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """Deprecated form of `fori_loop`, for `for` statements."""
    _deprecated("dynamic_range", "nl.fori_loop")
    lower, upper = (0, start) if stop is None else (start, stop)
    return _dynamic_loop("dynamic_range", lower, upper, step)


def _dynamic_loop(what: str, lower: Any, upper: Any, step: int) -> Iterator[VirtualRegister]:
    core = current()
    _refuse_no_reorder(what)
    if not isinstance(step, int) or step < 1:
        raise NkiValidationError(f"{what} step {step!r} must be a positive compile-time integer")
    values = range(_known(lower, f"{what} lower"), _known(upper, f"{what} upper"), step)
    core.loop_trips.append(len(values))
    folded = not core.launch.with_data
    if not values:
        return
    with core.loop(len(values), folded):
        for i in values[:1] if folded else values:
            with core.loop_pass():
                yield VirtualRegister(i, frozen=True)


def _known(bound: Any, what: str) -> int:
    value = bound.value if isinstance(bound, VirtualRegister) else bound
    if value is None:
        reason = "is an uninitialised register"
        if not current().launch.with_data:
            reason = "is unknown: pass the input that holds it as an array with data"
        raise NkiValidationError(f"{what} {reason}")
    if not isinstance(value, (int, np.integer)):
        raise NkiValidationError(f"{what} {value!r} must be an integer or a register")
    return int(value)


def _refuse_no_reorder(what: str) -> None:
    if current().no_reorder:
        raise NkiValidationError(f"{what} is not supported inside nl.no_reorder()")


def _python_range(name: str) -> Callable[..., range]:
    def alias(start: int, stop: int | None = None, step: int = 1) -> range:
        _deprecated(name, "range")
        return range(start) if stop is None else range(start, stop, step)

    alias.__name__ = name
    return alias


affine_range = _python_range("affine_range")
sequential_range = _python_range("sequential_range")
static_range = _python_range("static_range")


@contextmanager
def no_reorder() -> Iterator[None]:
    """Keeps instructions in program order, as the simulator does anyway; dynamic loops are refused inside."""
    core = current()
    core.no_reorder += 1
    try:
        yield
    finally:
        core.no_reorder -= 1


_NOT_SIMULATED = (
    *("cos", "tan", "ceil", "floor", "trunc", "negative", "var", "all", "rms_norm"),
    *("dropout", "random_seed", "rand", "gather_flattened"),
)
_REMOVED = {"arange": "slices or .ap", "mgrid": "slices or .ap", "par_dim": "the first dimension"}


def __getattr__(name: str) -> Any:
    if name in _NOT_SIMULATED:
        raise AttributeError(f"nl.{name} is an experimental wrapper that is not simulated; use instructions of nisa")
    hint = f"; it was removed from NKI, use {_REMOVED[name]}" if name in _REMOVED else ""
    raise AttributeError(f"nki.language has no {name}{hint}")


# Operators and wrappers that are here for `nl.` alone.
__all__ = [
    "abs",
    "abs_max",
    "abs_min",
    "add",
    "arctan",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "broadcast_to",
    "bypass",
    "copy",
    "divide",
    "equal",
    "erf",
    "erf_dx",
    "exp",
    "expand_dims",
    "fmod",
    "gelu",
    "gelu_apprx_sigmoid",
    "gelu_apprx_sigmoid_dx",
    "gelu_apprx_tanh",
    "gelu_dx",
    "greater",
    "greater_equal",
    "invert",
    "left_shift",
    "less",
    "less_equal",
    "load",
    "load_transpose2d",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mish",
    "mod",
    "multiply",
    "not_equal",
    "power",
    "prelu",
    "prod",
    "reciprocal",
    "relu",
    "right_shift",
    "rsqrt",
    "sigmoid",
    "sign",
    "silu",
    "silu_dx",
    "sin",
    "softmax",
    "softplus",
    "sqrt",
    "square",
    "store",
    "subtract",
    "sum",
    "tanh",
    "transpose",
    "where",
]

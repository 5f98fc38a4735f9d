"""One instruction being issued: the checks that all share, access to data, and what it is charged."""

import math
import os
import sys
import warnings
from functools import lru_cache
from typing import Any

import numpy as np

from nki_ops.simulator import costs, dtypes, layout
from nki_ops.simulator.core import current
from nki_ops.simulator.enums import MemoryRegion
from nki_ops.simulator.enums import engine as Engine
from nki_ops.simulator.errors import NkiValidationError
from nki_ops.simulator.memory import NkiTensor, Storage
from nki_ops.simulator.registers import VirtualRegister

SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
# Hardware access pattern: dimensions beside the partition, elements of one, stride of one. [trn1 guide]
MAX_FREE_DIMS = 4
MAX_COUNT = 2**16 - 1
MAX_STRIDE = 2**15 - 1
# Elements an instruction may stream through a partition. [trn1 guide, VectorE and ScalarE tile size]
MAX_FREE = {SBUF: 64 * 1024, PSUM: 4 * 1024}
# Partition where an access may start, by how many partitions it covers (up to 32, 64, 128). [trn1 guide]
START_STEPS = ((32, 32), (64, 64), (128, 128))
# Who can reach PSUM: not GpSimdE; TensorE writes it and reads SBUF.
MATMUL_MARK, OTHER_MARK = 1, 2


class Instruction:
    """A running instruction; what `nki.isa` functions return.

    Attributes:
        dynamic: an on-chip operand has an address known only at run time.
        live: all operands have data, so results are computed.
    """

    __slots__ = ("op", "engine", "core", "dynamic", "live")

    def __init__(self, op: str, runs_on: Engine, writes: dict[str, Any], reads: dict[str, Any]) -> None:
        self.op, self.engine, self.core = op, runs_on, current()
        self.core.tick += 1
        self.core.counts.instructions[op] += self.core.times
        self.dynamic = False
        self.live = not self.core.folded
        # Reads come first: in place, what is read is what was there before.
        operands = [*((n, t, False) for n, t in reads.items()), *((n, t, True) for n, t in writes.items())]
        operands = [o for o in operands if isinstance(o[1], NkiTensor) or o[2]]
        for name, tensor, written in operands:
            if not isinstance(tensor, NkiTensor):
                self.fail(f"{name} must be a tensor, got {type(tensor).__name__}")
            self._check_operand(name, tensor, written)
            self.core.touch(tensor.storage)
            self.live = self.live and tensor.storage.data is not None and self._index_is_known(tensor)
        if not self.live:
            for _, tensor, written in operands:
                if written:
                    tensor.storage.data = None

    def depends_on(self, *producers: "Instruction") -> "Instruction":
        """A scheduling hint for the compiler; instructions here run in program order."""
        return self

    def fail(self, message: str) -> None:
        raise NkiValidationError(f"{self.op} {message}")

    def _index_is_known(self, t: NkiTensor) -> bool:
        """False only where costs are modelled without data; a missing index is an error otherwise."""
        if t.indirection is None:
            return True
        index = t.indirection.index
        if isinstance(index, NkiTensor):
            self.core.touch(index.storage)
            return index.storage.data is not None
        return index.value is not None or self.core.launch.with_data

    # ---- checks

    def _check_operand(self, name: str, t: NkiTensor, written: bool) -> None:
        region = t.buffer
        if not region.on_chip:
            if self.engine is not Engine.dma:
                self.fail(f"{name} is in {region.value}; compute engines reach SBUF and PSUM only, use nisa.dma_copy")
            return
        if region is PSUM and self.engine is Engine.dma:
            self.fail(f"{name} is in PSUM, which DMA cannot reach; copy it with nisa.tensor_copy")
        if region is PSUM and self.engine is Engine.gpsimd:
            self.fail(f"{name} is in PSUM, which GpSimd Engine cannot access")
        if t.indirection is not None:
            self.dynamic = True
        if self.engine is not Engine.dma:
            self._check_access(name, t)
        if t.storage.address is not None:
            self._check_owner(name, t, written)

    def _check_access(self, name: str, t: NkiTensor) -> None:
        problem = access_problem(t.shape, t.strides, start_partition(t), t.buffer)
        if problem is not None:
            self.fail(f"{name} {problem}")

    def _check_owner(self, name: str, t: NkiTensor, written: bool) -> None:
        storage, item = t.storage, dtypes.itemsize(t.dtype)
        assert storage.address is not None
        lo, hi = layout.extent(t.shape[1:], t.strides[1:])
        first = storage.address[1] + (t.offset % t.row) * item
        span = (first + lo * item, first + (hi + 1) * item)
        if t.indirection is not None:  # anywhere in the tensor
            span = (storage.address[1], storage.address[1] + storage.row_bytes)
        start = start_partition(t)
        owners = self.core.address_map(storage.region)
        if written:
            owners.write(storage.number, storage.name or str(storage.shape), (start, start + t.shape[0]), span)
            return
        other = owners.foreign(storage.number, (start, start + t.shape[0]), span)
        if other is not None:
            self.fail(
                f"{name} reads {storage} at address {storage.address}, where tensor {other} has been written since"
            )

    def same_partitions(self, **tensors: Any) -> None:
        """All tensors (numbers are skipped) have as many partitions as the first."""
        named = [(n, t) for n, t in tensors.items() if isinstance(t, NkiTensor)]
        first_name, first = named[0]
        for name, t in named[1:]:
            if t.shape[0] != first.shape[0]:
                self.fail(f"{name} has {t.shape[0]} partitions, {first_name} has {first.shape[0]}")

    def same_elements(self, **tensors: Any) -> None:
        """All tensors have the partitions and the elements per partition of the first."""
        self.same_partitions(**tensors)
        named = [(n, t) for n, t in tensors.items() if isinstance(t, NkiTensor)]
        first_name, first = named[0]
        for name, t in named[1:]:
            if free_size(t) != free_size(first):
                self.fail(f"{name} has {free_size(t)} elements per partition, {first_name} has {free_size(first)}")

    def column(self, name: str, t: Any, partitions: int, kinds: frozenset[str] | None = None) -> None:
        """A per-partition operand: a number, or a tensor [P, 1] of one of `kinds`."""
        if not isinstance(t, NkiTensor):
            if t is not None and (isinstance(t, (str, VirtualRegister)) or not np.isscalar(t)):
                self.fail(f"{name} must be a number or a tensor [P, 1], got {type(t).__name__}")
            return
        if t.shape[0] != partitions or free_size(t) != 1:
            self.fail(f"{name} shape {t.shape} must be ({partitions}, 1)")
        self.dtype(name, t, kinds)

    def dtype(self, name: str, t: NkiTensor, kinds: frozenset[str] | None) -> None:
        """The dtype of `t` is one of `kinds`."""
        if kinds is not None and t.dtype not in kinds:
            self.fail(f"{name} dtype {t.dtype} must be one of {', '.join(sorted(kinds))}")

    def not_both_in_psum(self, **tensors: Any) -> None:
        if all(isinstance(t, NkiTensor) and t.buffer is PSUM for t in tensors.values()):
            self.fail(f"{' and '.join(tensors)} cannot both be in PSUM")

    def on(self, region: MemoryRegion, **tensors: Any) -> None:
        """All tensors are in `region`."""
        for name, t in tensors.items():
            if isinstance(t, NkiTensor) and t.buffer is not region:
                self.fail(f"{name} must be in {region.value}, is in {t.buffer.value}")

    # ---- data

    def start(self, t: NkiTensor) -> int:
        """First element of the view, dynamic part included."""
        if t.indirection is None:
            return t.offset
        offset = t.offset + scalar_index(t.indirection.index) * t.indirection.stride
        t.check_bounds(offset)
        return offset

    def read(self, t: NkiTensor) -> np.ndarray:
        """Contents as [P, N], in the dtype of the tensor."""
        return t.array(self.start(t)).reshape(t.shape[0], -1)

    def read32(self, t: Any) -> Any:
        """Contents as float32 [P, N]; numbers as float32."""
        return dtypes.to_float32(self.read(t)) if isinstance(t, NkiTensor) else np.float32(t)

    def write(self, t: NkiTensor, values: np.ndarray, mark: int = OTHER_MARK) -> None:
        """Casts `values` [P, N] to the tensor's dtype and stores them."""
        start, storage = self.start(t), t.storage
        assert storage.data is not None
        cast = dtypes.from_float32(values, t.dtype, storage.kinds[t.dtype])
        storage.window(storage.data, t, start)[...] = np.broadcast_to(cast, (t.shape[0], free_size(t))).reshape(
            t.shape
        )
        mark_written(storage, t, start, mark)

    # ---- cost

    def charge(self, cycles: float) -> None:
        """Keeps the instruction's engine busy for `cycles`."""
        name = self.engine.name
        self.core.counts.engine(name, self.op, cycles / costs.CLOCKS[name], self.core.times)

    def charge_stream(self, passes: float, *tensors: NkiTensor, extra: float = 0.0) -> None:
        """`passes` cycles an element of the longest tensor; a long innermost stride doubles that."""
        elements = max(free_size(t) for t in tensors)
        if self.engine is Engine.gpsimd:
            self.charge(costs.gpsimd_cycles(elements) + extra)
            return
        slow = max(costs.stride_factor(inner_stride(t), t.dtype) for t in tensors)
        self.charge(costs.stream_cycles(passes * slow, elements, self.dynamic) + extra)


def start_problem(partitions: int, start: int) -> str | None:
    """Why an access to so many partitions cannot start at partition `start`; None if it can."""
    step = next(step for most, step in START_STEPS if partitions <= most)
    if start % step == 0:
        return None
    allowed = "/".join(str(p) for p in range(0, 128, step))
    return f"start partition {start} with {partitions} partitions must be {allowed}"


@lru_cache(maxsize=65536)
def access_problem(shape: tuple[int, ...], strides: tuple[int, ...], start: int, region: MemoryRegion) -> str | None:
    """Why an engine's access pattern cannot express a view that starts at partition `start`; None if it can."""
    problem = start_problem(shape[0], start)
    if problem is not None:
        return problem
    pairs = layout.collapsed(shape[1:], strides[1:])
    if len(pairs) > MAX_FREE_DIMS:
        return f"access pattern has {len(pairs)} free dimensions, exceeds maximum {MAX_FREE_DIMS}"
    for stride, count in pairs:
        if count > MAX_COUNT:
            return f"access pattern count {count} exceeds maximum {MAX_COUNT}"
        if abs(stride) > MAX_STRIDE:
            return f"access pattern stride {stride} exceeds maximum {MAX_STRIDE}"
    elements = math.prod(shape[1:])
    if elements > MAX_FREE[region]:
        return f"free size {elements} exceeds maximum {MAX_FREE[region]} in {region.value}"
    return None


def free_size(t: NkiTensor) -> int:
    """Elements per partition."""
    return math.prod(t.shape[1:])


def inner_stride(t: NkiTensor) -> int:
    """Stride of the innermost dimension, in elements."""
    return layout.collapsed(t.shape[1:], t.strides[1:])[-1][0]


def start_partition(t: NkiTensor) -> int:
    """Physical partition where an on-chip view starts; tensors not placed by hand start at 0."""
    base = 0 if t.storage.address is None else t.storage.address[0]
    return base + t.offset // t.row


def mark_written(storage: Storage, t: NkiTensor, start: int, mark: int) -> None:
    """Notes who wrote the bytes of a view, where that is tracked."""
    if storage.marks is not None:
        storage.window(storage.marks, t, start, as_bytes=True)[...] = mark


def known_index(index: NkiTensor | VirtualRegister) -> int | None:
    """The value of a dynamic index; None where it is unknown (modelling without data)."""
    if isinstance(index, VirtualRegister):
        return index.value
    if index.size != 1 or index.buffer is not SBUF or index.dtype not in dtypes.INTEGERS:
        raise NkiValidationError(f"dynamic index must be a (1, 1) integer tensor in SBUF or a register, got {index}")
    return None if index.storage.data is None else int(index.array().reshape(-1)[0])


def scalar_index(index: NkiTensor | VirtualRegister) -> int:
    """The value of a dynamic index that must be known."""
    value = known_index(index)
    if value is None:
        raise NkiValidationError("dynamic index is an uninitialised register")
    return value


def call_site(name: str | None) -> str:
    """Where the kernel calls an instruction: the name it gave, or file and line."""
    if name:
        return name
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("nki_ops.simulator"):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def as_enum(op: str, name: str, value: Any, kind: type) -> Any:
    """A member of an enumeration; its raw number, which NKI refuses since 0.3, works with a warning."""
    if isinstance(value, kind):
        return value
    try:
        member = kind(value)
    except ValueError:
        raise NkiValidationError(f"{op} {name} must be a nisa.{kind.__name__}, got {value!r}") from None
    warnings.warn(
        f"{op} {name}={value!r}: NKI refuses raw numbers; use nisa.{member}", DeprecationWarning, stacklevel=4
    )
    return member


def as_engine(op: str, value: Any, *allowed: Engine) -> Engine:
    """The engine, which must be able to run the operation, or be left to the compiler."""
    chosen = as_enum(op, "engine", value, Engine)
    if chosen is not Engine.unknown and chosen not in allowed:
        raise NkiValidationError(f"{op} engine must be {' or '.join(e.name for e in allowed)}, got {chosen.name}")
    return chosen

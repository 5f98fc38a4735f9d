"""GpSimd Engine, and the cross-partition and top-8 instructions of VectorE. Source: nki.isa reference."""

import math
from collections.abc import Sequence

import numpy as np

from nki_ops.simulator import dtypes, ops
from nki_ops.simulator.enums import engine as Engine
from nki_ops.simulator.errors import NkiValidationError
from nki_ops.simulator.instruction import (
    SBUF,
    Instruction,
    free_size,
    known_index,
    start_partition,
    start_problem,
)
from nki_ops.simulator.memory import NkiTensor
from nki_ops.simulator.ops import Op
from nki_ops.simulator.registers import VirtualRegister

MAX_PATTERN_DIMS = 4
KEEP = 255  # shuffle mask entry of a partition that is left alone
QUADRANT = 32
MIN_TOP8, MAX_TOP8 = 8, 16384
GPSIMD_CORE = 16  # partitions a GpSimd processor is wired to
_COMPARISONS = (ops.equal, ops.not_equal, ops.less, ops.less_equal, ops.greater, ops.greater_equal)

Pattern = Sequence[Sequence[int]]


def iota(
    dst: NkiTensor,
    pattern: Pattern,
    offset: int | VirtualRegister = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> Instruction:
    """dst[p, ...] = offset + p * channel_multiplier + sum of index * step over `pattern` [[step, count], ...]."""
    run = Instruction("iota", Engine.gpsimd, {"dst": dst}, {})
    _check_pattern(run, dst, pattern)
    run.on(SBUF, dst=dst)
    run.charge_stream(1.0, dst)
    start = _offset(run, offset)
    if run.live and start is not None:
        run.write(dst, _affine(dst, pattern, start, channel_multiplier))
    return run


def affine_select(
    dst: NkiTensor,
    pattern: Pattern,
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Op = ops.equal,
    offset: int | VirtualRegister = 0,
    name: str | None = None,
) -> Instruction:
    """dst = on_true_tile where cmp_op(affine value as of `iota`, 0), else on_false_value."""
    if cmp_op not in _COMPARISONS:
        raise NkiValidationError(f"affine_select cmp_op {cmp_op!r} must be a comparison")
    run = Instruction("affine_select", Engine.gpsimd, {"dst": dst}, {"on_true_tile": on_true_tile})
    _check_pattern(run, dst, pattern)
    run.on(SBUF, dst=dst, on_true_tile=on_true_tile)
    run.same_elements(on_true_tile=on_true_tile, dst=dst)
    if isinstance(on_false_value, NkiTensor) or not np.isscalar(on_false_value):
        run.fail(f"on_false_value must be a number, got {type(on_false_value).__name__}")
    run.charge_stream(1.0, on_true_tile)
    start = _offset(run, offset)
    if run.live and start is not None:
        assert cmp_op.binary is not None
        chosen = cmp_op.binary(_affine(dst, pattern, start, channel_multiplier), 0) != 0
        same = on_true_tile.dtype == dst.dtype
        tile = run.read(on_true_tile) if same else run.read32(on_true_tile)
        kind = dst.storage.kinds[dst.dtype]
        tile = dtypes.from_float32(tile, dst.dtype, kind)
        other = dtypes.from_float32(np.full((1, 1), on_false_value, np.float32), dst.dtype, kind)
        run.write(dst, np.where(chosen, tile, other))
    return run


def _check_pattern(run: Instruction, dst: NkiTensor, pattern: Pattern) -> None:
    if not 1 <= len(pattern) <= MAX_PATTERN_DIMS:
        run.fail(f"pattern {pattern} must have 1 to {MAX_PATTERN_DIMS} dimensions")
    elements = math.prod(p[1] for p in pattern)
    if elements != free_size(dst):
        run.fail(f"pattern {pattern} has {elements} elements, dst has {free_size(dst)} per partition")


def _offset(run: Instruction, offset: int | VirtualRegister) -> int | None:
    value = known_index(offset) if isinstance(offset, VirtualRegister) else offset
    if value is None and run.live:
        run.fail("offset is an uninitialised register")
    return value


def _affine(dst: NkiTensor, pattern: Pattern, offset: int, channel_multiplier: int) -> np.ndarray:
    values = np.zeros((), np.int64)
    for step, count in pattern:
        values = values[..., None] + np.arange(count) * step
    channels = np.arange(dst.shape[0])[:, None] * channel_multiplier
    return (offset + channels + values.reshape(1, -1)).astype(np.int32)


def tensor_partition_reduce(dst: NkiTensor, op: Op, data: NkiTensor, name: str | None = None) -> Instruction:
    """dst[0] = data reduced over the partitions."""
    run = Instruction("tensor_partition_reduce", Engine.gpsimd, {"dst": dst}, {"data": data})
    if op not in (ops.add, ops.maximum, ops.bitwise_or, ops.bitwise_and):
        run.fail(f"op {op!r} must be add, maximum, bitwise_or or bitwise_and")
    if dst.shape[0] != 1 or free_size(dst) != free_size(data):
        run.fail(f"dst shape {dst.shape} must hold (1, {free_size(data)})")
    run.charge_stream(1.0, data)
    if run.live:
        assert op.reduce is not None
        values = run.read(data) if op.bitvec else run.read32(data)
        run.write(dst, op.reduce.reduce(values, axis=0)[None])
    return run


def nc_n_gather(dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> Instruction:
    """dst[p, i] = data[p, indices[p, i]], free dimensions flattened."""
    run = Instruction("nc_n_gather", Engine.gpsimd, {"dst": dst}, {"data": data, "indices": indices})
    run.on(SBUF, dst=dst, data=data, indices=indices)
    run.same_partitions(data=data, indices=indices, dst=dst)
    run.same_elements(indices=indices, dst=dst)
    run.dtype("indices", indices, frozenset(("uint32",)))
    if dst.dtype != data.dtype:
        run.fail(f"dst dtype {dst.dtype} must be that of data, {data.dtype}")
    run.charge_stream(1.0, indices)
    if run.live:
        index = run.read(indices).astype(np.int64)
        if index.max() >= free_size(data):
            run.fail(f"index {index.max()} is out of bounds of the {free_size(data)} elements per partition of data")
        run.write(dst, np.take_along_axis(run.read(data), index, axis=1))
    return run


def nonzero_with_count(
    dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1, name: str | None = None
) -> Instruction:
    """Indices of the nonzero elements, padding, and their count; on partitions 0, 16, 32 ... alone."""
    run = Instruction("nonzero_with_count", Engine.gpsimd, {"dst": dst}, {"src": src})
    run.on(SBUF, dst=dst, src=src)
    run.same_partitions(src=src, dst=dst)
    run.dtype("src", src, frozenset(("float32", "int32")))
    run.dtype("dst", dst, frozenset(("int32",)))
    if free_size(dst) != free_size(src) + 1:
        run.fail(f"dst shape {dst.shape} must hold {free_size(src) + 1} elements per partition")
    run.charge_stream(1.0, src)
    if run.live:
        source, out = run.read(src), run.read(dst).copy()
        for p in range(0, src.shape[0], GPSIMD_CORE):
            found = np.flatnonzero(source[p])
            out[p, :-1] = padding_val
            out[p, : len(found)] = found + index_offset
            out[p, -1] = len(found)
        run.write(dst, out)
    return run


def local_gather(
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> Instruction:
    """Each group of 16 partitions gathers from its own partitions by its own indices."""
    run = Instruction("local_gather", Engine.gpsimd, {"dst": dst}, {"src_buffer": src_buffer, "index": index})
    run.on(SBUF, dst=dst, src_buffer=src_buffer, index=index)
    run.same_partitions(src_buffer=src_buffer, index=index, dst=dst)
    run.dtype("index", index, frozenset(("uint16",)))
    if src_buffer.shape[0] % GPSIMD_CORE:
        run.fail(f"src_buffer has {src_buffer.shape[0]} partitions, must be a multiple of {GPSIMD_CORE}")
    if num_elem_per_idx not in (1, 2, 4, 8, 16, 32):
        run.fail(f"num_elem_per_idx {num_elem_per_idx} must be 1, 2, 4, 8, 16 or 32")
    if dst.dtype != src_buffer.dtype:
        run.fail(f"dst dtype {dst.dtype} must be that of src_buffer, {src_buffer.dtype}")
    valid = free_size(index) * GPSIMD_CORE if num_valid_indices is None else num_valid_indices
    if not 0 < valid <= min(4096, free_size(index) * GPSIMD_CORE):
        run.fail(f"num_valid_indices {valid} must be 1..{min(4096, free_size(index) * GPSIMD_CORE)}")
    if free_size(dst) != valid * num_elem_per_idx:
        run.fail(f"dst shape {dst.shape} must hold {valid * num_elem_per_idx} elements per partition")
    run.charge_stream(1.0, dst)
    if run.live:
        source, indices, out = run.read(src_buffer), run.read(index), run.read(dst).copy()
        for p in range(0, src_buffer.shape[0], GPSIMD_CORE):
            first = indices[p : p + GPSIMD_CORE].T.reshape(-1)[:valid].astype(np.int64) * num_elem_per_idx
            columns = (first[:, None] + np.arange(num_elem_per_idx)).reshape(-1)
            if columns.max() >= source.shape[1]:
                run.fail(f"index {columns.max()} is out of bounds of the {source.shape[1]} elements of src_buffer")
            out[p : p + GPSIMD_CORE] = source[p : p + GPSIMD_CORE, columns]
        run.write(dst, out)
    return run


def nc_stream_shuffle(
    dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None
) -> Instruction:
    """Within each 32 partitions: dst[i] = src[shuffle_mask[i]]; 255 leaves dst[i]."""
    run = Instruction("nc_stream_shuffle", Engine.vector, {"dst": dst}, {"src": src})
    if dst.dtype != src.dtype:
        run.fail(f"dst dtype {dst.dtype} must be that of src, {src.dtype}")
    if free_size(dst) != free_size(src):
        run.fail(f"dst has {free_size(dst)} elements per partition, src has {free_size(src)}")
    active = max(dst.shape[0], src.shape[0])
    for label, t in (("dst", dst), ("src", src)):
        problem = start_problem(active, start_partition(t))
        if problem is not None:
            run.fail(f"{label} {problem}")
    if len(shuffle_mask) != QUADRANT or any(not (0 <= m < QUADRANT or m == KEEP) for m in shuffle_mask):
        run.fail(f"shuffle_mask must have {QUADRANT} entries of 0..{QUADRANT - 1} or {KEEP}")
    run.charge_stream(1.0, src)
    if run.live:
        source, out = run.read(src), run.read(dst).copy()
        for p in range(out.shape[0]):
            wanted = shuffle_mask[p % QUADRANT]
            if wanted != KEEP:
                row = p // QUADRANT * QUADRANT + wanted
                if row >= source.shape[0]:
                    run.fail(
                        f"shuffle_mask[{p % QUADRANT}] = {wanted} reads partition {row} of {source.shape[0]} in src"
                    )
                out[p] = source[row]
        run.write(dst, out)
    return run


def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> Instruction:
    """The 8 largest values of each partition, largest first."""
    run = Instruction("max8", Engine.vector, {"dst": dst}, {"src": src})
    _check_top8(run, dst, "src", src)
    run.charge_stream(1.0, src)
    if run.live:
        run.write(dst, -np.sort(-run.read32(src), axis=1)[:, :8])
    return run


def nc_find_index8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> Instruction:
    """Where each of 8 values stands in its partition; equal values take successive places; all ones if absent."""
    run = Instruction("nc_find_index8", Engine.vector, {"dst": dst}, {"data": data, "vals": vals})
    _check_top8(run, dst, "data", data, vals)
    run.dtype("dst", dst, frozenset(("uint16", "uint32")))
    run.charge_stream(1.0, data)
    if run.live:
        absent = np.iinfo(dst.storage.kinds[dst.dtype]).max
        found, _ = _match(run.read32(data), run.read32(vals), range(8), absent)
        run.write(dst, found)
    return run


def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> Instruction:
    """dst = data with the first match of each of 8 values replaced by `imm`; their places go to dst_idx."""
    writes = {"dst": dst} if dst_idx is None else {"dst": dst, "dst_idx": dst_idx}
    run = Instruction("nc_match_replace8", Engine.vector, writes, {"data": data, "vals": vals})
    run.same_elements(data=data, dst=dst)
    _check_top8(run, dst_idx, "data", data, vals)
    run.charge_stream(1.0, data)
    if run.live:
        values = run.read32(data).copy()
        found, taken = _match(values, run.read32(vals), range(7, -1, -1), 2**32 - 1)
        run.write(dst, np.where(taken, np.float32(imm), values))
        if dst_idx is not None:
            run.write(dst_idx, found)
    return run


def _check_top8(
    run: Instruction, eight: NkiTensor | None, label: str, data: NkiTensor, vals: NkiTensor | None = None
) -> None:
    if not MIN_TOP8 <= free_size(data) <= MAX_TOP8:
        run.fail(f"{label} free size {free_size(data)} must be {MIN_TOP8}..{MAX_TOP8}")
    for name, t in (("dst", eight), ("vals", vals)):
        if t is not None and (free_size(t) != 8 or t.shape[0] != data.shape[0]):
            run.fail(f"{name} shape {t.shape} must hold ({data.shape[0]}, 8)")


def _match(data: np.ndarray, vals: np.ndarray, order: range, absent: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs each value, in `order`, with the first equal element not taken yet."""
    found = np.full(vals.shape, absent, np.int64)
    taken = np.zeros(data.shape, bool)
    rows = np.arange(len(data))
    for column in order:
        equal = (data == vals[:, column : column + 1]) & ~taken
        first = equal.argmax(1)
        hit = equal[rows, first]
        found[hit, column] = first[hit]
        taken[rows[hit], first[hit]] = True
    return found, taken

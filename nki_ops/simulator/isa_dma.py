"""DMA: copies, transposes and sums between HBM and SBUF. Source: nki.isa reference, nki-dge.rst."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_ops.simulator import costs, dtypes, layout, ops
from nki_ops.simulator.enums import dge_mode as Dge
from nki_ops.simulator.enums import engine as Engine
from nki_ops.simulator.enums import oob_mode as Oob
from nki_ops.simulator.errors import NkiValidationError
from nki_ops.simulator.instruction import (
    OTHER_MARK,
    SBUF,
    Instruction,
    as_enum,
    call_site,
    known_index,
    mark_written,
)
from nki_ops.simulator.memory import NkiTensor
from nki_ops.simulator.ops import Op

MAX_SOURCES = 16
_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
# Finding out whether two strided views share an element can be hard; past this effort they count as sharing.
_OVERLAP_EFFORT = 100_000


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: Oob = Oob.error,
    dge_mode: Dge = Dge.unknown,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> Instruction:
    """dst = src, elements in row-major order; other dtypes go through float32. HBM and SBUF only."""
    run, oob_mode, dge_mode = _start("dma_copy", dst, {"src": src}, priority, oob_mode, dge_mode)
    engine = as_enum("dma_copy", "engine", engine, Engine)
    if engine is not Engine.unknown and (dge_mode is not Dge.hwdge or engine not in (Engine.sync, Engine.scalar)):
        run.fail(f"engine {engine.name}: only sync or scalar, and only with dge_mode.hwdge")
    if dst.size != src.size:
        run.fail(f"src has {src.size} elements, dst has {dst.size}")
    if dge_mode is Dge.hwdge and dst.dtype != src.dtype:
        run.fail(f"dge_mode.hwdge moves bytes: src dtype {src.dtype} must be that of dst, {dst.dtype}")
    _check_oob(run, oob_mode, dst, src)
    _check_dge(run, dge_mode, dst, src)
    _check_overlap(run, dst, src)
    _charge_copy(run, dst, src, dge_mode, name)
    if run.live:
        values, valid = _gather(run, src, oob_mode)
        if src.dtype != dst.dtype:
            values = dtypes.from_float32(dtypes.to_float32(values), dst.dtype, dst.storage.kinds[dst.dtype])
        _scatter(run, dst, values, valid, oob_mode)
    return run


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: Sequence[int] | None = None,
    priority: int | None = None,
    dge_mode: Dge = Dge.unknown,
    oob_mode: Oob = Oob.error,
    name: str | None = None,
) -> Instruction:
    """dst = src with axes (1, 0), (2, 1, 0) or (3, 1, 2, 0), into SBUF."""
    run, oob_mode, dge_mode = _start("dma_transpose", dst, {"src": src}, priority, oob_mode, dge_mode)
    order = _AXES.get(src.ndim)
    if order is None or (axes is not None and tuple(axes) != order):
        run.fail(f"axes {axes} of a {src.ndim}-d src must be {order or 'those of 2 to 4 dimensions'}")
    assert order is not None
    run.on(SBUF, dst=dst)
    if dst.dtype != src.dtype:
        run.fail(f"dst dtype {dst.dtype} must be that of src, {src.dtype}")
    if dtypes.itemsize(src.dtype) not in (2, 4):
        run.fail(f"src dtype {src.dtype} must have 2 or 4 bytes")
    wanted = tuple(src.shape[a] for a in order)
    if dst.shape != wanted:
        run.fail(f"dst shape {dst.shape} must be the transposed shape {wanted} of src, rank included")
    _check_transpose(run, src, dge_mode, oob_mode)
    _check_overlap(run, dst, src)

    item = dtypes.itemsize(src.dtype)
    from_hbm = not src.buffer.on_chip
    seconds = costs.transpose_seconds(src.size, item, dst.shape[0], dst.shape[-1], from_hbm)
    _charge(run, f"{_route(dst, src)} transposed", src.size * item, None, seconds, dge_mode, name, src)
    if run.live:
        values, valid = _gather(run, src, oob_mode)
        if isinstance(valid, np.ndarray):
            valid = np.broadcast_to(_lead(valid, src.ndim), src.shape).transpose(order)
        _scatter(run, dst, values.transpose(order), valid, oob_mode)
    return run


def dma_compute(
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: Op,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: Oob = Oob.error,
    name: str | None = None,
) -> Instruction:
    """dst = sum of srcs in float32, by the DMA engines. A gathered source or a scattered dst makes it += ."""
    sources = {f"srcs[{i}]": s for i, s in enumerate(srcs)}
    run, oob_mode, _ = _start("dma_compute", dst, sources, None, oob_mode, Dge.unknown)
    if reduce_op is not ops.add:
        run.fail(f"reduce_op {reduce_op!r} must be nl.add")
    if not 1 <= len(srcs) <= MAX_SOURCES:
        run.fail(f"srcs has {len(srcs)} tensors, exceeds maximum {MAX_SOURCES}")
    if scales is not None and any(s != 1.0 for s in scales):
        run.fail(f"scales {list(scales)} must all be 1.0")
    indirect = any(t.is_indirect() for t in (dst, *srcs))
    if indirect and len(srcs) != 2:
        run.fail(f"with a dynamic index it takes 2 sources, got {len(srcs)}")
    if not unique_indices:
        run.fail("unique_indices must be True")
    _check_oob(run, oob_mode, dst, *srcs)
    for i, s in enumerate(srcs):
        if s.size != dst.size:
            run.fail(f"srcs[{i}] has {s.size} elements, dst has {dst.size}")
        _charge_copy(run, dst, s, Dge.unknown, name)
    if run.live:
        total, valid = np.zeros(dst.size, np.float32), None
        for s in srcs:
            values, kept = _gather(run, s, oob_mode)
            total = total + dtypes.to_float32(values).reshape(-1)
            valid = kept if valid is None else valid
        values = dtypes.from_float32(total.reshape(dst.shape), dst.dtype, dst.storage.kinds[dst.dtype])
        _scatter(run, dst, values, valid, oob_mode)
    return run


# ---- checks


def _start(op: str, dst: Any, srcs: dict[str, Any], priority: Any, oob: Any, dge: Any) -> tuple[Instruction, Oob, Dge]:
    oob, dge = as_enum(op, "oob_mode", oob, Oob), as_enum(op, "dge_mode", dge, Dge)
    if priority is not None:
        raise NkiValidationError(f"{op} priority needs NeuronCore-v4 (trn3)")
    for name, t in srcs.items():
        if not isinstance(t, NkiTensor):
            raise NkiValidationError(f"{op} {name} must be a tensor, got {type(t).__name__}")
    return Instruction(op, Engine.dma, {"dst": dst}, srcs), oob, dge


def _by_rows(t: NkiTensor) -> bool:
    return t.indirection is not None and t.indirection.per_partition


def _check_dge(run: Instruction, mode: Dge, *tensors: NkiTensor) -> None:
    for t in tensors:
        if _by_rows(t) and mode not in (Dge.unknown, Dge.swdge):
            run.fail(f"dge_mode {mode.name}: a vector_offset needs swdge")
        if t.is_indirect() and mode is Dge.none:
            run.fail("dge_mode none: a dynamic address needs swdge or hwdge")


def _check_oob(run: Instruction, mode: Oob, *tensors: NkiTensor) -> None:
    if mode is Oob.skip and not any(t.is_indirect() for t in tensors):
        run.fail("oob_mode.skip goes with dynamic indices only")


def _check_transpose(run: Instruction, src: NkiTensor, mode: Dge, oob: Oob) -> None:
    if _by_rows(src):
        _check_gather_transpose(run, src, mode)
        return
    _check_oob(run, oob, src)
    if mode not in (Dge.unknown, Dge.hwdge):
        run.fail(f"dge_mode {mode.name} must be unknown or hwdge")
    if mode is Dge.hwdge:
        if dtypes.itemsize(src.dtype) != 2:
            run.fail(f"dge_mode.hwdge src dtype {src.dtype} must have 2 bytes")
        allowed = (16,) if src.ndim == 2 else (1, 2, 4, 8, 16)
        if src.shape[0] not in allowed or (src.ndim > 2 and src.shape[0] * src.shape[-2] % 16):
            run.fail(f"dge_mode.hwdge src shape {src.shape}: first dimension must be one of {allowed}, rows % 16 == 0")


def _check_gather_transpose(run: Instruction, src: NkiTensor, mode: Dge) -> None:
    assert src.indirection is not None
    index = src.indirection.index
    assert isinstance(index, NkiTensor)
    if mode not in (Dge.unknown, Dge.swdge):
        run.fail(f"dge_mode {mode.name} must be unknown or swdge with a vector_offset")
    if dtypes.itemsize(src.dtype) != 2:
        run.fail(f"src dtype {src.dtype} must have 2 bytes with a vector_offset")
    if src.ndim == 4 and 1 not in src.shape[1:3]:
        run.fail(f"src shape {src.shape}: dimension 1 or 2 of a gathered src must be 1")
    if src.shape[0] % 16:
        run.fail(f"src first dimension {src.shape[0]} must be divisible by 16")
    if index.ndim != 2 or index.dtype != "uint32" or index.buffer is not SBUF:
        run.fail(f"indices must be a 2-d uint32 tensor in SBUF, got {index}")
    rows, columns = index.shape
    if rows % 16 or not 16 <= rows <= 128 or (columns > 1 and rows != 128) or rows * columns < src.shape[0]:
        run.fail(f"indices shape {index.shape} does not fit a src of {src.shape[0]} rows")


def _check_overlap(run: Instruction, dst: NkiTensor, src: NkiTensor) -> None:
    """DMA engines work in parallel: reading what the same DMA writes gives old and new data mixed.

    Copying a region onto itself changes nothing and is used as a fence, so it is allowed.
    """
    if dst.storage is not src.storage or _by_rows(dst) or _by_rows(src):
        return
    offsets = [_static_start(t) for t in (dst, src)]
    if None in offsets:
        return
    if offsets[0] == offsets[1] and dst.get_pattern() == src.get_pattern() and dst.dtype == src.dtype:
        return
    storage = dst.storage
    memory = storage.data
    if memory is None:  # addresses are all that counts; the pages are never touched
        memory = np.empty(storage.size * storage.kinds[storage.dtype].itemsize, np.uint8)
    a, b = (storage.window(memory, t, o) for t, o in zip((dst, src), offsets, strict=True) if o is not None)
    try:
        shared = np.shares_memory(a, b, max_work=_OVERLAP_EFFORT)  # pyright: ignore[reportArgumentType]
    except np.exceptions.TooHardError:
        shared = np.may_share_memory(a, b)
    if shared:
        run.fail(f"src and dst overlap in {storage}; copy in chunks that do not, or through SBUF")


def _static_start(t: NkiTensor) -> int | None:
    if t.indirection is None:
        return t.offset
    value = known_index(t.indirection.index)
    return None if value is None else t.offset + value * t.indirection.stride


# ---- data


def _gather(run: Instruction, src: NkiTensor, mode: Oob) -> tuple[np.ndarray, np.ndarray | bool | None]:
    """Elements in the shape of the view, and which of them are valid (None: all; per row, or all at once)."""
    if _by_rows(src):
        return _gather_rows(run, src, mode)
    offset = _dynamic_offset(run, src, mode)
    if offset is None:
        return np.zeros(src.shape, src.storage.kinds[src.dtype]), False
    return src.array(offset), None


def _gather_rows(run: Instruction, src: NkiTensor, mode: Oob) -> tuple[np.ndarray, np.ndarray | None]:
    starts, valid = _row_starts(run, src, mode)
    out = np.zeros(src.shape, src.storage.kinds[src.dtype])
    for row, start in enumerate(starts):
        if valid[row]:
            out[row] = _row(src).array(int(start))[0]
    return out, None if valid.all() else valid


def _scatter(run: Instruction, dst: NkiTensor, values: np.ndarray, valid: np.ndarray | bool | None, mode: Oob) -> None:
    if valid is False:
        return
    values = values.reshape(dst.shape)
    if _by_rows(dst):
        starts, inside = _row_starts(run, dst, mode)
        for row, start in enumerate(starts):
            if inside[row]:
                _row(dst).array(int(start))[0] = values[row]
                mark_written(dst.storage, _row(dst), int(start), OTHER_MARK)
        return
    offset = _dynamic_offset(run, dst, mode)
    if offset is None:
        return
    target = dst.array(offset)
    if isinstance(valid, np.ndarray):
        kept = valid if valid.shape == dst.shape else np.broadcast_to(_lead(valid, dst.ndim), dst.shape)
        values = np.where(kept, values, target)
    target[...] = values
    mark_written(dst.storage, dst, offset, OTHER_MARK)


def _dynamic_offset(run: Instruction, t: NkiTensor, mode: Oob) -> int | None:
    """First element of the view; None where the index is out of bounds and may be skipped."""
    if t.indirection is None:
        return t.offset
    index = known_index(t.indirection.index)
    if index is None:
        run.fail("dynamic index is an uninitialised register")
    assert index is not None
    offset = t.offset + index * t.indirection.stride
    try:
        if not 0 <= index < t.indirection.limit:
            run.fail(f"dynamic index {index} is out of bounds of {t.storage}")
        t.check_bounds(offset)
    except NkiValidationError:
        if mode is Oob.skip:
            return None
        raise
    return offset


def _row(t: NkiTensor) -> NkiTensor:
    """One row of a view with an index a row."""
    return NkiTensor(t.storage, (1, *t.shape[1:]), t.strides, t.offset, t.dtype)


def _row_starts(run: Instruction, t: NkiTensor, mode: Oob) -> tuple[np.ndarray, np.ndarray]:
    """First element of every row of a view with an index a row, and whether the row is in bounds."""
    assert t.indirection is not None
    index = t.indirection.index
    assert isinstance(index, NkiTensor)
    if index.dtype not in dtypes.INTEGERS or index.buffer is not SBUF:
        run.fail(f"vector_offset must be an integer tensor in SBUF, got {index}")
    # Indices beyond the first column continue it: column-major.
    picked = index.array().reshape(index.shape[0], -1).T.reshape(-1)[: t.shape[0]].astype(np.int64)
    if len(picked) < t.shape[0]:
        run.fail(f"vector_offset has {len(picked)} indices for {t.shape[0]} rows")
    starts = t.offset + picked * t.indirection.stride
    lo, hi = layout.extent(t.shape[1:], t.strides[1:])
    valid = (picked >= 0) & (picked < t.indirection.limit) & (starts + lo >= 0) & (starts + hi < t.storage.size)
    if not valid.all() and mode is Oob.error:
        run.fail(f"vector_offset index {picked[~valid][0]} is out of bounds of {t.storage}")
    return starts, valid


def _lead(valid: np.ndarray, ndim: int) -> np.ndarray:
    return valid.reshape(-1, *[1] * (ndim - 1))


# ---- cost


def _route(dst: NkiTensor, src: NkiTensor) -> str:
    return f"{'sbuf' if src.buffer.on_chip else 'hbm'}->{'sbuf' if dst.buffer.on_chip else 'hbm'}"


def _charge_copy(run: Instruction, dst: NkiTensor, src: NkiTensor, mode: Dge, name: str | None) -> None:
    """Descriptors end where either side jumps; partitions, or rows of an HBM dst, spread over the engines."""
    elements = dst.size
    partitions = max((t.shape[0] for t in (dst, src) if t.buffer.on_chip), default=None)
    rows = dst.shape[0] if dst.ndim > 1 else 1
    cuts = max(partitions or rows, layout.pieces(elements, _run_length(src), _run_length(dst)))
    item = max(dtypes.itemsize(dst.dtype), dtypes.itemsize(src.dtype))
    run_bytes = elements * item / cuts
    seconds = costs.dma_seconds(elements * item, run_bytes, costs.dma_engines(partitions, rows))
    _charge(run, _route(dst, src), elements * item, run_bytes, seconds, mode, name, dst, src)


def _run_length(t: NkiTensor) -> int:
    """Contiguous elements of a side; on chip a partition ends a run, and rows with an index each do in HBM."""
    first = 1 if t.buffer.on_chip or _by_rows(t) else 0
    return layout.contiguous_run(t.shape[first:], t.strides[first:])


def _charge(
    run: Instruction,
    route: str,
    moved: int,
    run_bytes: float | None,
    seconds: float,
    mode: Dge,
    name: str | None,
    *tensors: NkiTensor,
) -> None:
    counts, times = run.core.counts, run.core.times
    counts.dma(run.op, call_site(name), route, moved, run_bytes, seconds, times)
    by_rows = any(_by_rows(t) for t in tensors)
    if mode is Dge.hwdge or (mode is Dge.unknown and not by_rows and any(t.is_indirect() for t in tensors)):
        counts.engine("dge", run.op, costs.HWDGE_SECONDS / costs.HWDGE_INSTANCES, times)

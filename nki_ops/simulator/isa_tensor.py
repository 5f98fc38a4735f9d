"""Tensor Engine: matrix products and transposes. Source: nki.isa reference (nc_matmul, nc_transpose)."""

from typing import Any

import numpy as np

from nki_ops.simulator import costs, dtypes, layout
from nki_ops.simulator.accounting import PSUM_BANK_BYTES
from nki_ops.simulator.enums import engine as Engine
from nki_ops.simulator.enums import matmul_perf_mode
from nki_ops.simulator.instruction import (
    MATMUL_MARK,
    OTHER_MARK,
    PSUM,
    SBUF,
    Instruction,
    as_engine,
    as_enum,
    free_size,
    mark_written,
)
from nki_ops.simulator.memory import NkiTensor

MAX_STATIONARY, MAX_MOVING = 128, 512
_INPUTS = frozenset(("bfloat16", "float16", "float32", "tfloat32")) | dtypes.FP8
_FP32 = frozenset(("float32", "tfloat32"))
VECTOR_TRANSPOSE_MAX = 32


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple = (),
    tile_size: tuple = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: str | None = None,
) -> Instruction:
    """dst[M, N] = stationary[K, M].T @ moving[K, N], in float32, or added to what matmuls left in `dst`.

    `accumulate=None` overwrites where no matmul has written yet and adds elsewhere.
    """
    perf_mode = as_enum("nc_matmul", "perf_mode", perf_mode, matmul_perf_mode)
    run = Instruction("nc_matmul", Engine.tensor, {"dst": dst}, {"stationary": stationary, "moving": moving})
    double = perf_mode is matmul_perf_mode.double_row
    _check_operands(run, dst, stationary, moving, double)
    _check_tiling(run, stationary, tile_position, tile_size)
    columns, rows = free_size(stationary), free_size(moving)
    if double:
        columns, rows = columns // 2, rows // 2
    if is_transpose:
        _check_transpose(run, dst, stationary, accumulate, double)
    elif dst.dtype != "float32":
        run.fail(f"dst dtype {dst.dtype} must be float32")
    if columns > MAX_STATIONARY:
        run.fail(f"stationary free size {columns} exceeds maximum {MAX_STATIONARY}")
    if rows > MAX_MOVING:
        run.fail(f"moving free size {rows} exceeds maximum {MAX_MOVING}")
    if dst.shape[0] != columns or free_size(dst) != rows:
        run.fail(f"dst shape {dst.shape} must hold ({columns}, {rows})")

    fast = is_transpose or is_stationary_onezero or is_moving_onezero
    run.charge(costs.matmul_cycles(columns, rows, stationary.dtype, fast))
    if not run.live:
        return run
    if is_transpose:
        _transpose_by_identity(run, dst, stationary, moving)
    else:
        left, right = run.read32(stationary), run.read32(moving)
        if double:
            left, right = (x.reshape(x.shape[0] * 2, -1) for x in (left, right))
        _accumulate(run, dst, left.T @ right, accumulate)
    return run


def _check_operands(run: Instruction, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, double: bool) -> None:
    run.on(SBUF, stationary=stationary, moving=moving)
    run.on(PSUM, dst=dst)
    run.dtype("stationary", stationary, dtypes.FP8 if double else _INPUTS)
    run.dtype("moving", moving, dtypes.FP8 if double else _INPUTS)
    if (stationary.dtype in _FP32) != (moving.dtype in _FP32):
        run.fail(f"stationary {stationary.dtype} and moving {moving.dtype}: float32 goes with float32 only")
    run.same_partitions(stationary=stationary, moving=moving)
    if double and (len(stationary.shape) < 3 or stationary.shape[1] != 2 or moving.shape[1] != 2):
        run.fail("double_row needs a first free dimension of 2 in stationary and moving")
    check_one_bank(run, dst)


def check_one_bank(run: Instruction, dst: NkiTensor) -> None:
    """TensorE writes into one PSUM bank of 2 KiB a partition."""
    item = dtypes.itemsize(dst.dtype)
    lo, hi = layout.extent(dst.shape[1:], dst.strides[1:])
    first = (dst.offset % dst.row + lo) * item
    last = (dst.offset % dst.row + hi) * item + item - 1
    if first // PSUM_BANK_BYTES != last // PSUM_BANK_BYTES:
        run.fail(f"dst spans bytes {first}..{last} of a PSUM partition; it must fit one bank of {PSUM_BANK_BYTES}")


def _check_tiling(run: Instruction, stationary: NkiTensor, position: tuple, size: tuple) -> None:
    if not position and not size:
        return
    if not position or not size:
        run.fail("tile_position and tile_size must be set together")
    if size[1] != 128 or position[1] != 0:
        run.fail(f"tile_position {position} and tile_size {size}: start_column must be 0 and column_size 128")
    if size[0] not in (32, 64, 128) or position[0] % size[0] or position[0] + size[0] > 128:
        run.fail(f"tile_position {position} does not fit row tiles of {size[0]}")
    if stationary.shape[0] > size[0]:
        run.fail(f"stationary has {stationary.shape[0]} partitions, tile_size allows {size[0]}")


def _check_transpose(
    run: Instruction, dst: NkiTensor, stationary: NkiTensor, accumulate: bool | None, double: bool
) -> None:
    if double or accumulate:
        run.fail("is_transpose excludes double_row and accumulate")
    if dst.dtype not in ("float32", stationary.dtype):
        run.fail(f"dst dtype {dst.dtype} must be float32 or that of stationary, {stationary.dtype}")


def _transpose_by_identity(run: Instruction, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor) -> None:
    identity = run.read32(moving)
    if identity.shape[0] != identity.shape[1] or not np.array_equal(identity, np.eye(len(identity))):
        run.fail("moving must be the identity matrix with is_transpose=True")
    data = run.read(stationary)
    run.write(dst, data.T if dst.dtype == stationary.dtype else dtypes.to_float32(data).T)


def _accumulate(run: Instruction, dst: NkiTensor, product: np.ndarray, accumulate: bool | None) -> None:
    start, storage = run.start(dst), dst.storage
    assert storage.data is not None
    assert storage.marks is not None
    target = storage.window(storage.data, dst, start)
    marks = storage.window(storage.marks, dst, start, as_bytes=True)[..., 0]
    product = product.reshape(dst.shape)
    if accumulate is None:
        if np.any((marks == OTHER_MARK) & (target != 0)):
            run.fail(
                "dst was initialised by another instruction than a matmul, which must not be accumulated on; "
                "pass accumulate=False to overwrite it, or add it afterwards"
            )
        product = np.where(marks == MATMUL_MARK, target + product, product)
    elif accumulate:
        if np.any(marks != MATMUL_MARK):
            run.fail("accumulate=True on PSUM where no matmul has written; the first matmul must overwrite")
        product = target + product
    target[...] = product
    mark_written(storage, dst, start, MATMUL_MARK)


def nc_transpose(
    dst: NkiTensor, data: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None
) -> Instruction:
    """dst[F, P] = data[P, F], bit by bit; free dimensions count as one."""
    engine = as_engine("nc_transpose", engine, Engine.tensor, Engine.vector)
    if engine is Engine.unknown:
        engine = _transpose_engine(dst, data)
    run = Instruction("nc_transpose", engine, {"dst": dst}, {"data": data})
    partitions, free = data.shape[0], free_size(data)
    limit = 128 if engine is Engine.tensor else VECTOR_TRANSPOSE_MAX
    if partitions > limit or free > limit:
        run.fail(f"data shape ({partitions}, {free}) exceeds maximum ({limit}, {limit}) of the {engine.name} engine")
    if dst.dtype != data.dtype:
        run.fail(f"dst dtype {dst.dtype} must be that of data, {data.dtype}")
    if dst.shape[0] != free or free_size(dst) != partitions:
        run.fail(f"dst shape {dst.shape} must hold ({free}, {partitions})")
    if engine is Engine.tensor:
        run.on(SBUF, data=data)
        run.on(PSUM, dst=dst)
        check_one_bank(run, dst)
        run.charge(costs.matmul_cycles(free, partitions, data.dtype, fast_float32=True))
    else:
        run.charge_stream(1.0, data)
    if run.live:
        run.write(dst, run.read(data).T)
    return run


def _transpose_engine(dst: Any, data: Any) -> Engine:
    """TensorE where it can (SBUF to PSUM), else VectorE."""
    tensors = isinstance(dst, NkiTensor) and isinstance(data, NkiTensor)
    return Engine.tensor if tensors and dst.buffer is PSUM and data.buffer is SBUF else Engine.vector

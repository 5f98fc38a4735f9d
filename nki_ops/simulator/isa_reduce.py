"""Vector Engine: reductions, scans and selections, and the accumulator registers that some of them share.

Source: nki.isa reference. The registers are one float32 a lane; an instruction of the family that runs with
`reduce_cmd.idle` leaves them undefined (NaN here).
"""

from typing import Any

import numpy as np

from nki_ops.simulator import costs, dtypes, ops
from nki_ops.simulator.enums import engine as Engine
from nki_ops.simulator.enums import reduce_cmd as Cmd
from nki_ops.simulator.errors import NkiValidationError
from nki_ops.simulator.instruction import Instruction, as_enum, free_size, start_partition
from nki_ops.simulator.isa_vector import FP32, check_binary, check_scalar_ops, scalar_op
from nki_ops.simulator.memory import NkiTensor
from nki_ops.simulator.ops import Op

FP32_MIN = float(np.finfo(np.float32).min)
BN_STATS_MAX = 512
_COMPARISONS = (ops.equal, ops.less, ops.less_equal, ops.greater, ops.greater_equal)


def tensor_reduce(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> Instruction:
    """Reduces the trailing free dimensions `axis` of data; arithmetic is float32."""
    if not isinstance(op, Op) or op.reduce is None:
        raise NkiValidationError(f"tensor_reduce op {op!r} is no reduction operator")
    run = Instruction("tensor_reduce", Engine.vector, {"dst": dst}, {"data": data})
    axes = sorted(a % data.ndim for a in ((axis,) if isinstance(axis, int) else axis))
    if not axes or axes != list(range(axes[0], data.ndim)) or axes[0] == 0:
        run.fail(
            f"axis {axis} must be the last free dimensions of shape {data.shape}; the partition cannot be reduced"
        )
    run.same_partitions(data=data, dst=dst)
    inner = int(np.prod([data.shape[a] for a in axes]))
    if free_size(dst) != free_size(data) // inner:
        run.fail(f"dst shape {dst.shape} must hold {free_size(data) // inner} elements per partition")
    if op.bitvec:
        run.dtype("data", data, dtypes.INTEGERS)
        run.dtype("dst", dst, dtypes.INTEGERS)
        if negate:
            run.fail(f"negate goes with arithmetic operators, not with {op}")
    fast = data.dtype == dst.dtype == "bfloat16" and op in (ops.add, ops.maximum)
    run.charge_stream(0.5 if fast else 1.0, data)  # [isa]
    if run.live:
        values = (run.read(data) if op.bitvec else run.read32(data)).reshape(data.shape[0], -1, inner)
        result = op.reduce.reduce(values, axis=-1)
        run.write(dst, -result if negate else result)
    return run


def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Op,
    operand0: Any,
    reduce_op: Op,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: Cmd = Cmd.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> Instruction:
    """dst = data <op0> operand0, and a reduction of that over all free dimensions into reduce_res."""
    reduce_cmd = as_enum("tensor_scalar_reduce", "reduce_cmd", reduce_cmd, Cmd)
    if reduce_op not in (ops.add, ops.multiply, ops.maximum, ops.minimum):
        raise NkiValidationError(
            f"tensor_scalar_reduce reduce_op {reduce_op!r} must be add, multiply, maximum, minimum"
        )
    run = Instruction(
        "tensor_scalar_reduce",
        Engine.vector,
        {"dst": dst} | _out(reduce_res),
        {"data": data, "operand0": operand0, "reduce_init": reduce_init},
    )
    if reverse0:
        run.fail("reverse0 is not supported")
    check_scalar_ops(run, op0, operand0, None, None)
    if op0.bitvec:
        run.fail(f"op0 {op0}: bitvec operators are not supported")
    if reduce_cmd not in (Cmd.reset_reduce, Cmd.reduce, Cmd.load_reduce):
        run.fail(f"reduce_cmd {reduce_cmd.name} must be reset_reduce, reduce or load_reduce")
    if (reduce_cmd is Cmd.load_reduce) != (reduce_init is not None):
        run.fail("reduce_init goes with reduce_cmd.load_reduce, and only with it")
    run.same_elements(data=data, dst=dst)
    run.column("operand0", operand0, data.shape[0], FP32)
    run.column("reduce_init", reduce_init, data.shape[0], FP32)
    run.column("reduce_res", reduce_res, data.shape[0])
    run.charge_stream(1.0, data, extra=costs.READ_ACCUMULATOR if reduce_res is not None else 0)
    if run.live:
        values = scalar_op(run, op0, run.read32(data), operand0, False)
        init = None if reduce_init is None else run.read32(reduce_init)
        run.write(dst, values)
        _accumulate(run, data, values, reduce_op, reduce_cmd, reduce_res, init, reduce_res_negate)
    return run


def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Any,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Cmd = Cmd.idle,
    reduce_op: Op = ops.maximum,
    reverse_pred: bool = False,
    name: str | None = None,
) -> Instruction:
    """dst = on_true where predicate, else on_false (a number or column); maxima into reduce_res."""
    reduce_cmd = as_enum("select_reduce", "reduce_cmd", reduce_cmd, Cmd)
    run = Instruction(
        "select_reduce",
        Engine.vector,
        {"dst": dst} | _out(reduce_res),
        {"predicate": predicate, "on_true": on_true, "on_false": on_false},
    )
    run.dtype("predicate", predicate, frozenset(("int8", "uint8", "int16", "uint16")))
    run.dtype("on_true", on_true, frozenset(dtypes.NAMES) - {"tfloat32", "int32", "uint32"})
    _check_maximum(run, reduce_op, reduce_res, on_true)
    if reduce_cmd not in (Cmd.idle, Cmd.reset_reduce, Cmd.reduce):
        run.fail(f"reduce_cmd {reduce_cmd.name} must be idle, reset_reduce or reduce")
    run.same_elements(on_true=on_true, predicate=predicate, dst=dst)
    run.not_both_in_psum(on_true=on_true, predicate=predicate)
    run.column("on_false", on_false, on_true.shape[0])
    run.charge_stream(2.0, on_true, predicate, extra=costs.READ_ACCUMULATOR if reduce_res is not None else 0)
    if run.live:
        chosen = (run.read(predicate) != 0) != reverse_pred
        values = np.where(chosen, run.read32(on_true), run.read32(on_false))
        run.write(dst, values)
        _accumulate(run, on_true, values, reduce_op, reduce_cmd, reduce_res)
    return run


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Op,
    comp_op1: Op,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: Cmd = Cmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Op = ops.maximum,
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> Instruction:
    """dst = on_true_tile where its free index i has comp_op0(i, bound0) and comp_op1(i, bound1), else FP32_MIN."""
    reduce_cmd = as_enum("range_select", "reduce_cmd", reduce_cmd, Cmd)
    run = Instruction(
        "range_select",
        Engine.vector,
        {"dst": dst} | _out(reduce_res),
        {"on_true_tile": on_true_tile, "bound0": bound0, "bound1": bound1},
    )
    for label, op in (("comp_op0", comp_op0), ("comp_op1", comp_op1)):
        if op not in _COMPARISONS:
            run.fail(f"{label} {op!r} must be one of {_COMPARISONS}")
    if np.float32(on_false_value) != np.float32(FP32_MIN):
        run.fail(f"on_false_value {on_false_value} must be {FP32_MIN}")
    if not isinstance(range_start, int) or range_start + free_size(on_true_tile) > 2**24:
        run.fail(f"range_start {range_start} must be a compile-time integer with all indices below 2**24")
    run.dtype("on_true_tile", on_true_tile, dtypes.FLOATS)
    _check_maximum(run, reduce_op, reduce_res, on_true_tile)
    run.same_elements(on_true_tile=on_true_tile, dst=dst)
    for label, bound in (("bound0", bound0), ("bound1", bound1)):
        if not isinstance(bound, NkiTensor):
            run.fail(f"{label} must be a tensor [P, 1]")
        run.column(label, bound, on_true_tile.shape[0], FP32)
    run.charge_stream(1.0, on_true_tile, extra=costs.READ_ACCUMULATOR if reduce_res is not None else 0)
    if run.live:
        assert comp_op0.binary is not None and comp_op1.binary is not None
        index = np.arange(range_start, range_start + free_size(on_true_tile), dtype=np.float32)
        inside = (comp_op0.binary(index, run.read32(bound0)) != 0) & (comp_op1.binary(index, run.read32(bound1)) != 0)
        values = np.where(inside, run.read32(on_true_tile), np.float32(FP32_MIN))
        run.write(dst, values)
        _accumulate(run, on_true_tile, values, reduce_op, reduce_cmd, reduce_res)
    return run


def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: Op,
    op1: Op,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: Cmd = Cmd.reset_reduce,
    name: str | None = None,
) -> Instruction:
    """dst[i] = op1(src[i] <op0> imm0, dst[i-1]), starting from the accumulator."""
    reduce_cmd = as_enum("tensor_scalar_cumulative", "reduce_cmd", reduce_cmd, Cmd)
    if op1 not in (ops.add, ops.subtract, ops.multiply, ops.maximum, ops.minimum):
        raise NkiValidationError(
            f"tensor_scalar_cumulative op1 {op1!r} must be add, subtract, multiply, maximum, minimum"
        )
    run = Instruction(
        "tensor_scalar_cumulative", Engine.vector, {"dst": dst}, {"src": src, "imm0": imm0, "imm1": imm1}
    )
    check_scalar_ops(run, op0, imm0, None, None)
    for label, t in (("src", src), ("dst", dst)):
        run.dtype(label, t, frozenset(dtypes.NAMES) - {"int32", "uint32"})
    if (reduce_cmd is Cmd.load_reduce) != (imm1 is not None):
        run.fail("imm1 goes with reduce_cmd.load_reduce, and only with it")
    run.same_elements(src=src, dst=dst)
    run.column("imm0", imm0, src.shape[0], FP32)
    run.column("imm1", imm1, src.shape[0], FP32)
    run.charge_stream(1.0, src)
    if run.live:
        lanes = _lanes(run, src)
        state = lanes if reduce_cmd is Cmd.reduce else np.full(src.shape[0], op1.start, np.float32)
        if imm1 is not None:
            state = np.broadcast_to(run.read32(imm1), (src.shape[0], 1))[:, 0]
        values = scalar_op(run, op0, run.read32(src), imm0, False)
        function = op1.binary
        assert function is not None
        states = _scan(values, state, lambda state, x, _: function(x, state))
        run.write(dst, states)
        lanes[:] = states[:, -1]
    return run


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Any,
    op0: Op,
    op1: Op,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> Instruction:
    """dst[i] = (data0[i] <op0> dst[i-1]) <op1> data1[i], with dst[-1] = initial."""
    for label, op in (("op0", op0), ("op1", op1)):
        check_binary("tensor_tensor_scan", label, op)
        if op.bitvec:
            raise NkiValidationError(f"tensor_tensor_scan {label} {op}: bitvec operators are not supported")
    run = Instruction(
        "tensor_tensor_scan", Engine.vector, {"dst": dst}, {"data0": data0, "data1": data1, "initial": initial}
    )
    run.same_elements(data0=data0, data1=data1, dst=dst)
    run.not_both_in_psum(data0=data0, data1=data1)
    run.column("initial", initial, data0.shape[0])
    run.charge_stream(2.0, data0, data1)  # [isa]
    if run.live:
        f0, f1 = op0.binary, op1.binary
        assert f0 is not None and f1 is not None

        def step(state: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
            inner = f0(state, x) if reverse0 else f0(x, state)
            return f1(y, inner) if reverse1 else f1(inner, y)

        state = np.broadcast_to(run.read32(initial), (data0.shape[0], 1))[:, 0]
        run.write(dst, _scan(run.read32(data0), state, step, run.read32(data1)))
    return run


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Instruction:
    """(count, mean, count * variance) of the even and of the odd elements: six numbers a partition."""
    run = Instruction("bn_stats", Engine.vector, {"dst": dst}, {"data": data})
    run.same_partitions(data=data, dst=dst)
    if free_size(data) > BN_STATS_MAX:
        run.fail(f"data free size {free_size(data)} exceeds maximum {BN_STATS_MAX}")
    if free_size(dst) != 6:
        run.fail(f"dst shape {dst.shape} must hold 6 elements per partition")
    run.charge_stream(1.0, data)  # [isa]
    if run.live:
        columns = []
        for half in (run.read32(data)[:, ::2], run.read32(data)[:, 1::2]):
            count = np.full((data.shape[0], 1), half.shape[1], np.float32)
            mean = half.mean(1, keepdims=True) if half.shape[1] else np.zeros_like(count)
            columns += [count, mean, ((half - mean) ** 2).sum(1, keepdims=True)]
        run.write(dst, np.concatenate(columns, 1))
    return run


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Instruction:
    """Mean and variance of what several (count, mean, count * variance) describe."""
    run = Instruction("bn_aggr", Engine.vector, {"dst": dst}, {"data": data})
    run.same_partitions(data=data, dst=dst)
    if free_size(data) % 3:
        run.fail(f"data free size {free_size(data)} must be a multiple of 3")
    if free_size(dst) != 2:
        run.fail(f"dst shape {dst.shape} must hold 2 elements per partition")
    run.charge_stream(13 / 3, data)  # [isa]
    if run.live:
        count, mean, square = np.moveaxis(run.read32(data).reshape(data.shape[0], -1, 3), -1, 0)
        total = count.sum(1, keepdims=True)
        all_mean = (count * mean).sum(1, keepdims=True) / total
        variance = (square + count * (mean - all_mean) ** 2).sum(1, keepdims=True) / total
        run.write(dst, np.concatenate([all_mean, variance], 1))
    return run


# ---- the accumulator registers


def _out(tensor: NkiTensor | None) -> dict[str, Any]:
    return {} if tensor is None else {"reduce_res": tensor}


def _lanes(run: Instruction, data: NkiTensor) -> np.ndarray:
    start = start_partition(data)
    return run.core.vector_accumulator[start : start + data.shape[0]]


def _check_maximum(run: Instruction, reduce_op: Op, reduce_res: NkiTensor | None, data: NkiTensor) -> None:
    if reduce_op is not ops.maximum:
        run.fail(f"reduce_op {reduce_op!r} must be nl.maximum")
    run.column("reduce_res", reduce_res, data.shape[0], dtypes.FLOATS)


def _accumulate(
    run: Instruction,
    data: NkiTensor,
    values: np.ndarray,
    op: Op,
    cmd: Cmd,
    result: NkiTensor | None,
    init: Any = None,
    negate: bool = False,
) -> None:
    """Moves the registers of the lanes of `data` on by `values` [P, N], and stores them in `result`."""
    lanes = _lanes(run, data)
    assert op.reduce is not None
    if cmd is Cmd.idle:
        lanes[:] = np.nan
    else:
        if cmd in (Cmd.reset, Cmd.reset_reduce):
            lanes[:] = op.start
        elif cmd is Cmd.load_reduce:
            lanes[:] = np.broadcast_to(init, (len(lanes), 1))[:, 0]
        if cmd is not Cmd.reset:
            lanes[:] = op.reduce(lanes, op.reduce.reduce(values, axis=1))
    if result is not None:
        run.write(result, (-lanes if negate else lanes)[:, None].copy())


def _scan(values: np.ndarray, state: np.ndarray, step: Any, others: np.ndarray | None = None) -> np.ndarray:
    """Runs `step(state, value, other)` along the free axis; the states it goes through."""
    out = np.empty_like(values, dtype=np.float32)
    for i in range(values.shape[1]):
        state = step(state, values[:, i], None if others is None else others[:, i])
        out[:, i] = state
    return out

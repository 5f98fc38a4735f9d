"""Scalar Engine: activation functions. Source: nki.isa reference (activation, activation_reduce)."""

from typing import Any

import numpy as np

from nki_ops.simulator import costs, dtypes, ops
from nki_ops.simulator.enums import engine as Engine
from nki_ops.simulator.enums import reduce_cmd as Cmd
from nki_ops.simulator.errors import NkiValidationError
from nki_ops.simulator.instruction import Instruction, as_enum, start_partition
from nki_ops.simulator.isa_vector import FP32
from nki_ops.simulator.memory import NkiTensor
from nki_ops.simulator.ops import Op

_BIAS = frozenset(dtypes.NAMES) - {"tfloat32"}


def activation(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Op | None = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Cmd = Cmd.idle,
    name: str | None = None,
) -> Instruction:
    """dst = op(data * scale + bias) in float32; sums over all free dimensions into ScalarE's registers.

    Args:
        bias: a number, or a column [P, 1] of any dtype but tfloat32.
        scale: a number, or a float32 column [P, 1].
        reduce_op: nl.add, where the result is summed.
        reduce_res: a column that gets the registers.
        reduce_cmd: what happens to the registers, which live on from call to call.
    """
    return _activation("activation", dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


def activation_reduce(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    reduce_op: Op,
    reduce_res: NkiTensor | None,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> Instruction:
    """`activation` with `reduce_cmd.reset_reduce`."""
    return _activation("activation_reduce", dst, op, data, bias, scale, reduce_op, reduce_res, Cmd.reset_reduce)


def _activation(
    label: str,
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    bias: Any,
    scale: Any,
    reduce_op: Op | None,
    reduce_res: NkiTensor | None,
    cmd: Cmd,
) -> Instruction:
    cmd = as_enum(label, "reduce_cmd", cmd, Cmd)
    if not isinstance(op, Op) or op.activation is None:
        raise NkiValidationError(f"{label} op {op!r} is no activation function of the Scalar Engine")
    writes = {"dst": dst} if reduce_res is None else {"dst": dst, "reduce_res": reduce_res}
    run = Instruction(label, Engine.scalar, writes, {"data": data, "bias": bias, "scale": scale})
    run.same_elements(data=data, dst=dst)
    run.column("bias", bias, data.shape[0], _BIAS)
    run.column("scale", scale, data.shape[0], FP32)
    run.column("reduce_res", reduce_res, data.shape[0])
    if reduce_op is not None and reduce_op is not ops.add:
        run.fail(f"reduce_op {reduce_op!r} must be nl.add")
    if cmd is Cmd.load_reduce:
        run.fail("reduce_cmd load_reduce is not supported by the Scalar Engine")
    if reduce_op is None and cmd in (Cmd.reduce, Cmd.reset_reduce):
        run.fail(f"reduce_cmd {cmd.name} needs reduce_op=nl.add")
    run.charge_stream(1.0, data, extra=costs.READ_ACCUMULATOR if reduce_res is not None else 0)
    if run.live:
        shift = np.float32(0) if bias is None else run.read32(bias)
        values = op.activate(run.read32(data) * run.read32(scale) + shift).astype(np.float32, copy=False)
        run.write(dst, values)
        _reduce(run, data, values, cmd, reduce_res)
    return run


def _reduce(run: Instruction, data: NkiTensor, values: np.ndarray, cmd: Cmd, result: NkiTensor | None) -> None:
    start = start_partition(data)
    lanes = run.core.scalar_accumulator[start : start + data.shape[0]]
    if cmd in (Cmd.reset, Cmd.reset_reduce):
        lanes[:] = 0
    if cmd in (Cmd.reduce, Cmd.reset_reduce):
        lanes[:] += values.sum(1, dtype=np.float32)
    if result is not None:
        run.write(result, lanes[:, None].copy())

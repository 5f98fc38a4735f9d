"""Vector Engine, element by element: `tensor_*`, copies, memset. Some run on ScalarE or GpSimdE on request.

Arithmetic is float32 whatever the dtypes; bit operations keep integers. Source: nki.isa reference.
"""

from typing import Any

import numpy as np

from nki_ops.simulator import costs, dtypes, ops
from nki_ops.simulator.enums import engine as Engine
from nki_ops.simulator.errors import NkiValidationError
from nki_ops.simulator.instruction import PSUM, SBUF, Instruction, as_engine, free_size, inner_stride
from nki_ops.simulator.memory import NkiTensor
from nki_ops.simulator.ops import Op

FP32 = frozenset(("float32",))
_INT32 = frozenset(("int32", "uint32"))
_GEN4_OPS = (ops.abs_max, ops.abs_min, ops.square, ops.relu)  # as operators of tensor_scalar: trn3 only
# What ScalarE's tensor_scalar can do on Trainium2.
_SCALAR_ENGINE_PAIRS = ((ops.multiply, ops.add), (ops.multiply, None), (ops.add, None))


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Op,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> Instruction:
    """dst = data1 <op> data2. 32-bit integers go to GpSimdE, which computes them exactly; power does too."""
    engine = as_engine("tensor_tensor", engine, Engine.vector, Engine.gpsimd)
    check_binary("tensor_tensor", "op", op)
    tensors = [t for t in (dst, data1, data2) if isinstance(t, NkiTensor)]
    exact = all(t.dtype in _INT32 for t in tensors) and not op.bitvec
    if engine is Engine.unknown:
        in_psum = any(t.buffer is PSUM for t in tensors)
        engine = Engine.gpsimd if op is ops.power or (exact and not in_psum) else Engine.vector
    if op is ops.power and engine is Engine.vector:
        raise NkiValidationError("tensor_tensor op nl.power runs on the GpSimd Engine")
    run = Instruction("tensor_tensor", engine, {"dst": dst}, {"data1": data1, "data2": data2})
    _need_tensors(run, data1=data1, data2=data2)
    run.same_elements(data1=data1, data2=data2, dst=dst)
    run.not_both_in_psum(data1=data1, data2=data2)
    if op.bitvec:
        _need_integers(run, dst=dst, data1=data1, data2=data2)
    all_two_byte = all(t.dtype in dtypes.TWO_BYTE_FLOATS for t in (dst, data1, data2))
    inputs_in_sbuf = (data1.buffer is SBUF) + (data2.buffer is SBUF)
    run.charge_stream(costs.tensor_tensor_passes(all_two_byte, inputs_in_sbuf), data1, data2)
    if run.live:
        assert op.binary is not None
        if op.bitvec:
            run.write(dst, op.binary(run.read(data1), run.read(data2)))
        elif exact and engine is Engine.gpsimd:
            run.write(dst, _wrapped(op.binary(*(run.read(t).astype(np.int64) for t in (data1, data2))), dst.dtype))
        else:
            run.write(dst, op.binary(run.read32(data1), run.read32(data2)))
    return run


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Op,
    operand0: Any = None,
    reverse0: bool = False,
    op1: Op | None = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> Instruction:
    """dst = (data <op0> operand0) <op1> operand1; operands are numbers or float32 columns [P, 1]."""
    engine = as_engine("tensor_scalar", engine, Engine.vector, Engine.scalar, Engine.gpsimd)
    pair = (op0, op1)
    if engine is Engine.unknown:
        engine = Engine.gpsimd if op0 is ops.rsqrt else Engine.vector
    if engine is Engine.scalar and pair not in _SCALAR_ENGINE_PAIRS:
        raise NkiValidationError(f"tensor_scalar op0={op0}, op1={op1} is not supported by the Scalar Engine")
    if engine is Engine.gpsimd and op0 is not ops.rsqrt:
        raise NkiValidationError(f"tensor_scalar on the GpSimd Engine does nl.rsqrt only, got {op0}")
    run = Instruction(
        "tensor_scalar", engine, {"dst": dst}, {"data": data, "operand0": operand0, "operand1": operand1}
    )
    check_scalar_ops(run, op0, operand0, op1, operand1)
    run.same_elements(data=data, dst=dst)
    bitvec = op0.bitvec
    for label, operand in (("operand0", operand0), ("operand1", operand1)):
        run.column(label, operand, data.shape[0], dtypes.INTEGERS if bitvec else FP32)
    if bitvec:
        _need_integers(run, dst=dst, data=data)
    run.charge_stream(_copy_rate(run, dst, data), data)
    if run.live:
        load = run.read if bitvec else run.read32
        values = scalar_op(run, op0, load(data), operand0, reverse0)
        if op1 is not None:
            values = scalar_op(run, op1, values, operand1, reverse1)
        run.write(dst, values)
    return run


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Op,
    operand0: Any,
    op1: Op,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> Instruction:
    """dst = (data <op0> operand0) <op1> operand1, operand0 a number or column, operand1 a tile, at one cost."""
    for label, op in (("op0", op0), ("op1", op1)):
        check_binary("scalar_tensor_tensor", label, op)
        if op.bitvec:
            raise NkiValidationError(f"scalar_tensor_tensor {label} {op}: bitvec operators are not supported")
    run = Instruction(
        "scalar_tensor_tensor", Engine.vector, {"dst": dst}, {"data": data, "operand0": operand0, "operand1": operand1}
    )
    _need_tensors(run, data=data, operand1=operand1)
    run.same_elements(data=data, operand1=operand1, dst=dst)
    run.not_both_in_psum(data=data, operand1=operand1)
    run.column("operand0", operand0, data.shape[0])
    bf16_pair = data.dtype == operand1.dtype == "bfloat16" and (op0, op1) == (ops.subtract, ops.multiply)
    run.charge_stream(1.0 if bf16_pair and free_size(data) % 2 == 0 else 2.0, data, operand1)  # [isa]
    if run.live:
        values = scalar_op(run, op0, run.read32(data), operand0, reverse0)
        assert op1.binary is not None
        other = run.read32(operand1)
        run.write(dst, op1.binary(other, values) if reverse1 else op1.binary(values, other))
    return run


def tensor_copy(
    dst: NkiTensor, src: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None
) -> Instruction:
    """dst = src, bit by bit if the dtypes are equal, else through float32."""
    engine = as_engine("tensor_copy", engine, Engine.vector, Engine.scalar, Engine.gpsimd)
    run = Instruction("tensor_copy", Engine.vector if engine is Engine.unknown else engine, {"dst": dst}, {"src": src})
    _need_tensors(run, src=src)
    run.same_elements(src=src, dst=dst)
    run.charge_stream(_copy_rate(run, dst, src), src)
    if run.live:
        run.write(dst, run.read(src) if src.dtype == dst.dtype else run.read32(src))
    return run


def tensor_copy_predicated(
    dst: NkiTensor, src: Any, predicate: NkiTensor, reverse_pred: bool = False, name: str | None = None
) -> Instruction:
    """dst = src where predicate is not 0 (is 0, with reverse_pred); elsewhere dst stays. src may be a number."""
    run = Instruction(
        "tensor_copy_predicated", Engine.vector, {"dst": dst}, {"src": src, "predicate": predicate, "dst": dst}
    )
    _need_tensors(run, predicate=predicate)
    run.same_elements(dst=dst, src=src, predicate=predicate)
    run.dtype("predicate", predicate, frozenset(("uint8", "uint16", "uint32")))
    if isinstance(src, NkiTensor):
        run.not_both_in_psum(src=src, predicate=predicate)
        if src.dtype != dst.dtype:
            run.fail(f"src dtype {src.dtype} must be that of dst, {dst.dtype}")
    mixed = isinstance(src, NkiTensor) and (src.buffer is PSUM) != (predicate.buffer is PSUM)
    run.charge_stream(1.0 if mixed else 2.0, dst, predicate)  # [isa]
    if run.live:
        chosen = (run.read(predicate) == 0) == reverse_pred
        old = run.read(dst)
        if isinstance(src, NkiTensor):
            new = run.read(src)
        else:
            new = dtypes.from_float32(np.full(old.shape, src, np.float32), dst.dtype, old.dtype)
        run.write(dst, np.where(chosen, new, old))
    return run


def memset(dst: NkiTensor, value: Any, engine: Engine = Engine.unknown, name: str | None = None) -> Instruction:
    """dst = value everywhere. An integer tensor takes an integer."""
    engine = as_engine("memset", engine, Engine.vector, Engine.gpsimd)
    run = Instruction("memset", Engine.vector if engine is Engine.unknown else engine, {"dst": dst}, {})
    if isinstance(value, NkiTensor) or not np.isscalar(value):
        run.fail(f"value must be a compile-time number, got {type(value).__name__}")
    if dst.dtype in dtypes.INTEGERS and not isinstance(value, (int, np.integer)):
        run.fail(f"value {value!r} must be an integer for dst dtype {dst.dtype}")
    run.charge_stream(0.5 if value == 0 and dst.dtype in dtypes.TWO_BYTE_FLOATS else 1.0, dst)  # [isa]
    if run.live:
        kind = np.int64 if dst.dtype in dtypes.INTEGERS else np.float32
        run.write(dst, np.full((dst.shape[0], 1), value, kind))
    return run


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Instruction:
    """dst = 1 / data, more precise than ScalarE's and eight times slower."""
    run = Instruction("reciprocal", Engine.vector, {"dst": dst}, {"data": data})
    _need_tensors(run, data=data)
    run.same_elements(data=data, dst=dst)
    run.charge_stream(8.0, data)  # [isa]
    if run.live:
        run.write(dst, np.float32(1) / run.read32(data))
    return run


# ---- shared with the other instructions of VectorE


def check_binary(instruction: str, label: str, op: Any) -> None:
    """`op` is an operator with two operands that VectorE has on Trainium2."""
    if op in _GEN4_OPS:
        raise NkiValidationError(f"{instruction} {label} {op} needs NeuronCore-v4 (trn3)")
    if not isinstance(op, Op) or op.binary is None or op in (ops.divide, ops.fmod, ops.mod):
        raise NkiValidationError(f"{instruction} {label} {op!r} is no binary operator of the Vector Engine")


def check_scalar_ops(run: Instruction, op0: Op, operand0: Any, op1: Op | None, operand1: Any) -> None:
    """The operators of tensor_scalar: known, of one kind, and with operands where they need them."""
    for label, op, operand in (("op0", op0, operand0), ("op1", op1, operand1)):
        if op is None:
            if operand is not None:
                run.fail("operand1 must be None without op1")
            continue
        if isinstance(op, Op) and op.unary is not None:
            if operand is not None and (isinstance(operand, NkiTensor) or operand != 0):
                run.fail(f"{label} {op} is unary; its operand must be None or 0")
            continue
        check_binary(run.op, label, op)
        if operand is None:
            run.fail(f"{label} {op} needs an operand")
    if op1 is not None and op0.bitvec != op1.bitvec:
        run.fail(f"op0 {op0} and op1 {op1} must be both bitvec or both arithmetic")


def scalar_op(run: Instruction, op: Op, values: np.ndarray, operand: Any, reverse: bool) -> np.ndarray:
    """`values <op> operand`, or the other way round; the operand is a number or a column."""
    if op.binary is None:
        assert op.unary is not None
        return op.unary(values)
    if op.bitvec:
        other = run.read(operand) if isinstance(operand, NkiTensor) else np.asarray(operand).astype(values.dtype)
    else:
        other = run.read32(operand)
    return op.binary(other, values) if reverse else op.binary(values, other)


def _need_tensors(run: Instruction, **tensors: Any) -> None:
    for name, t in tensors.items():
        if not isinstance(t, NkiTensor):
            run.fail(f"{name} must be a tensor, got {type(t).__name__}")


def _need_integers(run: Instruction, **tensors: NkiTensor) -> None:
    for name, t in tensors.items():
        run.dtype(name, t, dtypes.INTEGERS)


def _copy_rate(run: Instruction, dst: NkiTensor, src: NkiTensor) -> float:
    """Cycles an element of a one-input instruction; VectorE has faster modes for 2-byte floats."""
    if run.engine is not Engine.vector:
        return 1.0
    two_byte = dst.dtype in dtypes.TWO_BYTE_FLOATS and src.dtype in dtypes.TWO_BYTE_FLOATS
    in_sbuf = (dst.buffer is SBUF) + (src.buffer is SBUF)
    return costs.copy_passes(two_byte, in_sbuf, inner_stride(dst) == 1 and inner_stride(src) == 1)


def _wrapped(values: np.ndarray, dtype: str) -> np.ndarray:
    """32-bit integer arithmetic wraps around."""
    return values.astype(np.uint32).view(np.uint32 if dtype == "uint32" else np.int32)

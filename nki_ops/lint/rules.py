"""What Neuron's compiler does not take, as a table of rules over the operations of a lowered program.

Sources: jax-neuronx-known-issues, the compiler's error codes, and its data types, of the Neuron SDK 2.32.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.mlir import ir

from nki_ops.lint.program import Program, argument_number, call_target, definition, name_of, operations, terminator
from nki_ops.primitives import STAND_IN


class Rule(NamedTuple):
    """One kind of operation that must not stand in a program.

    Attributes:
        number: as in the documents of this project.
        forbids: what it is.
        instead: what to write.
        broken_by: whether an operation is of that kind, given the program around it.
    """

    number: int
    forbids: str
    instead: str
    broken_by: Callable[[Any, Program], bool]


# NCC_EVRF015 lists the targets; Shardy's markers are those of the partitioner that runs before.
_KNOWN_TARGETS = re.compile(
    r"AwsNeuron\w+|ResizeNearest|ResizeBilinear|TopK|Sharding|SPMDFullToShardShape|SPMDShardToFullShape"
    rf"|xla\.sdy\.\w+|{re.escape(STAND_IN)}\w+"
)
_KNOWN_SMALL_FLOATS = ("f8E4M3", "f8E5M2")


# ---- reading operations


def _types(op: Any) -> list[ir.RankedTensorType]:
    values = [*op.operation.operands, *op.operation.results]
    return [v.type for v in values if isinstance(v.type, ir.RankedTensorType)]


def _elements(op: Any) -> list[str]:
    """Element types, as in the text: "f32", "ui64"."""
    return [str(t.element_type) for t in _types(op)]


def _is_integer(element: str) -> bool:
    return re.fullmatch(r"u?i\d+", element) is not None


def _text(op: Any, attribute: str) -> str:
    attributes = op.operation.attributes
    return str(attributes[attribute]) if attribute in attributes else ""


def _numbers(text: str, name: str = "") -> list[int]:
    """The list after `name = `, or that of an `array<i64: ...>`."""
    pattern = rf"\b{name} = \[([^\]]*)\]" if name else r"array<i64: ([^>]*)>"
    found = re.search(pattern, text)
    return [int(n) for n in found.group(1).split(",") if n.strip()] if found else []


def _above_one(op: Any, attribute: str) -> bool:
    return any(n > 1 for n in _numbers(_text(op, attribute)))


# ---- the rules that need more than a name


def _dynamic_loop(op: Any, program: Program) -> bool:
    """A loop is static if it counts: a constant start, a constant step, compared with a constant."""
    if name_of(op) != "stablehlo.while":
        return False
    condition, body = (region.blocks[0] for region in op.operation.regions)
    compare = definition(terminator(condition).operands[0])
    if compare is None or name_of(compare) != "stablehlo.compare":
        return True
    counters = [argument_number(x, condition) for x in compare.operands]
    for counter, bound in zip(counters, reversed(list(compare.operands)), strict=True):
        if counter is None or not program.constant(bound) or not program.constant(op.operation.operands[counter]):
            continue
        step = definition(terminator(body).operands[counter])
        if step is not None and name_of(step) in ("stablehlo.add", "stablehlo.subtract"):
            first, second = step.operands
            return argument_number(first, body) != counter or not program.constant(second)
    return True


def _compares_equal(op: Any, program: Program) -> bool:
    if name_of(op) == "stablehlo.sort":
        return any(re.search("EQ|NE", _text(inner, "comparison_direction")) for inner in operations(op))
    return name_of(op) == "chlo.top_k" and _is_integer(_elements(op)[0])


def _random_bits(op: Any, program: Program) -> bool:
    """Another generator than the default; or a bit rotation, which is threefry's."""
    if name_of(op) == "stablehlo.rng_bit_generator":
        return "DEFAULT" not in _text(op, "rng_algorithm")
    if name_of(op) != "stablehlo.or":
        return False
    sources = {name_of(source) for x in op.operands if (source := definition(x)) is not None}
    return sources == {"stablehlo.shift_left", "stablehlo.shift_right_logical"}


def _wide(op: Any, program: Program) -> bool:
    """64-bit numbers, but for the state of the default random generator, which its key is cast to."""
    wide = [str(t) for t in _types(op) if str(t.element_type) in ("f64", "i64", "ui64")]
    generator = name_of(op) in ("stablehlo.rng_bit_generator", "stablehlo.bitcast_convert")
    return bool(wide) and not (generator and set(wide) == {"tensor<2xui64>"})


def _small_floats(op: Any, program: Program) -> bool:
    return any(re.match(r"f[468]E", e) and e not in _KNOWN_SMALL_FLOATS for e in _elements(op))


def _out_of_range(op: Any, program: Program) -> bool:
    match name_of(op):
        case "stablehlo.gather":
            text = _text(op, "dimension_numbers")
            dims = _numbers(text, "start_index_map")
            windows = _numbers(_text(op, "slice_sizes"))
            operand, indices = op.operation.operands[:2]
        case "stablehlo.scatter":
            if _adds_integers(op):
                return True
            text = _text(op, "scatter_dimension_numbers")
            dims = _numbers(text, "scatter_dims_to_operand_dims")
            count = (len(op.operation.operands) - 1) // 2
            operand, indices, updates = (op.operation.operands[i] for i in (0, count, count + 1))
            windows = _scatter_windows(text, operand, updates)
        case "stablehlo.dynamic_gather":
            return True
        case _:
            return False
    shape = ir.RankedTensorType(operand.type).shape
    lowest, highest = program.bounds(indices)
    return lowest < 0 or any(highest > shape[dim] - windows[dim] for dim in dims)


def _scatter_windows(text: str, operand: Any, updates: Any) -> Sequence[int]:
    """How much of each dimension one update writes."""
    single = _numbers(text, "inserted_window_dims") + _numbers(text, "input_batching_dims")
    sizes = iter(ir.RankedTensorType(updates.type).shape[dim] for dim in _numbers(text, "update_window_dims"))
    rank = len(ir.RankedTensorType(operand.type).shape)
    return [1 if dim in single else next(sizes) for dim in range(rank)]


def _adds_integers(scatter: Any) -> bool:
    return any(name_of(op) == "stablehlo.add" and _is_integer(_elements(op)[0]) for op in operations(scatter))


def _window_beyond(op: Any, program: Program) -> bool:
    if name_of(op) != "stablehlo.reduce_window":
        return False
    dilated = _above_one(op, "base_dilations") or _above_one(op, "window_dilations")
    return len(op.operation.operands) != 2 or dilated


def _convolution(op: Any, program: Program) -> bool:
    if name_of(op) != "stablehlo.convolution" or not _above_one(op, "lhs_dilation"):
        return False
    return _above_one(op, "window_strides") or _above_one(op, "rhs_dilation")


def _is(*names: str) -> Callable[[Any, Program], bool]:
    return lambda op, program: name_of(op) in names


RULES = (
    Rule(1, "a conditional", "jnp.where, or Python's if on what is static", _is("stablehlo.case", "stablehlo.if")),
    Rule(
        2, "a loop whose trip count depends on data", "lax.scan, or lax.fori_loop between constants", _dynamic_loop
    ),
    Rule(
        3, "a callback to the host", "none on the device: jax.debug.print, pure_callback and checkify are for tests",
        lambda op, program: "callback" in (call_target(op) or ""),
    ),
    Rule(
        4, "a custom call that Neuron does not know", "plain JAX, or an NKI kernel",
        lambda op, program: not (
            (target := call_target(op)) is None or "callback" in target or _KNOWN_TARGETS.fullmatch(target)
        ),
    ),
    Rule(
        5, "complex numbers", "pairs of real ones",
        lambda op, program: name_of(op) == "stablehlo.complex" or any(e.startswith("complex<") for e in _elements(op)),
    ),
    Rule(
        6, "a reduction over several operands", "one reduction each; for argmax, max and then where it is first",
        lambda op, program: name_of(op) == "stablehlo.reduce" and len(op.operation.operands) > 2,
    ),
    Rule(
        7, "a window reduction over several operands, or dilated", "a product with a matrix of zeros and ones",
        _window_beyond,
    ),
    Rule(8, "reduced precision", "astype there and back", _is("stablehlo.reduce_precision")),
    Rule(
        9, "a sort that compares for equality, or top_k of integers", "none on the device: sort on the host",
        _compares_equal,
    ),
    Rule(
        10, "random bits of another generator than the default", 'draw on the host, or keys of impl="unsafe_rbg"',
        _random_bits,
    ),
    Rule(11, "64-bit numbers", "32-bit ones; keep jax_enable_x64 off", _wide),
    Rule(12, "an 8-bit or 4-bit float that Trainium2 has not", "float8_e4m3 or float8_e5m2", _small_floats),
    Rule(
        13, "a matrix product of integers", "a cast to bfloat16 or float32 before",
        lambda op, program: name_of(op) == "stablehlo.dot_general" and any(map(_is_integer, _elements(op)[:2])),
    ),
    Rule(
        14, "a dynamic shape", "static shapes; compile once for each",
        lambda op, program: any(not t.has_static_shape for t in _types(op)),
    ),
    Rule(
        15, "a gather or scatter whose indices may lie outside, or that adds integers",
        "dynamic_slice, static slices, or jnp.clip on the indices", _out_of_range,
    ),
    Rule(
        16, "a convolution with input dilation and stride or kernel dilation", "jnp.repeat, then a plain convolution",
        _convolution,
    ),
    Rule(
        17, "an arithmetic shift of other than 32-bit integers", "int32",
        lambda op, program: name_of(op) == "stablehlo.shift_right_arithmetic" and _elements(op)[0] != "i32",
    ),
)  # fmt: skip

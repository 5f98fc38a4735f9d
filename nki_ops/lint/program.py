"""Reading a lowered program: its operations, who calls what, and which values its integers can take."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.mlir import ir

Bounds = tuple[float, float]
UNKNOWN: Bounds = (-math.inf, math.inf)

_MOVES = ("broadcast_in_dim", "concatenate", "convert", "reshape", "reverse", "slice", "transpose")


def operations(parent: Any) -> Iterator[Any]:
    """An operation and all within it, in the order of the text."""
    yield parent
    for region in parent.operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield from operations(op)


def name_of(op: Any) -> str:
    """As in the text: "stablehlo.add"."""
    return op.operation.name


def call_target(op: Any) -> str | None:
    """What a custom call calls; None for other operations."""
    is_call = name_of(op) == "stablehlo.custom_call"
    return ir.StringAttr(op.operation.attributes["call_target_name"]).value if is_call else None


def definition(value: Any) -> Any:
    """The operation that makes a value; None for an argument of a function or a region."""
    return None if isinstance(value.owner, ir.Block) else value.owner


def argument_number(value: Any, block: Any) -> int | None:
    """Which argument of a block a value is, if it is one of them."""
    return next((i for i, argument in enumerate(block.arguments) if argument == value), None)


def terminator(block: Any) -> Any:
    """The operation that ends a block; its operands are what the block hands on."""
    return list(block.operations)[-1]


class Program:
    """A module in StableHLO, and what it says beyond single operations."""

    def __init__(self, module: Any) -> None:
        self.functions: dict[str, Any] = {}
        self.calls: dict[str, list[Any]] = defaultdict(list)
        self.known: dict[Any, Bounds] = {}
        self.operations = list(operations(module.operation))
        for op in self.operations:
            if name_of(op) == "func.func":
                self.functions[_symbol(op)] = op
            elif name_of(op) == "func.call":
                self.calls[_callee(op)].append(op)

    def callers(self, op: Any) -> list[Any]:
        """The calls of the function that an operation is in."""
        while op is not None and name_of(op) != "func.func":
            op = op.operation.parent
        return [] if op is None else self.calls[_symbol(op)]

    def bounds(self, value: Any) -> Bounds:
        """The least and the largest integer that a value may hold, as far as that shows."""
        if value not in self.known:
            self.known[value] = UNKNOWN  # for a value that depends on itself
            op = definition(value)
            self.known[value] = self._of_argument(value) if op is None else self._of_result(op, value)
        return self.known[value]

    def constant(self, value: Any) -> bool:
        """Whether all of a value is one number that shows in the program."""
        low, high = self.bounds(value)
        return low == high

    def _of_argument(self, value: Any) -> Bounds:
        """Of a function: what its callers pass. Of a loop: what goes in, if the body hands it on as it is."""
        block = value.owner
        parent, number = block.owner, argument_number(value, block)
        assert number is not None
        if name_of(parent) == "func.func":
            return _union([self.bounds(call.operands[number]) for call in self.calls[_symbol(parent)]])
        if name_of(parent) == "stablehlo.while":
            body = parent.operation.regions[1].blocks[0]
            if argument_number(terminator(body).operands[number], body) == number:
                return self.bounds(parent.operands[number])
        return UNKNOWN

    def _of_result(self, op: Any, value: Any) -> Bounds:
        kind = name_of(op).removeprefix("stablehlo.")
        operands = list(op.operands)
        match kind:
            case "constant":
                return _of_constant(op.operation.attributes["value"])
            case "iota":
                dim = ir.IntegerAttr(op.operation.attributes["iota_dimension"]).value
                return 0, ir.RankedTensorType(value.type).shape[dim] - 1
            case "func.call":
                results = terminator(self.functions[_callee(op)].operation.regions[0].blocks[0]).operands
                return self.bounds(results[list(op.operation.results).index(value)])
            case "dynamic_slice":
                return self.bounds(operands[0])
            case "optimization_barrier":
                return self.bounds(operands[list(op.operation.results).index(value)])
        if kind in _MOVES:
            return _union([self.bounds(x) for x in operands])
        ranges = [self.bounds(x) for x in operands]
        match kind, ranges:
            case "clamp", [low, x, high]:
                return _clamp(low, x, high)
            case "maximum", [x, y]:
                return max(x[0], y[0]), max(x[1], y[1])
            case "minimum", [x, y]:
                return min(x[0], y[0]), min(x[1], y[1])
            case "add", [x, y]:
                return x[0] + y[0], x[1] + y[1]
            case "select", [condition, x, y]:
                return x if condition[0] == 1 else y if condition[1] == 0 else _union([x, y])
            case "compare", [x, y] if "LT" in str(op.operation.attributes["comparison_direction"]):
                return (1, 1) if x[1] < y[0] else (0, 0) if x[0] >= y[1] else (0, 1)
        return UNKNOWN


def _symbol(function: Any) -> str:
    return ir.StringAttr(function.operation.attributes["sym_name"]).value


def _callee(call: Any) -> str:
    return ir.FlatSymbolRefAttr(call.operation.attributes["callee"]).value


def _union(ranges: list[Bounds]) -> Bounds:
    return (min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else UNKNOWN


def _clamp(low: Bounds, x: Bounds, high: Bounds) -> Bounds:
    return min(max(x[0], low[0]), high[0]), min(max(x[1], low[1]), high[1])


def _of_constant(attribute: Any) -> Bounds:
    if not isinstance(ir.RankedTensorType(attribute.type).element_type, ir.IntegerType):
        return UNKNOWN
    numbers = np.asarray(ir.DenseIntElementsAttr(attribute))
    return (int(numbers.min()), int(numbers.max())) if numbers.size else UNKNOWN

"""What a compiled program computes and sends, read from its HLO text.

XLA's own cost analysis counts the body of a loop once, and says nothing of collectives. Here a loop's body counts as
often as it runs, which XLA writes beside each loop whose length is known; all of ours are.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "reduce-scatter", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
          "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")


@dataclass(frozen=True)
class Product:
    """A matrix product or convolution of one device.

    Attributes:
        scope: the names that stand around it in the source, joined by "/".
        flops: of one run; a multiply and an add are two.
        elements: of its operands and its result.
        result: elements of its result alone.
        runs: how often it runs.
    """

    scope: str
    flops: int
    elements: int
    result: int
    runs: int


@dataclass(frozen=True)
class Collective:
    """An exchange between devices.

    Attributes:
        kind: one of `COLLECTIVES`.
        bytes_sent: by each device in one run, with the algorithm that sends least.
        runs: how often it runs.
    """

    kind: str
    bytes_sent: float
    runs: int


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    operation: str
    rest: str

    def attribute(self, pattern: str) -> str:
        found = re.search(pattern, self.rest)
        if found is None:
            raise ValueError(f"no {pattern} in HLO instruction {self.name}")
        return found.group(1)


class Program:
    """The products and collectives of a compiled program.

    Args:
        text: of `jax.stages.Compiled.as_text`.
        sends_bfloat16: all it sends is bfloat16, which XLA widens to float32 on a CPU; its own bytes are counted.

    Raises:
        ValueError: a loop that computes or sends has no known length.
    """

    def __init__(self, text: str, sends_bfloat16: bool = False):
        self._itemsizes = {**_BYTES, "f32": 2} if sends_bfloat16 else _BYTES
        self._computations: dict[str, dict[str, _Instruction]] = {}
        current: dict[str, _Instruction] = {}
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self._computations[header.group(2)] = {}
                if header.group(1):
                    self._entry = header.group(2)
            elif found := _INSTRUCTION.match(line):
                instruction = _Instruction(*found.groups())
                current[instruction.name] = instruction

    @cached_property
    def products(self) -> list[Product]:
        """Every matrix product and convolution."""
        return [_product(i, inside, runs) for i, inside, runs in self._walk() if i.operation in ("dot", "convolution")]

    @cached_property
    def collectives(self) -> list[Collective]:
        """Every exchange of data between devices."""
        kinds = {name + suffix: name for name in COLLECTIVES for suffix in ("", "-start")}
        return [
            Collective(kinds[i.operation], _bytes_sent(i, kinds[i.operation], self._itemsizes), runs)
            for i, inside, runs in self._walk()
            if i.operation in kinds and _group_size(i) > 1
        ]

    @property
    def flops(self) -> int:
        """Of all products."""
        return sum(p.flops * p.runs for p in self.products)

    def traffic(self) -> dict[str, tuple[int, float]]:
        """For each kind of collective, how many run and how many bytes a device sends in them."""
        total: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for c in self.collectives:
            count, size = total[c.kind]
            total[c.kind] = count + c.runs, size + c.bytes_sent * c.runs
        return dict(total)

    def _walk(self) -> Iterator[tuple[_Instruction, dict[str, _Instruction], int]]:
        """Every instruction that runs, those that stand beside it, and how often it runs."""
        open_ = [(self._entry, 1)]
        while open_:
            name, runs = open_.pop()
            inside = self._computations[name]
            for instruction in inside.values():
                yield instruction, inside, runs
                if instruction.operation in COLLECTIVES:
                    continue  # what it applies is the addition
                times = runs * self._trips(instruction) if instruction.operation == "while" else runs
                open_ += [(called, times) for called in _CALLED.findall(instruction.rest)]

    def _trips(self, loop: _Instruction) -> int:
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
        if found:
            return int(found.group(1))
        body = self._computations[loop.attribute(r"body=%?([\w.\-]+)")]
        if any(i.operation in ("dot", "convolution", "fusion", "call", "while", *COLLECTIVES) for i in body.values()):
            raise ValueError(f"loop {loop.name} of the compiled program has no known length")
        return 1


def _arrays(shape: str) -> list[tuple[str, list[int]]]:
    return [(kind, [int(n) for n in sides.split(",") if n]) for kind, sides in _ARRAY.findall(shape)]


def _operands(instruction: _Instruction, inside: dict[str, _Instruction]) -> list[list[int]]:
    """Shapes of the operands, which XLA writes out or leaves to the instructions of these names."""
    arguments = instruction.rest.partition(")")[0]
    if written := _arrays(arguments):
        return [sides for _, sides in written]
    return [_arrays(inside[name.strip().lstrip("%")].shape)[0][1] for name in arguments.split(",")]


def _product(instruction: _Instruction, inside: dict[str, _Instruction], runs: int) -> Product:
    out = math.prod(_arrays(instruction.shape)[0][1])
    left, right = _operands(instruction, inside)[:2]
    if instruction.operation == "dot":
        contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}").split(",")
        summed = math.prod(left[int(axis)] for axis in contracted if axis)
    else:
        labels = instruction.attribute(r"dim_labels=\w+_(\w+)->")
        summed = math.prod(side for side, label in zip(right, labels, strict=True) if label != "o")
    name = re.search(r'op_name="([^"]*)"', instruction.rest)
    elements = out + math.prod(left) + math.prod(right)
    return Product(name.group(1) if name else "", 2 * out * summed, elements, out, runs)


def _group_size(instruction: _Instruction) -> int:
    """How many devices take part in one exchange."""
    if instruction.operation.startswith("collective-permute"):
        return len(instruction.attribute(r"source_target_pairs=\{(\{.*?\})\}").split("},{"))
    groups = instruction.attribute(r"replica_groups=(\[[\d,]+\]|\{\{[\d,]+\}|\{\})")
    if groups.startswith("["):
        return int(groups.strip("[]").split(",")[-1])
    return len(groups.strip("{}").split(","))


def _bytes_sent(instruction: _Instruction, kind: str, itemsizes: Mapping[str, int]) -> float:
    """What a device sends in one run."""
    arrays = _arrays(instruction.shape)
    if instruction.operation == "all-gather-start":
        arrays = arrays[len(arrays) // 2 :]  # operands, then results
    size = sum(itemsizes[dtype] * math.prod(sides) for dtype, sides in arrays)
    devices = _group_size(instruction)
    others = devices - 1
    if kind == "all-reduce":
        return 2 * size * others / devices
    if kind == "reduce-scatter":
        return size * others
    return size if kind == "collective-permute" else size * others / devices

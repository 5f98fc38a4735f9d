"""A check of lowered programs against what Neuron's compiler takes, with the source line of each violation.

`check(jax.jit(f).lower(...))` needs no Trainium. Lower for it where kernels are used:
`jax.jit(f).trace(...).lower(lowering_platforms=("neuron",))` within `nki_ops.using("nki")`.
"""

import re
from collections import Counter
from typing import Any, NamedTuple

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir

from nki_ops.lint.program import Program, call_target, name_of
from nki_ops.lint.rules import RULES, Rule

__all__ = ["RULES", "Report", "Rule", "Violation", "check", "report"]

_LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\](jax|jaxlib|flax|einops)[/\\]")


class Violation(NamedTuple):
    """An operation that breaks a rule.

    Attributes:
        rule: the rule's number.
        found: what stands there, and the operation's name in StableHLO.
        instead: what to write.
        source: "file:line, function" of the Python code that made it; empty where the program does not say.
    """

    rule: int
    found: str
    instead: str
    source: str

    def __str__(self) -> str:
        return f"{self.source or 'unknown line'}: {self.found}; instead: {self.instead} (rule {self.rule})"


class Report(NamedTuple):
    """What a look at one program found.

    Attributes:
        operations: how many stand in it; those in a loop count once.
        custom_calls: how many there are of each target.
        violations: everything that breaks a rule, in its order; the same thing on the same line, once.
    """

    operations: int
    custom_calls: Counter[str]
    violations: list[Violation]


def check(lowered: jax.stages.Lowered | str) -> list[Violation]:
    """The violations of `report`."""
    return report(lowered).violations


def report(lowered: jax.stages.Lowered | str) -> Report:
    """Holds every operation of a program against every rule.

    Args:
        lowered: what `jax.jit(f).lower(...)` gives, or its text; only text with debug information
            (`as_text(debug_info=True)`) has source lines.
    """
    if isinstance(lowered, str):
        module = ir.Module.parse(lowered, mlir.make_ir_context())
    else:
        module = lowered.compiler_ir("stablehlo")
    program = Program(module)
    found = (
        Violation(rule.number, f"{rule.forbids} ({name_of(op)})", rule.instead, source)
        for op in program.operations
        for rule in RULES
        if rule.broken_by(op, program)
        for source in _sources(op, program)
    )
    return Report(
        operations=sum(not name_of(op).startswith(("builtin.", "func.")) for op in program.operations),
        custom_calls=Counter(target for op in program.operations if (target := call_target(op)) is not None),
        violations=list(dict.fromkeys(found)),
    )


def _sources(op: Any, program: Program) -> list[str]:
    """The innermost frame outside of JAX and what stands on it, or the innermost of all. What stands in a function of
    its own without a frame has those of the function's callers."""
    frames = re.findall(r'"([^"]*)"\("([^"]+)":(\d+)', str(op.operation.location))
    if frames:
        function, file, line = next((f for f in frames if not _LIBRARY.search(f[1])), frames[0])
        return [f"{file}:{line}, {function}"]
    return [source for call in program.callers(op) for source in _sources(call, program)] or [""]

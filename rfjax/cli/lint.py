"""Check what a model runs against what Trainium's compiler takes; no Trainium and no weights are needed.

  rfjax lint -c CHECKPOINT
  rfjax lint --preset wan-1.3b --size 832x480

Each program is lowered for Trainium with the NKI kernels in it. The exit code is 1 if anything breaks a rule.
"""

import argparse
from typing import TYPE_CHECKING

from rfjax.cli.options import Parser, add_model, add_preset, add_size, size_to_make
from rfjax.cli.session import chosen_config

if TYPE_CHECKING:
    from nki_ops.lint import Report

VIOLATIONS = 1  # exit code


def add_arguments(parser: Parser) -> None:
    add_model(parser, default_dtype="bfloat16")
    add_size(parser)
    add_preset(parser)


def run(args: argparse.Namespace) -> int:
    with args.interrupts.delayed():
        from rfjax.inputs import counted
        from rfjax.lint import lint_model

    config = chosen_config(args)
    width, height = size_to_make(args, config)
    reports = lint_model(config, args.dtype or "bfloat16", height, width)
    for name, report in reports.items():
        print(_of_program(name, report))
    operations = sum(report.operations for report in reports.values())
    violations = sum(len(report.violations) for report in reports.values())
    found = f"{counted(violations, 'violation')} of the rules of Neuron's compiler"
    print(f"{counted(len(reports), 'program')}, {counted(operations, 'operation')}: {found}")
    return VIOLATIONS if violations else 0


def _of_program(name: str, report: "Report") -> str:
    calls = ", ".join(f"{n} {target}" for target, n in sorted(report.custom_calls.items())) or "none"
    first = f"{name}: {report.operations} operations, custom calls: {calls}"
    return "\n".join([first, *(f"  {violation}" for violation in report.violations)])

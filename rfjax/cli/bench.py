"""Measure speed, compilations and memory.

Figures are ratios and counts; bare times stand beneath them with the machine's own matrix product beside.

  rfjax bench -c CHECKPOINT --size 832x480
  rfjax bench --preset tiny --size 64x64
  rfjax bench --case release-cpu
"""

import argparse
import json
from typing import Any

from rfjax.cli.options import DEFAULT_SIZE, Parser, add_model, add_size, chosen_size, integer
from rfjax.cli.session import checkpoint_config, chosen_dtype, load_pipeline, use_compile_cache
from rfjax.errors import InputError

STAGES = ("dit", "vae")


def add_arguments(parser: Parser) -> None:
    add_model(parser)
    add_size(parser)
    parser.add_argument("--preset", metavar="NAME", help="random weights of a known model: tiny, wan-1.3b, wan-14b")
    parser.add_argument("--case", choices=("release-cpu",), help="the work that was timed on the PyTorch release")
    parser.add_argument("--stage", choices=STAGES, help="of the case, only this one")
    parser.add_argument("--repeats", type=integer, default=5, metavar="N", help="timed repeats; default: %(default)s")
    parser.add_argument("--long", action="store_true", help="also compare steps at latent frames 30 and 3000")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    if args.repeats < 1:
        raise InputError(f"--repeats {args.repeats}: at least 1 is needed")
    if sum(x is not None for x in (args.checkpoint, args.preset, args.case)) != 1:
        raise InputError("bench needs one of --checkpoint DIR, --preset NAME and --case release-cpu")
    with args.interrupts.delayed():
        import jax  # noqa: F401
    figures = _case(args) if args.case else _model(args)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        from rfjax.bench.report import as_text

        print(as_text(figures))
    return 0


def _case(args: argparse.Namespace) -> dict[str, Any]:
    fixed = {"--size": chosen_size(args), "--dtype": args.dtype, "--long": args.long or None}
    for option, value in fixed.items():
        if value is not None:
            raise InputError(f"{option}: the case {args.case} fixes the work; leave it out")
    from rfjax.bench.release import bench_release

    use_compile_cache()
    return bench_release([args.stage] if args.stage else STAGES, args.repeats)


def _model(args: argparse.Namespace) -> dict[str, Any]:
    if args.stage:
        raise InputError(f"--stage {args.stage} is for --case release-cpu; all stages are timed here")
    width, height = chosen_size(args) or DEFAULT_SIZE
    if args.checkpoint:
        checkpoint_config(args)
    pipeline = _random(args) if args.preset else load_pipeline(args)
    from rfjax.bench.model import bench_model

    return bench_model(pipeline, height, width, args.repeats, args.long)


def _random(args: argparse.Namespace) -> Any:
    from rfjax.bench.random_weights import random_pipeline
    from rfjax.config import preset

    use_compile_cache()
    return random_pipeline(preset(args.preset), chosen_dtype(args))

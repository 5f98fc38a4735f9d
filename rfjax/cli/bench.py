"""Measure speed, compilations and memory.

Figures are ratios and counts; bare times stand beneath them with the machine's own matrix product beside.

  rfjax bench
  rfjax bench -c CHECKPOINT --size 832x480
  rfjax bench --preset tiny --size 64x64
  rfjax bench --case release-cpu
"""

import argparse
import json
from typing import TYPE_CHECKING, Any

from rfjax.cli.options import Parser, add_model, add_size, chosen_size, integer, size_to_make
from rfjax.cli.session import Warnings, checkpoint_config, chosen_dtype, load_pipeline, use_compile_cache
from rfjax.errors import InputError

if TYPE_CHECKING:
    from rfjax.config import ModelConfig

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
    if sum(x is not None for x in (args.checkpoint, args.preset, args.case)) > 1:
        raise InputError("bench takes one of --checkpoint DIR, --preset NAME and --case release-cpu")
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
    if args.preset:
        from rfjax.config import preset

        config = preset(args.preset)
    else:
        config = checkpoint_config(args)
    width, height = size_to_make(args, config)
    pipeline = _random(args, config) if args.preset else load_pipeline(args)
    from rfjax.bench.model import bench_model

    with Warnings():
        return bench_model(pipeline, height, width, args.repeats, args.long)


def _random(args: argparse.Namespace, config: "ModelConfig") -> Any:
    from rfjax.bench.random_weights import random_pipeline

    use_compile_cache()
    return random_pipeline(config, chosen_dtype(args))

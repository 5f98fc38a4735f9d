"""Say what a checkpoint, a PyTorch release or a weights file is, without loading a weight.

rfjax info CHECKPOINT
"""

import argparse
import json

from rfjax.cli.options import Parser, path


def add_arguments(parser: Parser) -> None:
    parser.add_argument("path", type=path, metavar="PATH", help="a checkpoint, a release's folder, or a weights file")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(args: argparse.Namespace) -> int:
    with args.interrupts.delayed():
        from rfjax.weights.info import describe, info

    about = info(args.path)
    print(json.dumps(about, indent=2) if args.json else describe(about))
    return 0

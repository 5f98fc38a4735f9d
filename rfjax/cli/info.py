"""Say what a checkpoint, a PyTorch release or a weights file is, without loading a weight.

rfjax info CHECKPOINT
rfjax info shapes-tiny
"""

import argparse
import json

from rfjax.cli.options import DEFAULT_CHECKPOINT, Parser, path


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "path", type=path, nargs="?", default=DEFAULT_CHECKPOINT, metavar="PATH",
        help="a checkpoint, the name of one that comes with rfjax, a release's folder, a weights file or a saved "
        "stream; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(args: argparse.Namespace) -> int:
    with args.interrupts.delayed():
        from rfjax.weights.info import describe, info

    about = info(args.path)
    print(json.dumps(about, indent=2) if args.json else describe(about))
    return 0

"""Convert a PyTorch release into a checkpoint.

  rfjax convert RELEASE_FOLDER CHECKPOINT
  rfjax convert rolling_forcing_dmd.pt CHECKPOINT --vae Wan2.1_VAE.pth --text models_t5_umt5-xxl-enc-bf16.pth \\
      --tokenizer google/umt5-xxl --config config.json
"""

import argparse
import dataclasses
import json

from rfjax.cli.options import Parser, path
from rfjax.cli.session import Warnings

PARTS = {
    "dit": "weights of the DiT",
    "vae": "weights of the VAE",
    "text": "weights of the text encoder",
    "tokenizer": "folder with tokenizer.json",
    "config": "the DiT's config.json",
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "src", type=path, nargs="?", metavar="SRC", help="the release's folder, or the DiT's weights file"
    )
    parser.add_argument("dst", type=path, metavar="DST", help="the checkpoint to make")
    parser.add_argument(
        "--weights", choices=("ema", "raw"), default="ema", help="if SRC has both; default: %(default)s"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the stored matrices; default: each part's own"
    )
    for part, what in PARTS.items():
        parser.add_argument(f"--{part}", type=path, metavar="PATH", help=f"{what}, in place of that in SRC")
    parser.add_argument("--force", action="store_true", help="overwrite a checkpoint at DST")
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors")
    parser.add_argument("--json", action="store_true", help="print what was made as JSON")


def run(args: argparse.Namespace) -> int:
    with args.interrupts.delayed():
        from rfjax.weights.convert import convert

    with Warnings():
        made = convert(
            args.src,
            args.dst,
            weights=args.weights,
            dtype=args.dtype,
            overwrite=args.force,
            progress=not args.quiet,
            **{part: getattr(args, part) for part in PARTS},
        )
    if args.json:
        print(json.dumps(dataclasses.asdict(made) | {"path": str(made.path), "config": made.config.to_json()}))
    elif not args.quiet:
        parts = ", ".join(f"{part} {n:,} parameters in {made.dtypes[part]}" for part, n in made.parameters.items())
        print(f"{made.path}: {made.weights} weights; {parts}; {made.nbytes / 1e9:.2f} GB")
    return 0

"""Scores a model of the shapes world by the judge that reads its frames.

python scripts/evaluate.py                                        (shapes-tiny, all parts: about half an hour on a CPU)
python scripts/evaluate.py CHECKPOINT --parts cold,switch --prompts 40 --out outputs/evaluation
python scripts/evaluate.py --parts long --long-blocks 801         (the last 15 seconds of ten minutes)

Writes OUT/scores.json and, for each part that makes videos, a contact sheet OUT/PART.png, failures first and marked.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rfjax import RollingForcingPipeline  # noqa: E402  (the path comes first)
from rfjax.errors import InputError  # noqa: E402
from rfjax.worlds import evaluate  # noqa: E402
from rfjax.worlds.sheet import Row, write_sheet  # noqa: E402

PARTS = ("cold", "two", "long", "switch", "seeds", "vae", "speed")
ROWS = 40  # of a contact sheet, at most


def main() -> int:
    args = _arguments()
    pipe = RollingForcingPipeline.from_pretrained(args.checkpoint, dtype=args.dtype)
    work = {
        "cold": lambda: evaluate.cold_start(pipe, args.prompts, batch=args.batch),
        "two": lambda: evaluate.cold_start(pipe, args.prompts, things=2, batch=args.batch),
        "long": lambda: evaluate.endless(pipe, args.long, blocks=args.long_blocks, batch=args.batch),
        "switch": lambda: evaluate.switches(pipe, args.switches, batch=args.batch),
        "seeds": lambda: evaluate.start_places(pipe, args.seeds, batch=args.batch),
        "vae": lambda: evaluate.codec(pipe, args.streams, batch=args.batch),
        "speed": lambda: evaluate.speed(pipe, Path(args.checkpoint)),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    scores = {"checkpoint": str(args.checkpoint)}
    for name in args.parts:
        figures, videos = work[name]()
        failures = [{"prompt": v.prompt, "seed": v.seed, "not": v.wrong} for v in videos if not v.passed["all"]]
        scores[name] = figures | ({"failures": failures} if videos else {})
        (args.out / "scores.json").write_text(json.dumps(scores, indent=2) + "\n")
        rows = [Row(f"{v.prompt}, seed {v.seed}", () if v.passed["all"] else v.wrong, v.frames) for v in videos]
        if rows:
            write_sheet(sorted(rows, key=lambda row: not row.wrong)[:ROWS], args.out / f"{name}.png")
        print(name, *_lines(figures), sep="\n  ", flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checkpoint", nargs="?", default="shapes-tiny", help="a folder or a name; default: %(default)s"
    )
    parser.add_argument(
        "--parts", type=_parts, default=PARTS, metavar="A,B", help=f"of {','.join(PARTS)}; default: all"
    )
    parser.add_argument("--prompts", type=int, default=200, metavar="N", help="of one thing, and as many of two")
    parser.add_argument("--long", type=int, default=40, metavar="N", help="long videos")
    parser.add_argument(
        "--long-blocks", type=int, default=82, metavar="N", help="their blocks; default: a minute's, 82"
    )
    parser.add_argument("--switches", type=int, default=40, metavar="N", help="videos whose motion is changed")
    parser.add_argument("--seeds", type=int, default=32, metavar="N", help="seeds whose start places are compared")
    parser.add_argument("--streams", type=int, default=24, metavar="N", help="videos that the VAE is tried on")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="videos made side by side")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, default=Path("outputs/evaluation"), metavar="DIR")
    args = parser.parse_args()
    for name in ("prompts", "long", "switches", "seeds", "streams", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: at least 1 is needed")
    return args


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; the parts are {','.join(PARTS)}")
    return names


def _lines(figures: dict) -> list[str]:
    def plain(value: object) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {plain(v)}" for name, v in value.items())
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    return [f"{name:<32} {plain(value)}" for name, value in figures.items()]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"evaluate: {error}")

"""Draws what compare.py --json wrote: python scripts/experiments/plot.py layouts.json docs/media/layouts.png"""

import json
import sys
from pathlib import Path


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = json.loads(Path(sys.argv[1]).read_text())[::-1]
    names = [row["name"] for row in rows]
    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(11, 3.4), sharey=True, width_ratios=(3, 2))
    _stack(
        time, names, [{name: 1e3 * s / row["streams"] for name, s in row["modelled_seconds"].items()} for row in rows]
    )
    time.set_xlabel("modelled ms of the chip for a step of one video (not measured)")
    parts = [{"resident": row["resident_bytes"] / 1e9, "temporary": row["temporary_bytes"] / 1e9} for row in rows]
    _stack(memory, names, parts)
    memory.set_xlabel("GB a core, DiT step alone")
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=110)
    return 0


def _stack(axis: "object", names: list[str], rows: list[dict[str, float]]) -> None:
    left = [0.0] * len(rows)
    for part in rows[0]:
        widths = [row[part] for row in rows]
        axis.barh(names, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.legend(fontsize="x-small")
    axis.grid(axis="x", alpha=0.3)


if __name__ == "__main__":
    raise SystemExit(main())

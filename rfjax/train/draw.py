"""Pictures of progress."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

_CAPTION_WIDTH, _GREY = 400, 128
_FEW = 40  # points, which are marked
_WIDE_RANGE = 10  # numbers that spread by more than this factor are drawn on a logarithmic axis


def contact_sheet(
    rows: Sequence[UInt8[np.ndarray, "T H W 3"]], path: Path, scale: int = 2, captions: Sequence[str] = ()
) -> None:
    """Writes rows of frames as one PNG, every pixel `scale` pixels wide, with a caption right of each row."""
    from PIL import Image, ImageDraw

    lines = [np.concatenate([np.pad(f, ((0, 1), (0, 1), (0, 0)), constant_values=_GREY) for f in r], 1) for r in rows]
    sheet = Image.fromarray(np.concatenate(lines).repeat(scale, 0).repeat(scale, 1))
    if captions:
        height, width = sheet.height // len(rows), sheet.width
        wide = Image.new("RGB", (width + _CAPTION_WIDTH, sheet.height), "white")
        wide.paste(sheet)
        draw = ImageDraw.Draw(wide)
        for i, caption in enumerate(captions):
            draw.text((width + 6, i * height + height // 2 - 6), caption, fill="black")
        sheet = wide
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def draw_curves(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the numbers of a log over the steps, those of one kind (a name up to its first digit or `_`) together."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    groups: dict[str, list[str]] = {}
    for name in sorted({name for row in rows for name in row} - {"step", "seconds"}):
        groups.setdefault(re.split(r"[\d_]", name)[0], []).append(name)
    figure, axes = pyplot.subplots(len(groups), 1, figsize=(9, 2.4 * len(groups)), sharex=True, squeeze=False)
    for axis, (group, names) in zip(axes[:, 0], groups.items(), strict=True):
        values: list[float] = []
        for name in names:
            points = [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
            steps, numbers = [x for x, _ in points], [y for _, y in points]
            axis.plot(steps, numbers, label=name, marker="." if len(points) < _FEW else None)
            values += numbers
        if values and min(values) > 0 and max(values) > _WIDE_RANGE * min(values):
            axis.set_yscale("log")
        axis.set_ylabel(group)
        axis.grid(alpha=0.3, which="both")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)

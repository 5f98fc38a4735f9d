"""Contact sheets: a row of frames for each video, with what it was to show and what of that it does not."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from rfjax.errors import InputError

_CAPTION, _GAP, _BAR = 14, 2, 6  # pixels: height of a caption, between frames, width of the mark
_RIGHT, _WRONG = (40, 160, 70), (220, 40, 40)


class Row(NamedTuple):
    """One video: its caption, the names of what is wrong with it, and its frames."""

    caption: str
    wrong: tuple[str, ...]
    frames: UInt8[np.ndarray, "T H W 3"]


def write_sheet(rows: Iterable[Row], path: Path, columns: int = 12) -> None:
    """Draws some frames of each video, evenly spaced from its first to its last; failures have a red bar and say why.

    Raises:
        InputError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise InputError("contact sheets need Pillow: pip install pillow") from None
    rows = list(rows)
    height, width = rows[0].frames.shape[1:3]
    line = _CAPTION + height + _GAP
    sheet = Image.new("RGB", (_BAR + columns * (width + _GAP), line * len(rows)), "white")
    draw = ImageDraw.Draw(sheet)
    for i, row in enumerate(rows):
        top, colour = i * line, _WRONG if row.wrong else _RIGHT
        draw.rectangle((0, top, _BAR - 3, top + line - 2 * _GAP), fill=colour)
        failed = f"   [not: {', '.join(row.wrong)}]" if row.wrong else ""
        draw.text((_BAR, top), row.caption + failed, fill=colour if failed else (0, 0, 0))
        for column, frame in enumerate(np.linspace(0, len(row.frames) - 1, columns).round().astype(int)):
            sheet.paste(Image.fromarray(row.frames[frame]), (_BAR + column * (width + _GAP), top + _CAPTION))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)

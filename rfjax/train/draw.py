"""Pictures of progress."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8


def contact_sheet(rows: Sequence[UInt8[np.ndarray, "T H W 3"]], path: Path, scale: int = 2) -> None:
    """Writes rows of frames as one PNG, every pixel `scale` pixels wide."""
    from PIL import Image

    lines = [np.concatenate([np.pad(f, ((0, 1), (0, 1), (0, 0)), constant_values=128) for f in row], 1) for row in rows]
    sheet = np.concatenate(lines).repeat(scale, 0).repeat(scale, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(sheet).save(path)

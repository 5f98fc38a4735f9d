"""Runs the 1.3B configuration end to end with random bfloat16 weights at 64x96 pixels, and prints the peak memory.

python scripts/run_full_size.py        (needs 16 GiB and some minutes on a CPU; the frames are noise)
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402  (the path comes first)

from rfjax.bench.measure import peak_memory  # noqa: E402
from rfjax.bench.random_weights import random_pipeline  # noqa: E402
from rfjax.config import preset  # noqa: E402

pipe = random_pipeline(preset("wan-1.3b"), "bfloat16")
frames = pipe("a red fox walks over a frozen lake", num_frames=21, height=64, width=96, seed=0).frames[0]
assert frames.shape == (21, 64, 96, 3) and np.isfinite(frames).all()
print({where: f"{size / 2**30:.2f} GiB" for where, size in peak_memory().items()})

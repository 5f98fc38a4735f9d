"""Converts a PyTorch release into a checkpoint; the same as `rfjax convert`, without installing the package.

python scripts/convert_checkpoint.py RELEASE_FOLDER CHECKPOINT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rfjax.cli import main  # noqa: E402  (the path comes first)

sys.exit(main(["convert", *sys.argv[1:]]))

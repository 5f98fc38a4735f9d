"""The checkpoints that come with rfjax, by name."""

import os
from pathlib import Path

import rfjax
from rfjax.errors import InputError
from rfjax.weights.store import is_checkpoint


def bundled_checkpoints() -> dict[str, Path]:
    """Where each checkpoint stands that comes with rfjax: inside the package, or in the source tree it runs from."""
    package = Path(rfjax.__file__).parent
    folder = package / "checkpoints" if (package / "checkpoints").is_dir() else package.parent / "checkpoints"
    return {path.name: path for path in sorted(folder.glob("[!.]*")) if is_checkpoint(path)}


def find_checkpoint(path: Path) -> Path:
    """The folder of a checkpoint: the path itself, or where there is nothing, the bundled one of that name.

    Raises:
        InputError: the path is a bare name, and there is nothing of that name.
    """
    if os.path.exists(path) or len(path.parts) > 1:  # Path.exists fails on names too long for a file
        return path
    bundled = bundled_checkpoints()
    if path.name not in bundled:
        raise InputError(f"{path}: no such checkpoint; rfjax comes with {', '.join(bundled) or 'none'}")
    return bundled[path.name]

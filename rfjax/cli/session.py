"""What commands that run the model share: loading it, the compile cache, warnings as plain lines."""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rfjax.errors import InputError

if TYPE_CHECKING:
    from rfjax.config import ModelConfig
    from rfjax.pipeline import RollingForcingPipeline


def checkpoint_config(args: argparse.Namespace) -> "ModelConfig":
    """The configuration of the checkpoint asked for, to check everything else before weights are loaded.

    Raises:
        InputError: there is no such checkpoint.
    """
    if args.checkpoint is None:
        raise InputError("no model: pass --checkpoint DIR (make one with: rfjax convert SRC DIR)")
    from rfjax.weights.store import load_config

    return load_config(Path(args.checkpoint))


def load_pipeline(args: argparse.Namespace) -> "RollingForcingPipeline":
    """The pipeline of `--checkpoint`, in `--dtype`.

    Raises:
        InputError: the checkpoint is missing or damaged.
    """
    checkpoint_config(args)
    use_compile_cache()
    from rfjax.pipeline import RollingForcingPipeline

    return RollingForcingPipeline.from_pretrained(args.checkpoint, dtype=chosen_dtype(args))


def chosen_dtype(args: argparse.Namespace) -> str:
    """`--dtype`; by default bfloat16, but float32 on a CPU, which is slower in bfloat16."""
    import jax

    return args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def use_compile_cache() -> None:
    """Keeps compiled programs between runs, unless the environment says where (JAX_COMPILATION_CACHE_DIR)."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "rfjax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def say(line: str) -> None:
    """A line on stderr that leaves a progress bar whole."""
    from tqdm import tqdm

    tqdm.write(f"rfjax: {line}", file=sys.stderr)


class Warnings(logging.Handler):
    """While entered, shows each warning of the package once, as a plain line on stderr."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self._shown:
            self._shown.add(message)
            say(message)

    def __enter__(self) -> "Warnings":
        logging.getLogger("rfjax").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("rfjax").removeHandler(self)

"""What commands that run the model share: loading it, the compile cache, warnings as plain lines."""

import argparse
import contextlib
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rfjax.cli.options import DEFAULT_CHECKPOINT, check_file, memory_options
from rfjax.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh
    from jaxtyping import UInt8

    from rfjax.config import ModelConfig
    from rfjax.inputs import Length
    from rfjax.pipeline import RollingForcingPipeline


def checkpoint_config(args: argparse.Namespace) -> "ModelConfig":
    """The configuration of the checkpoint asked for, to check everything else before weights are loaded.

    Raises:
        InputError: there is no such checkpoint.
    """
    with args.interrupts.delayed():
        import rfjax.pipeline  # noqa: F401
        from rfjax.weights.bundled import find_checkpoint
        from rfjax.weights.store import load_config

    return load_config(find_checkpoint(Path(args.checkpoint or DEFAULT_CHECKPOINT)))


def chosen_config(args: argparse.Namespace) -> "ModelConfig":
    """The configuration of `--preset`, or of the checkpoint asked for.

    Raises:
        InputError: both are given, or there is none such.
    """
    if args.preset is None:
        return checkpoint_config(args)
    if args.checkpoint is not None:
        raise InputError(f"{args.command} takes one of --checkpoint DIR and --preset NAME")
    from rfjax.config import preset

    return preset(args.preset)


def beginning(
    args: argparse.Namespace, width: int, height: int, length: "Length", config: "ModelConfig"
) -> "UInt8[np.ndarray, 'T H W 3'] | None":
    """The frames of `--image` or `--video` that the video begins with, read before weights are loaded.

    Raises:
        InputError: both are given, the file cannot be read, or the video is not to be longer than that.
    """
    from rfjax.inputs import given_frames

    if args.image is not None and args.video is not None:
        raise InputError("--image and --video: a video begins with one of them")
    for option, name in (("--image", args.image), ("--video", args.video)):
        if name is not None:
            check_file(option, name)
    frames = given_frames(args.image, args.video, height, width, config)
    if frames is not None and length.pixel_frames is not None and length.pixel_frames <= len(frames):
        raise InputError(f"the given image or video makes the first {len(frames)} frames; ask for more than that")
    return frames


def load_pipeline(args: argparse.Namespace, mesh: "Mesh | None" = None) -> "RollingForcingPipeline":
    """The pipeline of `--checkpoint` or the default one, in `--dtype`.

    Raises:
        InputError: the checkpoint is missing or damaged.
    """
    use_compile_cache()
    from rfjax.pipeline import RollingForcingPipeline

    source = args.checkpoint or DEFAULT_CHECKPOINT
    options = memory_options(args)
    return RollingForcingPipeline.from_pretrained(source, dtype=chosen_dtype(args), mesh=mesh, **options)


def chosen_mesh(args: argparse.Namespace, config: "ModelConfig", size: tuple[int, int] | None = None) -> "Mesh | None":
    """The mesh of `--mesh`, which must suit the model and, if it is known, the video's width and height.

    Raises:
        InputError: there are not so many devices, or something does not divide.
    """
    if args.mesh is None:
        return None
    from rfjax.inputs import check_size
    from rfjax.parallel import Layout, make_mesh

    mesh = make_mesh(head=args.mesh[0], seq=args.mesh[1])
    Layout(mesh).check_model(config)
    if size is not None:
        width, height = size
        Layout(mesh).check_cut(config, 1, *check_size(height, width, config))
    return mesh


def chosen_dtype(args: argparse.Namespace) -> str:
    """`--dtype`; by default bfloat16, but float32 on a CPU, which is slower in bfloat16."""
    import jax

    return args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def use_compile_cache() -> None:
    """Keeps compiled programs between runs, unless the environment says where (JAX_COMPILATION_CACHE_DIR)."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rfjax" / "xla"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            say(f"compiled programs are not kept for the next run: {folder}: {error.strerror}")
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def say(line: str) -> None:
    """A line on stderr that leaves a progress bar whole."""
    from tqdm import tqdm

    with contextlib.suppress(OSError):  # the terminal is gone; what is under way goes on
        tqdm.write(f"rfjax: {line}", file=sys.stderr)


class Warnings(logging.Handler):
    """While entered, shows each warning of the package once, as a plain line on stderr."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown: set[str] = set()
        self._logger = logging.getLogger("rfjax")

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self._shown:
            self._shown.add(message)
            say(message)

    def __enter__(self) -> "Warnings":
        self._logger.addHandler(self)
        self._logger.propagate = False  # libraries give the root logger a handler, which would show them again
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True

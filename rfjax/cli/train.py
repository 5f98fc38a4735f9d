"""Train a model, from a world of videos or from encoded ones, to a checkpoint.

  rfjax train --config shapes-tiny
  rfjax train --config shapes-tiny --stage vae
  rfjax train --config my_model.toml --out runs/first

The stages run in order and go on where they stopped; what is finished is passed over. Ctrl-C saves and ends. A run's
folder has, for each stage, a log, curves and samples to look at, and at the end the checkpoint.
"""

import argparse
import importlib.metadata
import importlib.util
import mmap
import os
import platform
from pathlib import Path

from rfjax.cli.options import Parser, path
from rfjax.cli.session import Warnings, say, use_compile_cache
from rfjax.errors import InputError
from rfjax.train import STAGES

_EXTRA = {"optax": "optax", "matplotlib": "matplotlib", "PIL": "pillow"}  # module -> package

# With it, XLA's CPU backend multiplies matrices by a library that makes training 1.5 times as fast (jax 0.10.2).
_FLAG = "xla_cpu_experimental_ynn_fusion_type"
_VALUE = "LIBRARY_FUSION_TYPE_DOT"
_FIRST_VERSION = (0, 10)


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--config", type=path, required=True, metavar="NAME_OR_FILE",
        help="shapes-tiny, or a .toml file (rfjax/train/config.py lists what can stand in it)",
    )  # fmt: skip
    parser.add_argument("--stage", choices=STAGES, help="only this one; default: all of the configuration, in order")
    parser.add_argument("--out", type=path, metavar="DIR", help="folder of the run; default: runs/NAME")


def run(args: argparse.Namespace) -> int:
    lacking = [package for module, package in _EXTRA.items() if importlib.util.find_spec(module) is None]
    if lacking:
        raise InputError(f"training needs {' and '.join(lacking)}: pip install 'rfjax[train]'")
    _use_fast_products()
    with args.interrupts.delayed():
        from rfjax.train.config import read_config
        from rfjax.train.run import Run

    config = read_config(args.config)
    folder = Path(args.out or Path("runs") / config.name)
    use_compile_cache()
    with Warnings(), args.interrupts.held() as received:
        if not Run(config, folder, stopped=lambda: bool(received), say=say)(args.stage):
            say(f"stopped, and saved in {folder}; the same command goes on")
    return 0


def _use_fast_products() -> None:
    """Sets `_FLAG` where it serves: before JAX starts, for a CPU alone, and if nobody has set it otherwise.

    XLA ends the process on a flag that it does not know, so the library must have it.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags and _runs_on_cpu() and _jaxlib_knows(_FLAG):
        os.environ["XLA_FLAGS"] = f"{flags} --{_FLAG}={_VALUE}".strip()


def _runs_on_cpu() -> bool:
    """Whether JAX will run on a CPU: it is told to, or has no plugin for anything else."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    modules = any(importlib.util.find_spec(name) is not None for name in ("jax_plugins", "libtpu"))
    return not modules and not importlib.metadata.entry_points(group="jax_plugins")


def _jaxlib_knows(flag: str) -> bool:
    """Whether the installed jaxlib is recent enough, for this processor, and has the flag's name in it."""
    version = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])
    if version < _FIRST_VERSION or platform.machine() not in ("x86_64", "AMD64"):
        return False
    spec = importlib.util.find_spec("jaxlib")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    libraries = [file for folder in folders for file in Path(folder).glob("*jax_common*")]
    return any(_contains(file, flag.encode()) for file in libraries)


def _contains(file: Path, text: bytes) -> bool:
    with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return view.find(text) >= 0

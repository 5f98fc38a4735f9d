"""Parsing: one-line errors, hyphens or underscores, and answers to the options of the PyTorch release."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from rfjax.errors import InputError

if TYPE_CHECKING:
    from rfjax.config import ModelConfig

_DISTILLED = "the model is distilled for fixed steps without guidance; leave it out"
_WHEN_CONVERTING = "weights are chosen when they are converted: rfjax convert SRC DST --weights ema"
_CHECKPOINT = "the converted checkpoint goes to --checkpoint, and holds the configuration too"
_ONE_PROCESS = "one process drives all devices; leave it out"

DEFAULT_CHECKPOINT = "shapes-tiny"

_DTYPES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16"}  # short names

# Options of the release and of its relatives that have another name here, or none.
_ANSWERS = {
    "--use-ema": _WHEN_CONVERTING,
    "--guidance-scale": _DISTILLED,
    "--guide-scale": _DISTILLED,
    "--negative-prompt": _DISTILLED,
    "--num-inference-steps": _DISTILLED,
    "--sample-steps": _DISTILLED,
    "--sample-shift": _DISTILLED,
    "--num-output-frames": "it counts latent frames, which is --num-latent-frames here",
    "--frame-num": "use --num-frames",
    "--config-path": _CHECKPOINT,
    "--checkpoint-path": _CHECKPOINT,
    "--ckpt-dir": _CHECKPOINT,
    "--model": _CHECKPOINT,
    "--data-path": "use --prompts-file",
    "--extended-prompt-path": "use --prompts-file",
    "--output-folder": "use -o with a folder",
    "--save-file": "use -o",
    "--base-seed": "use --seed",
    "--num-samples": "run again with another --seed",
    "--i2v": "use --image",
    "--fps": "the model makes 16 frames a second",
    "--ulysses-size": _ONE_PROCESS,
    "--ring-size": _ONE_PROCESS,
    "--task": "the model is the checkpoint's; leave it out",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a mistake in one line."""

    def __init__(self, **kwargs: object):
        super().__init__(allow_abbrev=False, **kwargs)  # pyright: ignore[reportArgumentType]

    @property
    def option_names(self) -> list[str]:
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        print(f"rfjax: {message}", file=sys.stderr)
        raise SystemExit(2)


def hyphenated(argv: Sequence[str]) -> list[str]:
    """The arguments with `_` as `-` in the names of long options; values stay as they are.

    A value that begins with a minus and a digit is joined to its option, to be answered as a value.
    """
    result: list[str] = []
    for i, word in enumerate(argv):
        if word == "--":
            return result + list(argv[i:])
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        elif re.fullmatch(r"-\d\S*", word) and i and argv[i - 1].startswith("--") and "=" not in argv[i - 1]:
            word = f"{result.pop()}={word}"
        result.append(word)
    return result


def refuse_extras(parser: Parser, extras: Sequence[str]) -> None:
    """Answers what the parser of a command could not place.

    Raises:
        InputError: there is anything at all.
    """
    for word in extras:
        if not word.startswith("-") or word == "-":
            continue
        name = word.partition("=")[0]
        if name in _ANSWERS:
            raise InputError(f"{name}: {_ANSWERS[name]}")
        known = {option.lstrip("-"): option for option in parser.option_names}
        close = difflib.get_close_matches(name.lstrip("-"), known, 1)
        hint = f"did you mean {known[close[0]]}?" if close else f"{parser.prog} --help lists the options"
        raise InputError(f"{name} is not an option of {parser.prog}; {hint}")
    if extras:
        raise InputError(f"unexpected argument {extras[0]!r}; put a prompt of several words in quotes")


def integer(text: str) -> int:
    """For argparse."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def path(text: str) -> str:
    """For argparse."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def size(text: str) -> tuple[int, int]:
    """Width and height of "832x480" or "832*480", for argparse."""
    width, _, height = text.lower().replace("*", "x").partition("x")
    try:
        return int(width), int(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write WIDTHxHEIGHT, as in 832x480") from None


def add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to show")
    parser.add_argument("--prompt", dest="prompt_option", metavar="TEXT", help="instead of PROMPT")


def given_prompts(args: argparse.Namespace) -> list[str]:
    """The prompt on the command line, if there is one.

    Raises:
        InputError: there are two.
    """
    given = [text for text in (args.prompt, args.prompt_option) if text is not None]
    if len(given) > 1:
        raise InputError(f"two prompts, {given[0]!r} and {given[1]!r}; give one (or --prompts-file to generate)")
    return given


def add_beginning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", type=path, metavar="FILE", help="begin with this image")
    parser.add_argument("--video", type=path, metavar="FILE", help="begin with the end of this video")


def check_file(option: str, name: str) -> None:
    """Raises InputError if it is no file."""
    if not Path(name).is_file():
        raise InputError(f"{option} {name}: " + ("it is a folder" if Path(name).is_dir() else "there is no such file"))


def check_distinct(args: argparse.Namespace, output: str) -> None:
    """Refuses to write over another file of the same command; a saved stream may take the place of the resumed one.

    Raises:
        InputError: two options name one file.
    """
    names = {f"--{name}": getattr(args, name.replace("-", "_"), None) for name in ("save-state", "image", "video")}
    names |= {"--resume": getattr(args, "resume", None)}
    seen = {os.path.realpath(output): "-o"}
    for option, name in names.items():
        if name is None:
            continue
        other = seen.setdefault(os.path.realpath(name), option)
        if other != option and (other, option) != ("--save-state", "--resume"):
            raise InputError(f"{option} {name}: {other} is the same file; give another name")


def standard_input(option: str) -> TextIO:
    """Raises InputError if it is closed."""
    if sys.stdin is None:
        raise InputError(f"{option}: standard input is closed")
    return sys.stdin


def add_model(parser: argparse.ArgumentParser, default_dtype: str = "bfloat16, on a CPU float32") -> None:
    """The options that choose the model."""
    parser.add_argument(
        "-c", "--checkpoint", type=path, metavar="DIR",
        help="a checkpoint made by `rfjax convert`, or the name of one that comes with rfjax; "
        f"default: {DEFAULT_CHECKPOINT}, a small trained model of moving shapes",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", type=lambda name: _DTYPES.get(name, name), choices=("float32", "bfloat16"),
        help=f"of the model; default: {default_dtype}",
    )  # fmt: skip


def add_preset(parser: argparse.ArgumentParser) -> None:
    """Instead of a checkpoint; `session.chosen_config` reads either."""
    parser.add_argument("--preset", metavar="NAME", help="a known model: tiny, wan-1.3b, wan-14b")


def mesh_size(text: str) -> tuple[int, int]:
    """Parts of the heads and of the queries, of "4x2", for argparse."""
    head, _, seq = text.lower().partition("x")
    try:
        return int(head), int(seq or 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh; write HEADxSEQ, as in 4x2") from None


def add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh", type=mesh_size, metavar="HEADxSEQ",
        help="share the work among as many devices: attention is cut into HEAD parts by heads, and each of them into "
        "SEQ by queries; 4x2 suits the 8 cores of a Trainium2 chip",
    )  # fmt: skip


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-cut", choices=("both", "head"),
        help="share the cache over both axes of the mesh, or over HEAD alone, which keeps SEQ copies and sends less; "
        "default: both",
    )  # fmt: skip
    parser.add_argument(
        "--cache-dtype", choices=("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        help="of the cache alone; 8 bits halve what bfloat16 takes, at a loss; default: that of the model",
    )  # fmt: skip


def add_text_encoder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text-encoder", choices=("device", "host"),
        help="where it is: on each device, or on the CPU, which frees their memory; default: device",
    )  # fmt: skip


def memory_options(args: argparse.Namespace) -> dict[str, str]:
    """Of `add_cache` and `add_text_encoder`, what was given, as `from_pretrained` takes it."""
    names = ("cache_cut", "cache_dtype", "text_encoder")
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", type=size, metavar="WxH",
        help="pixels, multiples of 16; default: that the checkpoint was trained at, 832x480 for the release",
    )  # fmt: skip
    parser.add_argument("--width", type=integer, metavar="N", help="instead of --size")
    parser.add_argument("--height", type=integer, metavar="N", help="instead of --size")


def chosen_size(args: argparse.Namespace) -> tuple[int, int] | None:
    """Width and height, from `--size` or from `--width` and `--height`; None if neither is given.

    Raises:
        InputError: both are given, or half of one.
    """
    if args.width is None and args.height is None:
        return args.size
    if args.size is not None:
        raise InputError(f"--size {'x'.join(map(str, args.size))} and --width or --height: give one of the two")
    if args.width is None or args.height is None:
        raise InputError("--width and --height go together; or write --size 832x480")
    return args.width, args.height


def size_to_make(args: argparse.Namespace, config: "ModelConfig") -> tuple[int, int]:
    """Width and height: those asked for, else the checkpoint's own.

    Raises:
        InputError: as `chosen_size`.
    """
    height, width = config.default_size
    return chosen_size(args) or (width, height)

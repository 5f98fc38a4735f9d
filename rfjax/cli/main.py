"""Entry point: picks the command, and turns every failure that a user can cause into one line."""

import argparse
import os
import sys
import time
from collections.abc import Sequence

from rfjax.cli import bench, convert, generate, info, lint, plan, stream, train
from rfjax.cli.interrupts import Interrupts
from rfjax.cli.options import Parser, hyphenated, refuse_extras
from rfjax.errors import InputError

_COMMANDS = {
    "generate": generate, "stream": stream, "convert": convert, "train": train, "info": info, "bench": bench,
    "lint": lint, "plan": plan,
}  # fmt: skip
BAD_INPUT, SIGNALLED = 2, 128


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0; 1 for what `lint` finds; 2 for bad input or a file that cannot be read or written; 130
            after Ctrl-C (128 and the number of the signal after others).
    """
    started = time.perf_counter()
    _fill_standard_streams()
    with Interrupts() as interrupts:
        code = _run(argv, started, interrupts)
    return code or (SIGNALLED + interrupts.received[0] if interrupts.received else 0)


def _run(argv: Sequence[str] | None, started: float, interrupts: Interrupts) -> int:
    try:
        parser, commands = _parsers()
        args, extras = parser.parse_known_args(hyphenated(sys.argv[1:] if argv is None else argv))
        refuse_extras(commands[args.command], extras)
        args.started, args.interrupts = started, interrupts
        return _COMMANDS[args.command].run(args)
    except InputError as error:
        return _fail(str(error))
    except ValueError as error:
        from nki_ops import KernelError  # loads JAX, which is loaded by now if this was raised

        if not isinstance(error, KernelError):
            raise
        return _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"{where}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail("out of memory; use a smaller --size, or --dtype bfloat16")
    except KeyboardInterrupt:  # the code is in the signal
        _say("interrupted")
        return 0


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"rfjax {version('rfjax')}")
        except PackageNotFoundError:
            print("rfjax, not installed as a package")
        parser.exit()


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="rfjax", description="Streamed text-to-video with Rolling Forcing, in JAX.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    commands = {}
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        commands[name] = subparsers.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(commands[name])
    return parser, commands


def _fill_standard_streams() -> None:
    """Opens the null device in place of those that are closed, as files opened later would take their numbers."""
    for standard in (sys.stdin, sys.stdout, sys.stderr):
        if standard is None:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")


def _say(message: str) -> None:
    print(f"rfjax: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _fail(message: str) -> int:
    _say(message)
    return BAD_INPUT

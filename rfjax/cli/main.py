"""Entry point: picks the command, and turns every failure that a user can cause into one line."""

import argparse
import sys
import time
from collections.abc import Sequence

from rfjax.cli import bench, convert, generate, info, stream
from rfjax.cli.options import Parser, hyphenated, refuse_extras
from rfjax.errors import InputError

_COMMANDS = {"generate": generate, "stream": stream, "convert": convert, "info": info, "bench": bench}
BAD_INPUT, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0; 2 for bad input or a file that cannot be read or written; 130 after Ctrl-C.
    """
    started = time.perf_counter()
    parser, commands = _parsers()
    try:
        args, extras = parser.parse_known_args(hyphenated(sys.argv[1:] if argv is None else argv))
        refuse_extras(commands[args.command], extras)
        args.started = started
        return _COMMANDS[args.command].run(args)
    except InputError as error:
        return _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"{where}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail("out of memory; use a smaller --size, or --dtype bfloat16")
    except KeyboardInterrupt:
        _fail("interrupted")
        return INTERRUPTED


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="rfjax", description="Streamed text-to-video with Rolling Forcing, in JAX.")
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


def _fail(message: str) -> int:
    print(f"rfjax: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return BAD_INPUT

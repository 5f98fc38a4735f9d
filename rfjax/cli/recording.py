"""A stream into a file, block by block, with progress, until it ends or Ctrl-C."""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rfjax.cli.options import Parser, check_distinct, integer, path
from rfjax.cli.session import say
from rfjax.errors import InputError

if TYPE_CHECKING:
    from tqdm import tqdm

    from rfjax.stream import VideoStream
    from rfjax.video import VideoWriter

PIPE = "-"


def add_output(parser: Parser, output: str) -> None:
    """The options for where the video goes and what is said about it."""
    parser.add_argument("-o", "--output", type=path, metavar="PATH", help=output)
    parser.add_argument("--force", action="store_true", help="overwrite what exists")
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each video")


def add_seed(parser: Parser) -> None:
    parser.add_argument(
        "--seed", type=integer, metavar="N", help="the same seed gives the same frames; default: drawn"
    )


def check_output(args: argparse.Namespace, output: str) -> None:
    """Refuses what cannot be written, before weights are loaded.

    Raises:
        InputError: the file exists and `--force` is not given, is another one of the command, or cannot be written.
    """
    from rfjax.video import check_destination

    if output == PIPE and args.json:
        raise InputError("-o - and --json both print on standard output; leave one out")
    if output != PIPE:
        check_distinct(args, output)
    check_destination(output, args.force)


def open_writer(
    args: argparse.Namespace, output: str, size: tuple[int, int], fps: int, prompt: str, seed: int
) -> "VideoWriter":
    """A writer of a path that is free, or that `--force` gives free.

    Raises:
        InputError: as `check_output`.
    """
    from rfjax.video import VideoWriter

    check_output(args, output)
    width, height = size
    comment = f"rfjax, seed {seed}"
    return VideoWriter(output, height, width, fps=fps, title=prompt, comment=comment, overwrite=args.force)


def default_name(prompt: str, seed: int) -> str:
    from rfjax.video import safe_stem

    return f"{safe_stem(prompt)}-{seed}.mp4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """What was written."""

    file: str
    prompt: str
    seed: int
    width: int
    height: int
    frames: int
    pixel_fps: float | None
    first_frame_s: float | None  # from the start of the command
    stopped: bool  # by Ctrl-C, SIGTERM or SIGHUP

    def __str__(self) -> str:
        if not self.frames:
            return "stopped before the first frame; nothing was written"
        name = "standard output" if self.file == PIPE else self.file
        return (
            f"{'stopped; ' if self.stopped else ''}{self.frames} frames of {self.width}x{self.height} in {name}, "
            f"seed {self.seed}, {self.pixel_fps:.1f} frames a second, the first after {self.first_frame_s:.1f} s"
        )


def record(
    stream: "VideoStream",
    writer: "VideoWriter",
    args: argparse.Namespace,
    before_block: Callable[[], object] = lambda: None,
) -> Recording:
    """Writes the blocks of a stream as they are finished, and says what it wrote.

    Args:
        stream: of one prompt.
        writer: closed when this returns, or fails.
        args: of the command; `started` is when it began.
        before_block: called before each block is computed.
    """
    prompt, clock = str(stream.prompt), Clock()
    with writer, args.interrupts.held() as stop, _progress(stream, args) as bar:
        with contextlib.suppress(BrokenPipeError):  # the reader has seen enough
            while not (stop or stream.finished):
                before_block()
                frames = next(stream).frames
                clock.count(len(frames))
                writer.write(frames)
                first = clock.first - args.started
                bar.set_postfix_str(f"{clock.fps:.1f} fps, first frame after {first:.1f} s", refresh=False)
                bar.update(len(frames))
    recording = Recording(
        file=writer.path,
        prompt=prompt,
        seed=int(stream.metadata["seed"]),
        width=stream.width,
        height=stream.height,
        frames=writer.num_frames,
        pixel_fps=clock.fps if clock.frames else None,
        first_frame_s=clock.first - args.started if clock.frames else None,
        stopped=bool(stop),
    )
    if args.json:
        print(json.dumps(dataclasses.asdict(recording)), flush=True)
    if stop or not (args.quiet or args.json):
        say(str(recording))
    return recording


class Clock:
    """Frames a second of a stream that runs; what comes before the first chunk counts only if there is no other."""

    def __init__(self) -> None:
        self.frames = self._first_frames = 0
        self._start = self.first = self._last = time.perf_counter()

    def count(self, frames: int) -> None:
        """Takes note of frames that are there now."""
        self._last = time.perf_counter()
        if not self.frames:
            self.first, self._first_frames = self._last, frames
        self.frames += frames

    @property
    def fps(self) -> float:
        if self.frames > self._first_frames:
            return (self.frames - self._first_frames) / (self._last - self.first)
        return self.frames / (self._last - self._start)


def _progress(stream: "VideoStream", args: argparse.Namespace) -> "tqdm":
    from tqdm import tqdm

    total = stream.total_frames
    count = "{n_fmt}" if total is None else "{bar} {n_fmt}/{total_fmt}"
    return tqdm(
        total=total,
        initial=stream.frames_done,
        bar_format=f"{count} frames, {{elapsed}}{{postfix}}",
        disable=args.quiet or not sys.stderr.isatty(),
        leave=False,
        file=sys.stderr,
    )

"""Generate an endless video, until Ctrl-C, with prompts that change on the way.

  rfjax stream "a red circle moving right" -o - | ffplay -
  rfjax stream "a red fox in the snow" -c CHECKPOINT -o - | ffplay -
  rfjax stream "a red fox" -c CHECKPOINT --num-frames 321 --prompt-at "160:a red fox asleep"
  rfjax stream "a red fox" -c CHECKPOINT --interactive     (each line typed is the next prompt)
  rfjax stream -c CHECKPOINT --resume fox.state -o more.mp4

A new prompt comes in over a few blocks. -o - pipes YUV4MPEG2.
"""

import argparse
import os
import re
import select
from pathlib import Path
from typing import TYPE_CHECKING

from rfjax.cli.options import (
    Parser,
    add_beginning,
    add_cache,
    add_mesh,
    add_model,
    add_prompt,
    add_size,
    add_text_encoder,
    check_file,
    chosen_size,
    given_prompts,
    integer,
    path,
    size_to_make,
    standard_input,
)
from rfjax.cli.recording import add_output, add_seed, check_output, default_name, open_writer, record
from rfjax.cli.session import Warnings, beginning, checkpoint_config, chosen_mesh, load_pipeline, say
from rfjax.errors import InputError

if TYPE_CHECKING:
    from rfjax.config import ModelConfig
    from rfjax.stream import VideoStream
    from rfjax.video import VideoWriter


def add_arguments(parser: Parser) -> None:
    add_prompt(parser)
    add_model(parser)
    add_mesh(parser)
    add_cache(parser)
    add_text_encoder(parser)
    add_size(parser)
    parser.add_argument("--num-frames", type=integer, metavar="N", help="pixel frames; default: endless")
    add_seed(parser)
    add_beginning(parser)
    parser.add_argument(
        "--prompt-at", type=_switch, action="append", default=[], metavar="FRAME:TEXT",
        help="change the prompt at the first block that starts at this frame or later; may be repeated",
    )  # fmt: skip
    parser.add_argument("--interactive", action="store_true", help="each line on standard input is the next prompt")
    parser.add_argument(
        "--save-state", type=path, metavar="FILE", help="at the end, save the stream, to go on from later"
    )
    parser.add_argument(
        "--resume", type=path, metavar="FILE", help="go on with a saved stream; a PROMPT changes its prompt"
    )
    add_output(parser, "a file (.mp4, .mkv, .webm), or -; default: named after the prompt and the seed")


def run(args: argparse.Namespace) -> int:
    with Warnings():
        config = checkpoint_config(args)
        _check_state_files(args)
        _check_prompts(args)
        if args.output is not None:
            check_output(args, args.output)
        lines = _TypedLines() if args.interactive else None
        stream, writer = _resume(args, config) if args.resume else _open(args, config)
        with stream:
            switches = _Switches(stream, args, lines)
            try:
                recording = record(stream, writer, args, before_block=switches.apply)
            except KeyboardInterrupt:
                if args.save_state:
                    say(f"interrupted inside a block: the stream is not saved to {args.save_state}")
                raise
            if not recording.stopped:
                switches.say_unused()
            if args.save_state:
                stream.save(args.save_state)
                complete = ", which is complete: there is nothing to go on with" if stream.finished else ""
                say(f"saved the stream to {args.save_state}{complete}")
    return 0


def _switch(text: str) -> tuple[int, str]:
    frame, colon, prompt = text.partition(":")
    if not colon or not re.fullmatch("[0-9]+", frame.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not FRAME:TEXT, as in 160:a red fox asleep")
    return int(frame), prompt.strip()


def _check_state_files(args: argparse.Namespace) -> None:
    if args.resume is not None:
        check_file("--resume", args.resume)
    name = args.save_state
    if name is None:
        return
    if Path(name).is_dir():
        raise InputError(f"--save-state {name}: it is a folder; give a file in it")
    if Path(name).exists() and name != args.resume and not args.force:
        raise InputError(f"--save-state {name}: the file exists; choose another, or overwrite it with --force")
    if not os.access(Path(name).absolute().parent, os.W_OK):
        raise InputError(f"--save-state {name}: there is no such folder, or it cannot be written; choose another")


def _check_prompts(args: argparse.Namespace) -> None:
    from rfjax.inputs import check_prompts

    frames = [frame for frame, _ in args.prompt_at]
    for frame in frames:
        if frames.count(frame) > 1:
            raise InputError(f"--prompt-at {frame}: there are two prompts for this frame; give one")
    for prompt in [*given_prompts(args), *(prompt for _, prompt in args.prompt_at)]:
        check_prompts(prompt)


def _open(args: argparse.Namespace, config: "ModelConfig") -> tuple["VideoStream", "VideoWriter"]:
    from rfjax.inputs import check_length, check_seeds, check_size

    (prompt,) = given_prompts(args) or (None,)
    if prompt is None:
        raise InputError("stream needs a PROMPT, or --resume FILE")
    size = width, height = size_to_make(args, config)
    check_size(height, width, config)
    mesh = chosen_mesh(args, config, size)
    length = check_length(args.num_frames, None, config)
    frames = beginning(args, width, height, length, config)
    (seed,) = check_seeds(args.seed, 1)
    writer = open_writer(args, args.output or default_name(prompt, seed), size, config.fps, prompt, seed)
    pipeline = load_pipeline(args, mesh)
    return pipeline.stream(prompt, args.num_frames, height, width, seed, video=frames), writer


def _resume(args: argparse.Namespace, config: "ModelConfig") -> tuple["VideoStream", "VideoWriter"]:
    options = {"--size": chosen_size(args), "--num-frames": args.num_frames, "--seed": args.seed}
    for option, value in (options | {"--image": args.image, "--video": args.video}).items():
        if value is not None:
            raise InputError(f"{option}: the saved stream fixes it; leave it out")
    _check_saved(args.resume)
    stream = load_pipeline(args, chosen_mesh(args, config)).resume(args.resume)
    assert isinstance(stream.prompt, str)
    if stream.finished:
        raise InputError(f"{args.resume}: the saved stream is complete, with all of its {stream.total_frames} frames")
    for prompt in given_prompts(args):
        _change_prompt(stream, prompt)
    size, seed = (stream.width, stream.height), stream.metadata["seed"]
    name = default_name(f"{stream.prompt} from {stream.frames_done}", seed)
    return stream, open_writer(args, args.output or name, size, config.fps, stream.prompt, seed)


def _check_saved(name: str) -> None:
    """Refuses what cannot go on here, before weights are loaded; what it reads is not checked for damage yet."""
    from rfjax.snapshot import saved_stream

    saved = saved_stream(Path(name))
    if saved is None:
        raise InputError(f"{name} is not a saved stream of this version of rfjax, or is damaged")
    details = saved.get("stream", {})
    if isinstance(details.get("prompt"), list):
        raise InputError(f"{name} holds {len(details['prompt'])} videos side by side; resume it in Python")
    if details.get("decode") is False:
        raise InputError(f"{name} holds a stream of latents without frames; resume it in Python")


def _change_prompt(stream: "VideoStream", prompt: str) -> None:
    frame = stream.set_prompt(prompt)
    say(f"the prompt is now {prompt!r}; it can show from frame {frame} on")


class _Switches:
    """The prompts to come: those with a frame number, and lines on standard input."""

    def __init__(self, stream: "VideoStream", args: argparse.Namespace, lines: "_TypedLines | None"):
        self._stream, self._lines = stream, lines
        self._planned: list[tuple[int, str]] = sorted(args.prompt_at)
        self._given = given_prompts(args)  # in force, but not seen by a block yet

    def apply(self) -> None:
        """Changes the prompt if it is time; called before each block."""
        prompts = self._lines.read() if self._lines else []
        while self._planned and self._planned[0][0] <= self._stream.frames_done:
            prompts.append(self._planned.pop(0)[1])
        if prompts:
            for superseded in self._given + prompts[:-1]:
                say(f"no block sees the prompt {superseded!r}: {prompts[-1]!r} comes before the next one")
            _change_prompt(self._stream, prompts[-1])
        self._given = []

    def say_unused(self) -> None:
        for frame, prompt in self._planned:
            say(f"--prompt-at {frame}:{prompt} was not reached: no block starts at frame {frame} or later")
        for prompt in self._lines.read() if self._lines else []:
            say(f"the prompt {prompt!r} came after the last block")


class _TypedLines:
    """Lines of standard input that are there by now, without waiting."""

    def __init__(self) -> None:
        self._fd, self._rest = standard_input("--interactive").fileno(), b""
        self._open = True

    def read(self) -> list[str]:
        """Lines since the last call, blank ones left out."""
        while self._open and select.select([self._fd], [], [], 0)[0]:
            data = os.read(self._fd, 1 << 16)
            self._open = bool(data)
            self._rest += data or b"\n"
        *lines, self._rest = self._rest.split(b"\n")
        texts = [line.decode(errors="replace").replace("\0", "").strip() for line in lines]
        return [text for text in texts if text]

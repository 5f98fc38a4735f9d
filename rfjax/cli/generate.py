"""Generate videos of a fixed length.

  rfjax generate "a red circle moving right" -o circle.mp4
  rfjax generate "a red fox in the snow" -c CHECKPOINT -o fox.mp4
  rfjax generate --prompts-file prompts.txt -c CHECKPOINT -o videos/

The file grows while the video is made; Ctrl-C leaves what is there, playable. -o - pipes YUV4MPEG2.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rfjax.cli.options import (
    Parser,
    add_beginning,
    add_cache,
    add_mesh,
    add_model,
    add_prompt,
    add_size,
    add_text_encoder,
    given_prompts,
    integer,
    path,
    size_to_make,
    standard_input,
)
from rfjax.cli.recording import add_output, add_seed, default_name, open_writer, record
from rfjax.cli.session import Warnings, beginning, checkpoint_config, chosen_mesh, load_pipeline
from rfjax.errors import InputError


def add_arguments(parser: Parser) -> None:
    add_prompt(parser)
    parser.add_argument(
        "--prompts-file", type=path, metavar="FILE", help="one prompt a line, one video each; - is standard input"
    )
    add_model(parser)
    add_mesh(parser)
    add_cache(parser)
    add_text_encoder(parser)
    add_size(parser)
    parser.add_argument("--num-frames", type=integer, metavar="N", help="pixel frames; default: 81")
    parser.add_argument("--num-latent-frames", type=integer, metavar="N", help="instead: 1 + 4 (N - 1) pixel frames")
    add_seed(parser)
    add_beginning(parser)
    add_output(parser, "a file (.mp4, .mkv, .webm), a folder, or -; default: named after the prompt and the seed")


def run(args: argparse.Namespace) -> int:
    prompts = _prompts(args)
    if args.num_frames is None and args.num_latent_frames is None:
        args.num_frames = 81
    with Warnings():
        config = checkpoint_config(args)
        from rfjax.inputs import check_length, check_prompts, check_seeds, check_size

        size = width, height = size_to_make(args, config)
        check_size(height, width, config)
        mesh = chosen_mesh(args, config, size)
        length = check_length(args.num_frames, args.num_latent_frames, config)
        frames = beginning(args, width, height, length, config)
        check_prompts(prompts)
        seeds = check_seeds(args.seed, len(prompts))
        paths = _outputs(args, prompts, seeds)
        writers = [
            open_writer(args, path, size, config.fps, prompt, seed)
            for path, prompt, seed in zip(paths, prompts, seeds, strict=True)
        ]
        pipeline = load_pipeline(args, mesh)
        for prompt, seed, writer in zip(prompts, seeds, writers, strict=True):
            stream = pipeline.stream(
                prompt, args.num_frames, height, width, seed, video=frames,
                num_latent_frames=args.num_latent_frames,
            )  # fmt: skip
            with stream:
                if record(stream, writer, args).stopped:
                    break
    return 0


def _prompts(args: argparse.Namespace) -> list[str]:
    given, name = given_prompts(args), args.prompts_file
    if len(given) + (name is not None) != 1:
        raise InputError("generate needs a PROMPT or --prompts-file FILE, and one of them only")
    if given:
        return given
    try:
        content = standard_input("--prompts-file -").buffer.read() if name == "-" else Path(name).read_bytes()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise InputError(f"{name} has no prompts; write one a line")
    return prompts


def _outputs(args: argparse.Namespace, prompts: list[str], seeds: Sequence[int]) -> list[str]:
    """Where each video goes."""
    output = args.output
    if output is not None and not output.endswith(("/", "\\")) and not Path(output).is_dir():
        if args.prompts_file is not None:
            raise InputError(f"-o {output}: a prompts file makes a video for each line; give a folder that exists")
        return [output]
    if output is not None and not Path(output).is_dir():
        raise InputError(f"-o {output}: there is no such folder; make it first")
    names = [default_name(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    return [str(Path(output or ".") / name) for name in names]

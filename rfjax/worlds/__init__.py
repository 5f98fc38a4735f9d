"""Small procedural worlds: exact video for any prompt, to train on and to judge by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from rfjax.errors import InputError
from rfjax.worlds.judge import judge
from rfjax.worlds.shapes import FPS, SIZE, Clip, parse, random_clip, random_streams
from rfjax.worlds.words import PROMPT_HINT, build_tokenizer


@dataclass(frozen=True)
class World:
    """What training asks of a world.

    Attributes:
        size: of its videos, pixels on both sides.
        fps: pixel frames a second.
        prompt_hint: how prompts are written, in a line.
        streams: (seed, batch, size, frames) -> videos uint8 [batch, frames, size, size, 3] to train a VAE on.
        clip: (random numbers, blocks) -> a video with the prompt of each of its blocks, to train a DiT on.
        check_prompt: raises InputError if a prompt does not describe a scene of the world.
        build_tokenizer: writes the tokenizer of its words into a folder.
        score: (videos, prompts) -> how well they go together, by name.
    """

    size: int
    fps: int
    prompt_hint: str
    streams: Callable[[int, int, int, int], UInt8[np.ndarray, "B T S S 3"]]
    clip: Callable[[np.random.Generator, int], Clip]
    check_prompt: Callable[[str], object]
    build_tokenizer: Callable[[Path], None]
    score: Callable[[UInt8[np.ndarray, "B T S S 3"], Sequence[str]], dict[str, float]]


def _score_shapes(videos: UInt8[np.ndarray, "B T 64 64 3"], prompts: Sequence[str]) -> dict[str, float]:
    """Share of videos that are right, for each of what the judge looks at, and the median of its PSNR in dB."""
    verdicts = [judge(video, prompt) for video, prompt in zip(videos, prompts, strict=True)]
    looked_at = ("background", "colour", "shape", "direction", "speed", "all")
    shares = {f"score_{name}": float(np.mean([getattr(v, name) for v in verdicts])) for name in looked_at}
    measured = [v.psnr for v in verdicts if np.isfinite(v.psnr)]
    return shares | ({"psnr": float(np.median(measured))} if measured else {})


WORLDS = {
    "shapes": World(
        SIZE, FPS, PROMPT_HINT, random_streams, random_clip, parse, build_tokenizer, _score_shapes
    )
}  # fmt: skip


def find_world(name: str) -> World:
    """The world of that name.

    Raises:
        InputError: there is none.
    """
    if name not in WORLDS:
        raise InputError(f"no world {name!r}; there is {', '.join(WORLDS)}")
    return WORLDS[name]

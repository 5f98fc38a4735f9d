"""Data sets of encoded videos on disk: what the diffusion model is trained on, whatever made them.

A data set is a folder of files `NNNNN.npz`, one a video, with

    latents   float16 [F, C, h, w], normalised; F is a whole number of blocks
    prompts   the prompt of each block
    start     optional, int [N, 2]: row and column of the latent cell where each thing of the video starts

All videos of a folder have one shape.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from tqdm import tqdm

from rfjax.errors import InputError

MAX_THINGS = 2  # things whose start the noise can say


class Video(NamedTuple):
    """One encoded video."""

    latents: Float[np.ndarray, "F C h w"]
    prompts: list[str]
    start: Int[np.ndarray, "N 2"]


class LatentSet(NamedTuple):
    """A data set in memory; -1 in `start` means that nothing is known."""

    latents: Float[np.ndarray, "S F C h w"]
    prompt_ids: Int[np.ndarray, "S blocks"]
    prompts: list[str]  # the different ones
    start: Int[np.ndarray, "S 2 2"]

    def __len__(self) -> int:
        return len(self.latents)


def write(folder: Path, videos: Iterator[Video], count: int) -> None:
    """Adds `count` videos to a data set, each written whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    first = len(list(folder.glob("*.npz")))
    for number in tqdm(range(first, first + count), unit="video", dynamic_ncols=True):
        video = next(videos)
        part = folder / f"{number:05d}.part"
        with part.open("wb") as file:
            np.savez(file, latents=video.latents.astype(np.float16), prompts=np.array(video.prompts), start=video.start)
        part.replace(folder / f"{number:05d}.npz")


def read(folder: Path) -> LatentSet:
    """Reads a data set.

    Raises:
        InputError: there is none, or its videos differ in shape.
    """
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise InputError(f"no encoded videos (*.npz) in {folder}; make them with `rfjax train --stage encode`")
    latents, ids, starts, known = [], [], [], {}
    for file in files:
        with np.load(file) as data:
            latents.append(data["latents"])
            ids.append([known.setdefault(str(p), len(known)) for p in data["prompts"]])
            start = np.full((MAX_THINGS, 2), -1, np.int32)
            if "start" in data:
                start[: len(data["start"])] = data["start"]
            starts.append(start)
    if len({x.shape for x in latents}) > 1:
        raise InputError(f"the videos in {folder} differ in shape: {sorted({x.shape for x in latents})}")
    return LatentSet(np.stack(latents), np.array(ids, np.int32), list(known), np.stack(starts))

"""Data sets of encoded videos on disk: what the diffusion model is trained on, whatever made them.

A data set is a folder of files `*.npz`, one a video, with

    latents   float16 [F, C, h, w], normalised; F is a whole number of blocks
    prompts   text, the prompt of each block
    start     optional, int [N, 2]: row and column of the patch (the DiT's token) where each thing of the video starts

All videos of a folder have one shape.
"""

import zipfile
from collections.abc import Iterator
from itertools import islice
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


def files_of(folder: Path) -> list[Path]:
    """The files of a data set, in order; none where there is no such folder."""
    return sorted(folder.glob("*.npz"))


def write(folder: Path, videos: Iterator[Video], count: int) -> None:
    """Adds up to `count` videos to a data set, each written whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    first = len(files_of(folder))
    with tqdm(total=count, desc=folder.name, unit="video", dynamic_ncols=True, disable=None) as bar:
        for number, video in enumerate(islice(videos, count), first):
            part = folder / f"{number:05d}.part"
            latents, prompts = video.latents.astype(np.float16), np.array(video.prompts)
            with part.open("wb") as file:
                np.savez(file, latents=latents, prompts=prompts, start=video.start)
            part.replace(part.with_suffix(".npz"))
            bar.update()


def read(folder: Path) -> LatentSet:
    """Reads a data set.

    Raises:
        InputError: there is none, a file is not as described above, or the videos differ in shape.
    """
    files = files_of(folder)
    if not files:
        raise InputError(f"no encoded videos (*.npz) in {folder}; `rfjax train --stage encode` makes some")
    videos = [_read_one(file) for file in files]
    shapes = {(video.latents.shape, len(video.prompts)) for video in videos}
    if len(shapes) > 1:
        listed = ", ".join(f"{list(shape)} with {prompts} prompts" for shape, prompts in sorted(shapes))
        raise InputError(f"the videos in {folder} differ in shape: {listed}")
    known: dict[str, int] = {}
    ids = [[known.setdefault(prompt, len(known)) for prompt in video.prompts] for video in videos]
    return LatentSet(
        latents=np.stack([video.latents for video in videos]),
        prompt_ids=np.array(ids, np.int32),
        prompts=list(known),
        start=np.stack([video.start for video in videos]),
    )


def _read_one(file: Path) -> Video:
    """One video; its start has a row for each thing that the noise can say."""
    try:
        with np.load(file) as data:
            latents, prompts = data["latents"], [str(prompt) for prompt in data["prompts"]]
            given = data["start"] if "start" in data else np.empty((0, 2), np.int32)
    except (KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{file} is no encoded video ({error})") from None
    if fault := _fault(latents, prompts, given):
        raise InputError(f"{file} is no encoded video: {fault}")
    start = np.full((MAX_THINGS, 2), -1, np.int32)
    start[: len(given)] = given
    return Video(latents, prompts, start)


def _fault(latents: np.ndarray, prompts: list[str], start: np.ndarray) -> str | None:
    if latents.ndim != 4 or latents.dtype.kind != "f":
        return f"latents are {latents.dtype} {list(latents.shape)}, not floating-point [F, C, h, w]"
    if not np.isfinite(latents).all():
        return "latents are not finite"
    if not prompts or len(latents) % len(prompts):
        return f"{len(prompts)} prompts do not divide {len(latents)} latent frames into blocks"
    if start.dtype.kind != "i" or start.shape[1:] != (2,) or len(start) > MAX_THINGS:
        return f"start is {start.dtype} {list(start.shape)}, not int [N, 2] with N up to {MAX_THINGS}"
    if ((start < 0) | (start >= latents.shape[2:])).any():
        return "start lies outside of the latents"
    return None

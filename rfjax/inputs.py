"""Checks of what a user asks for; each failure is one line that names the value and the fix."""

import logging
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from rfjax.config import ModelConfig
from rfjax.errors import InputError
from rfjax.rolling.noise import MAX_SEED
from rfjax.video import fit, read_image, read_video, to_pixels

logger = logging.getLogger("rfjax")


class Length(NamedTuple):
    """How long a video is; both None for an endless one."""

    blocks: int | None
    pixel_frames: int | None


def check_size(height: int, width: int, config: ModelConfig) -> tuple[int, int]:
    """Latent height and width of a size in pixels.

    Raises:
        InputError: a side is not a positive multiple of the model's stride; the nearest valid size is named.
    """
    multiple = config.spatial_multiple
    for side in (height, width):
        if isinstance(side, bool) or not isinstance(side, int | np.integer):
            raise InputError(f"size {width!r}x{height!r}: width and height must be integers")
    if height <= 0 or width <= 0 or height % multiple or width % multiple:
        nearest = (max(1, round(side / multiple)) * multiple for side in (width, height))
        raise InputError(
            f"size {width}x{height}: width and height must be multiples of {multiple}; "
            f"the nearest valid size is {'x'.join(map(str, nearest))}"
        )
    return height // config.vae.spatial_stride, width // config.vae.spatial_stride


def check_length(num_frames: int | None, num_latent_frames: int | None, config: ModelConfig) -> Length:
    """Blocks to generate for a number of pixel frames or of latent frames.

    The model makes whole blocks; a length that ends inside a block is reached by trimming the last one, and said.

    Raises:
        InputError: both are given, or the number is not a positive integer.
    """
    stride, block = config.vae.temporal_stride, config.rolling.block_frames
    if num_frames is not None and num_latent_frames is not None:
        raise InputError(f"num_frames={num_frames} and num_latent_frames={num_latent_frames}: give one of the two")
    if num_latent_frames is not None:
        latents = _positive("num_latent_frames", num_latent_frames)
        pixel_frames = 1 + stride * (latents - 1)
    elif num_frames is not None:
        pixel_frames = _positive("num_frames", num_frames)
        latents = 1 + -(-(pixel_frames - 1) // stride)
    else:
        return Length(None, None)
    blocks = -(-latents // block)
    whole = 1 + stride * (blocks * block - 1)
    if whole != pixel_frames:
        logger.warning(
            "%d frames end inside a block: %d are generated and the last %d dropped",
            pixel_frames, whole, whole - pixel_frames,
        )  # fmt: skip
    return Length(blocks, pixel_frames)


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InputError(f"{name}={value!r}: the number of frames must be an integer of at least 1")
    return int(value)


def check_prompts(prompt: str | Sequence[str]) -> list[str]:
    """The prompts as a list.

    Raises:
        InputError: not a string or a list of at least one string.
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list | tuple) or not prompts or not all(isinstance(p, str) for p in prompts):
        raise InputError(f"prompt {prompt!r} is neither a string nor a list of at least one string")
    if any(not p.strip() for p in prompts):
        logger.warning("an empty prompt: the video will follow no text")
    return list(prompts)


def check_seeds(seed: int | Sequence[int] | None, batch: int) -> list[int]:
    """One seed for each prompt: the given ones; or seed, seed + 1, ...; or drawn, and printed.

    Raises:
        InputError: the number of seeds is not that of the prompts.
    """
    if seed is None:
        seed = secrets.randbelow(2**32 - batch)
        print(f"rfjax: seed {seed}", file=sys.stderr, flush=True)
    if isinstance(seed, list | tuple):
        if len(seed) != batch:
            raise InputError(f"{len(seed)} seeds for {batch} prompts; give one seed for each, or a single one")
        seeds = list(seed)
    else:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise InputError(f"seed {seed!r} is not an integer from 0 to {MAX_SEED}")
        seeds = [int(seed) + i for i in range(batch)]
    for value in seeds:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= MAX_SEED:
            raise InputError(f"seed {value!r} is not an integer from 0 to {MAX_SEED}")
    return seeds


def refuse_guidance(guidance_scale: float | None, negative_prompt: Any) -> None:
    """A distilled model runs without classifier-free guidance; a scale of 1 says just that and passes.

    Raises:
        InputError: another scale, or a negative prompt, is asked for.
    """
    if guidance_scale is not None and guidance_scale != 1:
        raise InputError(
            f"guidance_scale={guidance_scale}: Rolling Forcing is distilled and has no guidance; leave it out"
        )
    if negative_prompt:
        raise InputError(
            f"negative_prompt={negative_prompt!r}: Rolling Forcing is distilled and takes no negative prompt; "
            "leave it out"
        )


def given_frames(
    image: Any, video: Any, height: int, width: int, config: ModelConfig
) -> UInt8[np.ndarray, "T H W 3"] | None:
    """The clean beginning that a user gives, as the frames of whole blocks; None if there is none.

    An image is held still for the first block. Of a video the last frames that fill whole blocks are taken, since
    what is generated goes on from its end.

    Raises:
        InputError: both are given, the input cannot be read, or a video is shorter than one block.
    """
    if image is not None and video is not None:
        raise InputError("both image and video are given; a stream begins with one of them")
    one_block = config.pixel_frames(1)
    if image is not None:
        if isinstance(image, str | Path):
            frame = read_image(image, height, width)
        else:
            frame = fit(_with_axes(image, "image", 3), height, width)
        return np.repeat(frame[None], one_block, axis=0)
    if video is None:
        return None
    if isinstance(video, str | Path):
        frames = read_video(video, height, width)
    else:
        frames = fit(_with_axes(video, "video", 4), height, width)
    if len(frames) < one_block:
        raise InputError(f"the given video has {len(frames)} frames; at least {one_block} are needed")
    latents = (len(frames) - 1) // config.vae.temporal_stride + 1
    used = config.pixel_frames(latents // config.rolling.block_frames)
    if used < len(frames):
        logger.warning(
            "of the given video's %d frames the last %d are used: they fill whole blocks", len(frames), used
        )
    return frames[-used:]


def _with_axes(value: Any, name: str, axes: int) -> UInt8[np.ndarray, "*T H W 3"]:
    pixels = to_pixels(value)
    if pixels.ndim != axes:
        raise InputError(f"{name} has shape {list(pixels.shape)}; {axes} axes are needed")
    return pixels

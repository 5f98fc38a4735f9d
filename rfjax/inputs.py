"""Checks of what a user asks for; each failure is one line that names the value and the fix."""

import logging
import os
import secrets
import sys
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from rfjax.config import ModelConfig
from rfjax.errors import InputError
from rfjax.rolling.noise import check_seed
from rfjax.video import fit, read_image, read_video, to_pixels

logger = logging.getLogger("rfjax")

MAX_SIDE = 16384  # pixels; far beyond any memory, and far below where arithmetic overflows


class Length(NamedTuple):
    """How long a video is; both None for an endless one."""

    blocks: int | None
    pixel_frames: int | None


def default_size(height: int | None, width: int | None, config: ModelConfig) -> tuple[int, int]:
    """Height and width in pixels; one that is None is the one that the checkpoint was trained at."""
    own_height, own_width = config.default_size
    return own_height if height is None else height, own_width if width is None else width


def warn_of_other_size(height: int, width: int, config: ModelConfig) -> None:
    """Says so where a model that was trained at one size is to run at another."""
    if config.use is not None and (height, width) != config.default_size:
        logger.warning(
            "size %dx%d: this model was trained at %dx%d, at other sizes it may do badly",
            width, height, config.use.width, config.use.height,
        )  # fmt: skip


def check_size(height: int, width: int, config: ModelConfig) -> tuple[int, int]:
    """Latent height and width of a size in pixels.

    Raises:
        InputError: a side is not a positive multiple of the model's stride (the nearest valid size is named), or is
            larger than any video.
    """
    multiple = config.spatial_multiple
    for side in (height, width):
        if isinstance(side, bool) or not isinstance(side, int | np.integer):
            raise InputError(f"size {width!r}x{height!r}: width and height must be integers")
    if max(height, width) > MAX_SIDE:
        raise InputError(f"size {width}x{height}: a side has at most {MAX_SIDE} pixels")
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
        latents = check_count("num_latent_frames", num_latent_frames, "frames")
        pixel_frames = 1 + stride * (latents - 1)
    elif num_frames is not None:
        pixel_frames = check_count("num_frames", num_frames, "frames")
        latents = 1 + -(-(pixel_frames - 1) // stride)
    else:
        return Length(None, None)
    blocks = -(-latents // block)
    whole = config.pixel_frames(blocks)
    if whole != pixel_frames:
        logger.warning(
            "a length of %s ends inside a block: %d are generated and the last %d dropped",
            counted(pixel_frames, "frame"), whole, whole - pixel_frames,
        )  # fmt: skip
    return Length(blocks, pixel_frames)


def check_count(name: str, value: Any, things: str) -> int:
    """The value of an argument that counts something.

    Raises:
        InputError: it is not an integer of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InputError(f"{name}={value!r}: the number of {things} must be an integer of at least 1")
    return int(value)


def check_prompts(prompt: str | Sequence[str]) -> list[str]:
    """The prompts as a list.

    Raises:
        InputError: not a string or a list of at least one string, or not text that a file could hold.
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list | tuple) or not prompts or not all(isinstance(p, str) for p in prompts):
        raise InputError(f"prompt {prompt!r} is neither a string nor a list of at least one string")
    if any("\0" in p or p != p.encode(errors="replace").decode() for p in prompts):
        raise InputError(f"prompt {prompt!r:.200} holds NUL or is not UTF-8 text; take such characters out")
    if any(not p.strip() for p in prompts):
        logger.warning("an empty prompt: the video will follow no text")
    return list(prompts)


def check_seeds(seed: int | Sequence[int] | None, batch: int) -> list[int]:
    """One seed for each prompt: the given ones; or seed, seed + 1, ...; or drawn, and printed.

    Raises:
        InputError: a seed is not an integer in 0 .. 2**64 - 1, or there are not as many as prompts.
    """
    if seed is None:
        seed = secrets.randbelow(2**32 - batch)
        print(f"rfjax: seed {seed}", file=sys.stderr, flush=True)
    if not isinstance(seed, list | tuple):
        return [check_seed(check_seed(seed) + i) for i in range(batch)]
    if len(seed) != batch:
        raise InputError(
            f"{counted(len(seed), 'seed')} for {counted(batch, 'prompt')}; give one for each, or one for all"
        )
    return [check_seed(value) for value in seed]


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
        frames = read_video(video, height, width, fps=config.fps)
    else:
        frames = fit(_with_axes(video, "video", 4), height, width)
    if len(frames) < one_block:
        raise InputError(f"the given video has {counted(len(frames), 'frame')}; at least {one_block} are needed")
    used = config.pixel_frames(config.whole_blocks(len(frames)))
    if used < len(frames):
        logger.warning(
            "of the given video's %d frames the last %d are used: they fill whole blocks", len(frames), used
        )
    return frames[-used:]


def _with_axes(value: Any, name: str, axes: int) -> UInt8[np.ndarray, "*T H W 3"]:
    try:
        pixels = to_pixels(value)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    except (TypeError, ValueError):  # lists of unequal lengths
        raise InputError(f"{name} is no array; one of {axes} axes is needed, all frames of one size") from None
    if pixels.ndim != axes:
        raise InputError(f"{name} has shape {list(pixels.shape)}; {axes} axes are needed, the same for every prompt")
    return pixels


def check_path(path: Any, what: str) -> Path:
    """The path of something.

    Raises:
        InputError: it is no path, or empty.
    """
    if not isinstance(path, str | PathLike) or not os.fspath(path):
        raise InputError(f"path {path!r} of {what}: give the name of a file or folder")
    return Path(path)


def counted(n: int, noun: str) -> str:
    """ "1 frame", "2 frames"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"

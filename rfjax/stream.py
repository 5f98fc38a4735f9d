"""One running video: a long-lived session that owns all of its state and yields finished blocks."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, UInt8

from rfjax.dit.model import TextKV
from rfjax.engine import Pixels, Shape
from rfjax.errors import InputError
from rfjax.inputs import check_prompts
from rfjax.rolling.noise import NoiseFn
from rfjax.rolling.plan import Roll, StepPlan, plan_step
from rfjax.rolling.step import RollingState

if TYPE_CHECKING:
    from rfjax.pipeline import RollingForcingPipeline

logger = logging.getLogger("rfjax")


class StreamState(NamedTuple):
    """Everything a stream is, as one pytree; `rfjax.snapshot` writes it to a file and reads it back."""

    rolling: RollingState
    text_kv: TextKV
    decoder: Any  # None before the first block is decoded
    step: np.ndarray  # int64 scalar: the step that runs next
    given: np.ndarray  # float32 [B, k, f, C, H, W]: latents of the conditioned blocks


class Course(NamedTuple):
    """What the streams of a batch are to do, but for their prompts."""

    roll: Roll
    noises: list[NoiseFn]
    seeds: list[int] | None  # None with a noise function
    given: Float[np.ndarray, "B k f C h w"]  # latents of the conditioned blocks


@dataclass(frozen=True, kw_only=True)
class ChunkTimings:
    """Seconds of wall time spent on one chunk."""

    denoise: float  # rolling steps, noise and plans included
    decode: float

    @property
    def total(self) -> float:
        return self.denoise + self.decode


class Chunk:
    """One finished block. Pixels are copied from the device when they are first looked at.

    Attributes:
        index: number of the block, from 0.
        first_frame: number of the chunk's first pixel frame in the video.
        latents: float32 [frames, 16, h, w], with a leading batch axis for a list of prompts.
        prompt: the prompt (or list of them) that the finishing step saw.
        timings: seconds.
    """

    def __init__(
        self,
        index: int,
        first_frame: int,
        latents: np.ndarray,
        pixels: Pixels | None,
        prompt: str | list[str],
        timings: ChunkTimings,
        n_frames: int,
        row: int = 0,
    ):
        self.index, self.first_frame, self.latents = index, first_frame, latents
        self.prompt, self.timings, self.n_frames = prompt, timings, n_frames
        self._pixels, self._row = pixels, row

    def __repr__(self) -> str:
        last = self.first_frame + self.n_frames - 1
        return f"<{type(self).__name__} {self.index}: frames {self.first_frame} to {last}, prompt {self.prompt!r:.60}>"

    @cached_property
    def frames(self) -> UInt8[np.ndarray, "*B T H W 3"]:
        """Pixel frames, 0 .. 255; with a leading batch axis for a list of prompts."""
        return self._host("uint8")

    @cached_property
    def frames_float(self) -> Float[np.ndarray, "*B T H W 3"]:
        """Pixel frames, 0 .. 1, without the rounding to 8 bits."""
        return np.clip(self._host("unit") * 0.5 + 0.5, 0.0, 1.0)

    def _host(self, form: str) -> np.ndarray:
        if self._pixels is None:
            raise InputError("this stream gives latents only; open it with decode=True for frames")
        frames = np.asarray(getattr(self._pixels, form))[:, : self.n_frames]
        return frames[self._row] if isinstance(self.prompt, str) else frames


class VideoStream:
    """Iterates over the blocks of a video as they are finished; a context manager.

    Made by `RollingForcingPipeline.stream` and `.resume`. Nothing is computed ahead: each `next` runs the steps that
    finish one block. Two streams of one pipeline share nothing but weights.
    """

    def __init__(
        self,
        pipeline: "RollingForcingPipeline",
        *,
        prompt: str | list[str],
        state: StreamState,
        shape: Shape,
        roll: Roll,
        noises: Sequence[NoiseFn],
        total_frames: int | None,
        metadata: Mapping[str, Any],
        decode: bool = True,
        next_block: int = 0,
    ):
        self._pipeline, self._engine, self._shape = pipeline, pipeline.engine, shape
        self._run = self._engine.executables(shape)
        self._state: StreamState | None = state
        self._prompt, self._roll, self._noises, self._decode = prompt, roll, noises, decode
        self._next_block, self.total_frames = next_block, total_frames
        self.metadata = MappingProxyType(dict(metadata))  # read-only: a saved stream has it too

    def __repr__(self) -> str:
        size, total = f"{self.width}x{self.height}", self.total_frames
        state = " closed" if self._state is None else ""
        frames = f"frame {self.frames_done} of {'an endless video' if total is None else total}"
        return f"<{type(self).__name__}{state} {size}, {frames}, prompt {self._prompt!r:.60}>"

    @property
    def prompt(self) -> str | list[str]:
        """The prompt that the next step will see."""
        return self._prompt

    @property
    def seed(self) -> int | list[int] | None:
        """What to pass to get the same video again; None if it ran on a noise function."""
        return self.metadata["seed"]

    @property
    def height(self) -> int:
        """Pixels."""
        return self._shape.latent_height * self._engine.config.vae.spatial_stride

    @property
    def width(self) -> int:
        """Pixels."""
        return self._shape.latent_width * self._engine.config.vae.spatial_stride

    @property
    def frames_done(self) -> int:
        """Pixel frames yielded so far."""
        return self._limit(self._engine.config.pixel_frames(self._next_block))

    def __enter__(self) -> "VideoStream":
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the stream's caches; after that only `seed`, `prompt` and the frame counters remain."""
        self._state = None

    def __iter__(self) -> "VideoStream":
        return self

    def __next__(self) -> Chunk:
        self._require_open()
        block = self._next_block
        if self.finished:
            raise StopIteration
        start = time.perf_counter()
        latents = self._require_open().given[:, block] if block < self._roll.first else self._finish_block(block)
        denoised = time.perf_counter()
        pixels = self._decode_block(latents) if self._decode else None
        decoded = time.perf_counter()

        first_frame = self._engine.config.pixel_frames(block)
        self._next_block += 1
        return Chunk(
            index=block,
            first_frame=first_frame,
            latents=latents[0] if isinstance(self._prompt, str) else latents,
            pixels=pixels,
            prompt=self._prompt if isinstance(self._prompt, str) else list(self._prompt),
            timings=ChunkTimings(denoise=denoised - start, decode=decoded - denoised),
            n_frames=self._limit(self._engine.config.pixel_frames(block + 1)) - first_frame,
        )

    def set_prompt(self, prompt: str | list[str]) -> int:
        """Changes the prompt; it acts from the next step on.

        Args:
            prompt: of the same kind as the stream's: a string, or as many strings as the stream has prompts.

        Returns:
            The number of the first pixel frame in which the change can show. Blocks that are still in the window
            turn to the new prompt by as many steps as they have left, so the change comes in over a few blocks.

        Raises:
            InputError: the stream is closed or finished, or the prompt is of the wrong kind.
        """
        state = self._require_open()
        if self.finished:
            raise InputError(f"the stream has made all of its {self.total_frames} frames; a new prompt shows in none")
        prompts = check_prompts(prompt)
        if isinstance(prompt, str) != isinstance(self._prompt, str) or len(prompts) != self._shape.batch:
            wanted = "a string" if isinstance(self._prompt, str) else f"a list of {self._shape.batch} strings"
            raise InputError(f"prompt {prompt!r} does not fit this stream; it takes {wanted}")
        self._state = state._replace(text_kv=self._pipeline.text_kv(prompts, self._shape))
        self._prompt = prompt if isinstance(prompt, str) else prompts
        first = self._engine.config.pixel_frames(max(self._next_block, self._roll.first))
        logger.info("the new prompt can show from frame %d on", first)
        return first

    def save(self, path: str | Path) -> None:
        """Writes the stream to one file; `RollingForcingPipeline.resume` continues it bit for bit.

        Raises:
            InputError: the stream is closed, or the file cannot be written.
        """
        from rfjax.snapshot import save_snapshot

        details = {
            **self.metadata,
            "prompt": self._prompt,
            "shape": list(self._shape),
            "roll": list(self._roll),
            "total_frames": self.total_frames,
            "decode": self._decode,
            "next_block": self._next_block,
        }
        save_snapshot(path, self._require_open(), details, self._pipeline)

    @property
    def finished(self) -> bool:
        """Whether the last block of a video of fixed length has been yielded."""
        return self._roll.last is not None and self._next_block > self._roll.last

    def _require_open(self) -> StreamState:
        if self._state is None:
            raise InputError("this stream is closed; open a new one, or `resume` one that was saved")
        return self._state

    def _finish_block(self, block: int) -> Float[np.ndarray, "B f C h w"]:
        """Runs steps until `block` is final."""
        window = self._engine.config.rolling.window_blocks
        while True:
            state = self._require_open()
            step = int(state.step)
            self._step(state, step)
            if self._roll.finished_block(step, window) == block:
                return self._engine.finished(self._require_open().rolling, self._shape)

    def _step(self, state: StreamState, step: int) -> None:
        config, roll = self._engine.config, self._roll
        plan = plan_step(step, roll, config.rolling, config.dit.head_dim, config.dit.rope_theta)
        draws = self._engine.no_draws(self._shape)
        for row, noise in enumerate(self._noises):
            draw_window(draws[row], step, roll, noise, state.given[row])
        self._state = None  # the step takes the caches over: interrupted, it leaves no stream behind
        plan = StepPlan.of_rows([plan] * self._shape.batch)
        rolling = self._engine.step(self._shape, state.rolling, state.text_kv, plan, draws)
        self._state = state._replace(rolling=rolling, step=np.array(step + 1))

    def _decode_block(self, latents: Float[np.ndarray, "B f C h w"]) -> Pixels:
        state = self._require_open()
        params = self._engine.params["vae"]
        self._state = None  # as in `_step`
        if state.decoder is None:
            pixels, decoder = self._run.decode_first(params, latents)
        else:
            pixels, decoder = self._run.decode_next(params, latents, state.decoder)
        self._state = state._replace(decoder=decoder)
        return jax.block_until_ready(pixels)

    def _limit(self, frames: int) -> int:
        return frames if self.total_frames is None else min(frames, self.total_frames)


def draw_window(
    draws: Float[np.ndarray, "W f C h w"],
    step: int,
    roll: Roll,
    noise: NoiseFn,
    given: Float[np.ndarray, "k f C h w"],
) -> None:
    """Fills in what one stream's step takes in: the noise of each place, or at the front a given block."""
    window = len(draws)
    if roll.takes_given(step):
        draws[0] = given[step - 1]
    for place in range(window):
        block = step - window + 1 + place
        if block >= roll.first and (roll.last is None or block <= roll.last):
            draws[place] = noise(block, window - 1 - place)


BlockCallback = Callable[["RollingForcingPipeline", int, Chunk], None]

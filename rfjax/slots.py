"""Streams that come and go in one batch: every step of the model serves all of them, each at a step of its own.

What a stream computes does not depend on who else is there. A slot that is taken over needs no clearing: a fresh
stream's first block enters as pure noise, and its plan names no key that it has not written.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float

from rfjax.dit.model import TextKV
from rfjax.engine import Pixels, Shape
from rfjax.errors import InputError
from rfjax.inputs import check_length, check_prompts
from rfjax.rolling.noise import NoiseFn
from rfjax.rolling.plan import Roll, StepPlan, plan_step
from rfjax.rolling.step import RollingState
from rfjax.stream import Chunk, ChunkTimings, Course, draw_window

if TYPE_CHECKING:
    from rfjax.pipeline import RollingForcingPipeline

_IDLE = Roll(0, 0)  # what an empty slot does, for nobody


class SlotStream:
    """One stream in a slot of `Slots`; made by `Slots.join`.

    Attributes:
        slot: its number.
        prompt: the text that the next step will see.
        seed: what to pass to get the same video again; None if it runs on a noise function.
        total_frames: pixel frames of the whole video; None is endless.
    """

    def __init__(
        self,
        slots: "Slots",
        slot: int,
        prompt: str,
        course: Course,
        total_frames: int | None,
    ):
        self._slots, self.slot, self.prompt, self.total_frames = slots, slot, prompt, total_frames
        self.seed = course.seeds[0] if course.seeds else None
        self._roll, self._noise, self._given = course.roll, course.noises[0], course.given[0]
        self._step, self._next_block = course.roll.first_step, 0

    def __repr__(self) -> str:
        state = f"slot {self.slot}" if self.running else "left"
        return f"<{type(self).__name__} {state}, frame {self.frames_done}, prompt {self.prompt!r:.60}>"

    @property
    def running(self) -> bool:
        """Whether it is still in its slot: it has not left, nor made all of its frames."""
        return self._slots._streams[self.slot] is self

    @property
    def frames_done(self) -> int:
        """Pixel frames given so far."""
        return self._limit(self._next_block)

    def set_prompt(self, prompt: str) -> None:
        """Changes the prompt; it acts from the next step on.

        Raises:
            InputError: the stream is no longer running, or the prompt is no text.
        """
        (text,) = check_prompts(self._slots._one(prompt))
        if not self.running:
            raise InputError(f"prompt {text!r:.60}: this stream has left its slot; join again")
        self._slots._say(self.slot, text)
        self.prompt = text

    def leave(self) -> None:
        """Frees the slot; after that, nothing more comes."""
        if self.running:
            self._slots._streams[self.slot] = None

    def _limit(self, blocks: int) -> int:
        frames = self._slots._pipeline.config.pixel_frames(blocks)
        return frames if self.total_frames is None else min(frames, self.total_frames)

    def _due(self, window: int) -> int | None:
        """The block that is there after this step. Given ones, too, come at the step that would finish them."""
        block = self._step - window + 1
        return block if block >= 0 else None

    def _chunk(self, block: int, latents: np.ndarray, pixels: Pixels, timings: ChunkTimings) -> Chunk:
        first, last = self._limit(block), self._limit(block + 1)
        self._next_block = block + 1
        if block == self._roll.last:
            self.leave()
        return Chunk(
            index=block, first_frame=first, latents=latents[self.slot], pixels=pixels, prompt=self.prompt,
            timings=timings, n_frames=last - first, row=self.slot,
        )  # fmt: skip


class _State(NamedTuple):
    rolling: RollingState
    text_kv: TextKV
    decoder: Any  # None before the first block of all is decoded


class Slots:
    """A batch of a fixed size, whose streams join and leave between any two steps; a context manager.

    Made by `RollingForcingPipeline.slots`, which compiles all that it needs: no stream that joins, leaves or changes
    its prompt compiles anything. Every step costs what the full batch costs, and the decoding of a stream's first
    block is one more decoding for all.
    """

    def __init__(self, pipeline: "RollingForcingPipeline", shape: Shape):
        self._pipeline, self._engine, self._shape = pipeline, pipeline.engine, shape
        self._run = self._engine.executables(shape)
        self._merge = self._engine.merge_decoders(shape)
        dit = pipeline.config.dit
        self._contexts = np.zeros((shape.batch, dit.text_len, dit.text_dim), np.float32)
        self._streams: list[SlotStream | None] = [None] * shape.batch
        kv = self._engine.text_kv(self._contexts, shape)
        self._state: _State | None = _State(self._engine.init_state(shape), kv, None)

    def __repr__(self) -> str:
        state = " closed" if self._state is None else ""
        return f"<{type(self).__name__}{state}, {len(self.streams)} of {len(self)} taken>"

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def streams(self) -> list[SlotStream]:
        """Those that are running, in the order of their slots."""
        return [stream for stream in self._streams if stream is not None]

    def __enter__(self) -> "Slots":
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the caches; all streams have then left."""
        self._state, self._streams = None, [None] * len(self)

    def join(
        self,
        prompt: str,
        num_frames: int | None = None,
        seed: int | None = None,
        image: Any = None,
        video: Any = None,
        noise: NoiseFn | None = None,
        *,
        num_latent_frames: int | None = None,
    ) -> SlotStream:
        """Starts a stream in a free slot. Its first chunk comes with the fifth `step` from now.

        Args:
            prompt, num_frames, seed, image, video, noise, num_latent_frames: as in `RollingForcingPipeline.stream`.

        Raises:
            InputError: an argument is not valid, or no slot is free.
        """
        self._require_open()
        if None not in self._streams:
            raise InputError(f"all {len(self)} slots are taken; wait for a stream to end, or let one leave")
        slot, pipe = self._streams.index(None), self._pipeline
        (text,) = check_prompts(self._one(prompt))
        length = check_length(num_frames, num_latent_frames, pipe.config)
        course = pipe.course(self._shape._replace(batch=1), length, seed, image, video, noise)
        self._say(slot, text)
        self._streams[slot] = stream = SlotStream(self, slot, text, course, length.pixel_frames)
        return stream

    def step(self) -> list[tuple[SlotStream, Chunk]]:
        """Runs one step for all streams.

        Returns:
            The chunks that came of it, one of each stream that has been there for five steps, with their streams; a
            stream whose last chunk this is has left.

        Raises:
            InputError: it is closed, or no stream is there.
        """
        state, start = self._require_open(), time.perf_counter()
        if not self.streams:
            raise InputError("no stream is there; let one join first")
        window = self._pipeline.config.rolling.window_blocks
        plan, draws = self._inputs()
        self._state = None  # the step takes the caches over: interrupted, it leaves no streams behind
        rolling = self._engine.step(self._shape, state.rolling, state.text_kv, plan, draws)
        due = {stream: stream._due(window) for stream in self.streams}
        latents = self._latents(rolling, due)
        denoised = time.perf_counter()
        pixels, decoder = self._decode(latents, state.decoder, due)
        timings = ChunkTimings(denoise=denoised - start, decode=time.perf_counter() - denoised)
        self._state = _State(rolling, state.text_kv, decoder)
        for stream in due:
            stream._step += 1
        return [
            (stream, stream._chunk(block, latents, pixels[block == 0], timings))
            for stream, block in due.items()
            if block is not None
        ]

    def _inputs(self) -> tuple[StepPlan, Float[np.ndarray, "B W f C h w"]]:
        config = self._pipeline.config
        dit, rolling = config.dit, config.rolling
        draws, plans = self._engine.no_draws(self._shape), []
        for slot, stream in enumerate(self._streams):
            step, roll = (0, _IDLE) if stream is None else (stream._step, stream._roll)
            plans.append(plan_step(step, roll, rolling, dit.head_dim, dit.rope_theta))
            if stream is not None:
                draw_window(draws[slot], step, roll, stream._noise, stream._given)
        return StepPlan.of_rows(plans), draws

    def _latents(self, rolling: RollingState, due: dict[SlotStream, int | None]) -> Float[np.ndarray, "B f C h w"]:
        latents = self._engine.finished(rolling, self._shape)
        for stream, block in due.items():
            if block is not None and block < stream._roll.first:
                latents[stream.slot] = stream._given[block]
        return latents

    def _decode(
        self, latents: np.ndarray, decoder: Any, due: dict[SlotStream, int | None]
    ) -> tuple[dict[bool, Any], Any]:
        """Pixels of those whose first block this is (True) and of the others (False), and the decoder's new state."""
        params, pixels = self._engine.params["vae"], {}
        first: Bool[np.ndarray, " B"] = np.zeros(len(self), bool)
        first[[stream.slot for stream, block in due.items() if block == 0]] = True
        if decoder is not None and any(due.values()):
            pixels[False], decoder = self._run.decode_next(params, latents, decoder)
        if first.any():
            pixels[True], begun = self._run.decode_first(params, latents)
            decoder = begun if decoder is None else self._merge(decoder, begun, first)
        return jax.block_until_ready(pixels), decoder

    def _say(self, slot: int, prompt: str) -> None:
        state = self._require_open()
        contexts = self._contexts.copy()
        contexts[slot] = self._pipeline.text_features([prompt])[0]
        self._state = state._replace(text_kv=self._engine.text_kv(contexts, self._shape))
        self._contexts = contexts

    def _require_open(self) -> _State:
        if self._state is None:
            raise InputError("these slots are closed; open new ones")
        return self._state

    @staticmethod
    def _one(prompt: str | Sequence[str]) -> str:
        if not isinstance(prompt, str):
            raise InputError(f"prompt {prompt!r:.60} is no text; a slot has one prompt")
        return prompt

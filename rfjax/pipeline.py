"""`RollingForcingPipeline`: text to streamed video."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float, UInt8

from rfjax.config import ModelConfig
from rfjax.dit.model import TextKV
from rfjax.engine import EIGHT_BITS, Engine, Shape
from rfjax.errors import InputError
from rfjax.inputs import (
    Length,
    check_count,
    check_length,
    check_path,
    check_prompts,
    check_seeds,
    check_size,
    counted,
    default_size,
    given_frames,
    refuse_guidance,
    warn_of_other_size,
)
from rfjax.parallel.mesh import WHOLE, HostLayout, Layout
from rfjax.rolling.noise import NoiseFn, checked_noise, counter_noise
from rfjax.rolling.plan import Roll
from rfjax.slots import Slots
from rfjax.stream import BlockCallback, Chunk, Course, StreamState, VideoStream
from rfjax.text import Tokenizer

logger = logging.getLogger("rfjax")

DTYPES = ("float32", "bfloat16")
CACHE_DTYPES = (*DTYPES, *map(str, EIGHT_BITS))
LISTED_WORDS = 100  # a smaller vocabulary is told in full to who writes other words


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds of wall time of one call. Compilation, where it was needed, is in `setup` alone."""

    setup: float  # checks, compilation, text and conditioning
    first_frame: float  # from the call to the first chunk's pixels
    denoise: float
    decode: float
    total: float


@dataclass(frozen=True, kw_only=True)
class PipelineOutput:
    """What a call gives.

    Attributes:
        frames: one entry a prompt. "np": float32 [T, H, W, 3] in 0 .. 1; "pil": a list of images; "latent":
            float32 [F, 16, h, w], normalised.
        seed: what to pass to get the same video again; None with a noise function.
        timings: seconds.
    """

    frames: list[Any]
    seed: int | list[int] | None
    timings: Timings


class RollingForcingPipeline:
    """Text (and optionally an image or a video) to video, block by block.

    Rolling Forcing: a window of five blocks at rising noise is denoised jointly while a sink block and recent clean
    blocks, kept in a cache, hold the scene together. The output has no length limit.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        self.engine, self.tokenizer = engine, tokenizer
        self._kept_features: dict[str, Float[np.ndarray, "S text_dim"]] = {}  # of prompts, once the encoder is gone

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: str = "bfloat16",
        mesh: jax.sharding.Mesh | None = None,
        *,
        text_dtype: str | None = None,
        vae_encode_dtype: str = "float32",
        cache_cut: str = "both",
        cache_dtype: str | None = None,
        text_encoder: str = "device",
    ) -> "RollingForcingPipeline":
        """Loads a checkpoint.

        Args:
            path: the directory that `rfjax convert` or `save` wrote; or, if there is none, the name of a checkpoint
                that comes with rfjax, such as "shapes-tiny".
            dtype: of matmuls, activations and caches, "float32" or "bfloat16". Norms, softmax, modulation and both
                ends of the DiT are float32 always.
            mesh: devices that share the work, from `rfjax.make_mesh`: each holds the weights whole, and its part of
                everything else. None is the default device.
            text_dtype: of the text encoder; None is `dtype`.
            vae_encode_dtype: of the VAE encoder. bfloat16 here is known to harm what is conditioned on it.
            cache_cut: "both": the devices of a mesh share the cache along "head" and "seq". "head": each device along
                "seq" has a copy, and a step gathers less.
            cache_dtype: of the cache; None is `dtype`. "float8_e4m3fn" and "float8_e5m2" halve what bfloat16 takes, at
                a loss (docs/parallelism.md), and not with the NKI kernels.
            text_encoder: "device", whole on each device of the mesh; or "host", on the CPU, where a prompt takes
                longer and the accelerator's memory is free. `drop_text_encoder` frees it altogether.

        Raises:
            InputError: the checkpoint is missing, broken or of another kind, a dtype is unknown, or the model's heads
                do not divide among the mesh's devices.
        """
        from rfjax.weights.bundled import find_checkpoint
        from rfjax.weights.parts import load_parts
        from rfjax.weights.store import check_files, load_config

        path = find_checkpoint(check_path(path, "the checkpoint"))
        text_dtype = dtype if text_dtype is None else text_dtype
        for name in (dtype, text_dtype, vae_encode_dtype):
            if name not in DTYPES:
                raise InputError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
        if cache_dtype not in (None, *CACHE_DTYPES):
            raise InputError(f"cache_dtype {cache_dtype!r} is not one of {', '.join(CACHE_DTYPES)}")
        if text_encoder not in ("device", "host"):
            raise InputError(f"text_encoder {text_encoder!r} is not one of device, host")
        layout = Layout(mesh, cache_cut)
        text_layout = HostLayout() if text_encoder == "host" else layout
        layout.check_model(load_config(path))
        config, graphs, params = load_parts(
            path,
            dtypes={"dit": dtype, "vae": dtype, "text": text_dtype, "vae_encoder": vae_encode_dtype},
            sharding=layout.sharding(WHOLE),
            text_sharding=text_layout.sharding(WHOLE),
        )
        check_files(path, "tokenizer")
        tokenizer = Tokenizer.from_dir(path / "tokenizer")
        if tokenizer.vocab_size > config.text.vocab_size:
            raise InputError(
                f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the text encoder {config.text.vocab_size}; "
                "these files are of different models"
            )
        return cls(Engine(config, graphs, params, dtype, layout, cache_dtype, text_layout), tokenizer)

    def __repr__(self) -> str:
        dit = self.config.dit
        return f"<{type(self).__name__} of width {dit.dim}, {dit.num_layers} layers, {self.engine.dtype}>"

    @property
    def config(self) -> ModelConfig:
        return self.engine.config

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Writes the pipeline as a checkpoint that `from_pretrained` reads; `overwrite` replaces one at `path`.

        Raises:
            InputError: `path` exists or cannot be written.
        """
        from rfjax.weights.store import save

        if "text" not in self.engine.params:
            raise InputError(
                "the text encoder was dropped; a checkpoint needs it, so load the pipeline again to save it"
            )
        target, source = check_path(path, "the checkpoint"), {"source": "pipeline"}
        save(target, self.config, self.engine.params, self.tokenizer.directory, source, overwrite=overwrite)

    def warmup(self, height: int | None = None, width: int | None = None, batch: int = 1) -> None:
        """Compiles all that a stream of this size needs, so that the first frame does not wait for it.

        Args:
            height, width: as in `stream`.
            batch: number of prompts.

        Raises:
            InputError: the size or the batch is not valid.
        """
        batch = check_count("batch", batch, "prompts")
        height, width = default_size(height, width, self.config)
        self.engine.executables(Shape(batch, *check_size(height, width, self.config)))

    def __call__(
        self,
        prompt: str | Sequence[str],
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        seed: int | Sequence[int] | None = None,
        output_type: Literal["np", "pil", "latent"] = "np",
        image: Any = None,
        video: Any = None,
        noise: NoiseFn | None = None,
        callback_on_block_end: BlockCallback | None = None,
        *,
        num_latent_frames: int | None = None,
        guidance_scale: float | None = None,
        negative_prompt: str | None = None,
    ) -> PipelineOutput:
        """Generates whole videos.

        Args:
            prompt: one text, or a list for a batch.
            num_frames: pixel frames of each video; 81 unless `num_latent_frames` is given.
            height, width: see `stream`.
            seed: of the noise; in a batch item i takes seed + i, so that it equals a run of its own, or item i of
                a list. None draws one, prints and returns it.
            output_type: "np", "pil" or "latent".
            image, video: clean beginning, see `stream`.
            noise: see `stream`.
            callback_on_block_end: called as (pipeline, block index, chunk) when a block is finished.
            num_latent_frames: the length in latent frames instead.
            guidance_scale, negative_prompt: refused; a distilled model has neither.

        Raises:
            InputError: an argument is not valid.
        """
        start = time.perf_counter()
        if output_type not in ("np", "pil", "latent"):
            raise InputError(f"output_type {output_type!r} is not one of np, pil, latent")
        if callback_on_block_end is not None and not callable(callback_on_block_end):
            raise InputError(f"callback_on_block_end {callback_on_block_end!r:.60} is no function")
        if num_frames is None and num_latent_frames is None:
            num_frames = 81
        chunks: list[Chunk] = []
        with self.stream(
            prompt, num_frames, height, width, seed, image, video, noise,
            num_latent_frames=num_latent_frames, guidance_scale=guidance_scale, negative_prompt=negative_prompt,
            decode=output_type != "latent",
        ) as stream:  # fmt: skip
            setup = first_frame = time.perf_counter() - start
            for chunk in stream:
                if not chunks:
                    first_frame = time.perf_counter() - start
                chunks.append(chunk)
                if callback_on_block_end is not None:
                    callback_on_block_end(self, chunk.index, chunk)
        videos = _join(chunks, output_type)
        frames = [videos] if isinstance(prompt, str) else list(videos)
        if output_type == "latent" and num_latent_frames is not None:
            frames = [latents[:num_latent_frames] for latents in frames]
        if output_type == "pil":
            frames = [_to_pil(video) for video in frames]
        timings = Timings(
            setup=setup,
            first_frame=first_frame,
            denoise=sum(chunk.timings.denoise for chunk in chunks),
            decode=sum(chunk.timings.decode for chunk in chunks),
            total=time.perf_counter() - start,
        )
        return PipelineOutput(frames=frames, seed=stream.seed, timings=timings)

    def stream(
        self,
        prompt: str | Sequence[str],
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        seed: int | Sequence[int] | None = None,
        image: Any = None,
        video: Any = None,
        noise: NoiseFn | None = None,
        *,
        num_latent_frames: int | None = None,
        guidance_scale: float | None = None,
        negative_prompt: str | None = None,
        decode: bool = True,
    ) -> VideoStream:
        """Opens a stream; iterate it for chunks of frames as they are finished.

        Args:
            prompt: one text, or a list for a batch of streams that run in step.
            num_frames: pixel frames; None (and no `num_latent_frames`) is endless.
            height, width: pixels, multiples of 16; None is the checkpoint's own, which is 480 x 832 unless it says
                (`config.use`) at which it was trained.
            seed: as in `__call__`.
            image: a clean beginning, path, PIL image or array [H, W, 3] (uint8, or float 0 .. 1). It is held still
                for the 9 frames of the first block: the cache works in whole blocks, and a block of one clean
                frame and two invented ones would not be clean.
            video: likewise a path or array [T, H, W, 3], at least 9 frames; those that fill whole blocks, counted
                from its end, become the first blocks.
            noise: `(block, step) -> float32 [3, 16, h, w]`, used instead of the seed's: step 0 is the initial noise
                of the block, steps 1 .. 4 the re-noising before its next denoising steps.
            num_latent_frames, guidance_scale, negative_prompt: as in `__call__`.
            decode: False skips the VAE; chunks then have latents only.

        Given frames are part of the video: they come first and count in `num_frames`.

        Raises:
            InputError: an argument is not valid.
        """
        refuse_guidance(guidance_scale, negative_prompt)
        prompts = check_prompts(prompt)
        height, width = default_size(height, width, self.config)
        size = check_size(height, width, self.config)
        shape = Shape(len(prompts), *size)
        self.engine.layout.check_cut(self.config, *shape)
        length = check_length(num_frames, num_latent_frames, self.config)
        course = self.course(shape, length, seed, image, video, noise)
        warn_of_other_size(height, width, self.config)
        single, seeds = isinstance(prompt, str), course.seeds
        state = StreamState(
            rolling=self.engine.init_state(shape),
            text_kv=self.text_kv(prompts, shape),
            decoder=None,
            step=np.array(course.roll.first_step),
            given=course.given,
        )
        return VideoStream(
            self,
            prompt=prompts[0] if single else prompts,
            state=state,
            shape=shape,
            roll=course.roll,
            noises=course.noises,
            total_frames=length.pixel_frames,
            metadata={"seed": seeds[0] if single and seeds else seeds, "custom_noise": noise is not None},
            decode=decode,
        )

    def slots(self, count: int, height: int | None = None, width: int | None = None) -> Slots:
        """Opens a batch whose streams join and leave while it runs, and compiles all that it needs.

        Args:
            count: streams that can be there at once.
            height, width: of all of them, as in `stream`.

        Raises:
            InputError: the size or the count is not valid.
        """
        count = check_count("count", count, "slots")
        height, width = default_size(height, width, self.config)
        warn_of_other_size(height, width, self.config)
        return Slots(self, Shape(count, *check_size(height, width, self.config)))

    def resume(self, path: str | Path, noise: NoiseFn | None = None) -> VideoStream:
        """Continues a stream that `VideoStream.save` wrote, bit for bit.

        Args:
            path: the file.
            noise: needed if, and only if, the stream ran on a noise function of its own.

        Raises:
            InputError: the file is missing, broken or of another model, or `noise` does not fit.
        """
        from rfjax.snapshot import load_snapshot

        details, state = load_snapshot(path, self)
        on_device = self.engine.place_stream(state.rolling, state.text_kv, state.decoder)
        state = StreamState(*on_device, step=state.step, given=state.given)
        shape, roll = Shape(*details["shape"]), Roll(*details["roll"])
        if details["custom_noise"] != (noise is not None):
            had = "a noise function of its own; pass it" if noise is None else "seeded noise; pass no noise function"
            raise InputError(f"{path}: this stream ran on {had}")
        return VideoStream(
            self,
            prompt=details["prompt"],
            state=state,
            shape=shape,
            roll=roll,
            noises=self._noises(noise, details["seed"], shape)[0],
            total_frames=details["total_frames"],
            metadata={key: details[key] for key in ("seed", "custom_noise")},
            decode=details["decode"],
            next_block=details["next_block"],
        )

    def text_kv(self, prompts: list[str], shape: Shape) -> TextKV:
        """Cross-attention keys and values of as many prompts as the shape's batch."""
        self.engine.executables(shape)  # compiles the text encoder side by side with the rest
        return self.engine.text_kv(self.text_features(prompts), shape)

    def drop_text_encoder(self, prompts: str | Sequence[str]) -> None:
        """Encodes prompts and frees the text encoder, the largest part of the release; these can still be used.

        Args:
            prompts: all that will be asked for from now on.

        Raises:
            InputError: a prompt is no text, or the encoder has gone before and did not know it.
        """
        texts = check_prompts(prompts)
        self._kept_features |= dict(zip(texts, self.text_features(texts), strict=True))
        self.engine.drop_text_encoder()

    def text_features(self, prompts: list[str]) -> Float[np.ndarray, "B S text_dim"]:
        """What the text encoder says of each prompt, on the host."""
        if "text" not in self.engine.params:
            for text in prompts:
                if text not in self._kept_features:
                    raise InputError(f"prompt {text!r:.60}: the text encoder was dropped, and this was not kept")
            return np.stack([self._kept_features[text] for text in prompts])
        tokens = self.tokenizer(prompts, self.config.dit.text_len)
        for text, dropped in zip(prompts, tokens.dropped, strict=True):
            if dropped:
                logger.warning(
                    "the prompt is longer than %d tokens: its last %d are ignored (%s...)",
                    self.config.dit.text_len, dropped, text[:40],
                )  # fmt: skip
        if unknown := dict.fromkeys(word for words in tokens.unknown for word in words):
            logger.warning("%s", self._answer_to_words(unknown))
        encoded = [self.engine.encode_text(*tokens) for tokens in zip(tokens.ids, tokens.lengths, strict=True)]
        return np.stack(encoded)

    def course(
        self,
        shape: Shape,
        length: Length,
        seed: int | Sequence[int] | None,
        image: Any,
        video: Any,
        noise: NoiseFn | None,
    ) -> Course:
        """What the streams of a batch are to do, of arguments as `stream` takes them.

        Raises:
            InputError: an argument is not valid.
        """
        noises, seeds = self._noises(noise, seed, shape)
        height, width = (self.config.vae.spatial_stride * side for side in shape[1:])
        frames = given_frames(image, video, height, width, self.config)
        roll = self._roll(length, 0 if frames is None else self.config.whole_blocks(len(frames)))
        return Course(roll, noises, seeds, self._given(frames, shape))

    def _answer_to_words(self, unknown: Iterable[str]) -> str:
        """The line about words of a prompt that the model does not know."""
        known, use = self.tokenizer.words, self.config.use
        quoted = ", ".join(f'"{word}"' for word in unknown)
        parts = [f"the prompt has words this model does not know: {quoted}"]
        if len(known) < LISTED_WORDS:
            parts.append(f"it knows: {', '.join(known)}")
        if use is not None and use.prompt_hint:
            parts.append(use.prompt_hint)
        return "; ".join(parts)

    def _noises(
        self, noise: NoiseFn | None, seed: int | Sequence[int] | None, shape: Shape
    ) -> tuple[list[NoiseFn], list[int] | None]:
        block = (self.config.rolling.block_frames, self.config.dit.in_dim, *shape[1:])
        if noise is None:
            seeds = check_seeds(seed, shape.batch)
            return [counter_noise(s, block) for s in seeds], seeds
        if seed is not None:
            raise InputError(f"seed={seed} and a noise function are both given; the noise comes from one of them")
        return [checked_noise(noise, block)] * shape.batch, None

    def _roll(self, length: Length, given: int) -> Roll:
        if length.blocks is not None and length.blocks <= given:
            raise InputError(
                f"the given image or video fills {counted(given, 'block')}, the whole video is to have "
                f"{length.blocks}; ask for at least {self.config.pixel_frames(given) + 1} frames"
            )
        return Roll(given, None if length.blocks is None else length.blocks - 1)

    def _given(self, frames: UInt8[np.ndarray, "T H W 3"] | None, shape: Shape) -> Float[np.ndarray, "B k f C h w"]:
        """Latents of the conditioned blocks; none without an image or a video."""
        block, channels = self.config.rolling.block_frames, self.config.dit.in_dim
        if frames is None:
            return np.zeros((shape.batch, 0, block, channels, *shape[1:]), np.float32)
        latents = self.engine.encode_video(frames[None].astype(np.float32) / 127.5 - 1)
        return np.repeat(latents.reshape(1, -1, block, *latents.shape[2:]), shape.batch, axis=0)


def _join(chunks: Sequence[Chunk], output_type: str) -> np.ndarray:
    """The chunks as one array along time, which is the first axis, or the second behind a batch."""
    field = {"np": "frames_float", "pil": "frames", "latent": "latents"}[output_type]
    axis = 0 if isinstance(chunks[0].prompt, str) else 1
    return np.concatenate([getattr(chunk, field) for chunk in chunks], axis=axis)


def _to_pil(video: np.ndarray) -> list[Any]:
    try:
        from PIL import Image
    except ImportError:
        raise InputError("output_type='pil' needs Pillow: pip install pillow") from None
    return [Image.fromarray(frame) for frame in video]

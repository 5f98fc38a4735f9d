"""Speed, compilations and memory of a whole pipeline, at one size."""

import statistics
import time
from typing import Any

import jax
import numpy as np

from rfjax.bench.flops import rolling_step_flops
from rfjax.bench.measure import Compilations, Matmul, Rate, machine, peak_memory
from rfjax.engine import Shape
from rfjax.inputs import check_size
from rfjax.pipeline import RollingForcingPipeline
from rfjax.rolling.noise import counter_noise
from rfjax.rolling.plan import Roll
from rfjax.stream import StreamState, VideoStream
from rfjax.vae.flops import decode_flops

PROMPT = "a red circle moves right on a blue background"
WHOLE_VIDEO = 81  # pixel frames of the video that is timed from text to pixels
LATENT_FRAMES = (30, 3000)  # where steps are compared for a stream that runs on and on


def bench_model(
    pipeline: RollingForcingPipeline, height: int, width: int, repeats: int, long: bool = False
) -> dict[str, Any]:
    """Figures of one pipeline at one size, batch 1.

    Args:
        pipeline: with any weights.
        height, width: pixels.
        repeats: steady blocks that are timed.
        long: also compare the steps of a young and of an old stream.

    Returns:
        JSON values; `rfjax.bench.report.as_text` explains them.

    Raises:
        InputError: the size is not valid.
    """
    latent = check_size(height, width, pipeline.config)
    matmul = Matmul(str(pipeline.engine.dtype))
    warming = Compilations()
    start = time.perf_counter()
    pipeline.warmup(height, width)
    warmup_s = time.perf_counter() - start
    with pipeline.stream(PROMPT, None, height, width, seed=0) as stream:
        for _ in range(2):
            next(stream).frames  # noqa: B018
    warmed, engine_compiled = warming.count, pipeline.engine.compilations

    after = Compilations()
    video = _whole_video(pipeline, height, width)
    stages = _stages(pipeline, height, width, repeats, matmul)
    figures = {
        "machine": machine(),
        "size": f"{width}x{height}",
        "dtype": str(pipeline.engine.dtype),
        "parameters": {part: _count(params) for part, params in pipeline.engine.params.items()},
        "compilations": {
            "warm_up": warmed,
            "of_them_engine": engine_compiled,
            "after_warm_up": after.count,
        },
        "warm_up_s": warmup_s,
        **video,
    }
    config, frames = pipeline.config, pipeline.config.rolling.block_frames
    step = Rate(rolling_step_flops(config, *latent), stages["step"], matmul.flops_per_s)
    decode = Rate(decode_flops(config.vae, *latent, frames, first=False), stages["decode"], matmul.flops_per_s)
    block = config.vae.temporal_stride * frames
    both = [a + b for a, b in zip(stages["step"], stages["decode"], strict=True)]
    figures["pixel_fps"] = {
        "dit": block / statistics.median(stages["step"]),
        "dit_vae": block / statistics.median(both),
        "text_dit_vae_whole_video": WHOLE_VIDEO / video["whole_video_s"],
    }
    figures["stages"] = {
        "text": {"seconds_min": min(stages["text"]), "seconds_median": statistics.median(stages["text"])},
        "step": step.to_json(),
        "decode": decode.to_json(),
    }
    if long:
        figures["long"] = _compare_ages(pipeline, Shape(1, *latent), repeats)
    figures["peak_memory"] = peak_memory()
    return figures


def _whole_video(pipeline: RollingForcingPipeline, height: int, width: int) -> dict[str, float]:
    """Times of one finite video, compiled code at hand: from the prompt to its first and its last frame."""
    start, first = time.perf_counter(), None
    with pipeline.stream(PROMPT, WHOLE_VIDEO, height, width, seed=1) as stream:
        for chunk in stream:
            chunk.frames  # noqa: B018
            first = first or time.perf_counter() - start
    return {"first_frame_s": first or 0.0, "whole_video_s": time.perf_counter() - start}


def _stages(
    pipeline: RollingForcingPipeline, height: int, width: int, repeats: int, matmul: Matmul
) -> dict[str, list[float]]:
    """Seconds of the stages: encoding a prompt, and in the steady state a step and a block's decoding."""
    seconds: dict[str, list[float]] = {"text": [], "step": [], "decode": []}
    shape = Shape(1, *check_size(height, width, pipeline.config))
    with pipeline.stream(PROMPT, None, height, width, seed=2) as stream:
        next(stream)  # the first block takes a step for each block of the window
        for _ in range(repeats):
            matmul.sample()
            timings = next(stream).timings
            seconds["step"].append(timings.denoise)
            seconds["decode"].append(timings.decode)
            start = time.perf_counter()
            jax.block_until_ready(pipeline.text_kv([PROMPT], shape))
            seconds["text"].append(time.perf_counter() - start)
    matmul.sample()
    return seconds


def _compare_ages(pipeline: RollingForcingPipeline, shape: Shape, repeats: int) -> dict[str, Any]:
    """Steps at latent frame 3000 against steps at 30; the counter is set forward, nothing in between is run."""
    block_frames = pipeline.config.rolling.block_frames
    young, old = (_stream_at(pipeline, shape, frame // block_frames) for frame in LATENT_FRAMES)
    seconds: dict[str, list[float]] = {"young": [], "old": []}
    live_bytes = []
    for _ in range(repeats + 1):
        for name, stream in (("young", young), ("old", old)):
            seconds[name].append(next(stream).timings.denoise)
        live_bytes.append(sum(array.nbytes for array in jax.live_arrays()))
    return {
        "latent_frames": list(LATENT_FRAMES),
        "step_time_ratio": min(seconds["old"][1:]) / min(seconds["young"][1:]),
        "live_bytes_growth": live_bytes[-1] - live_bytes[0],
    }


def _stream_at(pipeline: RollingForcingPipeline, shape: Shape, block: int) -> VideoStream:
    """An endless stream that is about to finish `block`."""
    engine, config = pipeline.engine, pipeline.config
    block_shape = (config.rolling.block_frames, config.dit.in_dim, *shape[1:])
    state = StreamState(
        rolling=engine.init_state(shape),
        text_kv=pipeline.text_kv([PROMPT], shape),
        decoder=engine.init_decoder_state(shape),
        step=np.array(block + config.rolling.window_blocks - 1),
        given=np.zeros((1, 0, *block_shape), np.float32),
    )
    return VideoStream(
        pipeline,
        prompt=PROMPT,
        state=state,
        shape=shape,
        roll=Roll(0, None),
        noises=[counter_noise(0, block_shape)],
        total_frames=None,
        metadata={"seed": 0, "custom_noise": False},
        next_block=block,
    )


def _count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))

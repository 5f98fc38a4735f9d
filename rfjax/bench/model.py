"""Speed, compilations and memory of a whole pipeline, at one size."""

import statistics
import time
from typing import Any

import jax
import numpy as np

from rfjax.bench.flops import rolling_step_flops
from rfjax.bench.measure import Compilations, Matmul, Rate, machine, peak_memory
from rfjax.config import ModelConfig
from rfjax.engine import Shape
from rfjax.inputs import check_size
from rfjax.pipeline import RollingForcingPipeline
from rfjax.rolling.noise import counter_noise
from rfjax.rolling.plan import Roll
from rfjax.stream import StreamState, VideoStream
from rfjax.vae.flops import decode_flops

PROMPT = "a red circle moving right on a blue background"
WHOLE_VIDEO = 81  # pixel frames of the video that is timed from text to pixels
LATENT_FRAMES = (30, 3000)  # where steps are compared for a stream that runs on and on

Seconds = dict[str, list[float]]  # wall times by stage


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
    shape = Shape(1, *check_size(height, width, pipeline.config))
    matmul = Matmul(str(pipeline.engine.dtype))
    before, start = Compilations(), time.perf_counter()
    pipeline.warmup(height, width)
    warm_up_s = time.perf_counter() - start
    with pipeline.stream(PROMPT, None, height, width, seed=0) as stream:
        for _ in range(2):
            next(stream).frames  # noqa: B018
    warm_up, engine, after = before.count, pipeline.engine.compilations, Compilations()

    video = _whole_video(pipeline, height, width)
    seconds = _steady_stages(pipeline, height, width, repeats, matmul)
    figures = {
        "machine": machine(),
        "size": f"{width}x{height}",
        "dtype": str(pipeline.engine.dtype),
        "parameters": {part: _count(params) for part, params in pipeline.engine.params.items()},
        "pixel_fps": _pixel_fps(pipeline.config, seconds, video["whole_video_s"]),
        "compilations": {"warm_up": warm_up, "of_them_engine": engine, "after_warm_up": after.count},
        "warm_up_s": warm_up_s,
        **video,
        "stages": _stage_figures(pipeline.config, shape, seconds, matmul),
    }
    if long:
        figures["long"] = _compare_ages(pipeline, shape, repeats)
    return figures | {"peak_memory": peak_memory()}


def _pixel_fps(config: ModelConfig, seconds: Seconds, whole_video_s: float) -> dict[str, float]:
    block = config.vae.temporal_stride * config.rolling.block_frames
    both = [step + decode for step, decode in zip(seconds["step"], seconds["decode"], strict=True)]
    return {
        "dit": block / statistics.median(seconds["step"]),
        "dit_vae": block / statistics.median(both),
        "text_dit_vae_whole_video": WHOLE_VIDEO / whole_video_s,
    }


def _stage_figures(config: ModelConfig, shape: Shape, seconds: Seconds, matmul: Matmul) -> dict[str, Any]:
    flops = {
        "step": rolling_step_flops(config, *shape[1:]),
        "decode": decode_flops(config.vae, *shape[1:], config.rolling.block_frames, first=False),
    }
    text = {"seconds_min": min(seconds["text"]), "seconds_median": statistics.median(seconds["text"])}
    return {"text": text} | {name: Rate(n, seconds[name], matmul).to_json() for name, n in flops.items()}


def _whole_video(pipeline: RollingForcingPipeline, height: int, width: int) -> dict[str, float]:
    """Times of one finite video, compiled code at hand: from the prompt to its first and its last frame."""
    start, first = time.perf_counter(), None
    with pipeline.stream(PROMPT, WHOLE_VIDEO, height, width, seed=1) as stream:
        for chunk in stream:
            chunk.frames  # noqa: B018
            first = first or time.perf_counter() - start
    return {"first_frame_s": first or 0.0, "whole_video_s": time.perf_counter() - start}


def _steady_stages(pipeline: RollingForcingPipeline, height: int, width: int, repeats: int, matmul: Matmul) -> Seconds:
    """Wall time of the stages: encoding a prompt, and in the steady state a step and a block's decoding."""
    seconds: Seconds = {"text": [], "step": [], "decode": []}
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
    seconds: Seconds = {"young": [], "old": []}
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
        decoder=None,
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

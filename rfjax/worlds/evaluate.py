"""Scores of a model of the shapes world: which share of its videos show what their prompts ask for.

Each part of an evaluation is a function that takes a pipeline and gives figures (JSON values) and the judged videos.
Prompts and seeds are fixed, and no training uses them: figures of two models compare.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8
from tqdm import tqdm

from rfjax.engine import Shape
from rfjax.pipeline import RollingForcingPipeline
from rfjax.weights.bundled import find_checkpoint
from rfjax.worlds.judge import border_ratio, judge, read
from rfjax.worlds.shapes import COLOURS, MOTIONS, SIZE, Scene, parse, random_streams, sample_scene

FACTS = ("colour", "shape", "direction", "speed", "all")
UNSEEN = 10**9  # where the seeds begin that are for evaluation alone

Video = UInt8[np.ndarray, "T 64 64 3"]


@dataclass(frozen=True)
class JudgedVideo:
    """One video and what is right about it, by name; "all" is the verdict."""

    prompt: str
    seed: int
    passed: Mapping[str, bool]
    numbers: Mapping[str, float]
    frames: Video

    @property
    def wrong(self) -> tuple[str, ...]:
        """The names of what is not right."""
        return tuple(name for name, right in self.passed.items() if not right and name != "all")


class Part(NamedTuple):
    """The outcome of one part of an evaluation."""

    figures: dict[str, Any]
    videos: list[JudgedVideo]


@dataclass(frozen=True)
class Change:
    """New prompts for the videos of a batch, once `blocks` of their blocks are finished."""

    blocks: int
    prompts: Sequence[str]


def unseen_scenes(count: int, things: int = 1) -> list[Scene]:
    """The scenes that models are judged on."""
    return [sample_scene(np.random.default_rng([UNSEEN, i]), things) for i in range(count)]


def score(videos: UInt8[np.ndarray, "B T 64 64 3"], prompts: Sequence[str]) -> dict[str, float]:
    """The share of videos in which each of `FACTS` is right."""
    return shares([judged_video(video, parse(prompt), 0) for video, prompt in zip(videos, prompts, strict=True)])


def shares(videos: Sequence[JudgedVideo]) -> dict[str, float]:
    """The share of videos that pass, by name of what they pass."""
    return {name: float(np.mean([video.passed[name] for video in videos])) for name in videos[0].passed}


def cold_start(pipe: RollingForcingPipeline, count: int, things: int = 1, *, blocks: int = 7, batch: int = 8) -> Part:
    """Videos from a prompt alone, 81 frames (7 blocks) each, of one or two things."""
    scenes = unseen_scenes(count, things)
    videos = _generate(pipe, [str(scene) for scene in scenes], blocks, batch)
    return _part(
        [judged_video(video, scene, seed) for seed, (scene, video) in enumerate(zip(scenes, videos, strict=True))]
    )


def endless(pipe: RollingForcingPipeline, count: int, *, blocks: int = 82, last: int = 20, batch: int = 8) -> Part:
    """The end of long videos: the `last` 20 of 82 blocks are the last 15 seconds of a minute."""
    scenes = unseen_scenes(count)
    videos = _generate(pipe, [str(scene) for scene in scenes], blocks, batch, keep=last)
    part = _part(
        [judged_video(video, scene, seed) for seed, (scene, video) in enumerate(zip(scenes, videos, strict=True))]
    )
    return Part({"blocks": blocks, **part.figures}, part.videos)


def switches(
    pipe: RollingForcingPipeline,
    count: int,
    *,
    before: int = 8,
    after: int = 12,
    within: int = 6,
    batch: int = 8,
) -> Part:
    """Videos whose motion is changed after `before` blocks and that go on for `after` blocks.

    One passes if it shows the new motion from `within` blocks after the change on, and colour and shape are right in
    all of it.
    """
    pairs = [_motion_change(i) for i in range(count)]
    change = Change(before, [str(new) for _, new in pairs])
    videos = _generate(pipe, [str(old) for old, _ in pairs], before + after, batch, change)
    ends = [pipe.config.pixel_frames(block) for block in range(1, before + after + 1)]
    judged = [
        _judged_switch(np.split(video, ends[:-1]), *pair, seed, before, within)
        for seed, (pair, video) in enumerate(zip(pairs, videos, strict=True))
    ]
    waits = np.array([video.numbers["blocks_until_it_holds"] for video in judged])
    figures = {
        "videos": count,
        **shares(judged),
        "blocks_until_it_holds": {
            "never" if np.isinf(wait) else str(int(wait)): int(n)
            for wait, n in zip(*np.unique(waits, return_counts=True), strict=True)
        },
    }
    return Part(figures, judged)


def start_places(pipe: RollingForcingPipeline, count: int, *, batch: int = 8) -> Part:
    """Where one prompt's thing stands with one seed and another: even places on a torus are 24.5 pixels apart."""
    scene = parse("a white circle still on a blue background")
    videos = _generate(pipe, [str(scene)] * count, 3, batch, keep=1)  # a still thing stands where it started
    judged = [judged_video(video, scene, seed) for seed, video in enumerate(videos)]
    places = np.array([read(video.frames, 1).things[0].centres[-1] for video in judged if video.passed["colour"]])
    places = places[~np.isnan(places).any(axis=-1)] if len(places) else np.zeros((0, 2))
    apart = np.abs(places[:, None] - places[None])
    distances = np.hypot(*np.moveaxis(np.minimum(apart, SIZE - apart), -1, 0))
    n = len(places)
    figures = {
        "videos": count,
        "seen": n,
        "mean_pixels_apart": float(distances.sum() / max(1, n * (n - 1))),
        "cells_of_8_pixels": len(np.unique(places // 8, axis=0)),
    }
    return Part(figures, judged)


def codec(pipe: RollingForcingPipeline, count: int, *, frames: int = 105, steady: int = 50, batch: int = 8) -> Part:
    """The VAE on streams that training has not seen: encoded whole, decoded block by block."""
    streams = random_streams(UNSEEN, count, SIZE, frames)
    borders = [pipe.config.pixel_frames(n) for n in range(1, pipe.config.whole_blocks(frames))]
    psnr, ratios, exact = [], [], []
    for chosen in _batches(count, batch):
        videos = streams[chosen]
        unit = _through_vae(pipe, videos)
        error = np.square(unit - (videos / 127.5 - 1)).mean(axis=(2, 3, 4))
        psnr.append(10 * np.log10(4 / np.maximum(error, 1e-10)))
        decoded = np.rint(np.clip(unit * 127.5 + 127.5, 0, 255)).astype(np.uint8)
        ratios += [border_ratio(video, borders) for video in decoded]
        exact += [border_ratio(video, borders) for video in videos]
    by_frame, ratios, exact = np.concatenate(psnr)[:count], ratios[:count], exact[:count]
    figures = {
        "streams": count,
        "psnr_first_13": float(by_frame[:, :13].mean()),
        f"psnr_{steady}_to_{frames}": float(by_frame[:, steady:].mean()),
        f"psnr_{steady}_to_{frames}_worst_stream": float(by_frame[:, steady:].mean(axis=1).min()),
        "border_ratio": float(np.median(ratios)),
        "border_ratio_worst_stream": float(np.max(ratios)),
        "border_ratio_of_exact_video": float(np.median(exact)),
    }
    return Part(figures, [])


def speed(pipe: RollingForcingPipeline, checkpoint: Path, *, blocks: int = 20) -> Part:
    """Of one stream: text, DiT, decoding and delivery as uint8 frames; start-up in new processes, and size on disk."""
    from rfjax.bench.measure import Matmul, machine

    matmul = Matmul(str(pipe.engine.dtype))
    matmul.sample()
    with pipe.stream("a red circle moving right", seed=0) as stream:
        for _ in range(2):
            next(stream).frames  # noqa: B018
        start = time.perf_counter()
        frames = sum(len(next(stream).frames) for _ in range(blocks))
        seconds = time.perf_counter() - start
    matmul.sample()
    folder = find_checkpoint(checkpoint)
    figures = {
        "machine": machine() | {"processors": os.cpu_count(), "matmul_gflops_per_s": matmul.per_wall / 1e9},
        "pixel_fps": frames / seconds,
        "times_real_time": frames / seconds / pipe.config.fps,
        "start_up_s": _start_up(folder, str(pipe.engine.dtype)),
        "checkpoint_mb": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6,
    }
    return Part(figures, [])


def _generate(
    pipe: RollingForcingPipeline,
    prompts: Sequence[str],
    blocks: int,
    batch: int,
    change: Change | None = None,
    keep: int | None = None,
) -> Iterator[Video]:
    """A video of each prompt, seeds counted from 0; only the last `keep` blocks if that is given."""
    count = len(prompts)
    with tqdm(total=count, unit="video", leave=False, disable=None) as bar:
        for chosen in _batches(count, batch):
            chunks: deque[np.ndarray] = deque(maxlen=keep)
            with pipe.stream([prompts[i] for i in chosen], pipe.config.pixel_frames(blocks), seed=chosen) as stream:
                for chunk in stream:
                    chunks.append(chunk.frames)
                    if change is not None and chunk.index + 1 == change.blocks:
                        stream.set_prompt([change.prompts[i] for i in chosen])
            for video in np.concatenate(chunks, axis=1)[: count - chosen[0]]:
                yield video
                bar.update()


def _batches(count: int, size: int) -> Iterator[list[int]]:
    """The numbers below `count`, the last again and again where they do not fill a batch: one size is compiled."""
    size = min(size, count)
    return ([min(i, count - 1) for i in range(start, start + size)] for start in range(0, count, size))


def judged_video(video: Video, scene: Scene, seed: int) -> JudgedVideo:
    """A video with what is right about it."""
    verdict = judge(video, scene)
    background = np.median(video, axis=(1, 2))  # things cover less than a half; a mean would see their soft edges
    drift = np.abs(background - COLOURS[scene.background]).max()
    numbers = {"psnr": verdict.psnr, "flicker": verdict.reading.flicker, "background_drift": float(drift)}
    return JudgedVideo(str(scene), seed, {fact: getattr(verdict, fact) for fact in FACTS}, numbers, video)


def _part(videos: list[JudgedVideo]) -> Part:
    psnr, flicker, drift = ([video.numbers[name] for video in videos] for name in videos[0].numbers)
    figures = {
        "videos": len(videos),
        **shares(videos),
        "psnr_median": float(np.nanmedian(psnr)) if not np.isnan(psnr).all() else None,
        "flicker_median": float(np.median(flicker)),
        "background_drift_max": max(drift),
        "background_drift_median": float(np.median(drift)),
    }
    return Part(figures, videos)


def _motion_change(number: int) -> tuple[Scene, Scene]:
    """A scene of one thing, and the same in another motion."""
    (old,) = unseen_scenes(number + 1)[number:]
    others = [motion for motion in MOTIONS if motion != old.things[0].motion]
    rng = np.random.default_rng([UNSEEN, number, 1])
    return old, old.with_motions([others[rng.integers(len(others))]])


def _judged_switch(
    blocks: Sequence[Video], old: Scene, new: Scene, seed: int, before: int, within: int
) -> JudgedVideo:
    whole = np.concatenate(blocks)
    first, later, throughout = (
        judge(np.concatenate(blocks[:before]), old),
        judge(np.concatenate(blocks[before + within :]), new),
        judge(whole, new),
    )
    moves = [_moves_as(block, new) for block in blocks[before:]]
    wait = next((n for n in range(len(moves)) if all(moves[n:])), float("inf"))
    passed = {
        "old_motion": first.direction and first.speed,
        "new_motion": later.direction and later.speed,
        "colour": throughout.colour and later.colour,
        "shape": throughout.shape and later.shape,
    }
    passed["all"] = passed["new_motion"] and passed["colour"] and passed["shape"]
    return JudgedVideo(f"{old}  ->  {new.things[0].motion}", seed, passed, {"blocks_until_it_holds": wait}, whole)


def _moves_as(block: Video, scene: Scene) -> bool:
    """Whether the nearest words for a block's motion are the scene's."""
    things = read(block, 1).things
    return bool(things) and things[0].motion == scene.things[0].motion


def _through_vae(
    pipe: RollingForcingPipeline, videos: UInt8[np.ndarray, "B T 64 64 3"]
) -> Float[np.ndarray, "B T 64 64 3"]:
    """What is decoded, block by block, from the latents of whole videos; -1 .. 1."""
    engine, block = pipe.engine, pipe.config.rolling.block_frames
    latents = engine.encode_video(videos.astype(np.float32) / 127.5 - 1)
    run, params = engine.executables(Shape(len(videos), *latents.shape[3:])), engine.params["vae"]
    pixels, state = run.decode_first(params, latents[:, :block])
    decoded = [np.asarray(pixels.unit)]
    for start in range(block, latents.shape[1], block):
        pixels, state = run.decode_next(params, latents[:, start : start + block], state)
        decoded.append(np.asarray(pixels.unit))
    return np.concatenate(decoded, axis=1)


_START_UP = """
import json, sys, time
start = time.perf_counter()
from rfjax import RollingForcingPipeline
imported = time.perf_counter()
pipe = RollingForcingPipeline.from_pretrained(sys.argv[1], dtype=sys.argv[2])
loaded = time.perf_counter()
pipe.warmup()
warm = time.perf_counter()
next(pipe.stream("a red circle moving right", seed=0)).frames
seen = time.perf_counter()
print(json.dumps({
    "import": imported - start, "load": loaded - imported, "compile": warm - loaded, "first_frame": seen - warm
}))
"""


def _start_up(checkpoint: Path, dtype: str) -> dict[str, dict[str, float]]:
    """Seconds of the steps to a first frame in a new process: with no compiled programs in the cache, and with all."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = [sys.executable, "-c", _START_UP, str(checkpoint), dtype]
        return {
            name: json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
            for name in ("first", "with_cache")
        }

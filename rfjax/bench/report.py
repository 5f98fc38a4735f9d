"""Figures as lines of text: ratios and counts first, bare times beneath."""

from collections.abc import Mapping
from typing import Any

_STAGE_NAMES = {"dit": "DiT step", "step": "DiT step", "vae": "VAE decode", "decode": "VAE decode", "text": "text"}


def as_text(figures: Mapping[str, Any]) -> str:
    """The figures of `bench_model` or `bench_release`."""
    where = figures["machine"]
    lines = [f"{where['devices']} x {where['device']} ({where['platform']}), {figures['dtype']}"]
    if "pixel_fps" in figures:
        lines += _model_lines(figures)
    for name, stage in figures["stages"].items():
        lines += _stage_lines(_STAGE_NAMES[name], stage)
    if "long" in figures:
        long = figures["long"]
        young, old = long["latent_frames"]
        lines.append(f"step at latent frame {old} over that at {young}: {long['step_time_ratio']:.3f}")
        lines.append(f"  arrays alive grew by {long['live_bytes_growth']} bytes")
    lines += [
        f"peak memory, {kind.removesuffix('_bytes')}: {n / 1e9:.2f} GB" for kind, n in figures["peak_memory"].items()
    ]
    return "\n".join(lines)


def _model_lines(figures: Mapping[str, Any]) -> list[str]:
    fps, counts = figures["pixel_fps"], figures["compilations"]
    parameters = ", ".join(f"{part} {n:,}" for part, n in figures["parameters"].items())
    return [
        f"size {figures['size']}, parameters: {parameters}",
        f"pixel frames a second: {fps['dit']:.2f} DiT alone, {fps['dit_vae']:.2f} with VAE, "
        f"{fps['text_dit_vae_whole_video']:.2f} a whole video from text",
        f"compilations: {counts['warm_up']} in warm-up ({counts['of_them_engine']} by the engine), "
        f"{counts['after_warm_up']} after it",
        f"  warm-up {figures['warm_up_s']:.2f} s, then first frame after {figures['first_frame_s']:.3f} s, "
        f"whole video {figures['whole_video_s']:.3f} s",
    ]


def _stage_lines(name: str, stage: Mapping[str, Any]) -> list[str]:
    times = f"{stage['seconds_min']:.4f} s min, {stage['seconds_median']:.4f} s median"
    if "efficiency" not in stage:
        return [f"{name}:", f"  {times}"]
    shared = f" ({stage['processor_efficiency']:.1%} in processor time)" if "processor_efficiency" in stage else ""
    lines = [f"{name}: {stage['gflop']:.1f} GFLOP at {stage['efficiency']:.1%} of the matrix product's rate{shared}"]
    if "release_efficiency" in stage:
        lines.append(
            f"  {stage['speed_over_release']:.2f} times the release's speed, each over its own machine's matrix "
            f"product (release {stage['release_efficiency']:.1%})"
        )
    lines.append(f"  {times}; 2048^3 matrix product {stage['matmul_gflops_per_s']:.1f} GFLOP/s")
    return lines

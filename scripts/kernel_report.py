"""What the NKI kernels cost at the real shapes on one Trainium2 core, as modelled by nki_ops.simulator.

python scripts/kernel_report.py            (two tables in Markdown; those of docs/kernels.md)
python scripts/kernel_report.py --json     (the same and all counts, for programs)

The model counts each engine's busy time by AWS's documented rates and takes the busiest one's: as if engines and DMA
overlapped perfectly. Nothing here was run on a Trainium.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402  (the path comes first)

from nki_ops import kernels  # noqa: E402
from nki_ops.simulator import Report, TensorSpec, costs, profile  # noqa: E402
from nki_ops.simulator import nki as simulated  # noqa: E402
from nki_ops.simulator.accounting import PSUM_BANK_BYTES, SBUF_BYTES  # noqa: E402

# 480x832 on a chip of 8 cores, 4 x 2: a core has 3 of 12 heads and an eighth (attention: half) of the tokens.
HEADS, HEAD_DIM, CHANNELS = 3, 128, 1536
BLOCK, PLACES, LAYERS, SLOTS = 4680, 7, 30, 8
WINDOW_QUERIES, CLEAN_QUERIES, TOKENS = 23400 // 2, 4680 // 2, 28080 // 8

BLOCK_BYTES = HEADS * BLOCK * HEAD_DIM * 2
# Each score is D multiply-adds twice, and one exp: TensorE and ScalarE tie.
SCORE_RATE = min(128 * 128 * costs.TENSOR_CLOCK / (2 * HEAD_DIM), 128 * costs.SCALAR_CLOCK)

PUBLISHED = {
    "rms_norm_rope_3d": (1.8e-3, "3-D RoPE (5 s before)"),
    "update_cache": (1.9e-3, "cache copy, a layer (23 ms before)"),
}


@dataclass(frozen=True)
class Case:
    """One kernel call; `limit_seconds` is the time of what cannot be avoided, `limit` says what that is."""

    kernel: str
    work: str
    launch: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    limit_seconds: float
    limit: str
    cores: int = 1


def bf16(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "bfloat16")


def fp32(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "float32")


def memory_case(work: str, kernel: Any, arguments: tuple[Any, ...], moved: int, cores: int = 1) -> Case:
    """A kernel that cannot be faster than a core's share of the HBM reads and writes `moved` bytes."""
    limit = "HBM, all read and written once"
    return Case(kernel.__name__, work, kernel, arguments, {}, moved / costs.HBM_RATE, limit, cores)


def attention_case(work: str, queries: int, pools: tuple[int, ...], variant: str) -> Case:
    arrays = [bf16(blocks, 1, HEADS, BLOCK, HEAD_DIM) for blocks in pools for _ in "kv"]
    table, n_valid = np.arange(PLACES, dtype=np.int32), np.array([PLACES], np.int32)
    arguments = (bf16(1, queries, HEADS, HEAD_DIM), table, n_valid, *arrays)
    seconds = HEADS * queries * PLACES * BLOCK / SCORE_RATE
    limit = f"{SCORE_RATE / 1e9:.1f} G scores/s (two products; one exp)"
    return Case(f"attention, {variant}", work, kernels.attention, arguments, {"variant": variant}, seconds, limit)


def cases() -> list[Case]:
    tokens, table, scale = bf16(1, TOKENS, CHANNELS), fp32(TOKENS, HEAD_DIM // 2), fp32(CHANNELS)
    angles, keys = fp32(1, HEAD_DIM // 2), bf16(1, 1, HEADS, BLOCK, HEAD_DIM)
    pool, block = bf16(LAYERS * SLOTS, 1, HEADS, BLOCK, HEAD_DIM), bf16(1, HEADS, BLOCK, HEAD_DIM)
    update = (pool, pool, block, block, np.zeros((1, 1), np.int32))
    window, clean = (LAYERS * SLOTS, 1, 5), (LAYERS * SLOTS,)
    return [
        memory_case(
            f"q and k of {TOKENS} tokens, 12 heads",
            kernels.rms_norm_rope_3d,
            (tokens, tokens, scale, scale, table, table),
            4 * TOKENS * CHANNELS * 2,
        ),
        memory_case("the sink's keys, 3 heads", kernels.rotate, (keys, angles, angles), 2 * BLOCK_BYTES),
        memory_case("k and v of a block, 3 heads", kernels.update_cache, update, 4 * BLOCK_BYTES),
        memory_case("the same on 2 cores", kernels.update_cache, update, 2 * BLOCK_BYTES, cores=2),
        attention_case(f"window: {WINDOW_QUERIES} queries, 3 heads", WINDOW_QUERIES, window, "shift"),
        attention_case(f"clean block: {CLEAN_QUERIES} queries, 3 heads", CLEAN_QUERIES, clean, "shift"),
        attention_case(f"window: {WINDOW_QUERIES} queries, 3 heads", WINDOW_QUERIES, window, "online"),
    ]


def measure(case: Case) -> Report:
    return profile(case.launch[case.cores], cost_only=True)(*case.arguments, **case.options)[1]


def as_dict(case: Case, report: Report) -> dict[str, Any]:
    published, what = PUBLISHED.get(case.kernel, (None, None))
    return {
        "kernel": case.kernel,
        "work": case.work,
        "cores": case.cores,
        "seconds": report.seconds,
        "bound": report.bound,
        "limit_seconds": case.limit_seconds,
        "limit": case.limit,
        "of_limit": case.limit_seconds / report.seconds,
        "published_seconds": published,
        "published": what,
        "report": report.to_dict(),
    }


def time_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| kernel | on one core | modelled ms | bound by | limit ms | of the limit | limit set by | reported ms |",
        "|---|---|---:|---|---:|---:|---|---|",
    ]
    for row in rows:
        published = f"{row['published_seconds'] * 1e3:.1f}: {row['published']}" if row["published"] else "-"
        cells = [
            row["kernel"],
            row["work"],
            f"{row['seconds'] * 1e3:.3f}",
            row["bound"],
            f"{row['limit_seconds'] * 1e3:.3f}",
            f"{row['of_limit']:.0%}",
            row["limit"],
            published,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def cost_table(rows: list[dict[str, Any]]) -> list[str]:
    engines = ("tensor", "vector", "scalar", "gpsimd")
    lines = [
        "| kernel | TensorE | VectorE | ScalarE | GpSimdE (thousand cycles) | DMA MB | DMA efficiency | "
        "in runs < 512 B | SBUF KiB | PSUM banks |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        report = row["report"]
        part = f": {row['work'].split(':')[0]}" if ":" in row["work"] else ""
        cells = [row["kernel"] + part + (", 2 cores" if row["cores"] == 2 else "")]
        cells += [f"{report['engine_cycles'].get(engine, 0) / 1e3:.0f}" for engine in engines]
        cells += [
            f"{sum(report['dma_bytes'].values()) / 1e6:.1f}",
            f"{report['dma_efficiency']:.0%}",
            f"{report['small_run_share']:.0%}",
            f"{report['sbuf_peak'] / 1024:.0f}",
            f"{report['psum_peak'] // PSUM_BANK_BYTES}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="all counts as JSON")
    as_json = parser.parse_args(arguments).json
    if kernels.nki is not simulated:
        sys.exit("the real nki package is installed; the model needs the simulator in its place: uninstall nki")
    rows = [as_dict(case, measure(case)) for case in cases()]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print("\n".join(time_table(rows)), "", *cost_table(rows), sep="\n")
    print(f"\nA core has {SBUF_BYTES / 1024:.0f} KiB of SBUF a partition and 8 PSUM banks.")


if __name__ == "__main__":
    main()

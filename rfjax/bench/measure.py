"""Measuring: times against the machine's own matrix product, compilations, memory."""

import functools
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

MATMUL_SIZE = 2048
_MATMUL_SECONDS = 0.05  # one sample queues enough products to last about this long


def precision(dtype: str) -> Any:
    """float32 means float32, also where a backend would take a faster, coarser product by default."""
    return jax.default_matmul_precision("highest" if dtype == "float32" else "default")


def timed(function: Callable[[], Any]) -> float:
    """Seconds until the result of `function` is there."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


class Matmul:
    """The rate of a 2048 x 2048 x 2048 product on this machine, sampled now and then during a run."""

    def __init__(self, dtype: str):
        values = np.random.default_rng(0).standard_normal((MATMUL_SIZE, MATMUL_SIZE), np.float32)
        operand = jax.device_put(values.astype(jnp.dtype(dtype)))
        with precision(dtype):
            product = jax.jit(jnp.matmul).lower(operand, operand).compile()
        self._run = lambda: product(operand, operand)
        timed(self._run)
        self._queued = max(1, round(_MATMUL_SECONDS / timed(self._run)))
        self.seconds: list[float] = []

    def sample(self, times: int = 3) -> None:
        for _ in range(times):
            self.seconds.append(timed(lambda: [self._run() for _ in range(self._queued)]) / self._queued)

    @property
    def flops_per_s(self) -> float:
        """Of the fastest sample."""
        return 2 * MATMUL_SIZE**3 / min(self.seconds)


@dataclass(frozen=True)
class Rate:
    """Repeated timings of one piece of work."""

    flops: int
    seconds: list[float]
    matmul_flops_per_s: float

    @property
    def efficiency(self) -> float:
        """Useful rate of the fastest repeat over the rate of the matrix product."""
        return self.flops / min(self.seconds) / self.matmul_flops_per_s

    @property
    def matmul_work(self) -> float:
        """What the fastest repeat costs, in FLOPs of the matrix product: a time that machines share."""
        return min(self.seconds) * self.matmul_flops_per_s

    def to_json(self) -> dict[str, Any]:
        return {
            "gflop": self.flops / 1e9,
            "efficiency": self.efficiency,
            "cost_in_matmul_gflop": self.matmul_work / 1e9,
            "seconds_min": min(self.seconds),
            "seconds_median": statistics.median(self.seconds),
            "repeats": len(self.seconds),
            "matmul_gflops_per_s": self.matmul_flops_per_s / 1e9,
        }


def measure(run: Callable[[], Any], flops: int, dtype: str, repeats: int) -> Rate:
    """Times `run` (once more than asked, to warm up) with matrix products before, between and after."""
    matmul = Matmul(dtype)
    timed(run)
    seconds = []
    for _ in range(repeats):
        matmul.sample()
        seconds.append(timed(run))
    matmul.sample()
    return Rate(flops, seconds, matmul.flops_per_s)


class Compilations:
    """Counts what XLA compiles in this process, the small programs of eager operations included."""

    def __init__(self) -> None:
        self._before = len(_compile_events())

    @property
    def count(self) -> int:
        return len(_compile_events()) - self._before


@functools.cache
def _compile_events() -> list[str]:
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return events


def peak_memory() -> dict[str, int]:
    """Peak bytes of the process, and of the device where it keeps count."""
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        peak["device_bytes"] = stats["peak_bytes_in_use"]
    return peak


def machine() -> dict[str, Any]:
    device = jax.local_devices()[0]
    return {"platform": device.platform, "device": device.device_kind, "devices": jax.device_count()}

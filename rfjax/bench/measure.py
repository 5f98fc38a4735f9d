"""Measuring: times against the machine's own matrix product, compilations, memory."""

import functools
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

from rfjax.layers import precision

MATMUL_SIZE = 2048
_QUEUE_SECONDS, _SAMPLE_SECONDS = 0.05, 0.25


class Seconds(NamedTuple):
    """How long something took: on the clock, and in processor time of all threads."""

    wall: float
    processor: float


def timed(function: Callable[[], Any]) -> Seconds:
    """Runs `function` until its result is there."""
    wall, processor = time.perf_counter(), time.process_time()
    jax.block_until_ready(function())
    return Seconds(time.perf_counter() - wall, time.process_time() - processor)


class Matmul:
    """The rate of a 2048 x 2048 x 2048 product on this machine, sampled now and then during a run.

    Attributes:
        per_wall: FLOPs a second of the fastest product.
        per_processor: FLOPs a second of processor time, of the best sample.
    """

    def __init__(self, dtype: str):
        values = np.random.default_rng(0).standard_normal((MATMUL_SIZE, MATMUL_SIZE), np.float32)
        operand = jax.device_put(values.astype(jnp.dtype(dtype)))
        with precision(dtype):
            product = jax.jit(jnp.matmul).lower(operand, operand).compile()
        self._run = lambda: product(operand, operand)
        timed(self._run)
        # A device runs what is queued without waiting for the host; timed one by one, short products look slow.
        self._queued = max(1, round(_QUEUE_SECONDS / timed(self._run).wall))
        self.per_wall = self.per_processor = 0.0

    def sample(self) -> None:
        """Times products for about a quarter of a second."""
        flops, spent = 2 * MATMUL_SIZE**3 * self._queued, []
        while sum(seconds.wall for seconds in spent) < _SAMPLE_SECONDS:
            spent.append(timed(lambda: [self._run() for _ in range(self._queued)]))
        self.per_wall = max(self.per_wall, flops / min(seconds.wall for seconds in spent))
        processor = sum(seconds.processor for seconds in spent)
        self.per_processor = max(self.per_processor, flops * len(spent) / processor)


@dataclass(frozen=True)
class Rate:
    """Repeated timings of one piece of work, beside the matrix product sampled between them."""

    flops: int
    seconds: list[float]
    matmul: Matmul
    processor_seconds: list[float] = field(default_factory=list)

    @property
    def efficiency(self) -> float:
        """Useful rate of the fastest repeat over that of the fastest matrix product."""
        return self.flops / min(self.seconds) / self.matmul.per_wall

    @property
    def processor_efficiency(self) -> float:
        """The same in processor time: on a CPU that others use too it holds still, but it does not see idle cores."""
        return self.flops / min(self.processor_seconds) / self.matmul.per_processor

    @property
    def matmul_work(self) -> float:
        """What the fastest repeat costs, in FLOPs of the matrix product: a time that machines share."""
        return min(self.seconds) * self.matmul.per_wall

    def to_json(self) -> dict[str, Any]:
        figures = {
            "gflop": self.flops / 1e9,
            "efficiency": self.efficiency,
            "cost_in_matmul_gflop": self.matmul_work / 1e9,
            "seconds_min": min(self.seconds),
            "seconds_median": statistics.median(self.seconds),
            "repeats": len(self.seconds),
            "matmul_gflops_per_s": self.matmul.per_wall / 1e9,
        }
        if self.processor_seconds:
            figures["processor_efficiency"] = self.processor_efficiency
        return figures


def measure(run: Callable[[], Any], flops: int, dtype: str, repeats: int) -> Rate:
    """Times `run` (once more than asked, to warm up) with matrix products before, between and after."""
    matmul = Matmul(dtype)
    timed(run)
    spent = []
    for _ in range(repeats):
        matmul.sample()
        spent.append(timed(run))
    matmul.sample()
    processor = [seconds.processor for seconds in spent] if jax.default_backend() == "cpu" else []
    return Rate(flops, [seconds.wall for seconds in spent], matmul, processor)


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

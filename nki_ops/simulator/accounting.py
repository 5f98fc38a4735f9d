"""Counts of one core: engine time, DMA traffic, and how much on-chip memory is live at once."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nki_ops.simulator import costs
from nki_ops.simulator.enums import MemoryRegion
from nki_ops.simulator.errors import NkiValidationError

# Usable bytes a partition: 224 KiB less what the compiler and runtime keep (16 KiB and 264 B; AWS's NKI library).
SBUF_BYTES = 224 * 1024 - 16 * 1024 - 264
PSUM_BANK_BYTES = 2048
PSUM_BANKS = 8
CAPACITY = {MemoryRegion.sbuf: SBUF_BYTES, MemoryRegion.psum: PSUM_BANK_BYTES * PSUM_BANKS}
QUADRANT = 32


@dataclass(slots=True)
class Life:
    """One on-chip tensor: its bytes a partition, and the instructions between which its contents matter."""

    region: MemoryRegion
    bytes: int
    label: str
    address: int | None
    created: int
    first: int = -1
    last: int = -1


@dataclass(frozen=True)
class DmaSite:
    """All DMAs of one place in a kernel.

    Attributes:
        bytes: payload.
        seconds: busy time of the DMA engines.
        run: contiguous bytes of the shortest descriptors; None for transposes.
    """

    bytes: int
    seconds: float
    run: float | None

    def __add__(self, other: "DmaSite") -> "DmaSite":
        shortest = min((r for r in (self.run, other.run) if r is not None), default=None)
        return DmaSite(self.bytes + other.bytes, self.seconds + other.seconds, shortest)

    def scaled(self, factor: float) -> "DmaSite":
        return DmaSite(int(self.bytes * factor), self.seconds * factor, self.run)


@dataclass
class Counts:
    """Running totals; every entry is already multiplied by the trip counts of the loops around it.

    Attributes:
        seconds: busy time of each engine, and of "dma", "hbm" and "dge".
        by_operation: the same by (engine, operation).
        instructions: calls by operation.
        dma_bytes: payload by route, "hbm->sbuf" and so on.
        dma_runs: payload by contiguous bytes a descriptor.
        dma_sites: where in the kernel DMAs are, by name or "file:line".
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    instructions: Counter = field(default_factory=Counter)
    by_operation: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    dma_bytes: Counter = field(default_factory=Counter)
    dma_runs: Counter = field(default_factory=Counter)
    dma_sites: dict[str, DmaSite] = field(default_factory=dict)

    def engine(self, engine: str, operation: str, seconds: float, times: int) -> None:
        self.seconds[engine] += seconds * times
        self.by_operation[engine, operation] += seconds * times

    def dma(
        self, operation: str, site: str, route: str, moved: int, run: float | None, seconds: float, times: int
    ) -> None:
        """One DMA of `moved` payload bytes, in descriptors of `run` contiguous bytes (None: a transpose)."""
        self.engine("dma", operation, seconds, times)
        hbm_bytes = moved * route.count("hbm")
        self.engine("hbm", operation, hbm_bytes / costs.HBM_RATE, times)
        self.dma_bytes[route] += moved * times
        if run is not None:
            self.dma_runs[int(run)] += moved * times
        here = DmaSite(moved * times, seconds * times, run)
        self.dma_sites[site] = self.dma_sites[site] + here if site in self.dma_sites else here


class AddressMap:
    """Which tensor owns each byte of an on-chip memory, among tensors placed by hand (`address=`).

    Tensors at the same address are how kernels rotate buffers, so that alone is no error; reading bytes that another
    tensor has overwritten is. Ownership is kept per quadrant of 32 partitions, by bounding interval.
    """

    def __init__(self, region: MemoryRegion) -> None:
        self.owner = np.zeros((4, CAPACITY[region]), np.int32)
        self.labels: dict[int, str] = {}

    def _part(self, partitions: tuple[int, int], span: tuple[int, int]) -> np.ndarray:
        return self.owner[partitions[0] // QUADRANT : (partitions[1] - 1) // QUADRANT + 1, span[0] : span[1]]

    def write(self, number: int, label: str, partitions: tuple[int, int], span: tuple[int, int]) -> None:
        """Tensor `number` writes bytes `span` of `partitions` (both half open)."""
        self.labels[number] = label
        self._part(partitions, span)[...] = number

    def foreign(self, number: int, partitions: tuple[int, int], span: tuple[int, int]) -> str | None:
        """The tensor that wrote last where tensor `number` now reads, if it is another."""
        part = self._part(partitions, span)
        other = part[(part != number) & (part != 0)]
        return self.labels[int(other[0])] if other.size else None


def peak(lives: list[Life], region: MemoryRegion) -> tuple[int, list[Life]]:
    """Most bytes a partition that are live at once, and the tensors that are.

    A tensor is live from its first to its last instruction: no placement in program order needs less. Tensors placed
    by hand count as one block up to the highest address in use.
    """
    placed = [x for x in lives if x.region is region and x.address is not None]
    free = [x for x in lives if x.region is region and x.address is None and x.first >= 0]
    block = max((x.address + x.bytes for x in placed if x.address is not None), default=0)
    changes: Counter = Counter()
    for x in free:
        changes[x.first] += x.bytes
        changes[x.last + 1] -= x.bytes
    level = best = best_at = 0
    for tick in sorted(changes):
        level += changes[tick]
        if level > best:
            best, best_at = level, tick
    return block + best, placed + [x for x in free if x.first <= best_at <= x.last]


def check_capacity(lives: list[Life]) -> dict[str, int]:
    """Peak bytes a partition by memory.

    Raises:
        NkiValidationError: more is live at once than the memory holds.
    """
    peaks = {}
    for region, capacity in CAPACITY.items():
        used, living = peak(lives, region)
        if used > capacity:
            largest = sorted(living, key=lambda x: -x.bytes)[:5]
            names = ", ".join(f"{x.label} {x.bytes} B" for x in largest)
            raise NkiValidationError(
                f"{region.value} needs {used} bytes per partition at once and has {capacity}; the largest: {names}"
            )
        peaks[region.value] = used
    return peaks


def label_of(storage: Any) -> str:
    return f"{storage.name or 'tensor'}{storage.shape}"

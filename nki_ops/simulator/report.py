"""The modelled cost of a kernel run: what `profile` returns beside the outputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from nki_ops.simulator import accounting, costs
from nki_ops.simulator.accounting import DmaSite
from nki_ops.simulator.core import Core


@dataclass(frozen=True)
class Report:
    """Costs of one Trainium2 core, modelled with the documented rates of `costs`; nothing is measured.

    Attributes:
        engine_seconds: busy time by engine (tensor, vector, scalar, gpsimd), and of "dma" (the 16 DMA engines), "hbm"
            (the core's share of the HBM's bandwidth) and "dge" (descriptors made by hardware).
        operation_seconds: the same by "engine operation".
        instructions: calls by operation.
        dma_bytes: payload by route, "hbm->sbuf" and so on.
        dma_runs: payload of the copies by contiguous bytes that a descriptor moves.
        dma_sites: the same by place in the kernel: its name, or "file:line".
        sbuf_peak, psum_peak: bytes a partition live at once; PSUM counts whole banks of 2 KiB.
        cores: on how many cores the kernel ran.
        per_core: with two cores, the report of each; this report is then the slower one's.
    """

    engine_seconds: dict[str, float]
    operation_seconds: dict[str, float]
    instructions: dict[str, int]
    dma_bytes: dict[str, int]
    dma_runs: dict[int, int]
    dma_sites: dict[str, DmaSite]
    sbuf_peak: int
    psum_peak: int
    cores: int = 1
    per_core: tuple[Report, ...] = ()

    @property
    def seconds(self) -> float:
        """Modelled time: engines overlap, so the busiest one's."""
        return max(self.engine_seconds.values(), default=0.0)

    @property
    def bound(self) -> str:
        """The busiest engine."""
        return max(self.engine_seconds, key=lambda e: self.engine_seconds[e], default="none")

    @property
    def engine_cycles(self) -> dict[str, float]:
        """Busy cycles of the compute engines, each at its own clock."""
        return {e: s * costs.CLOCKS[e] for e, s in self.engine_seconds.items() if e in costs.CLOCKS}

    @property
    def dma_efficiency(self) -> float:
        """Payload over what the DMA engines could have moved in their busy time; 1.0 without DMA."""
        busy = self.engine_seconds.get("dma", 0.0)
        peak = costs.DMA_ENGINES * costs.DMA_ENGINE_RATE
        return sum(self.dma_bytes.values()) / (busy * peak) if busy else 1.0

    @property
    def small_run_share(self) -> float:
        """Share of the payload in descriptors of less than 512 contiguous bytes."""
        total = sum(self.dma_runs.values())
        return sum(b for run, b in self.dma_runs.items() if run < costs.SMALL_RUN_BYTES) / total if total else 0.0

    @property
    def small_run_sites(self) -> dict[str, DmaSite]:
        """Places whose descriptors move less than 512 contiguous bytes, the slowest first."""
        small = [(k, s) for k, s in self.dma_sites.items() if s.run is not None and s.run < costs.SMALL_RUN_BYTES]
        return dict(sorted(small, key=lambda item: -item[1].seconds))

    def scaled(self, factor: float) -> Report:
        """The report of running this `factor` times, one after another (peaks stay)."""

        def times(values: dict) -> dict:
            return {k: type(v)(v * factor) for k, v in values.items()}

        return replace(
            self,
            engine_seconds=times(self.engine_seconds),
            operation_seconds=times(self.operation_seconds),
            instructions=times(self.instructions),
            dma_bytes=times(self.dma_bytes),
            dma_runs=times(self.dma_runs),
            dma_sites={
                k: DmaSite(int(s.bytes * factor), s.seconds * factor, s.run) for k, s in self.dma_sites.items()
            },
            per_core=tuple(r.scaled(factor) for r in self.per_core),
        )

    def __add__(self, other: Report) -> Report:
        """Both kernels, one after another."""

        def both(a: dict, b: dict) -> dict:
            return {k: a[k] + b[k] if k in a and k in b else a.get(k, b.get(k)) for k in {**a, **b}}

        return Report(
            both(self.engine_seconds, other.engine_seconds),
            both(self.operation_seconds, other.operation_seconds),
            both(self.instructions, other.instructions),
            both(self.dma_bytes, other.dma_bytes),
            both(self.dma_runs, other.dma_runs),
            both(self.dma_sites, other.dma_sites),
            max(self.sbuf_peak, other.sbuf_peak),
            max(self.psum_peak, other.psum_peak),
            max(self.cores, other.cores),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, for JSON."""
        derived = {
            "seconds": self.seconds,
            "bound": self.bound,
            "engine_cycles": self.engine_cycles,
            "dma_efficiency": self.dma_efficiency,
            "small_run_share": self.small_run_share,
        }
        return asdict(self) | derived

    def table(self) -> str:
        """A few lines for a terminal."""
        lines = [f"modelled {self.seconds * 1e6:.1f} us, bound by {self.bound}"]
        lines += [f"  {e:<8} {s * 1e6:10.1f} us" for e, s in sorted(self.engine_seconds.items(), key=lambda x: -x[1])]
        moved = sum(self.dma_bytes.values())
        lines.append(
            f"  DMA {moved / 1e6:.2f} MB at {self.dma_efficiency:.0%} of peak, "
            f"{self.small_run_share:.0%} in runs below {costs.SMALL_RUN_BYTES} B"
        )
        lines += [
            f"    {site}: {s.run:.0f} B a descriptor, {s.seconds * 1e6:.1f} us"
            for site, s in [*self.small_run_sites.items()][:3]
        ]
        lines.append(
            f"  SBUF {self.sbuf_peak} of {accounting.SBUF_BYTES} B, "
            f"PSUM {self.psum_peak // accounting.PSUM_BANK_BYTES} of {accounting.PSUM_BANKS} banks; "
            f"{sum(self.instructions.values())} instructions"
        )
        return "\n".join(lines)


def report_of(cores: list[Core]) -> Report:
    """The report of a finished launch.

    Raises:
        NkiValidationError: a core needed more SBUF or PSUM at once than there is.
    """
    reports = [_one(core, len(cores)) for core in cores]
    slowest = max(reports, key=lambda r: r.seconds)
    return replace(slowest, per_core=tuple(reports)) if len(reports) > 1 else slowest


def _one(core: Core, cores: int) -> Report:
    peaks = accounting.check_capacity(core.lives)
    counts = core.counts
    operations: Counter = Counter({f"{e} {op}": s for (e, op), s in counts.by_operation.items()})
    return Report(
        dict(counts.seconds),
        dict(operations),
        dict(counts.instructions),
        dict(counts.dma_bytes),
        dict(counts.dma_runs),
        dict(counts.dma_sites),
        peaks["sbuf"],
        peaks["psum"],
        cores,
    )

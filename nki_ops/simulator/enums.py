"""The enumerations of `nki.isa` and `nki.language`, under their own (lower case) names.

Source: the NKI 0.6 API reference. Raw integers in place of a member are refused, as NKI does since 0.3.
"""

from enum import Enum, IntEnum


class MemoryRegion(Enum):
    """Where a tensor lives."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    @property
    def on_chip(self) -> bool:
        return self in (MemoryRegion.sbuf, MemoryRegion.psum)


class engine(Enum):
    """The engines of a NeuronCore."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(Enum):
    """What an instruction does with the accumulator registers of its engine."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who makes the descriptors of a DMA."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What a DMA does with a dynamic index that is out of bounds."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """`double_row` contracts 256 rows of fp8 in the time of 128 rows of bf16."""

    none = "none"
    double_row = "double_row"


class dma_engine(Enum):
    """Which DMA a `sendrecv` uses."""

    dma = 1
    gpsimd_dma = 2


class nc_version(IntEnum):
    """NeuronCore generations; ordered, so that kernels can write `get_nc_version() >= nc_version.gen3`."""

    gen2 = 2
    gen3 = 3
    gen4 = 4

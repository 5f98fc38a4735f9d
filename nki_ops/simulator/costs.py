"""What an instruction costs on one Trainium2 core: the rates, where each comes from, and the formulas.

Nothing here was measured on a Trainium. Sources:
  [trn2]   AWS Neuron SDK 2.32, nki/guides/architecture/trainium2_arch.rst
  [trn1]   same, trainium_inferentia2_arch.rst (cost model, access pattern, tensor access overhead)
  [isa]    "Estimated instruction cost" in the API reference of nki.isa (NKI 0.1; later references leave it out)
  [dma]    nki/deep-dives/nki-dma-bandwidth-guide.rst and nki/get-started/about/nki-dma-overview.rst
  [choice] this project's choice where the documents are silent; stated at the constant

N is the number of elements that an instruction streams through each partition. Lanes (partitions) are parallel, so
using fewer of them costs the same. Busy times of different engines overlap; the largest bounds the kernel.
"""

import bisect
import math

from nki_ops.simulator import dtypes

# Clocks in Hz. [trn2]
TENSOR_CLOCK = 2.4e9
VECTOR_CLOCK = 0.96e9
SCALAR_CLOCK = 1.2e9
GPSIMD_CLOCK = 1.2e9
CLOCKS = {"tensor": TENSOR_CLOCK, "vector": VECTOR_CLOCK, "scalar": SCALAR_CLOCK, "gpsimd": GPSIMD_CLOCK}

# A tensor access costs about 60 cycles before the first element [trn1]; the guide gives 60 to 100 for an instruction.
INSTRUCTION_OVERHEAD = 60
# Reading the accumulator registers is an instruction of its own: about 64 cycles. [trn1, ActReadAccumulator]
READ_ACCUMULATOR = 64
# GpSimdE takes about 150 cycles to start. [isa, iota and affine_select]
GPSIMD_START = 150
# An on-chip access at a dynamic offset takes at least about 600 cycles. [isa, tensor_copy_dynamic_src]
DYNAMIC_ACCESS = 600
# An innermost stride above 16 bytes halves the rate of the access. [trn1]
FULL_RATE_STRIDE_BYTES = 16

# A matmul costs max(min(64, stationary columns), moving columns) cycles, float32 four times that. [isa, nc_matmul]
MATMUL_MIN = 64
MATMUL_FLOAT32 = 4
# Transpose mode doubles float32 [trn2]; so does the hint that an operand is all ones and zeros [isa].
MATMUL_FLOAT32_FAST = 2

# 16 DMA engines of 23 B/ns; each serves 8 partitions. [dma]
DMA_ENGINES = 16
DMA_ENGINE_RATE = 23e9
PARTITIONS_PER_DMA_ENGINE = 8
# Share of the peak by contiguous bytes a descriptor moves: points read off the plot of [dma] (nki-dma-overview.rst).
DMA_EFFICIENCY = (
    (32, 0.014),
    (64, 0.026),
    (128, 0.05),
    (256, 0.10),
    (512, 0.21),
    (1024, 0.42),
    (2048, 0.81),
    (4096, 0.97),
    (32768, 1.0),
)
# Runs below this are flagged: severely overhead-bound. [dma: "< 256 B"; 512 B still has a fifth of the rate]
SMALL_RUN_BYTES = 512
# dma_transpose reaches 90 % of the DMA rate from HBM and 50 % within SBUF, on full tiles: 128 partitions by a
# multiple of 16 elements. [trn2] Partial tiles are charged as full ones. [choice]
TRANSPOSE_FROM_HBM = 0.9
TRANSPOSE_FROM_SBUF = 0.5
TRANSPOSE_TILE = (128, 16)
# One core's share of the HBM: 2.9 TB/s over 8 cores. [about-neuron, trainium2.rst]
HBM_RATE = 2.9e12 / 8
# A DMA through the hardware descriptor engine takes about 600 ns; a core has two. [trn2, DGE]
HWDGE_SECONDS = 600e-9
HWDGE_INSTANCES = 2


def stride_factor(stride: int, dtype: str) -> int:
    """2 where the innermost stride of an on-chip access halves its rate."""
    return 2 if abs(stride) * dtypes.itemsize(dtype) > FULL_RATE_STRIDE_BYTES else 1


def stream_cycles(passes: float, elements: int, dynamic: bool = False) -> float:
    """VectorE or ScalarE: `passes` cycles an element, plus the overhead of an instruction."""
    return INSTRUCTION_OVERHEAD + max(passes * elements, DYNAMIC_ACCESS if dynamic else 0)


def gpsimd_cycles(elements: int, passes: float = 1.0) -> float:
    """GpSimdE: one 32-bit element a lane and cycle. [isa: 150 + N]"""
    return GPSIMD_START + passes * elements


def matmul_cycles(stationary_columns: int, moving_columns: int, dtype: str, fast_float32: bool) -> float:
    """TensorE; loading the stationary operand goes on behind the running matmul."""
    cycles = max(min(MATMUL_MIN, stationary_columns), moving_columns)
    if dtype == "float32":
        cycles *= MATMUL_FLOAT32 / (MATMUL_FLOAT32_FAST if fast_float32 else 1)
    return cycles


def copy_passes(two_byte: bool, in_sbuf: int, contiguous: bool) -> float:
    """VectorE's tensor_copy and tensor_scalar: 4x and 2x performance modes. [trn2]

    Args:
        two_byte: input and output are bf16 or fp16.
        in_sbuf: how many of the two are in SBUF.
        contiguous: both have stride 1 innermost.
    """
    if not two_byte or in_sbuf == 0 or (in_sbuf == 1 and not contiguous):
        return 1.0
    return 0.25 if in_sbuf == 2 and contiguous else 0.5


def tensor_tensor_passes(all_two_byte: bool, inputs_in_sbuf: int) -> float:
    """VectorE with two input tiles: 2 cycles an element; 1 in performance mode, or where one input is in PSUM.

    [trn2: all bf16/fp16 and inputs in SBUF] [isa: one input in PSUM]
    """
    return 1.0 if inputs_in_sbuf < 2 or all_two_byte else 2.0


def dma_efficiency(run_bytes: float) -> float:
    """Share of the peak rate for descriptors of `run_bytes` contiguous bytes: linear between the plot's points."""
    first_bytes, first_share = DMA_EFFICIENCY[0]
    if run_bytes <= first_bytes:
        return first_share * run_bytes / first_bytes
    if run_bytes >= DMA_EFFICIENCY[-1][0]:
        return DMA_EFFICIENCY[-1][1]
    at = bisect.bisect(DMA_EFFICIENCY, (run_bytes, 2.0))
    (x0, y0), (x1, y1) = DMA_EFFICIENCY[at - 1], DMA_EFFICIENCY[at]
    return y0 + (y1 - y0) * (run_bytes - x0) / (x1 - x0)


def dma_engines(partitions: int | None, rows: int) -> int:
    """How many DMA engines a copy uses: one for 8 partitions of SBUF [dma], one a row between HBM tensors [choice]."""
    wanted = rows if partitions is None else math.ceil(partitions / PARTITIONS_PER_DMA_ENGINE)
    return max(1, min(DMA_ENGINES, wanted))


def dma_seconds(moved_bytes: int, run_bytes: float, engines: int) -> float:
    """Time that a copy of `moved_bytes` in descriptors of `run_bytes` keeps `engines` DMA engines busy."""
    return moved_bytes / (engines * DMA_ENGINE_RATE * dma_efficiency(run_bytes))


def transpose_seconds(elements: int, item_bytes: int, partitions: int, inner: int, from_hbm: bool) -> float:
    """Time of a dma_transpose that writes `partitions` rows whose innermost run is `inner` elements."""
    tile_p, tile_f = TRANSPOSE_TILE
    fill = (math.ceil(partitions / tile_p) * tile_p / partitions) * (math.ceil(inner / tile_f) * tile_f / inner)
    share = TRANSPOSE_FROM_HBM if from_hbm else TRANSPOSE_FROM_SBUF
    return elements * item_bytes * fill / (DMA_ENGINES * DMA_ENGINE_RATE * share)

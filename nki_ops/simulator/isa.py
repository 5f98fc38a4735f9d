"""`nki.isa`: the instructions of Trainium2, as `import nki.isa as nisa` gives them."""

import warnings
from typing import Any

from nki_ops.simulator import enums as constants  # an older home of the enumerations
from nki_ops.simulator.core import current
from nki_ops.simulator.enums import (
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)
from nki_ops.simulator.errors import NkiValidationError, SimulatorError
from nki_ops.simulator.instruction import Instruction as NkiInstruction
from nki_ops.simulator.isa_control import (
    core_barrier,
    get_nc_sub_version,
    get_nc_version,
    register_alloc,
    register_load,
    register_move,
    register_store,
    sendrecv,
)
from nki_ops.simulator.isa_dma import dma_compute, dma_copy, dma_transpose
from nki_ops.simulator.isa_gpsimd import (
    affine_select,
    iota,
    local_gather,
    max8,
    nc_find_index8,
    nc_match_replace8,
    nc_n_gather,
    nc_stream_shuffle,
    nonzero_with_count,
    tensor_partition_reduce,
)
from nki_ops.simulator.isa_reduce import (
    bn_aggr,
    bn_stats,
    range_select,
    select_reduce,
    tensor_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor_scan,
)
from nki_ops.simulator.isa_scalar import activation, activation_reduce
from nki_ops.simulator.isa_tensor import nc_matmul, nc_transpose
from nki_ops.simulator.isa_vector import (
    memset,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
)
from nki_ops.simulator.registers import VirtualRegister

_OLD_ENGINE_NAMES = {f"{e.name}_engine": e for e in engine if e.name not in ("dma", "sync")}
_TRN3_ONLY = ("activate2", "exponential", "nc_matmul_mx", "quantize_mx", "rand2")
_NOT_SIMULATED = ("dropout", "rand_get_state", "rand_set_state", "rng", "sequence_bounds", "set_rng_seed", "topk")


def __getattr__(name: str) -> Any:
    if name in _OLD_ENGINE_NAMES:
        new = _OLD_ENGINE_NAMES[name]
        warnings.warn(f"nisa.{name} is deprecated; use nisa.engine.{new.name}", DeprecationWarning, stacklevel=2)
        return new
    if name in _TRN3_ONLY or name in _NOT_SIMULATED:
        return _refusing(name)
    raise AttributeError(f"nki.isa has no {name}")


def _refusing(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        current()
        if name in _TRN3_ONLY:
            raise NkiValidationError(f"{name} needs NeuronCore-v4 (trn3); the simulator models Trainium2")
        raise SimulatorError(f"nisa.{name} is not simulated")

    return refuse


__all__ = [
    "NkiInstruction",
    "NkiValidationError",
    "VirtualRegister",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "constants",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "get_nc_sub_version",
    "get_nc_version",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
]

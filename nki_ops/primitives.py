"""The NKI kernels as JAX functions, with the signatures of nki_ops/xla.py. Each is a primitive of its own.

What a primitive becomes in a lowered program:

    simulated                   a callback to the host, which runs the kernel on the CPU simulator
    for Trainium, with NKI      what the kernel's `nki.jit` makes of a call: `AwsNeuronCustomNativeKernel`
    for Trainium, without NKI   `nki_ops_stand_in.<kernel>`, to be read on any machine; no compiler takes it
    for anything else           an error

Programs for Trainium are lowered without one by `jax.jit(f).trace(...).lower(lowering_platforms=("neuron",))`. The
primitives work in jit, scan, vmap and shard_map. They have no derivatives: train with RFJAX_KERNELS=xla.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from nki_ops import limits
from nki_ops.dispatch import backend
from nki_ops.errors import KernelError

PLATFORM = "neuron"
STAND_IN = "nki_ops_stand_in."


# ---- the operations


def rms_norm_rope_3d(
    q: Float[Array, "B T C"],
    k: Float[Array, "B T C"],
    weights: tuple[Float[Array, " C"], Float[Array, " C"]],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    eps: float = 1e-6,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B T N D"]]:
    """`nki_ops.xla.rms_norm_rope_3d` by its kernel; rounds once, at the end. Raises KernelError."""
    cos, sin = (jnp.asarray(x, jnp.float32) for x in (cos, sin))
    q, k = _call(_rms_norm_rope_3d, q, k, *weights, cos, sin, eps=eps)
    return q, k


def rotate(
    x: Float[Array, "*b d"], cos: Float[Array, "*r half"], sin: Float[Array, "*r half"]
) -> Float[Array, "*b d"]:
    """`nki_ops.xla.rotate` by its kernel; the table has a row for each token, or one for all. Raises KernelError."""
    cos, sin = (jnp.asarray(x, jnp.float32) for x in (cos, sin))
    return _call(_rotate, x, cos, sin)[0]


def update_cache(
    cache: tuple[Float[Array, "P B N T D"], Float[Array, "P B N T D"]],
    block_kv: tuple[Float[Array, "B N T D"], Float[Array, "B N T D"]],
    slot: Int[Array, ""],
) -> tuple[Float[Array, "P B N T D"], Float[Array, "P B N T D"]]:
    """`nki_ops.xla.update_cache` by its kernel; a slot that the pool does not have is an error on the device, and not
    the nearest one. Raises KernelError."""
    block = (x.astype(pool.dtype) for x, pool in zip(block_kv, cache, strict=True))
    k_pool, v_pool = _call(_update_cache, *cache, *block, _integers(slot, (1, 1)))
    return k_pool, v_pool


def attention(
    q: Float[Array, "B T N D"],
    pools: Sequence[tuple[Float[Array, "_ B N S D"], Float[Array, "_ B N S D"]]],
    table: Int[Array | np.ndarray, " P"],
    n_valid: Int[Array | np.ndarray, ""],
) -> Float[Array, "B T N D"]:
    """`nki_ops.xla.attention` by its kernel, which reads the blocks where they lie. Raises KernelError."""
    arrays = (x for pool in pools for x in pool)
    return _call(_attention, q, _integers(table, (-1,)), _integers(n_valid, (1,)), *arrays)[0]


def _integers(x: Any, shape: tuple[int, ...]) -> Array:
    return jnp.asarray(x, jnp.int32).reshape(shape)


# ---- what makes a primitive of a kernel

_Outputs = list[tuple[tuple[int, ...], Any]]


def _primitive(kernel: str, outputs: Callable[..., _Outputs], in_place: int = 0) -> Primitive:
    """A primitive that stands for a kernel.

    Args:
        kernel: its name in `nki_ops.kernels`. The primitive's operands and parameters are its arguments.
        outputs: checks abstract operands, and gives shape and dtype of each output.
        in_place: this many outputs are the first operands, changed in place.
    """
    primitive = Primitive(f"nki_{kernel}")
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def abstract(*avals: Any, simulated: bool, **parameters: Any) -> list[Any]:
        del simulated, parameters  # no shape depends on them
        return [_output(kernel, avals, *kind) for kind in outputs(*avals)]

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, simulated: bool, **parameters: Any) -> Any:
        if simulated:
            return _simulated_call(ctx, kernel, parameters, operands)
        kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ctx.avals_out]
        call = _device_call(kernel, tuple(ctx.module_context.platforms))
        form = partial(call, kernel, kinds, parameters, in_place)
        return mlir.lower_fun(form, multiple_results=True)(ctx, *operands)

    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = partial(_one_after_the_other, primitive)
    primitive.def_impl(jax.jit(primitive.bind, static_argnames=("simulated", "eps")))
    return primitive


def _call(primitive: Primitive, *operands: Any, **parameters: Any) -> list[Array]:
    return primitive.bind(*operands, simulated=backend() == "simulate", **parameters)


def _output(kernel: str, avals: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """An abstract output. In `shard_map` it varies over the mesh axes that the operands vary over."""
    model = max(avals, key=lambda aval: len(_varying(aval)))
    for aval in avals:
        if not _varying(aval) <= _varying(model):
            raise KernelError(
                f"NKI kernel {kernel}: one operand varies over the mesh axes {sorted(_varying(aval))}, another over "
                f"{sorted(_varying(model))}; cast one to vary over all of them (jax.lax.pcast), or use check_vma=False"
            )
    sharding = NamedSharding(model.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return model.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _varying(aval: Any) -> frozenset[str]:
    """Mesh axes over which a value varies; JAX 0.10 moved them."""
    return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying


def _one_after_the_other(
    primitive: Primitive, operands: Sequence[Array], dims: Sequence[int | None], **parameters: Any
) -> tuple[list[Array], list[int]]:
    """vmap: the kernel has a batch axis of its own for speed; this is for generality."""
    stacked = {i: jnp.moveaxis(operands[i], dim, 0) for i, dim in enumerate(dims) if dim is not None}

    def call(own: dict[int, Array]) -> list[Array]:
        return primitive.bind(*(own.get(i, x) for i, x in enumerate(operands)), **parameters)

    outputs = jax.lax.map(call, stacked)
    return outputs, [0] * len(outputs)


# ---- what stands in the lowered program


def _simulated_call(
    ctx: mlir.LoweringRuleContext, kernel: str, parameters: dict[str, Any], operands: Sequence[Any]
) -> Sequence[Any]:
    """A callback that gets numpy arrays. `jax.pure_callback` would make arrays of JAX of them, by the threads that run
    programs, and wait: for ever, where the machine has one core and so one thread, which runs this program."""
    if PLATFORM in ctx.module_context.platforms:
        raise KernelError(
            f"NKI kernel {kernel}: a simulation is a callback to the host, which Trainium has not; "
            "unset RFJAX_KERNELS, or set it to nki or xla"
        )

    def run(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        from nki_ops import kernels

        copies = (np.array(x) for x in arrays)  # writable, for what is changed in place
        results = kernels.nki.simulate(getattr(kernels, kernel)[_cores()])(*copies, **parameters)
        return tuple(results) if isinstance(results, tuple | list) else (results,)

    os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")  # AWS's simulator takes trn3 without a device
    avals: Any = ctx.avals_in, ctx.avals_out  # shaped arrays all, which JAX's annotation does not say
    outputs, *_ = mlir.emit_python_callback(ctx, run, None, operands, *avals, has_side_effect=False)
    return outputs


def _device_call(kernel: str, platforms: tuple[str, ...]) -> Callable[..., Any]:
    from nki_ops import kernels

    if platforms != (PLATFORM,):
        raise KernelError(
            f"NKI kernel {kernel}: it runs on Trainium, and this program is for {', '.join(platforms)} "
            f"({_nki_state()}); unset RFJAX_KERNELS, or set it to xla or simulate"
        )
    if not _is_simulator(kernels.nki):
        return _nki_call
    if jax.default_backend() == PLATFORM:
        raise KernelError(
            f"NKI kernel {kernel}: {_nki_state()}; install the Neuron SDK's package, or set RFJAX_KERNELS=xla"
        )
    return _stand_in_call


def _nki_call(kernel: str, kinds: list[Any], parameters: dict[str, Any], in_place: int, *operands: Array) -> Any:
    """The real thing. A kernel that returns operands that it wrote has them as aliased outputs; how that shows in JAX
    is not documented, beyond that the caller is to donate them, as the model does with its cache."""
    from nki_ops import kernels

    results = getattr(kernels, kernel)[_cores()](*operands, **parameters)
    return list(results) if isinstance(results, tuple | list) else [results]


def _stand_in_call(kernel: str, kinds: list[Any], parameters: dict[str, Any], in_place: int, *operands: Array) -> Any:
    call = jax.ffi.ffi_call(STAND_IN + kernel, kinds, input_output_aliases={i: i for i in range(in_place)})
    return call(*operands, cores=np.int32(_cores()), **{name: np.float32(x) for name, x in parameters.items()})


def _cores() -> int:
    """Physical cores that share a kernel's work: those of a logical core, as the runtime and compiler are told."""
    variable = "NEURON_LOGICAL_NC_CONFIG"
    value = os.environ.get(variable, "2")
    if value not in ("1", "2"):
        raise KernelError(f"{variable}={value}: a logical core of Trainium2 has 1 or 2 physical ones")
    return int(value)


def _is_simulator(nki: Any) -> bool:
    from nki_ops.simulator import nki as simulator

    return nki is simulator


def _nki_state() -> str:
    from nki_ops import kernels

    if not _is_simulator(kernels.nki):
        return "AWS's nki is installed"
    try:
        return f"the nki {metadata.version('nki')} installed here is a placeholder without nki.jit"
    except metadata.PackageNotFoundError:
        return "AWS's nki is not installed"


# ---- the primitives


def _rms_norm_rope_3d_outputs(q: Any, k: Any, q_scale: Any, k_scale: Any, cos: Any, sin: Any) -> _Outputs:
    limits.check_rms_norm_rope_3d(q, k, q_scale, k_scale, cos, sin)
    dim = 2 * cos.shape[1]
    return [((*x.shape[:2], x.shape[2] // dim, dim), x.dtype) for x in (q, k)]


def _rotate_outputs(x: Any, cos: Any, sin: Any) -> _Outputs:
    limits.check_rotate(x, cos, sin)
    return [(x.shape, x.dtype)]


def _update_cache_outputs(k_pool: Any, v_pool: Any, k: Any, v: Any, slot: Any) -> _Outputs:
    limits.check_update_cache(k_pool, v_pool, k, v)
    return [(x.shape, x.dtype) for x in (k_pool, v_pool)]


def _attention_outputs(q: Any, table: Any, n_valid: Any, *pools: Any) -> _Outputs:
    limits.check_attention(q, table, n_valid, list(zip(pools[::2], pools[1::2], strict=True)))
    return [(q.shape, q.dtype)]


_rms_norm_rope_3d = _primitive("rms_norm_rope_3d", _rms_norm_rope_3d_outputs)
_rotate = _primitive("rotate", _rotate_outputs)
_update_cache = _primitive("update_cache", _update_cache_outputs, in_place=2)
_attention = _primitive("attention", _attention_outputs)

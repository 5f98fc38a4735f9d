"""What the models share: a stack of equal layers as one loop, and the precision of matrix products."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

Carry = TypeVar("Carry")


def precision(dtype: DTypeLike) -> Any:
    """A context to trace in: float32 means float32, also where a backend takes coarser products by default."""
    return jax.default_matmul_precision("highest" if jnp.dtype(dtype) == jnp.float32 else "default")


def scan_layers(
    blocks: nnx.Module,
    body: Callable[[Any, Any, jax.Array, Carry], tuple[Carry, Any]],
    carry: Carry,
    per_layer: Any = None,
) -> tuple[Carry, Any]:
    """Runs `body(block, x, index, carry) -> (carry, y)` for each layer, so that compile time does not grow with them.

    Args:
        blocks: one module whose parameters have a leading axis of L layers.
        body: gets the module of one layer, its entry of `per_layer`, and its number.
        carry: what the first layer gets.
        per_layer: a pytree with a leading axis of L.

    Returns:
        The last carry, and the stacked outputs of all layers.
    """
    graph, params = nnx.split(blocks)
    n_layers = jax.tree.leaves(params)[0].shape[0]

    def run(carry: Carry, index: jax.Array) -> tuple[Carry, Any]:
        # The barrier makes the weights vary with the index. Without it XLA's CPU backend, which multiplies no
        # bfloat16, converts the weights of all layers to float32 at once, ahead of the loop.
        stacks, index = jax.lax.optimization_barrier(((params, per_layer), index))
        layer, x = jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, index, keepdims=False), stacks)
        return body(nnx.merge(graph, layer), x, index, carry)

    return jax.lax.scan(run, carry, jnp.arange(n_layers, dtype=jnp.int32))

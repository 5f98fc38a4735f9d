"""The XLA form of attention on CUDA: cuDNN's flash attention where it takes the arguments, else the plain form."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from nki_ops import xla
from nki_ops.dispatch import forced


def attention(
    q: Float[Array, "B T N D"],
    pools: Sequence[tuple[Float[Array, "_ B N S D"], Float[Array, "_ B N S D"]]],
    table: Int[Array | np.ndarray, " P"],
    n_valid: Int[Array | np.ndarray, ""],
) -> Float[Array, "B T N D"]:
    """As `nki_ops.xla.attention`, which it is unless there is a GPU and cuDNN has a kernel; RFJAX_KERNELS=xla forbids
    that. cuDNN takes 16-bit floats and head dims that are multiples of 8 up to 128."""
    dtypes = {x.dtype for pool in pools for x in pool} | {q.dtype}
    fits = dtypes in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}) and q.shape[-1] in range(8, 129, 8)
    if fits and jax.default_backend() == "gpu" and forced() != "xla":
        try:
            return fused(q, pools, table, n_valid, "cudnn")
        except RuntimeError:  # how JAX says, while tracing, that cuDNN is missing or the GPU too old
            pass
    return xla.attention(q, pools, table, n_valid)


def fused(
    q: Float[Array, "B T N D"],
    pools: Sequence[tuple[Float[Array, "_ B N S D"], Float[Array, "_ B N S D"]]],
    table: Int[Array | np.ndarray, " P"],
    n_valid: Int[Array | np.ndarray, ""],
    implementation: Literal["cudnn", "xla"],
) -> Float[Array, "B T N D"]:
    """As `nki_ops.xla.attention`, by `jax.nn.dot_product_attention` over the blocks, gathered in the table's order."""
    table = jnp.where(jnp.arange(table.shape[0]) < n_valid, table, table[0])  # what does not count must be finite
    keys, values = (xla.gather_blocks(arrays, table, q.dtype) for arrays in zip(*pools, strict=True))  # P B N S D
    block_tokens = keys.shape[3]
    keys, values = (x.transpose(1, 0, 3, 2, 4).reshape(q.shape[0], -1, *q.shape[2:]) for x in (keys, values))
    lengths = jnp.full(q.shape[0], n_valid * block_tokens, jnp.int32)
    return jax.nn.dot_product_attention(q, keys, values, key_value_seq_lengths=lengths, implementation=implementation)

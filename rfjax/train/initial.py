"""Parameters that training begins with, where the modules' own random ones would train slowly.

Every residual branch starts closed, its last product zero: the network is its shortcuts, and opens as it learns. The
DiT also starts blind to time, with all gates open, and says zero.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from rfjax.config import DiTConfig, VAEConfig
from rfjax.dit.model import DiT
from rfjax.vae.model import VAE

_GATES = jnp.array([0.0, 0, 1, 0, 0, 1])  # of shift, scale, gate; shift, scale, gate


def initial_vae(config: VAEConfig, seed: int) -> nnx.State:
    """The parameters of a new VAE."""
    return _closed(nnx.state(VAE(config, rngs=nnx.Rngs(seed))), ("conv2.kernel", "attention.out.kernel"))


def initial_dit(config: DiTConfig, seed: int) -> nnx.State:
    """The parameters of a new DiT."""
    dit = DiT(config, rngs=nnx.Rngs(seed))
    dit.blocks.modulation[...] = jnp.broadcast_to(_GATES[:, None], dit.blocks.modulation.shape)
    closed = ("attn.o.kernel", "ffn.down.kernel", "time_projection.kernel", "head.kernel")
    return _closed(nnx.state(dit), closed)


def _closed(state: nnx.State, names: tuple[str, ...]) -> nnx.State:
    def close(path: tuple, leaf: Array) -> Array:
        name = ".".join(str(getattr(key, "key", key)) for key in path)
        return jnp.zeros_like(leaf) if any(word in name for word in names) else leaf

    return jax.tree_util.tree_map_with_path(close, state)

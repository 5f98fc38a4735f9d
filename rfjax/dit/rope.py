"""3-D rotary tables, made on the host.

A head's channel pairs are divided among time, height and width (RoFormer applied to each axis, Wan2.1's split).
Angles are computed in float64 and rounded once, so positions may grow without end; only small per-axis tables
travel to the device.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Table = tuple[np.ndarray, np.ndarray]  # cos, sin


def axis_pairs(head_dim: int) -> tuple[int, int, int]:
    """How many channel pairs of a head rotate with time, height and width."""
    pairs = head_dim // 2
    return pairs - 2 * (pairs // 3), pairs // 3, pairs // 3


def axis_table(positions: np.ndarray, n_pairs: int, theta: float = 10000.0) -> Table:
    """cos and sin of position * theta^(-j / n_pairs), float32, [len(positions), n_pairs]."""
    frequencies = theta ** (-np.arange(n_pairs, dtype=np.float64) / max(n_pairs, 1))
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def spatial_table(height: int, width: int, head_dim: int, theta: float = 10000.0) -> Table:
    """Table of the height and width axes of one frame of patches, row by row: [height * width, pairs]."""
    _, pairs_h, pairs_w = axis_pairs(head_dim)
    rows = axis_table(np.repeat(np.arange(height), width), pairs_h, theta)
    columns = axis_table(np.tile(np.arange(width), height), pairs_w, theta)
    cos, sin = (np.concatenate(both, axis=-1) for both in zip(rows, columns, strict=True))
    return cos, sin


def token_table(
    temporal: Float[Array | np.ndarray, "*R F pairs_t"],
    spatial: Float[Array | np.ndarray, "P pairs_hw"],
) -> Float[Array, "*R T half"]:
    """One half (cos or sin) of the table of every token, frame by frame: T = F * P."""
    *rows, frames, pairs = temporal.shape
    patches = spatial.shape[0]
    by_time = jnp.broadcast_to(jnp.asarray(temporal)[..., None, :], (*rows, frames, patches, pairs))
    by_place = jnp.broadcast_to(jnp.asarray(spatial), (*rows, frames, patches, spatial.shape[1]))
    return jnp.concatenate([by_time, by_place], axis=-1).reshape(*rows, frames * patches, -1)

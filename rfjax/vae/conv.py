"""Convolutions over space and time, written as 2-D ones: no compiler sees a 3-D convolution.

Layout is [B, T, H, W, C] throughout. `width_axis` names the mesh axis that the width is cut along (inside
`shard_map`); a shard then takes the columns beyond its edges from its neighbours, where the whole image has zeros.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Pad = tuple[int, int]


def _halo(x: Float[Array, "N H W C"], pad: Pad, axis: str) -> Float[Array, "N H W2 C"]:
    """Adds pad[0] columns of the left neighbour and pad[1] of the right one; zeros at the ends of the image."""
    shards = lax.axis_size(axis)
    left = lax.ppermute(x[:, :, x.shape[2] - pad[0] :], axis, [(i, i + 1) for i in range(shards - 1)])
    right = lax.ppermute(x[:, :, : pad[1]], axis, [(i + 1, i) for i in range(shards - 1)])
    return jnp.concatenate([left, x, right], axis=2)


def conv2d(
    x: Float[Array, "N H W I"],
    kernel: Float[Array, "kh kw I O"],
    padding: tuple[Pad, Pad],
    stride: int = 1,
    width_axis: str | None = None,
) -> Float[Array, "N h w O"]:
    """Convolution of images with zero padding ((top, bottom), (left, right))."""
    rows, columns = padding
    if width_axis is not None and columns != (0, 0):
        x, columns = _halo(x, columns, width_axis), (0, 0)
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), (rows, columns), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def conv3d(
    x: Float[Array, "B T2 H W I"],
    kernel: Float[Array, "3 kh kw I O"],
    stride: int = 1,
    width_axis: str | None = None,
) -> Float[Array, "B T H W O"]:
    """Convolution of a video: as is along time (with a stride there, if any), zero padded to the same size in space."""
    kh, kw = kernel.shape[1:3]
    padding = ((kh // 2, kh // 2), (kw // 2, kw // 2))
    last = x.shape[1] - 2
    frames = [x[:, t : t + last : stride] for t in range(3)]
    batch, time = frames[0].shape[:2]
    if jax.default_backend() == "cpu":
        taps = [frame.reshape(-1, *frame.shape[2:]) for frame in frames]
        y = sum(conv2d(tap, k, padding, width_axis=width_axis) for tap, k in zip(taps, kernel, strict=True))
    else:
        taps = jnp.concatenate(frames, axis=-1).reshape(batch * time, *x.shape[2:4], -1)
        y = conv2d(taps, jnp.concatenate(list(kernel), axis=2), padding, width_axis=width_axis)
    return y.reshape(batch, time, *y.shape[1:])


def upsample_conv(
    x: Float[Array, "N H W I"], kernel: Float[Array, "3 3 I O"], width_axis: str | None = None
) -> Float[Array, "N 2*H 2*W O"]:
    """Nearest-neighbour doubling of both sides, then a 3x3 convolution, without the doubled image.

    A 3x3 patch of the doubled image covers only 2x2 source pixels, so each of the four output phases is a 2x2
    convolution of the source whose taps are sums of the kernel's: 4 products a pixel instead of 9.
    """

    def fold(k: Array, axis: int) -> tuple[Array, Array]:
        a, b, c = (lax.slice_in_dim(k, i, i + 1, axis=axis) for i in range(3))
        return jnp.concatenate([a, b + c], axis), jnp.concatenate([a + b, c], axis)

    k32 = kernel.astype(jnp.float32)
    rows = []
    for dy, k_rows in enumerate(fold(k32, 0)):
        row = [
            conv2d(x, k.astype(kernel.dtype), ((1 - dy, dy), (1 - dx, dx)), width_axis=width_axis)
            for dx, k in enumerate(fold(k_rows, 1))
        ]
        rows.append(jnp.stack(row, axis=3))  # N H W 2 O
    n, height, width, _ = x.shape
    return jnp.stack(rows, axis=2).reshape(n, 2 * height, 2 * width, -1)

"""Convolutions over space and time, written as 2-D ones: no compiler sees a 3-D convolution.

Layout is [B, T, H, W, C] throughout. `width_axis` names the mesh axis that the width is cut along (inside
`shard_map`); a shard then takes the columns beyond its edges from its neighbours, where the whole image has zeros.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

Pad = tuple[int, int]
WidthAxis = str | tuple[str, ...] | None


def _halo(x: Float[Array, "*b W C"], pad: Pad, axis: str | tuple[str, ...]) -> Float[Array, "*b W2 C"]:
    """Adds pad[0] columns of the left neighbour and pad[1] of the right one; zeros at the ends of the image."""
    shards, shard, width = lax.axis_size(axis), lax.axis_index(axis), x.shape[-2]
    # A whole ring: some backends refuse a permutation in which a shard sends or receives nothing.
    right_edge, left_edge = x[..., width - pad[0] :, :], x[..., : pad[1], :]
    left = lax.ppermute(right_edge, axis, [(i, (i + 1) % shards) for i in range(shards)])
    right = lax.ppermute(left_edge, axis, [((i + 1) % shards, i) for i in range(shards)])
    ends = jnp.where(shard == 0, 0, left), x, jnp.where(shard == shards - 1, 0, right)
    return jnp.concatenate(ends, axis=-2)


def _beyond_edges(x: Float[Array, "*b W C"], pad: Pad, width_axis: WidthAxis) -> tuple[Float[Array, "*b W2 C"], Pad]:
    """x with the columns beyond its edges if they are on other shards, and the zero padding that is left to do."""
    return (x, pad) if width_axis is None or pad == (0, 0) else (_halo(x, pad, width_axis), (0, 0))


def conv2d(
    x: Float[Array, "N H W I"],
    kernel: Float[Array, "kh kw I O"],
    padding: tuple[Pad, Pad],
    stride: int = 1,
    width_axis: WidthAxis = None,
) -> Float[Array, "N h w O"]:
    """Convolution of images with zero padding ((top, bottom), (left, right))."""
    rows, columns = padding
    x, columns = _beyond_edges(x, columns, width_axis)
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), (rows, columns), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


# A convolution to so few channels is dominated by reading its input; it then reads each frame once for all taps.
_FEW_CHANNELS = 12
# With fewer multiply-adds than this, the sums of the short algorithm cost as much as it saves.
_MUCH_WORK = 10**8


def conv3d(
    x: Float[Array, "B T2 H W I"], kernel: Float[Array, "3 kh kw I O"], width_axis: WidthAxis = None
) -> Float[Array, "B T H W O"]:
    """Convolution of a video: as is along time (T = T2 - 2), zero padded to the same size in space.

    The form depends on sizes and backend alone: taps as output channels where there are few of those; in float32 on
    a CPU, where arithmetic is what costs, a short algorithm over time (half the multiplications); else taps as input
    channels, one large product that accumulates in the matmul unit.
    """
    side = kernel.shape[2] // 2
    x, columns = _beyond_edges(x, (side, side), width_axis)
    return _conv3d(x, kernel, columns)


def _conv3d(x: Float[Array, "B T2 H W2 I"], kernel: Array, columns: Pad) -> Float[Array, "B T H W O"]:
    frames = x.shape[1] - 2
    if kernel.shape[-1] <= _FEW_CHANNELS:
        return _taps_as_outputs(x, kernel, columns)
    work = frames * math.prod(x.shape[2:4]) * x.shape[0] * kernel.size
    if frames == 1 or work < _MUCH_WORK or x.dtype != jnp.float32 or jax.default_backend() != "cpu":
        return _direct(x, kernel, columns)
    tile = next((m for m in (4, 3, 2) if frames % m == 0), None)
    if tile is not None:
        return _short(x, kernel, tile, columns)
    return jnp.concatenate([_conv3d(part, kernel, columns) for part in (x[:, :3], x[:, 1:])], axis=1)


def halve_time(x: Float[Array, "B T2 H W I"], kernel: Float[Array, "3 1 1 I O"]) -> Float[Array, "B T H W O"]:
    """`conv3d` at every second frame, without extent in space: T2 = 2 T + 1."""
    last = x.shape[1] - 2
    return _taps_as_inputs([_every(2, x, t, t + last) for t in range(3)], kernel, (0, 0))


def _every(step: int, x: Float[Array, "B T2 H W I"], start: int, stop: int) -> Float[Array, "B T H W I"]:
    """x[:, start:stop:step], which jax 0.7 makes a gather of."""
    return jax.lax.slice_in_dim(x, start, stop, step, axis=1)


def _conv_frames(
    x: Float[Array, "B T H W2 I"], kernel: Float[Array, "kh kw I O"], columns: Pad
) -> Float[Array, "B T H W O"]:
    """Convolution of each frame, to the same height; `columns` is the zero padding of the width."""
    rows = kernel.shape[0] // 2, kernel.shape[0] // 2
    y = conv2d(x.reshape(-1, *x.shape[2:]), kernel, (rows, columns))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def _taps_as_inputs(
    frames: list[Float[Array, "B T H W2 I"]], kernel: Float[Array, "3 kh kw I O"], columns: Pad
) -> Float[Array, "B T H W O"]:
    """The three frames that an output frame sees stand side by side as channels."""
    return _conv_frames(jnp.concatenate(frames, axis=-1), jnp.concatenate(list(kernel), axis=-2), columns)


def _direct(
    x: Float[Array, "B T2 H W2 I"], kernel: Float[Array, "3 kh kw I O"], columns: Pad
) -> Float[Array, "B T H W O"]:
    return _taps_as_inputs([x[:, t : t + x.shape[1] - 2] for t in range(3)], kernel, columns)


def _taps_as_outputs(
    x: Float[Array, "B T2 H W2 I"], kernel: Float[Array, "3 kh kw I O"], columns: Pad
) -> Float[Array, "B T H W O"]:
    """What each frame contributes to the three output frames that see it stands side by side as channels."""
    frames, channels = x.shape[1] - 2, kernel.shape[-1]
    y = _conv_frames(x, jnp.concatenate(list(kernel), axis=-1), columns)
    return sum(y[:, t : t + frames, ..., t * channels : (t + 1) * channels] for t in range(3))  # type: ignore


# Where the polynomials of a tile are evaluated, besides infinity: chosen for little rounding. On random data of 192
# channels the error is 1.3, 1.7 and 2.2 times that of the direct form for tiles of 2, 3 and 4.
_POINTS = {2: (0, 1, -1), 3: (1 / 2, -1 / 2, 5 / 4, -5 / 4), 4: (0, 3 / 4, -3 / 4, 3 / 2, -3 / 2)}


def _toom_cook(tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Matrices A, G, B with which a correlation takes few products (Lavin & Gray 2016, "Fast algorithms for CNNs").

    A ((G k) * (B x)) are the `tile` sums y[j] = k[0] x[j] + k[1] x[j+1] + k[2] x[j+2], with tile + 2 products instead
    of 3 tile.
    """

    def powers(width: int) -> np.ndarray:
        at_infinity = np.eye(width)[-1]
        return np.vstack([np.vander(_POINTS[tile], width, increasing=True), at_infinity])

    b = np.linalg.inv(powers(tile + 2)).T
    scale = np.abs(b).max(axis=1, keepdims=True)
    return powers(tile).T, powers(3) * scale, b / scale


def _combine(weights: np.ndarray, arrays: list[Array]) -> Array:
    return sum(float(w) * a for w, a in zip(weights, arrays, strict=True) if w)  # type: ignore[return-value]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _short(
    x: Float[Array, "B T2 H W2 I"], kernel: Float[Array, "3 kh kw I O"], tile: int, columns: Pad
) -> Float[Array, "B T H W O"]:
    """Every `tile` output frames from tile + 2 convolutions of single frames, rather than 3 tile.

    The convolutions are of sums of frames with sums of the kernel's taps; sums of theirs are the output frames.
    """
    a, g, b = _toom_cook(tile)
    last = x.shape[1] - 2 - tile
    frames = [_every(tile, x, i, i + last + 1) for i in range(tile + 2)]
    products = [
        _conv_frames(_combine(b_row, frames), _combine(g_row, list(kernel)), columns)
        for g_row, b_row in zip(g, b, strict=True)
    ]
    y = jnp.stack([_combine(a_row, products) for a_row in a], axis=2)
    return y.reshape(x.shape[0], -1, *y.shape[3:])


def _short_forward(x: Array, kernel: Array, tile: int, columns: Pad) -> tuple[Array, tuple[Array, Array]]:
    return _short(x, kernel, tile, columns), (x, kernel)


def _short_backward(tile: int, columns: Pad, inputs: tuple[Array, Array], g: Array) -> tuple[Array, ...]:
    """Gradients of the direct form: backwards, the sums of the short one cost more than they save."""

    def direct(x: Array, kernel: Array) -> Array:
        return _direct(x, kernel, columns)

    return jax.vjp(direct, *inputs)[1](g)


_short.defvjp(_short_forward, _short_backward)


def upsample_conv(
    x: Float[Array, "N H W I"], kernel: Float[Array, "3 3 I O"], width_axis: WidthAxis = None
) -> Float[Array, "N 2*H 2*W O"]:
    """Nearest-neighbour doubling of both sides, then a 3x3 convolution, without the doubled image.

    A 3x3 patch of the doubled image covers only 2x2 source pixels, so each of the four output phases is a 2x2
    convolution of the source whose taps are sums of the kernel's: 4 products a pixel instead of 9.
    """

    def fold(k: Array, axis: int) -> tuple[Array, Array]:
        a, b, c = (lax.slice_in_dim(k, i, i + 1, axis=axis) for i in range(3))
        return jnp.concatenate([a, b + c], axis), jnp.concatenate([a + b, c], axis)

    n, height, width, _ = x.shape
    x, columns = _beyond_edges(x, (1, 1), width_axis)
    k32 = kernel.astype(jnp.float32)
    rows = []
    for dy, k_rows in enumerate(fold(k32, 0)):
        row = []
        for dx, k in enumerate(fold(k_rows, 1)):
            # A phase sees one column beyond one edge: the one padded there, or the one that came from a neighbour.
            near, pad = (x, (1 - dx, dx)) if columns == (1, 1) else (x[:, :, dx : dx + width + 1], (0, 0))
            row.append(conv2d(near, k.astype(kernel.dtype), ((1 - dy, dy), pad)))
        rows.append(jnp.stack(row, axis=3))  # N H W 2 O
    return jnp.stack(rows, axis=2).reshape(n, 2 * height, 2 * width, -1)

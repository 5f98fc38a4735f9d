"""Building blocks of the causal VAE.

Every block maps a chunk of frames [B, T, H, W, C] and its state to the chunk's output and the new state: for each
causal convolution, the last frames it has read. State None starts a video: nothing was read before.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rfjax.vae.conv import WidthAxis, conv2d, conv3d, halve_time, upsample_conv
from rfjax.vae.plan import StagePlan

Video = Float[Array, "B _T _H _W _C"]  # frames, sides and channels change from layer to layer
State = Any
kernel_init = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform")


def pointwise(dim_in: int, dim_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Linear:
    """A convolution with a kernel of one pixel."""
    return nnx.Linear(dim_in, dim_out, dtype=dtype, param_dtype=dtype, rngs=rngs)


def _before_start(x: Video) -> Video:
    """What a causal convolution sees before the first frame of a video: two frames of zeros."""
    return jnp.zeros((x.shape[0], 2, *x.shape[2:]), x.dtype)


class Norm(nnx.Module):
    """Divides by the root mean square over channels, in float32, and scales."""

    def __init__(self, dim: int):
        self.scale = nnx.Param(jnp.ones(dim, jnp.float32))

    def __call__(self, x: Video) -> Video:
        x32 = x.astype(jnp.float32)
        # The release clamps the Euclidean norm from below by 1e-12.
        square = jnp.maximum(jnp.sum(jnp.square(x32), axis=-1, keepdims=True), 1e-24)
        return (x32 * jax.lax.rsqrt(square) * (self.scale[...] * x.shape[-1] ** 0.5)).astype(x.dtype)


class Conv(nnx.Module):
    """The kernel and bias of a convolution."""

    def __init__(self, size: tuple[int, ...], dim_in: int, dim_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.kernel = nnx.Param(kernel_init(rngs.params(), (*size, dim_in, dim_out), dtype))
        self.bias = nnx.Param(jnp.zeros(dim_out, dtype))


class CausalConv(Conv):
    """Convolution over space and over the current and the two previous frames."""

    def __call__(self, x: Video, state: State, width_axis: WidthAxis = None) -> tuple[Video, State]:
        x = jnp.concatenate([_before_start(x) if state is None else state, x], axis=1)
        return conv3d(x, self.kernel[...], width_axis=width_axis) + self.bias[...], x[:, -2:]


class ResBlock(nnx.Module):
    """Twice norm, SiLU and causal convolution, beside a shortcut."""

    def __init__(self, dim_in: int, dim_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.norm1, self.norm2 = Norm(dim_in), Norm(dim_out)
        self.conv1 = CausalConv((3, 3, 3), dim_in, dim_out, dtype=dtype, rngs=rngs)
        self.conv2 = CausalConv((3, 3, 3), dim_out, dim_out, dtype=dtype, rngs=rngs)
        if dim_in != dim_out:
            self.shortcut = pointwise(dim_in, dim_out, dtype=dtype, rngs=rngs)

    def __call__(self, x: Video, state: State, width_axis: WidthAxis = None) -> tuple[Video, State]:
        past1, past2 = state or (None, None)
        h, past1 = self.conv1(jax.nn.silu(self.norm1(x)), past1, width_axis)
        h, past2 = self.conv2(jax.nn.silu(self.norm2(h)), past2, width_axis)
        shortcut = self.shortcut(x) if hasattr(self, "shortcut") else x
        return shortcut + h, (past1, past2)


class Attention(nnx.Module):
    """Self-attention with one head over the pixels of a frame."""

    def __init__(self, dim: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.norm = Norm(dim)
        self.q, self.k, self.v, self.out = (pointwise(dim, dim, dtype=dtype, rngs=rngs) for _ in range(4))

    def __call__(self, x: Video, width_axis: WidthAxis = None) -> Video:
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        if width_axis is not None:
            k, v = (jax.lax.all_gather(a, width_axis, axis=3, tiled=True) for a in (k, v))
        q, k, v = (rearrange(a, "b t h w c -> (b t) (h w) c") for a in (q, k, v))
        scores = jnp.einsum("nqc,nkc->nqk", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * x.shape[-1] ** -0.5, axis=-1).astype(x.dtype)
        return x + self.out(jnp.einsum("nqk,nkc->nqc", weights, v).reshape(x.shape))


class Middle(nnx.Module):
    """Residual block, attention, residual block, at the resolution of the latents."""

    def __init__(self, dim: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.res0 = ResBlock(dim, dim, dtype=dtype, rngs=rngs)
        self.attention = Attention(dim, dtype=dtype, rngs=rngs)
        self.res1 = ResBlock(dim, dim, dtype=dtype, rngs=rngs)

    def __call__(self, x: Video, state: State, width_axis: WidthAxis = None) -> tuple[Video, State]:
        past0, past1 = state or (None, None)
        x, past0 = self.res0(x, past0, width_axis)
        x, past1 = self.res1(self.attention(x, width_axis), past1, width_axis)
        return x, (past0, past1)


class Upsample(nnx.Module):
    """Doubles height and width, halves the channels; with `time`, first doubles the frames.

    The first frame of a video stays single, and the convolution over time does not see it.
    """

    def __init__(self, dim: int, *, time: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        self.conv = Conv((3, 3), dim, dim // 2, dtype=dtype, rngs=rngs)
        if time:
            self.time_conv = CausalConv((3, 1, 1), dim, 2 * dim, dtype=dtype, rngs=rngs)

    def _double_frames(self, x: Video, state: State) -> tuple[Video, State]:
        if state is None:
            first, later, state = x[:, :1], x[:, 1:], _before_start(x)
            if later.shape[1] == 0:
                return first, state
            later, state = self._double_frames(later, state)
            return jnp.concatenate([first, later], axis=1), state
        y, state = self.time_conv(x, state)
        even_odd = jnp.stack(jnp.split(y, 2, axis=-1), axis=2)
        return even_odd.reshape(x.shape[0], -1, *x.shape[2:]), state

    def __call__(self, x: Video, state: State, width_axis: WidthAxis = None) -> tuple[Video, State]:
        if hasattr(self, "time_conv"):
            x, state = self._double_frames(x, state)
        frames = x.shape[:2]
        x = upsample_conv(x.reshape(-1, *x.shape[2:]), self.conv.kernel[...], width_axis) + self.conv.bias[...]
        return x.reshape(*frames, *x.shape[1:]), state


class Downsample(nnx.Module):
    """Halves height and width; with `time`, then halves the frames, except that the first of a video stays single."""

    def __init__(self, dim: int, *, time: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        self.conv = Conv((3, 3), dim, dim, dtype=dtype, rngs=rngs)
        if time:
            self.time_conv = Conv((3, 1, 1), dim, dim, dtype=dtype, rngs=rngs)

    def _halve_frames(self, x: Video, state: State) -> tuple[Video, State]:
        if state is None:
            return x, x
        pairs = jnp.concatenate([state, x], axis=1)
        return halve_time(pairs, self.time_conv.kernel[...]) + self.time_conv.bias[...], x[:, -1:]

    def __call__(self, x: Video, state: State, width_axis: WidthAxis = None) -> tuple[Video, State]:
        frames = x.shape[:2]
        # Padded below and on the right only, as Wan2.1 was trained.
        padding = ((0, 1), (0, 1))
        x = conv2d(x.reshape(-1, *x.shape[2:]), self.conv.kernel[...], padding, 2, width_axis)
        x = (x + self.conv.bias[...]).reshape(*frames, *x.shape[1:])
        return self._halve_frames(x, state) if hasattr(self, "time_conv") else (x, state)


class Stage(nnx.Module):
    """Residual blocks of one resolution, then the step to the next."""

    def __init__(self, plan: StagePlan, step: type[Upsample | Downsample], *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.num_blocks = plan.num_blocks
        for i in range(plan.num_blocks):
            dim_in = plan.dim_in if i == 0 else plan.dim_out
            setattr(self, f"res{i}", ResBlock(dim_in, plan.dim_out, dtype=dtype, rngs=rngs))
        if plan.resample:
            self.resample = step(plan.dim_out, time=plan.time, dtype=dtype, rngs=rngs)

    def __call__(self, x: Video, state: State, width_axis: WidthAxis = None) -> tuple[Video, State]:
        parts = [getattr(self, f"res{i}") for i in range(self.num_blocks)]
        if hasattr(self, "resample"):
            parts.append(self.resample)
        return run(parts, x, state, width_axis)


def run(parts: Sequence[Any], x: Video, state: State, width_axis: WidthAxis = None) -> tuple[Video, State]:
    """One part after the other, each with its own entry of the state."""
    after = []
    for part, past in zip(parts, state or [None] * len(parts), strict=True):
        x, past = part(x, past, width_axis)
        after.append(past)
    return x, tuple(after)

"""The causal video VAE of Wan2.1: latents to pixels as a stream, pixels to latents.

Features: decoding in chunks of any length, equal to decoding at once; explicit state; decoding cut along the width.
Left out on purpose: sampling from the posterior (the mean is what the diffusion model was trained on), tiling.
"""

import math
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from rfjax.config import VAEConfig
from rfjax.errors import InputError
from rfjax.layers import precision
from rfjax.vae.conv import WidthAxis
from rfjax.vae.layers import CausalConv, Downsample, Middle, Norm, Stage, State, Upsample, Video, pointwise, run
from rfjax.vae.plan import decoder_stages, encoder_stages

# Of a layer at full resolution, in what is decoded at once. Some six such layers are alive at the same time.
_MAX_VALUES = 2**25


class Head(nnx.Module):
    """Norm, SiLU and a causal convolution to the output channels."""

    def __init__(self, dim_in: int, dim_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.norm = Norm(dim_in)
        self.conv = CausalConv((3, 3, 3), dim_in, dim_out, dtype=dtype, rngs=rngs)

    def __call__(self, x: Video, state: State, width_axis: WidthAxis = None) -> tuple[Video, State]:
        return self.conv(jax.nn.silu(self.norm(x)), state, width_axis)


class Encoder(nnx.Module):
    """Pixels to the mean of the posterior, not yet normalised."""

    def __init__(self, config: VAEConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        stages = encoder_stages(config)
        top = stages[-1].dim_out
        self.num_stages = len(stages)
        self.conv_in = CausalConv((3, 3, 3), 3, config.dim, dtype=dtype, rngs=rngs)
        for i, plan in enumerate(stages):
            setattr(self, f"stage{i}", Stage(plan, Downsample, dtype=dtype, rngs=rngs))
        self.middle = Middle(top, dtype=dtype, rngs=rngs)
        self.head = Head(top, 2 * config.z_dim, dtype=dtype, rngs=rngs)
        self.quant = pointwise(2 * config.z_dim, 2 * config.z_dim, dtype=dtype, rngs=rngs)

    def __call__(self, x: Video, state: State, width_axis: WidthAxis = None) -> tuple[Video, State]:
        stages = [getattr(self, f"stage{i}") for i in range(self.num_stages)]
        x, state = run([self.conv_in, *stages, self.middle, self.head], x, state, width_axis)
        mean, _log_variance = jnp.split(self.quant(x), 2, axis=-1)
        return mean, state


class Decoder(nnx.Module):
    """Latents, no longer normalised, to pixels."""

    def __init__(self, config: VAEConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        stages = decoder_stages(config)
        top = stages[0].dim_in
        self.num_stages = len(stages)
        self.post_quant = pointwise(config.z_dim, config.z_dim, dtype=dtype, rngs=rngs)
        self.conv_in = CausalConv((3, 3, 3), config.z_dim, top, dtype=dtype, rngs=rngs)
        self.middle = Middle(top, dtype=dtype, rngs=rngs)
        for i, plan in enumerate(stages):
            setattr(self, f"stage{i}", Stage(plan, Upsample, dtype=dtype, rngs=rngs))
        self.head = Head(stages[-1].dim_out, 3, dtype=dtype, rngs=rngs)

    def __call__(self, x: Video, state: State, width_axis: WidthAxis = None) -> tuple[Video, State]:
        stages = [getattr(self, f"stage{i}") for i in range(self.num_stages)]
        return run([self.conv_in, self.middle, *stages, self.head], self.post_quant(x), state, width_axis)


class VAE(nnx.Module):
    """Encoder and decoder of the Wan2.1 causal VAE.

    Args:
        config: sizes, and the mean and spread of the latents.
        dtype: of the decoder.
        encoder_dtype: of the encoder; what it makes is conditioned on for a whole video, so it stays in float32
            unless asked otherwise.
        rngs: for the initial parameters.
    """

    def __init__(
        self,
        config: VAEConfig,
        *,
        dtype: DTypeLike = jnp.float32,
        encoder_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.dtype, self.encoder_dtype = jnp.dtype(dtype), jnp.dtype(encoder_dtype)
        self.encoder = Encoder(config, dtype=encoder_dtype, rngs=rngs)
        self.decoder = Decoder(config, dtype=dtype, rngs=rngs)

    def decode(
        self,
        latents: Float[Array, "B F C h w"],
        state: State,
        *,
        first: bool,
        width_axis: WidthAxis = None,
    ) -> tuple[Float[Array, "B T H W 3"], State]:
        """The next frames of a video; any split of a video into chunks gives the same pixels (Wan2.1).

        Args:
            latents: normalised latents of F >= 1 frames.
            state: from `init_decoder_state` or the chunk before, for the same B, h and w; safe to donate.
            first: whether the video starts here. The state, which may be None, is then disregarded, so that nothing
                of another video can leak into this one, and F frames become 1 + 4 (F - 1); else 4 F.
            width_axis: inside `jax.shard_map`, the mesh axis or axes that the width of latents, state and pixels is
                cut along.

        Returns:
            float32 pixels in -1 .. 1 at 8 times the height and width, and the state for the next chunk.
        """
        mean, std = _statistics(self.config)
        x = rearrange(latents, "b f c h w -> b f h w c").astype(jnp.float32) * std + mean
        x, state = self._decode(x.astype(self.dtype), None if first else state, width_axis)
        return jnp.clip(x.astype(jnp.float32), -1, 1), state

    def _decode(self, x: Video, state: State, width_axis: WidthAxis) -> tuple[Video, State]:
        """The decoder over as many latent frames at once as memory has room for, and so on in a scan."""
        config, frames = self.config, x.shape[1]
        latents = math.prod(x[:, 0, ..., 0].shape)
        values = latents * config.temporal_stride * config.spatial_stride**2 * config.dim
        room = max(1, _MAX_VALUES // values)
        if frames <= room:
            return self.decoder(x, state, width_axis)
        if state is None:
            first, state = self.decoder(x[:, :1], None, width_axis)
            later, state = self._decode(x[:, 1:], state, width_axis)
            return jnp.concatenate([first, later], axis=1), state
        at_once = max(n for n in range(1, frames + 1) if frames % n == 0 and n <= room)

        def decode_piece(state: State, piece: Video) -> tuple[State, Video]:
            pixels, state = self.decoder(piece, state, width_axis)
            return state, pixels

        pieces = rearrange(x, "b (k f) h w c -> k b f h w c", f=at_once)
        state, pixels = jax.lax.scan(decode_piece, state, pieces)
        return rearrange(pixels, "k b t h w c -> b (k t) h w c"), state

    def encode(self, pixels: Float[Array, "B T H W 3"], *, width_axis: WidthAxis = None) -> Float[Array, "B F C h w"]:
        """Normalised latents of a video: the posterior's mean (Wan2.1).

        The encoder runs over the first frame, then over groups of 4 in a scan, which gives the same latents as one
        pass and needs memory for 4 frames, however long the video.

        Args:
            pixels: in -1 .. 1; T = 1 + 4 k frames, height and width multiples of 8.
            width_axis: as in `decode`.

        Returns:
            float32 latents of 1 + k frames at an eighth of the height and width.

        Raises:
            InputError: T, the height or the width is not such a number.
        """
        config = self.config
        _, frames, height, width, _ = pixels.shape
        time, space = config.temporal_stride, config.spatial_stride
        if frames < 1 or (frames - 1) % time:
            shorter = max(1, 1 + (frames - 1) // time * time)
            raise InputError(f"{frames} frames to encode: give 1 + {time} k frames, such as {shorter}")
        if height % space or width % space:
            raise InputError(f"frames of {width}x{height} to encode: both sides must be multiples of {space}")

        def encode_group(state: State, group: Video) -> tuple[State, Video]:
            mean, state = self.encoder(group, state, width_axis)
            return state, mean

        with precision(self.encoder_dtype):
            x = pixels.astype(self.encoder_dtype)
            state, latents = encode_group(None, x[:, :1])
            if frames > 1:
                groups = rearrange(x[:, 1:], "b (k t) h w c -> k b t h w c", t=time)
                _, later = jax.lax.scan(encode_group, state, groups)
                latents = jnp.concatenate([latents, rearrange(later, "k b f h w c -> b (k f) h w c")], axis=1)
        latents = latents.astype(jnp.float32)
        mean, std = _statistics(config)
        return rearrange((latents - mean) / std, "b f h w c -> b f c h w")


def init_decoder_state(
    config: VAEConfig, batch: int, latent_h: int, latent_w: int, dtype: DTypeLike = jnp.float32
) -> State:
    """The state of a decoder that has decoded nothing: zeros for the last two input frames of every causal conv."""
    shapes = _decoder_state_shapes(config, batch, latent_h, latent_w, jnp.dtype(dtype))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


@lru_cache
def _decoder_state_shapes(config: VAEConfig, batch: int, latent_h: int, latent_w: int, dtype: Any) -> State:
    def decode_one() -> State:
        decoder = Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))
        return decoder(jnp.zeros((batch, 1, latent_h, latent_w, config.z_dim), dtype), None)[1]

    return jax.eval_shape(decode_one)


def to_uint8(pixels: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Pixels in -1 .. 1 as 0 .. 255, rounded to the nearest and clipped."""
    return jnp.clip(jnp.round((pixels + 1) * 127.5), 0, 255).astype(jnp.uint8)


def _statistics(config: VAEConfig) -> tuple[Array, Array]:
    """Mean and standard deviation of each latent channel."""
    return jnp.array(config.latents_mean, jnp.float32), jnp.array(config.latents_std, jnp.float32)

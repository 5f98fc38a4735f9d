"""WAN diffusion transformer (Wan2.1 T2V), as one function of tokens.

Features: per-group timesteps (a group is a run of frames that share a noise level), cross-attention keys and values
computed once per prompt, layers stacked under one scan, self-attention handed in by the caller. Left out on purpose:
windows, caches and meshes; the model knows none of them.
"""

from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import nki_ops
from rfjax.config import DiTConfig
from rfjax.layers import scan_layers

# cos and sin of every token: of all items of a batch alike (R = 1), or of each
Rotary = tuple[Float[Array, "R T half"], Float[Array, "R T half"]]


class TextKV(NamedTuple):
    """Cross-attention keys and values of one prompt, for every layer."""

    k: Float[Array, "L B N S D"]
    v: Float[Array, "L B N S D"]


@runtime_checkable
class Attend(Protocol):
    """Self-attention as the caller wants it: over a cache, over a mesh, or plainly over the tokens given."""

    def __call__(
        self,
        q: Float[Array, "B T N D"],
        k: Float[Array, "B T N D"],
        v: Float[Array, "B T N D"],
        layer: Int[Array, ""],
        carry: Any,
    ) -> tuple[Float[Array, "B T N D"], Any]: ...


def attend_all(q: Array, k: Array, v: Array, layer: Array, carry: None) -> tuple[Array, None]:
    """Every token attends to every token; the plain form, for training and tests."""
    pool = (k.transpose(0, 2, 1, 3)[None], v.transpose(0, 2, 1, 3)[None])
    return nki_ops.attention(q, [pool], jnp.zeros(1, jnp.int32), jnp.int32(1)), carry


def timestep_features(timesteps: np.ndarray, freq_dim: int) -> np.ndarray:
    """Sinusoidal features of timesteps (0..1000): cosines, then sines; float64 on the host, rounded to float32.

    Args:
        timesteps: any shape.
        freq_dim: width of the features, even.

    Returns:
        float32 array of shape [*timesteps.shape, freq_dim].
    """
    half = freq_dim // 2
    frequencies = 10000.0 ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.asarray(timesteps, np.float64)[..., None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def layer_norm(x: Float[Array, "*b C"], eps: float) -> Float[Array, "*b C"]:
    """Layer norm without parameters, in float32."""
    x = x.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)


def modulate(x: Array, modulation: tuple[Array, Array], eps: float) -> Array:
    """adaLN: layer norm, then the (shift, scale) of each group of tokens; x [B T C], shift and scale [B G C]."""
    shift, scale = (m[:, :, None] for m in modulation)
    groups = shift.shape[1]
    normed = rearrange(layer_norm(x, eps), "b (g t) c -> b g t c", g=groups)
    return rearrange(normed * (1 + scale) + shift, "b g t c -> b (g t) c").astype(x.dtype)


def gated(x: Array, gate: Array) -> Array:
    """Multiplies the tokens of each group by its gate, in float32; x [B T C], gate [B G C]."""
    by_group = rearrange(x.astype(jnp.float32), "b (g t) c -> b g t c", g=gate.shape[1])
    return rearrange(by_group * gate[:, :, None], "b g t c -> b (g t) c")


class Projections(nnx.Module):
    """The four projections and two norms of an attention; the norms span all heads at once."""

    def __init__(self, config: DiTConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear() -> nnx.Linear:
            return nnx.Linear(config.dim, config.dim, dtype=dtype, param_dtype=dtype, rngs=rngs)

        self.q, self.k, self.v, self.o = linear(), linear(), linear(), linear()
        self.norm_q = nnx.Param(jnp.ones(config.dim, jnp.float32))
        self.norm_k = nnx.Param(jnp.ones(config.dim, jnp.float32))


class FeedForward(nnx.Module):
    """Two projections with a tanh-approximated GELU between them; also the form of the text embedding."""

    def __init__(self, dims: tuple[int, int, int], *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.up = nnx.Linear(dims[0], dims[1], dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(dims[1], dims[2], dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Block(nnx.Module):
    """Self-attention, cross-attention and feed-forward, the first and last modulated by the timestep."""

    def __init__(self, config: DiTConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.eps = config.eps
        self.num_heads = config.num_heads
        self.self_attn = Projections(config, dtype=dtype, rngs=rngs)
        self.cross_attn = Projections(config, dtype=dtype, rngs=rngs)
        self.ffn = FeedForward((config.dim, config.ffn_dim, config.dim), dtype=dtype, rngs=rngs)
        self.norm3_scale = nnx.Param(jnp.ones(config.dim, jnp.float32))
        self.norm3_bias = nnx.Param(jnp.zeros(config.dim, jnp.float32))
        std = config.dim**-0.5
        self.modulation = nnx.Param(std * jax.random.normal(rngs.params(), (6, config.dim), jnp.float32))

    def text_keys_values(self, text: Float[Array, "B S C"]) -> tuple[Array, Array]:
        attn = self.cross_attn
        k = nki_ops.rms_norm(attn.k(text), attn.norm_k[...], self.eps)
        heads = "b s (n d) -> b n s d"
        return rearrange(k, heads, n=self.num_heads), rearrange(attn.v(text), heads, n=self.num_heads)

    def queries_keys(self, h: Float[Array, "B T C"], rotary: Rotary) -> tuple[Array, Array]:
        attn = self.self_attn
        rows = rotary[0].shape[0]
        # Streams that are each at a step of their own have tables of their own: to the operation, more tokens.
        q, k = (rearrange(x, "(r b) t c -> b (r t) c", r=rows) for x in (attn.q(h), attn.k(h)))
        cos, sin = (rearrange(table, "r t half -> (r t) half") for table in rotary)
        q, k = nki_ops.rms_norm_rope_3d(q, k, (attn.norm_q[...], attn.norm_k[...]), cos, sin, eps=self.eps)
        return rearrange(q, "b (r t) n d -> (r b) t n d", r=rows), rearrange(k, "b (r t) n d -> (r b) t n d", r=rows)

    def attend_text(self, x: Float[Array, "B T C"], k: Array, v: Array) -> Float[Array, "B T C"]:
        attn = self.cross_attn
        q = nki_ops.rms_norm(attn.q(x), attn.norm_q[...], self.eps)
        q = rearrange(q, "b t (n d) -> b t n d", n=self.num_heads)
        out = nki_ops.attention(q, [(k[None], v[None])], jnp.zeros(1, jnp.int32), jnp.int32(1))
        return attn.o(rearrange(out, "b t n d -> b t (n d)"))

    def __call__(
        self,
        x: Float[Array, "B T C"],
        time_modulation: Float[Array, "#B G 6 C"],
        rotary: Rotary,
        text_kv: TextKV,
        attend: Attend,
        layer: Int[Array, ""],
        carry: Any,
    ) -> tuple[Float[Array, "B T C"], Any]:
        m = self.modulation[...] + time_modulation
        shift_sa, scale_sa, gate_sa, shift_ffn, scale_ffn, gate_ffn = (m[:, :, i] for i in range(6))

        with jax.named_scope("self_attention"):
            attn = self.self_attn
            h = modulate(x, (shift_sa, scale_sa), self.eps)
            q, k = self.queries_keys(h, rotary)
            v = rearrange(attn.v(h), "b t (n d) -> b t n d", n=self.num_heads)
            out, carry = attend(q, k, v, layer, carry)
            out = attn.o(rearrange(out, "b t n d -> b t (n d)"))
            x = (x + gated(out, gate_sa)).astype(x.dtype)

        with jax.named_scope("cross_attention"):
            h = layer_norm(x, self.eps) * self.norm3_scale[...] + self.norm3_bias[...]
            x = x + self.attend_text(h.astype(x.dtype), *text_kv)

        with jax.named_scope("ffn"):
            h = modulate(x, (shift_ffn, scale_ffn), self.eps)
            x = (x + gated(self.ffn(h), gate_ffn)).astype(x.dtype)
        return x, carry


class DiT(nnx.Module):
    """Predicts the flow of noisy latents under text and per-group timesteps.

    The matmuls run in `dtype`; both ends of the network and everything about time stay float32 (they are a
    thousandth of the work and decide the precision of the result).
    """

    def __init__(self, config: DiTConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        dim, f32 = config.dim, jnp.float32
        self.patch = config.patch_size[1:]
        self.eps, self.dtype = config.eps, jnp.dtype(dtype)
        patch = self.patch[0] * self.patch[1]
        self.patch_embedding = nnx.Linear(config.in_dim * patch, dim, dtype=f32, rngs=rngs)
        self.text_embedding = FeedForward((config.text_dim, dim, dim), dtype=dtype, rngs=rngs)
        self.time_in = nnx.Linear(config.freq_dim, dim, dtype=f32, rngs=rngs)
        self.time_out = nnx.Linear(dim, dim, dtype=f32, rngs=rngs)
        self.time_projection = nnx.Linear(dim, 6 * dim, dtype=f32, rngs=rngs)
        self.head = nnx.Linear(dim, config.out_dim * patch, dtype=f32, rngs=rngs)
        self.head_modulation = nnx.Param(dim**-0.5 * jax.random.normal(rngs.params(), (2, dim), f32))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, dtype=dtype, rngs=rngs)

        self.blocks = stack(rngs)

    def text_keys_values(self, context: Float[Array, "B S text_dim"]) -> TextKV:
        """Cross-attention keys and values of every layer for text features (padding rows zero, and attended)."""
        text = self.text_embedding(context.astype(self.dtype))
        _, kv = scan_layers(self.blocks, lambda block, _, index, carry: (carry, block.text_keys_values(text)), None)
        return TextKV(*kv)

    def __call__(
        self,
        latents: Float[Array, "B F C H W"],
        time_features: Float[Array, "#B G freq_dim"],
        rotary: Rotary,
        text_kv: TextKV,
        attend: Attend = attend_all,
        carry: Any = None,
    ) -> tuple[Float[Array, "B F C H W"], Any]:
        """The flow (noise minus clean) at every frame, float32, and what `attend` carried through the layers.

        Args:
            latents: noisy latents, normalised; height and width are multiples of the patch.
            time_features: `timestep_features` of G groups; F divides into G runs of equal length. B may be 1.
            rotary: cos and sin of every token.
            text_kv: from `text_keys_values`.
            attend: self-attention over the tokens.
            carry: handed to `attend` layer by layer.
        """
        tokens = patchify(latents, self.patch)
        flow, carry = self.flow_of_tokens(tokens, time_features, rotary, text_kv, attend, carry)
        return unpatchify(flow, self.patch, latents.shape[3:]), carry

    def flow_of_tokens(
        self,
        tokens: Float[Array, "B T Z"],
        time_features: Float[Array, "#B G freq_dim"],
        rotary: Rotary,
        text_kv: TextKV,
        attend: Attend,
        carry: Any = None,
    ) -> tuple[Float[Array, "B T Z"], Any]:
        """`__call__` on patches, any of them: T divides into G runs of equal length, one for each group."""
        x = self.patch_embedding(tokens).astype(self.dtype)
        time = self.time_out(jax.nn.silu(self.time_in(time_features)))
        modulation = rearrange(self.time_projection(jax.nn.silu(time)), "b g (six c) -> b g six c", six=6)

        def run_layer(
            block: Block, kv: TextKV, index: Array, state: tuple[Array, Any]
        ) -> tuple[tuple[Array, Any], None]:
            x, carry = state
            with jax.named_scope("block"):
                return block(x, modulation, rotary, kv, attend, index, carry), None

        (x, carry), _ = scan_layers(self.blocks, run_layer, (x, carry), text_kv)

        head = self.head_modulation[...] + time[:, :, None]
        x = self.head(modulate(x.astype(jnp.float32), (head[:, :, 0], head[:, :, 1]), self.eps))
        patch_h, patch_w = self.patch
        return rearrange(x, "b t (p q c) -> b t (c p q)", p=patch_h, q=patch_w), carry


Tensor = TypeVar("Tensor", Array, np.ndarray)  # on the device or on the host


def patchify(latents: Float[Tensor, "*b F C H W"], patch: tuple[int, int]) -> Float[Tensor, "*b T Z"]:
    """Latents as the DiT's tokens, frame by frame and row by row, the channels of a patch in the order (C, p, q)."""
    return rearrange(latents, "... f c (h p) (w q) -> ... (f h w) (c p q)", p=patch[0], q=patch[1])


def unpatchify(
    tokens: Float[Tensor, "*b T Z"], patch: tuple[int, int], sides: tuple[int, ...]
) -> Float[Tensor, "*b F C H W"]:
    """The inverse of `patchify`, for frames of height and width `sides`."""
    (patch_h, patch_w), (height, width) = patch, sides
    return rearrange(
        tokens, "... (f h w) (c p q) -> ... f c (h p) (w q)",
        h=height // patch_h, w=width // patch_w, p=patch_h, q=patch_w,
    )  # fmt: skip

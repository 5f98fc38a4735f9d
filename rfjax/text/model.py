"""umT5 encoder (Chung et al. 2023, "UniMax"): T5 v1.1 with a relative position bias of its own in every layer.

`dtype` is how the large matrices are stored; the arithmetic is float32 throughout. The release ships them in
bfloat16, so storing them so loses nothing, and umT5 is known to drift when its activations are bfloat16 too. The
encoder runs once a prompt: its time hardly counts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from rfjax.config import TextConfig
from rfjax.errors import InputError
from rfjax.layers import scan_layers


def relative_position_buckets(length: int, num_buckets: int, max_distance: int) -> Int[np.ndarray, "S S"]:
    """Which learned bias applies between a query (row) and a key (column) (T5, Raffel et al. 2020, section 2.1).

    The upper half of the buckets is for keys after the query. Within a half, distances below a quarter of
    `num_buckets` have a bucket each; longer ones share logarithmically wider buckets up to `max_distance`.

    Returns:
        int32 [length, length], values in 0 .. num_buckets-1.
    """
    position = np.arange(length, dtype=np.int32)
    key_minus_query = position[None, :] - position[:, None]
    half, exact = num_buckets // 2, num_buckets // 4
    distance = np.abs(key_minus_query)
    # The bucket borders are where float32 rounding puts them; in float64 some distances change bucket.
    octaves = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    wide = exact + (octaves / np.float32(np.log(max_distance / exact)) * np.float32(half - exact)).astype(np.int32)
    bucket = np.where(distance < exact, distance, np.minimum(wide, half - 1))
    return (bucket + half * (key_minus_query > 0)).astype(np.int32)


class _Linear(nnx.Linear):
    """Matrix without bias, stored in `dtype`, applied in float32."""

    def __init__(self, in_dim: int, out_dim: int, *, gain: float = 1.0, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(
            in_dim,
            out_dim,
            use_bias=False,
            dtype=jnp.float32,
            param_dtype=dtype,
            kernel_init=nnx.initializers.variance_scaling(gain, "fan_in", "normal"),
            rngs=rngs,
        )


class SelfAttention(nnx.Module):
    """Bidirectional multi-head attention; T5 does not scale the scores, its initial q matrices are small instead."""

    def __init__(self, config: TextConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        head_dim = config.dim_attn // config.num_heads
        self.q = _Linear(config.dim, config.dim_attn, gain=1 / head_dim, dtype=dtype, rngs=rngs)
        self.k = _Linear(config.dim, config.dim_attn, dtype=dtype, rngs=rngs)
        self.v = _Linear(config.dim, config.dim_attn, dtype=dtype, rngs=rngs)
        self.o = _Linear(config.dim_attn, config.dim, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B S C"], bias_nqk: Float[Array, "N S S"], valid: Bool[Array, "B S"]
    ) -> Float[Array, "B S C"]:
        q_bsnd, k_bsnd, v_bsnd = (
            h.reshape(*h.shape[:2], self.num_heads, -1) for h in (self.q(x), self.k(x), self.v(x))
        )
        scores = jnp.einsum("bqnd,bknd->bnqk", q_bsnd, k_bsnd) + bias_nqk
        scores = jnp.where(valid[:, None, None, :], scores, jnp.finfo(scores.dtype).min)
        out = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), v_bsnd)
        return self.o(out.reshape(*out.shape[:2], -1))


class FeedForward(nnx.Module):
    """fc2(fc1(x) * gelu(gate(x))) (Shazeer 2020, GEGLU)."""

    def __init__(self, config: TextConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.gate = _Linear(config.dim, config.dim_ffn, dtype=dtype, rngs=rngs)
        self.fc1 = _Linear(config.dim, config.dim_ffn, dtype=dtype, rngs=rngs)
        self.fc2 = _Linear(config.dim_ffn, config.dim, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B S C"]) -> Float[Array, "B S C"]:
        return self.fc2(self.fc1(x) * jax.nn.gelu(self.gate(x), approximate=True))


class Block(nnx.Module):
    """Self-attention and feed-forward, each behind an RMS norm and around a residual."""

    def __init__(self, config: TextConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(config.dim, epsilon=config.eps, rngs=rngs)
        self.attn = SelfAttention(config, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.RMSNorm(config.dim, epsilon=config.eps, rngs=rngs)
        self.ffn = FeedForward(config, dtype=dtype, rngs=rngs)
        self.pos_embedding = nnx.Embed(config.num_buckets, config.num_heads, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B S C"], buckets: Int[np.ndarray, "S S"], valid: Bool[Array, "B S"]
    ) -> Float[Array, "B S C"]:
        table_nr = self.pos_embedding.embedding[...].T
        bias_nqk = jnp.take(table_nr, buckets, axis=1, mode="clip")
        x = x + self.attn(self.norm1(x), bias_nqk, valid)
        return x + self.ffn(self.norm2(x))


class UMT5Encoder(nnx.Module):
    """The text encoder of Wan2.1."""

    def __init__(self, config: TextConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stacked_blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, dtype=dtype, rngs=rngs)

        self.config = config
        self.token_embedding = nnx.Embed(config.vocab_size, config.dim, param_dtype=dtype, rngs=rngs)
        self.blocks = stacked_blocks(rngs)
        self.norm = nnx.RMSNorm(config.dim, epsilon=config.eps, rngs=rngs)

    def __call__(self, ids: Int[Array, "B S"], lengths: Int[Array, "B"]) -> Float[Array, "B S C"]:
        """Features of each token of each prompt.

        Args:
            ids: token ids, padded on the right to any common length S; below `vocab_size`.
            lengths: tokens of each prompt, `</s>` included; the rest is padding and is not attended to.

        Returns:
            float32 features; rows of padding are zero, which is what the DiT is trained to see there.

        Raises:
            InputError: the shapes do not match.
        """
        if ids.ndim != 2 or lengths.shape != ids.shape[:1]:
            raise InputError(f"ids {ids.shape} and lengths {lengths.shape}; expected [B, S] and [B]")
        config, length = self.config, ids.shape[1]
        buckets = relative_position_buckets(length, config.num_buckets, config.max_distance)
        valid = jnp.arange(length) < lengths[:, None]

        def run_block(block: Block, _: None, index: Int[Array, ""], x: Float[Array, "B S C"]) -> tuple[Array, None]:
            with jax.named_scope("umt5_block"):
                return block(x, buckets, valid), None

        embedding = self.token_embedding.embedding[...]
        ids = jnp.clip(ids, 0, embedding.shape[0] - 1)  # so that the program says that no index lies outside
        x = jnp.take(embedding, ids, axis=0, mode="clip").astype(jnp.float32)
        x, _ = scan_layers(self.blocks, run_block, x)
        return jnp.where(valid[:, :, None], self.norm(x), 0)

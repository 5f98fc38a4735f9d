"""Ways to cut one rolling step over eight devices, each a whole step that runs.

Between the layers tokens are cut over all devices, except with pmap. What differs is what attention and the weights
are cut by, and so what is sent, held and computed twice.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import PartitionSpec as P

import nki_ops
from rfjax import make_mesh
from rfjax.bench.flops import dit_tokens
from rfjax.config import ModelConfig, RollingConfig
from rfjax.dit.model import Block, TextKV, gated, layer_norm, modulate
from rfjax.engine import Shape
from rfjax.layers import precision
from rfjax.parallel import Layout, mesh
from rfjax.parallel.attention import MeshAttention, own_part
from rfjax.rolling.plan import Roll, StepPlan, plan_step
from rfjax.rolling.step import RollingState, WindowAttention, init_state, rolling_step, rotary_of, token_grid

DEVICES = 8


@dataclass(frozen=True)
class Experiment:
    """One way to cut a step.

    Attributes:
        name, about: for the table.
        lower: (config, graph, parameters, dtype, shape) -> the lowered step of (parameters, state, text keys and
            values, plan, noise); the shape's batch is that of one device's stream.
        state: (config, shape, dtype) -> its state before the first step, on the host.
        streams: how many videos it makes at once.
        keys: elements of a block's keys that a device attends to, and that it stores, as shares of all.
    """

    name: str
    about: str
    lower: Callable[..., Any]
    state: Callable[[ModelConfig, Shape, str], RollingState]
    streams: int
    keys: tuple[float, float]


def example(config: ModelConfig, shape: Shape, number: int) -> tuple[StepPlan, np.ndarray]:
    """Plan and noise of a step."""
    rolling = config.rolling
    plan = plan_step(number, Roll(0, None), rolling, config.dit.head_dim, config.dit.rope_theta)
    tokens = rolling.block_frames * dit_tokens(config, *shape[1:])
    features = config.dit.in_dim * math.prod(config.dit.patch_size)
    draws = np.random.default_rng(number).standard_normal((shape.batch, rolling.window_blocks, tokens, features))
    return StepPlan.of_rows([plan] * shape.batch), draws.astype(np.float32)


def _state(config: ModelConfig, shape: Shape, dtype: str, heads: int | None = None) -> RollingState:
    state = init_state(config, *shape, dtype=jnp.dtype(dtype))
    pad = [(0, 0)] * 2 + [(0, (heads or config.dit.num_heads) - config.dit.num_heads)] + [(0, 0)] * 2
    return state._replace(k_cache=np.pad(state.k_cache, pad), v_cache=np.pad(state.v_cache, pad))


def _arguments(config: ModelConfig, params: Any, state: RollingState, dtype: str, shape: Shape) -> tuple:
    """What a step is lowered for."""
    dit = config.dit
    text = jax.ShapeDtypeStruct((dit.num_layers, shape.batch, dit.num_heads, dit.text_len, dit.head_dim), dtype)
    return params, state, TextKV(text, text), *example(config, shape, 0)


def _shared(head: int, seq: int, attention: Callable, *, heads: int | None = None, cache: P, weights: Any = None,
            block: type[Block] | None = None) -> tuple[Callable, Callable]:  # fmt: skip
    """`Experiment.lower` and `.state` of a step under shard_map."""

    def lower(config: ModelConfig, graph: Any, params: Any, dtype: str, shape: Shape) -> Any:
        import flax.nnx as nnx

        layout, grid = Layout(make_mesh(head=head, seq=seq)), token_grid(config, *shape[1:])

        def step(params: Any, state: RollingState, kv: TextKV, plan: StepPlan, noise: Any) -> RollingState:
            dit = nnx.merge(graph, params)
            if block is not None:
                dit.blocks.__class__ = block  # the same parameters, cut, and another forward pass
            rotary = jax.tree.map(lambda x: own_part(x, axis=2), rotary_of(config, plan, grid))
            return rolling_step(config, dit, state, kv, plan, noise, rotary, attention)

        rolling: Any = RollingState(mesh.TOKENS, cache, cache)
        params_specs = mesh.WHOLE if weights is None else weights(params)
        text = mesh.TEXT_KV if weights is None else P(None, None, "head")
        inputs = params_specs, rolling, text, mesh.ROWS, mesh.TOKENS

        args = _arguments(config, params, _state(config, shape, dtype, heads), dtype, shape)
        with precision(jnp.dtype(dtype)):
            shared = jax.jit(layout.shared(step, inputs, rolling), donate_argnums=(1,))
            return shared.lower(*layout.abstract(args, inputs))

    return lower, partial(_state, heads=heads)


class PaddedAttention(MeshAttention):
    """Attention with heads added that nobody reads, so that they divide among the devices."""

    def __call__(self, q: Any, k: Any, v: Any, layer: Any, carry: Any) -> Any:
        heads, devices = q.shape[2], jax.lax.axis_size("head")
        pad = [(0, 0), (0, 0), (0, -heads % devices), (0, 0)]
        out, carry = super().__call__(*(jnp.pad(x, pad) for x in (q, k, v)), layer, carry)
        return out[:, :, :heads], carry


class MegatronBlock(Block):
    """A block whose weights are cut over "head", as Megatron-LM cuts them.

    Tokens are gathered over "head" before each cut product and the partial sums are added and scattered after it
    (Korthikanti et al. 2022, sequence parallelism).
    """

    def __call__(self, x: Any, time_modulation: Any, rotary: Any, text_kv: Any, attend: Any, layer: Any, carry: Any):
        m = self.modulation[...] + time_modulation
        shift_sa, scale_sa, gate_sa, shift_ffn, scale_ffn, gate_ffn = (m[:, :, i] for i in range(6))
        groups = m.shape[1]
        gather, scatter = partial(_gathered, groups=groups), partial(_scattered, groups=groups)
        head_dim = text_kv.k.shape[-1]

        attn = self.self_attn
        h = gather(modulate(x, (shift_sa, scale_sa), self.eps))
        cos, sin = (_gathered(table, groups)[:, :, None] for table in rotary)
        q = nki_ops.rotate(_heads(_norm(attn.q(h), attn.norm_q[...], self.eps), head_dim), cos, sin)
        k = nki_ops.rotate(_heads(_norm(attn.k(h), attn.norm_k[...], self.eps), head_dim), cos, sin)
        out, carry = attend(q, k, _heads(attn.v(h), head_dim), layer, carry)
        x = (x + gated(scatter(out, attn.o), gate_sa)).astype(x.dtype)

        attn = self.cross_attn
        h = layer_norm(x, self.eps) * self.norm3_scale[...] + self.norm3_bias[...]
        q = _heads(_norm(attn.q(gather(h.astype(x.dtype))), attn.norm_q[...], self.eps), head_dim)
        pool = text_kv.k[None], text_kv.v[None]
        x = x + scatter(nki_ops.attention(q, [pool], jnp.zeros(1, jnp.int32), jnp.int32(1)), attn.o)

        h = gather(modulate(x, (shift_ffn, scale_ffn), self.eps))
        h = jax.nn.gelu(self.ffn.up(h), approximate=True)
        return (x + gated(scatter(h, self.ffn.down), gate_ffn)).astype(x.dtype), carry


class MegatronAttention(MeshAttention):
    """Attention of heads that are here already; the queries are those of a seq part."""

    def __call__(self, q: Any, k: Any, v: Any, layer: Any, carry: Any) -> Any:
        groups = self.config.window_blocks + 1
        kv = rearrange(jnp.stack([k, v]), "i b (g t) n d -> i b g t n d", g=groups)
        k, v = rearrange(jax.lax.all_gather(kv, "seq", axis=3, tiled=True), "i b g t n d -> i b (g t) n d")
        return WindowAttention(self.config, self.plan)(q, k, v, layer, carry)


def _gathered(x: Any, groups: int) -> Any:
    """The tokens of all heads' devices, group by group."""
    x = rearrange(x, "b (g t) c -> b g t c", g=groups)
    return rearrange(jax.lax.all_gather(x, "head", axis=2, tiled=True), "b g t c -> b (g t) c")


def _scattered(x: Any, linear: Any, groups: int) -> Any:
    """A product cut along what it sums over: partial sums added, each device keeping its tokens."""
    kernel = linear.kernel[...]
    partial_sum = rearrange(x.reshape(*x.shape[:2], -1) @ kernel, "b (g t) c -> b g t c", g=groups)
    own = jax.lax.psum_scatter(partial_sum, "head", scatter_dimension=2, tiled=True)
    return rearrange(own, "b g t c -> b (g t) c") + linear.bias[...]


def _norm(x: Any, scale: Any, eps: float) -> Any:
    """RMS norm over the channels of all devices."""
    x32 = x.astype(jnp.float32)
    total = jax.lax.psum(jnp.sum(jnp.square(x32), axis=-1, keepdims=True), "head")
    channels = x.shape[-1] * jax.lax.axis_size("head")
    return (x32 * jax.lax.rsqrt(total / channels + eps) * scale).astype(x.dtype)


def _heads(x: Any, head_dim: int) -> Any:
    return rearrange(x, "b t (n d) -> b t n d", d=head_dim)


def _megatron_weights(params: Any) -> Any:
    """Specs: what makes heads or hidden channels is cut by its columns, what takes them by its rows."""

    def spec(path: tuple, leaf: Any) -> P:
        name = ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        made = any(f"{word}." in name for word in ("attn.q", "attn.k", "attn.v", "ffn.up"))
        if "blocks" in name and (made or "norm_q" in name or "norm_k" in name):
            return P(*[None] * (len(leaf.shape) - 1), "head")
        if "blocks" in name and ("attn.o.kernel" in name or "ffn.down.kernel" in name):
            return P(None, "head")
        return mesh.WHOLE

    return jax.tree_util.tree_map_with_path(spec, params)


def _lower_pmap(config: ModelConfig, graph: Any, params: Any, dtype: str, shape: Shape) -> Any:
    import flax.nnx as nnx

    grid = token_grid(config, *shape[1:])

    def step(params: Any, state: RollingState, kv: TextKV, plan: StepPlan, noise: Any) -> RollingState:
        return rolling_step(config, nnx.merge(graph, params), state, kv, plan, noise, rotary_of(config, plan, grid))

    args = _arguments(config, params, _state(config, shape, dtype), dtype, shape)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((DEVICES, *x.shape), x.dtype), args)
    with precision(jnp.dtype(dtype)):
        return jax.pmap(step, donate_argnums=(1,)).lower(*stacked)


def _mesh_attention(config: RollingConfig, plan: StepPlan, kind: type[MeshAttention], cut: bool = False) -> Any:
    return kind(config, plan, cuts_cached_tokens=cut)


def experiments() -> list[Experiment]:
    """All of them."""
    plain = partial(_mesh_attention, kind=MeshAttention, cut=True)
    by_head, both = P(None, "data", "head"), P(None, "data", "head", "seq")
    return [
        Experiment("heads padded to 16 over 8", "four heads of zeros are computed and cached, too",
                   *_shared(8, 1, partial(_mesh_attention, kind=PaddedAttention), heads=16, cache=by_head),
                   streams=1, keys=(16 / 12 / 8, 16 / 12 / 8)),
        Experiment("sequence over 8", "every device needs all keys and values: it gathers them",
                   *_shared(1, 8, plain, cache=both), streams=1, keys=(1, 1 / 8)),
        Experiment("4 heads x 2 sequence, all-to-all", "what rfjax does",
                   *_shared(4, 2, plain, cache=both), streams=1, keys=(1 / 4, 1 / 8)),
        Experiment("4 x 2, Megatron", "weights cut over heads, too; tokens gathered, partial sums scattered",
                   *_shared(4, 2, partial(_mesh_attention, kind=MegatronAttention), cache=by_head,
                            weights=_megatron_weights, block=MegatronBlock), streams=1, keys=(1 / 4, 1 / 4)),
        Experiment("8 streams, pmap", "nothing is sent, each video is as slow as on one core",
                   _lower_pmap, _state, streams=DEVICES, keys=(1, 1)),
    ]  # fmt: skip

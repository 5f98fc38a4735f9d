"""The rolling algorithm the plain way: two calls a step, every block's raw keys kept, nothing shared with the engine.

Keys are stored without rotation and rotated wherever they are used, in the positions of the release's rules. There is
no ring, no table, no phase batching; this is what the static step is checked against.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nki_ops
from rfjax.dit import rope
from rfjax.dit.model import timestep_features

LEVELS = np.array([1000.0, 952.38104, 882.35291, 769.23077, 555.5556], np.float32)
MAX_BLOCKS = 12


class Oracle:
    """One stream of the tiny model; latents are [frames, 16, h, w]."""

    def __init__(self, config, graph, params, context, height, width):
        self.config, self.graph, self.params = config, graph, params
        self.grid = height // 2, width // 2
        dit = nnx.merge(graph, params)
        self.text_kv = dit.text_keys_values(jnp.asarray(context))
        tokens = 3 * self.grid[0] * self.grid[1]
        shape = (config.dit.num_layers, MAX_BLOCKS, 1, config.dit.num_heads, tokens, config.dit.head_dim)
        self.cache = jnp.zeros(shape), jnp.zeros(shape)

    def denoise(self, latents, timesteps, first):
        """Flow of a window that starts at block `first`; the clean keys of all blocks before it are known."""
        n = len(latents) // 3
        if first == 0:
            keys, positions = [], []
        else:
            working = list(range(max(1, first - (6 - n)), first))
            keys = [0, *working]
            positions = [first - len(working) - 1, *working]
        return self._call(latents, timesteps, first, keys, positions, store=None)

    def clean(self, latents, block):
        """Stores the clean keys of a finished block."""
        keys = list(range(max(0, block - 6), block))
        return self._call(latents, np.zeros(3), block, keys, keys, store=block)

    def _call(self, latents, timesteps, first, keys, positions, store):
        table = lambda starts: self._rotary(3 * np.repeat(starts, 3) + np.tile(np.arange(3), len(starts)))  # noqa: E731
        own = table(np.arange(first, first + len(latents) // 3))
        # Padded to 6 blocks, and masked, so that few shapes are compiled.
        pad = 6 - len(keys)
        cached = table(np.array(positions + [0] * pad))
        visible = np.repeat(np.arange(6) < len(keys), 3 * self.grid[0] * self.grid[1])
        features = timestep_features(np.asarray(timesteps)[None], self.config.dit.freq_dim)
        flow, cache = _run(
            self.config, self.graph, self.params, latents[None].astype(np.float32), features, self.text_kv,
            self.cache, own, cached, np.array(keys + [0] * pad, np.int32), visible, np.int32(store or 0),
            store is not None,
        )  # fmt: skip
        self.cache = cache
        return np.asarray(flow[0])

    def _rotary(self, frames):
        head_dim = self.config.dit.head_dim
        temporal = rope.axis_table(frames, rope.axis_pairs(head_dim)[0])
        spatial = rope.spatial_table(*self.grid, head_dim)
        return tuple(np.asarray(rope.token_table(t, s)) for t, s in zip(temporal, spatial, strict=True))


@partial(jax.jit, static_argnames=("config", "graph", "store"))
def _run(config, graph, params, latents, features, text_kv, cache, own, cached, keys, visible, block, store):
    still = jnp.ones_like(own[0])[None], jnp.zeros_like(own[0])[None]

    def attend(q, k, v, layer, cache):
        k_store, v_store = cache
        q_rotated, k_rotated = (nki_ops.rotate(x, own[0][:, None], own[1][:, None]) for x in (q, k))
        k_heads, v_heads = (x.transpose(0, 2, 1, 3) for x in (k, v))
        if store:
            k_store = k_store.at[layer, block].set(k_heads)
            v_store = v_store.at[layer, block].set(v_heads)
        merge = lambda x: x.transpose(1, 2, 0, 3, 4).reshape(1, x.shape[2], -1, x.shape[-1])  # noqa: E731
        k_old = nki_ops.rotate(merge(cache[0][layer][keys]), cached[0], cached[1])
        v_old = merge(cache[1][layer][keys])
        k_all = jnp.concatenate([k_old, k_rotated.transpose(0, 2, 1, 3)], axis=2)
        v_all = jnp.concatenate([v_old, v_heads], axis=2)
        scores = jnp.einsum("btnd,bnsd->bnts", q_rotated, k_all) / np.sqrt(q.shape[-1])
        scores = jnp.where(jnp.pad(visible, (0, k_rotated.shape[1]), constant_values=True), scores, -jnp.inf)
        out = jnp.einsum("bnts,bnsd->btnd", jax.nn.softmax(scores, axis=-1), v_all)
        return out, (k_store, v_store)

    return nnx.merge(graph, params)(latents, features, still, text_kv, attend, cache)


def roll(oracle, noise, n_blocks, given=()):
    """Latents of all blocks and the window estimates of every step, by the rules of the release.

    `noise(block, step)` as in the pipeline; `given` are the latents of conditioned blocks.
    """
    k = len(given)
    sigma = LEVELS / 1000
    final = {b: np.asarray(x) for b, x in enumerate(given)}
    for block in range(k):
        oracle.clean(final[block], block)
    noisy = {b: noise(b, 0) for b in range(k, n_blocks)}
    windows = []
    for w in range(k, n_blocks + 4):
        first, last = max(k, w - 4), min(n_blocks - 1, w)
        blocks = range(first, last + 1)
        entries = [w - b for b in blocks]
        window = np.concatenate([noisy[b] for b in blocks])
        times = np.repeat(LEVELS[entries], 3)
        flow = oracle.denoise(window, times, first)
        x0 = window - np.repeat(sigma[entries], 3)[:, None, None, None] * flow
        windows.append(x0)
        for i, (block, entry) in enumerate(zip(blocks, entries, strict=True)):
            estimate = x0[3 * i : 3 * i + 3]
            if entry == 4:
                final[block] = estimate
                oracle.clean(estimate, block)
            else:
                s = sigma[entry + 1]
                noisy[block] = (1 - s) * estimate + s * noise(block, entry + 1)
    return np.stack([final[b] for b in range(n_blocks)]), windows

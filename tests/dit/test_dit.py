"""The DiT against recorded calls of the PyTorch release."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rfjax.config import preset
from rfjax.dit import rope
from rfjax.dit.model import DiT, timestep_features

CONFIG = preset("tiny").dit


@pytest.fixture(scope="module")
def call(tiny_dit):
    """`call(latents, timesteps, context)` -> flow, all tokens attending to all."""
    graph, params = tiny_dit

    @jax.jit
    def run(params, latents, features, rotary, context):
        dit = nnx.merge(graph, params)
        return dit(latents, features, rotary, dit.text_keys_values(context))[0]

    def call(latents, timesteps, context):
        frames, height, width = latents.shape[1], latents.shape[3] // 2, latents.shape[4] // 2
        pairs = rope.axis_pairs(CONFIG.head_dim)[0]
        temporal = rope.axis_table(np.arange(frames), pairs)
        spatial = rope.spatial_table(height, width, CONFIG.head_dim)
        rotary = tuple(rope.token_table(t, s)[None] for t, s in zip(temporal, spatial, strict=True))
        features = timestep_features(timesteps, CONFIG.freq_dim)
        return np.asarray(run(params, latents.astype(np.float32), features, rotary, context))

    return call


@pytest.mark.parametrize(
    ("case", "latents", "contexts"),
    [("A", "x3", slice(0, 1)), ("B", "x6", slice(2, 3)), ("C", "xb", slice(0, 2)), ("D", "x3", slice(0, 1))],
)
def test_flow_equals_the_release(call, load_golden, assert_parity, case, latents, contexts):
    # A: pure noise; B: another timestep for each frame; C: a batch with timesteps of its own; D: timestep 0.
    arrays, _ = load_golden("dit_single")
    flow = call(arrays[latents], arrays[f"{case}_t"], arrays["context"][contexts])
    assert_parity("DiT flow", flow, arrays[f"{case}_flow"], 1e-5)


def test_batch_equals_solo(call, load_golden):
    arrays, _ = load_golden("dit_single")
    both = call(arrays["xb"], arrays["C_t"], arrays["context"][:2])
    solo = call(arrays["xb"][1:], arrays["C_t"][1:], arrays["context"][1:2])
    np.testing.assert_allclose(both[1:], solo, rtol=0, atol=5e-6)


def test_timestep_features_equal_the_release(load_golden):
    arrays, _ = load_golden("dit_debug")
    features = timestep_features(arrays["t"][0], CONFIG.freq_dim)
    np.testing.assert_allclose(features, arrays["sinusoid"], rtol=0, atol=6e-8)


def test_bfloat16_stays_close(tiny_dit, call, load_golden):
    arrays, _ = load_golden("dit_single")
    graph, params = nnx.split(nnx.eval_shape(lambda: DiT(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
    params = jax.tree.map(lambda half, full: jnp.asarray(full, half.dtype), params, tiny_dit[1])
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    assert kinds == {"bfloat16", "float32"}
    context = jnp.asarray(arrays["context"][:1])
    rotary = tuple(
        rope.token_table(t, s)[None]
        for t, s in zip(rope.axis_table(np.arange(3), 4), rope.spatial_table(4, 6, 16), strict=True)
    )
    dit = nnx.merge(graph, params)
    features = timestep_features(arrays["A_t"], CONFIG.freq_dim)
    flow, _ = dit(jnp.asarray(arrays["x3"], jnp.float32), jnp.asarray(features), rotary, dit.text_keys_values(context))
    error = np.linalg.norm(flow - arrays["A_flow"]) / np.linalg.norm(arrays["A_flow"])
    assert 1e-4 < error < 2e-2  # bfloat16 was really used, and the network holds


def test_rotary_table_equals_the_release(load_golden):
    arrays, _ = load_golden("rope")
    pairs_t, pairs_h, pairs_w = rope.axis_pairs(16)
    assert (pairs_t, pairs_h, pairs_w) == (4, 2, 2) and rope.axis_pairs(128) == (22, 21, 21)
    for rows, head_dim, suffix in ((64, 16, ""), (16, 128, "_hd128")):
        tables = [rope.axis_table(np.arange(rows), n) for n in rope.axis_pairs(head_dim)]
        for i, half in enumerate(("cos", "sin")):
            ours = np.concatenate([table[i] for table in tables], axis=1)
            np.testing.assert_allclose(ours, arrays[half + suffix], rtol=0, atol=6e-8)


def test_rotation_equals_the_release_at_any_start(load_golden):
    import nki_ops

    arrays, _ = load_golden("rope")
    for start, expected in zip(arrays["start_frames"], arrays["y"], strict=True):
        temporal = rope.axis_table(start + np.arange(3), 4)
        spatial = rope.spatial_table(4, 6, 16)
        cos, sin = (rope.token_table(t, s) for t, s in zip(temporal, spatial, strict=True))
        rotated = nki_ops.rotate(jnp.asarray(arrays["x"], jnp.float32), cos[:, None], sin[:, None])
        np.testing.assert_allclose(rotated[0], expected, rtol=0, atol=1e-6)

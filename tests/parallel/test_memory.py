"""Options that trade memory: each saves what it says, and the video stays what it was, or nearly so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nki_ops
from rfjax import InputError, RollingForcingPipeline, make_mesh
from rfjax.engine import Shape

PROMPT, SEED, FRAMES = "a paper boat on a pond", 3, 69  # 6 blocks: ramp-up, a full window, ramp-down
SIZE = {"height": 64, "width": 128}


def latents(pipeline, prompt=PROMPT):
    with pipeline.stream(prompt, FRAMES, seed=SEED, decode=False, **SIZE) as stream:
        return np.concatenate([chunk.latents for chunk in stream])


@pytest.fixture(scope="module")
def alone(pipe):
    return latents(pipe)


def test_the_text_encoder_on_the_host_is_on_no_other_device(tiny_checkpoint, alone):
    mesh = make_mesh(head=2, seq=1)
    pipeline = RollingForcingPipeline.from_pretrained(tiny_checkpoint, "float32", mesh, text_encoder="host")
    cpu = jax.local_devices(backend="cpu")[0]
    assert all(leaf.devices() == {cpu} for leaf in jax.tree.leaves(pipeline.engine.params["text"]))
    assert all(len(leaf.devices()) == 2 for leaf in jax.tree.leaves(pipeline.engine.params["dit"]))
    np.testing.assert_allclose(latents(pipeline), alone, rtol=0, atol=1e-5)


def test_a_dropped_text_encoder_leaves_the_prompts_it_was_told(tiny_checkpoint, alone, tmp_path):
    pipeline = RollingForcingPipeline.from_pretrained(tiny_checkpoint, "float32")
    pipeline.drop_text_encoder([PROMPT, "a red fox"])
    assert "text" not in pipeline.engine.params
    np.testing.assert_array_equal(latents(pipeline), alone)
    assert np.abs(latents(pipeline, "a red fox") - alone).max() > 0.01
    pipeline.drop_text_encoder(PROMPT)  # nothing new
    with pytest.raises(InputError, match="prompt 'a grey wolf': the text encoder was dropped"):
        latents(pipeline, "a grey wolf")
    with pytest.raises(InputError, match="the text encoder was dropped; a checkpoint needs it"):
        pipeline.save(tmp_path / "checkpoint")


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 3e-4), ("float8_e4m3fn", 4e-3), ("float8_e5m2", 8e-3)])
@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_a_cache_in_fewer_bits(tiny_checkpoint, alone, dtype, error, mesh, tmp_path):
    """A smaller cache, and the latents within `error` (relative L2), yet not equal; a stream goes on bit for bit."""
    on = mesh and make_mesh(head=mesh[0], seq=mesh[1])
    pipeline = RollingForcingPipeline.from_pretrained(tiny_checkpoint, "float32", on, cache_dtype=dtype)
    assert pipeline.engine.init_state(Shape(1, 8, 16)).k_cache.dtype == jnp.dtype(dtype)
    ours = latents(pipeline)
    far = np.linalg.norm(ours - alone) / np.linalg.norm(alone)
    assert error / 20 < far < error
    with pipeline.stream(PROMPT, FRAMES, seed=SEED, decode=False, **SIZE) as stream:
        parts = [next(stream).latents, next(stream).latents]
        stream.save(tmp_path / "stream")
    parts += [chunk.latents for chunk in pipeline.resume(tmp_path / "stream")]
    np.testing.assert_array_equal(np.concatenate(parts), ours)


def test_a_stream_with_another_cache_is_refused(pipe, tiny_checkpoint, tmp_path):
    pipeline = RollingForcingPipeline.from_pretrained(tiny_checkpoint, "float32", cache_dtype="float8_e4m3fn")
    with pipeline.stream(PROMPT, FRAMES, seed=SEED, decode=False, **SIZE) as stream:
        next(stream)
        stream.save(tmp_path / "stream")
    with pytest.raises(InputError, match="cache dtype"):
        pipe.resume(tmp_path / "stream")


def test_what_is_too_large_for_eight_bits_is_the_largest_number():
    pool = (jnp.zeros((1, 1, 1, 2, 4), jnp.float8_e4m3fn),) * 2
    block = (jnp.full((1, 1, 2, 4), 1e4), jnp.full((1, 1, 2, 4), -1e4))
    k, v = nki_ops.update_cache(pool, block, jnp.int32(0))
    assert (k.astype(jnp.float32) == 448).all() and (v.astype(jnp.float32) == -448).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_dtype": "int8"}, "cache_dtype 'int8' is not one of float32, bfloat16, float8_e4m3fn, float8_e5m2"),
        ({"text_encoder": "nowhere"}, "text_encoder 'nowhere' is not one of device, host"),
    ],
)
def test_unknown_options_are_refused(tiny_checkpoint, options, message):
    with pytest.raises(InputError, match=message):
        RollingForcingPipeline.from_pretrained(tiny_checkpoint, "float32", **options)


def test_kernels_refuse_a_cache_of_another_dtype(tiny_checkpoint):
    with nki_ops.dispatch.using("simulate"), pytest.raises(InputError, match="cache_dtype float8_e4m3fn: the NKI"):
        RollingForcingPipeline.from_pretrained(tiny_checkpoint, "float32", cache_dtype="float8_e4m3fn")

"""Training the VAE: on streams that run on, from any step of them."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from rfjax.train.loop import train
from rfjax.train.vae import Phase, VAERecipe, chunk_of, vae_stage
from rfjax.vae.model import VAE

STEPS = 120


def plain_colours(seed, batch, size, frames):
    """Videos of one colour each, which changes with time; there are two."""
    rng = np.random.default_rng([seed % 2, batch, size, frames])
    ends = rng.integers(256, size=(2, batch, 1, 1, 1, 3))
    time = np.linspace(0, 1, frames)[:, None, None, None]
    return ((1 - time) * ends[0] + time * ends[1]).repeat(size, 2).repeat(size, 3).astype(np.uint8)


@pytest.fixture(scope="module")
def stage(tiny_model):
    recipe = VAERecipe((Phase(STEPS, 2, 8, 2, chunk_frames=2),), learning_rate=0.05, adam_learning_rate=0.02)
    stage = vae_stage(tiny_model.vae, recipe, plain_colours)
    return replace(stage, show=lambda *_: {})


def test_chunks_of_a_phase_are_streams_in_order():
    phases = (Phase(2, 3, 8, 0), Phase(8, 2, 16, 2, chunk_frames=4))
    chunks = [chunk_of(phases, plain_colours, number) for number in range(8)]
    assert [pixels.shape for pixels, _ in chunks[:3]] == [(3, 1, 8, 8, 3), (3, 1, 8, 8, 3), (2, 1, 16, 16, 3)]
    assert [starts for _, starts in chunks] == [True, True, True, False, False, True, False, False]
    stream = np.concatenate([pixels for pixels, _ in chunks[2:5]], axis=1)
    assert (stream == plain_colours(2, 2, 16, 9)).all()
    assert not (chunks[5][0] == chunks[2][0]).all()


def test_loss_falls(stage):
    state, psnr = stage.init(0), []
    for number in range(STEPS):
        state, metrics = stage.step(state, number)
        psnr.append(float(metrics["psnr"]))
    assert np.mean(psnr[-30:]) > np.mean(psnr[:6]) + 3


def test_a_stopped_run_goes_on_bit_for_bit(stage, tmp_path):
    """Stopped at the end of streams and within them."""
    folder, numbers = tmp_path / "cut", iter(range(1, 100))
    assert train(stage, tmp_path / "whole", 12, save_every=100)
    for stop in (3, 4, 8):
        assert not train(stage, folder, 12, save_every=100, stopped=lambda n=stop: next(numbers) == n)
    assert train(stage, folder, 12, save_every=100)
    with np.load(tmp_path / "whole" / "state.npz") as whole, np.load(folder / "state.npz") as cut:
        assert set(whole) == set(cut)
        assert all((whole[name] == cut[name]).all() for name in whole)


def test_residual_blocks_start_as_their_shortcuts(stage):
    leaves, _ = jax.tree_util.tree_flatten_with_path(stage.init(0).params)
    last = [leaf for path, leaf in leaves if "conv2" in jax.tree_util.keystr(path) and leaf.ndim > 1]
    assert last and all((leaf == 0).all() for leaf in last)


def test_a_decoder_alone_goes_on_from_a_trained_vae(tiny_model):
    """The encoder, and so every latent, stays what it is; the decoder gets better from where it was."""
    recipe = VAERecipe((Phase(20, 2, 8, 2, chunk_frames=2),), learning_rate=0.02, adam_learning_rate=0.01)
    before = nnx.state(VAE(tiny_model.vae, rngs=nnx.Rngs(7)))
    stage = vae_stage(tiny_model.vae, recipe, plain_colours, before)
    state, psnr = stage.init(0), []
    assert set(state.params) == {"decoder"}
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), state.params["decoder"], before["decoder"]))
    for number in range(20):
        state, metrics = stage.step(state, number)
        psnr.append(float(metrics["psnr"]))
    assert np.mean(psnr[-5:]) > np.mean(psnr[:5]) + 1

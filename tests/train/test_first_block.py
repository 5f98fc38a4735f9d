"""Training on first blocks: what prompt and noise say of them is learned, from any step."""

import numpy as np
import pytest
from flax import nnx

from rfjax.text.model import UMT5Encoder
from rfjax.train.first_block import FirstBlockRecipe, first_block_stage
from rfjax.train.initial import initial_dit
from rfjax.train.latents import LatentSet
from rfjax.train.loop import train

STEPS, SIDE = 150, 4


@pytest.fixture(scope="module")
def stage(tiny_model):
    """Still videos of two kinds, which prompt 0 and prompt 1 name."""
    kinds = np.repeat([[-1.0, 1.0]], 8, 0).ravel()
    data = LatentSet(
        latents=np.broadcast_to(kinds[:, None, None, None, None], (16, 12, 4, SIDE, SIDE)).astype(np.float16),
        prompt_ids=np.tile(np.array([[0], [1]], np.int32), (8, 4)),
        prompts=["low", "high"],
        start=np.full((16, 2, 2), -1, np.int32),
    )
    tokens = np.array([[3, 4, 1, 0, 0, 0], [5, 1, 0, 0, 0, 0]], np.int32), np.array([3, 2], np.int32)
    params = {"dit": initial_dit(tiny_model.dit, 1), "text": nnx.state(UMT5Encoder(tiny_model.text, rngs=nnx.Rngs(2)))}
    recipe = FirstBlockRecipe(STEPS, batch=16, learning_rate=0.02, adam_learning_rate=0.01)
    return first_block_stage(tiny_model, recipe, data, tokens, params, lambda *_: {"seen": 1.0})


def test_what_the_prompt_says_is_learned(stage):
    """At pure noise nothing but the prompt tells the two kinds apart: without it the error stays at 1."""
    state, errors = stage.init(0), []
    for number in range(STEPS):
        state, metrics = stage.step(state, number)
        errors.append(metrics.get("level0", np.nan))
    assert np.nanmean(errors[:3]) > 0.8
    assert np.nanmean(errors[-10:]) < 0.3


def test_a_stopped_run_goes_on_bit_for_bit(stage, tmp_path):
    numbers = iter(range(1, 100))
    assert train(stage, tmp_path / "whole", 6, save_every=100)
    assert not train(stage, tmp_path / "cut", 6, save_every=100, stopped=lambda: next(numbers) == 3)
    assert train(stage, tmp_path / "cut", 6, save_every=100)
    with np.load(tmp_path / "whole" / "state.npz") as whole, np.load(tmp_path / "cut" / "state.npz") as cut:
        assert all((whole[name] == cut[name]).all() for name in whole)

"""Training the text encoder: its features tell the words around."""

import numpy as np
import pytest
from flax import nnx

from rfjax.text.model import UMT5Encoder
from rfjax.train.text import TextRecipe, _shifted, text_stage

STEPS = 120


@pytest.fixture(scope="module")
def prompts(tiny_model):
    """Of 2 to 5 words out of 6, and the end of the prompt."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 7, size=64).astype(np.int32)
    ids = np.where(np.arange(6) < lengths[:, None] - 1, rng.integers(2, 8, size=(64, 6)), 0)
    ids[np.arange(64), lengths - 1] = 1
    return ids.astype(np.int32), lengths


def test_words_around_are_those_at_an_offset():
    ids = np.array([[5, 6, 7, 1, 0]])
    assert _shifted(ids, 1).tolist() == [[6, 7, 1, 0, 0]]
    assert _shifted(ids, -2).tolist() == [[0, 0, 5, 6, 7]]


def test_features_tell_more_and_more_of_the_words_around(tiny_model, prompts):
    params = nnx.state(UMT5Encoder(tiny_model.text, rngs=nnx.Rngs(2)))
    recipe = TextRecipe(STEPS, learning_rate=0.05, adam_learning_rate=0.02)
    stage = text_stage(tiny_model.text, recipe, prompts, params)
    state, told = stage.init(0), []
    for number in range(STEPS):
        state, metrics = stage.step(state, number)
        told.append(metrics["told"])
    # More than half of the places around a word of so short a prompt are padding, which is soon learned.
    assert told[-1] > told[20] + 0.1 and told[-1] > 0.7
    assert stage.show(state, STEPS, None)["told_by_average"] == pytest.approx(told[-1], abs=0.05)

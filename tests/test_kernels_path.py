"""RFJAX_KERNELS=simulate: the whole step through the simulated kernels makes the video that the XLA form makes."""

from collections import Counter

import numpy as np
import pytest

from nki_ops import dispatch, kernels
from nki_ops.simulator import nki as simulator
from rfjax import RollingForcingPipeline
from rfjax.engine import Engine

BLOCKS = 6  # the window fills, rolls on beyond the sink, and empties
STEPS = BLOCKS + 4
LAYERS = 3
A_LAYER = {"attention": 3, "rms_norm_rope_3d": 1, "rotate": 1, "update_cache": 1}


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel runs on the simulator."""
    if kernels.nki is not simulator:
        pytest.skip("AWS's nki is installed")
    counts, simulate = Counter(), simulator.simulate

    def counted(kernel):
        counts[kernel.function.__name__] += 1
        return simulate(kernel)

    monkeypatch.setattr(simulator, "simulate", counted)
    return counts


def test_simulated_kernels_make_the_same_video(pipe, launches, monkeypatch):
    request = {"prompt": "a red circle", "num_latent_frames": 3 * BLOCKS, "height": 32, "width": 32, "seed": 3}
    expected = pipe(**request).frames[0]
    assert launches == {}

    monkeypatch.setenv(dispatch.VARIABLE, "simulate")
    engine = Engine(pipe.config, pipe.engine.graphs, pipe.engine.params, "float32")  # nothing is compiled in it yet
    got = RollingForcingPipeline(engine, pipe.tokenizer)(**request).frames[0]
    assert launches == {kernel: n * LAYERS * STEPS for kernel, n in A_LAYER.items()}
    assert got.shape == expected.shape == (12 * BLOCKS - 3, 32, 32, 3) and expected.std() > 0.01
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)

"""Shared fixtures: the golden data, the tiny release, and pipelines built from it."""

import json
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # for meshes; all else runs on the first

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The recorded numbers of the PyTorch release, and its tiny checkpoint."""
    return GOLDEN


@pytest.fixture(scope="session")
def load_golden():
    """`load_golden("dit_single")` -> arrays (npz) and description (json, empty where there is none)."""

    def load(name: str):
        folder = GOLDEN / "tiny_a" / "golden"
        text = folder / f"{name}.json"
        return np.load(folder / f"{name}.npz"), json.loads(text.read_text()) if text.exists() else {}

    return load


@pytest.fixture(scope="session")
def recorded_noise(load_golden):
    """`recorded_noise("pipeline_F36")`: the release's draws for a video, as a noise function."""
    from rfjax.config import preset
    from rfjax.rolling.schedule import noise_levels

    def read(name):
        arrays, _ = load_golden("pipeline_noise")
        initial, pool = arrays["noise"][0], arrays["randn_pool"]
        levels = noise_levels(preset("tiny").rolling).timesteps
        draws = {}
        for call in load_golden(name)[1]["randn_calls"]:
            step = int(np.argmin(np.abs(levels - call["next_timestep"])))
            draws[call["block"], step] = pool[slice(*call["kept_pool_frames"])].astype(np.float32)

        def noise(block, step):
            return draws[block, step] if step else initial[3 * block : 3 * block + 3].astype(np.float32)

        return noise

    return read


_parity: dict[str, tuple[float, float]] = {}  # what was compared -> largest error, bound


@pytest.fixture(scope="session")
def assert_parity():
    """`assert_parity("DiT flow", got, recorded, atol)`; the largest errors are listed after the run."""

    def check(what, got, recorded, atol):
        np.testing.assert_allclose(got, recorded, rtol=0, atol=atol)
        error = float(np.abs(np.asarray(got) - np.asarray(recorded)).max())
        _parity[what] = max(error, _parity.get(what, (0.0, 0.0))[0]), atol

    return check


def pytest_terminal_summary(terminalreporter):
    if _parity:
        terminalreporter.section("largest error against the PyTorch release (float32)")
        for what, (error, atol) in _parity.items():
            terminalreporter.write_line(f"{what:<44} {error:.1e}   bound {atol:.0e}")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """The tiny release, converted in float32 (EMA weights)."""
    from rfjax.weights.convert import convert

    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    convert(GOLDEN / "tiny_a", path, dtype="float32")
    return path


@pytest.fixture(scope="session")
def word_checkpoint(tmp_path_factory) -> Path:
    """A stand-in for checkpoints/shapes-tiny: its words, size and hint, on few random weights."""
    from dataclasses import replace

    from rfjax.bench.random_weights import random_pipeline
    from rfjax.config import TextConfig, UseConfig, VAEConfig, preset
    from rfjax.weights.store import save
    from rfjax.worlds.words import PROMPT_HINT, build_tokenizer

    tiny, folder = preset("tiny"), tmp_path_factory.mktemp("words")
    config = replace(
        tiny,
        dit=replace(tiny.dit, dim=48, ffn_dim=64, num_heads=4, num_layers=1, text_dim=16, text_len=16),
        vae=VAEConfig(dim=4, num_res_blocks=1, dim_mult=(1, 1, 1, 1)),
        text=TextConfig(vocab_size=32, dim=16, dim_attn=16, dim_ffn=16, num_heads=2, num_layers=1),
        rolling=replace(tiny.rolling, prediction="clean"),
        use=UseConfig(height=64, width=64, prompt_hint=PROMPT_HINT),
    )
    build_tokenizer(folder / "tokenizer")
    params = random_pipeline(config, "float32").engine.params
    save(folder / "shapes-tiny", config, params, folder / "tokenizer", {"source": "random numbers"})
    return folder / "shapes-tiny"


@pytest.fixture(scope="session")
def word_pipe(word_checkpoint):
    """A float32 pipeline on the stand-in."""
    from rfjax import RollingForcingPipeline

    return RollingForcingPipeline.from_pretrained(word_checkpoint, dtype="float32")


@pytest.fixture(scope="session")
def pipe(tiny_checkpoint):
    """A float32 pipeline on the tiny release; its executables are compiled once for the whole session."""
    from rfjax import RollingForcingPipeline

    return RollingForcingPipeline.from_pretrained(tiny_checkpoint, dtype="float32")


@pytest.fixture(scope="session")
def tiny_dit(pipe):
    """(graph definition, parameters) of the tiny DiT, EMA weights, float32."""
    return pipe.engine.graphs["dit"], pipe.engine.params["dit"]


@pytest.fixture(scope="session")
def count_compilations():
    """`with count_compilations() as counts`: one entry for every program XLA compiles, stray eager operations too."""
    running = []  # jax 0.7 cannot take a listener back, so one listens for the whole session

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            for counts in running:
                counts.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)

    @contextmanager
    def count():
        counts = []
        running.append(counts)
        yield counts
        running.remove(counts)

    return count

"""A tiny training run: everything of the real one, at sizes that compile in seconds."""

from pathlib import Path

import jax
import pytest

from rfjax.config import DiTConfig, ModelConfig, RollingConfig, TextConfig, VAEConfig

TINY = """
[data]
world = "shapes"

[model.vae]
dim = 4
z_dim = 4
num_res_blocks = 1
dim_mult = [1, 1, 1]
temporal_downsample = [true, true]

[model.dit]
dim = 16
ffn_dim = 16
num_heads = 2
num_layers = 1
freq_dim = 8
text_dim = 8
text_len = 24
in_dim = 4
out_dim = 4

[model.text]
dim = 8
dim_attn = 8
dim_ffn = 8
num_heads = 2
num_layers = 1

[model.rolling]
prediction = "clean"

[vae]
phases = [{ end = 4, batch = 2, size = 16, chunks = 0, chunk_frames = 4 }]

[encode]
videos = 5
blocks = 4
first_blocks = 3

[text]
steps = 2

[first]
steps = 3
batch = 4

[dit]
steps = 4
batch = 2
lanes = 2

[rollout]
steps = 2
batch = 2
lanes = 1
own = [1, 1]

[decoder]
phases = [{ end = 2, batch = 1, size = 16, chunks = 0, chunk_frames = 4 }]

[samples]
prompts = ["a red circle still", "a blue square moving up fast on a white background"]
frames = 9
every = 3
"""


@pytest.fixture(scope="package", autouse=True)
def quick_compilation():
    """These tests compile much and compute little."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def tiny_model() -> ModelConfig:
    return ModelConfig(
        dit=DiTConfig(
            dim=16, ffn_dim=16, num_heads=2, num_layers=2, freq_dim=8, text_dim=8, text_len=6, in_dim=4, out_dim=4
        ),
        vae=VAEConfig(
            dim=4, z_dim=4, num_res_blocks=1, dim_mult=(1, 1), temporal_downsample=(True,),
            latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4,
        ),
        text=TextConfig(vocab_size=8, dim=8, dim_attn=8, dim_ffn=8, num_heads=2, num_layers=1),
        rolling=RollingConfig(prediction="clean"),
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny_toml(tmp_path_factory) -> Path:
    """The file of a configuration with all stages."""
    file = tmp_path_factory.mktemp("configs") / "tiny.toml"
    file.write_text(TINY)
    return file


@pytest.fixture
def write_toml(tmp_path):
    """`write_toml(old, new)`: the tiny configuration with a part of it replaced, as a file."""

    def write(old="", new=""):
        assert old in TINY
        file = tmp_path / "changed.toml"
        file.write_text(TINY.replace(old, new) if old else TINY + new)
        return file

    return write

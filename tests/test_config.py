"""The configuration in a checkpoint: what was edited into nonsense is refused in a line that names the field."""

import json

import pytest

from rfjax.config import PRESETS, ModelConfig
from rfjax.errors import InputError


@pytest.mark.parametrize("config", PRESETS.values(), ids=list(PRESETS))
def test_json_round_trip(config):
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("dit", "num_heads", 0),
        ("dit", "num_heads", "12"),
        ("dit", "num_heads", 7),
        ("dit", "num_layers", True),
        ("dit", "num_layers", 3.0),
        ("dit", "dim", None),
        ("dit", "freq_dim", 63),
        ("dit", "text_len", 0),
        ("dit", "eps", "x"),
        ("dit", "eps", float("nan")),
        ("dit", "rope_theta", -1.0),
        ("dit", "patch_size", [1, 2]),
        ("dit", "patch_size", [2, 2, 2]),
        ("dit", "patch_size", 2),
        ("vae", "dim_mult", []),
        ("vae", "dim_mult", [1, 2]),
        ("vae", "temporal_downsample", [0, 1, 1]),
        ("vae", "latents_std", [1.0]),
        ("vae", "latents_std", [0.0] * 16),
        ("vae", "latents_mean", [[1.0]] * 16),
        ("text", "num_heads", 5),
        ("text", "num_buckets", 1),
        ("rolling", "block_frames", 0),
        ("rolling", "denoising_steps", []),
        ("rolling", "denoising_steps", [1000, 5000]),
        ("rolling", "denoising_steps", [5000, 1000]),
        ("rolling", "max_attention_blocks", 5),
        ("rolling", "timestep_shift", 0),
        ("rolling", "prediction", "noise"),
        ("rolling", "prediction", 1),
    ],
)
def test_a_bad_value_is_named(section, field, value):
    data = json.loads(json.dumps(PRESETS["tiny"].to_json()))
    data[section][field] = value
    with pytest.raises(InputError, match=field) as caught:
        ModelConfig.from_json(data)
    assert "\n" not in str(caught.value)


def test_a_choice_is_told_in_full_and_may_be_absent_from_older_checkpoints():
    data = PRESETS["tiny"].to_json()
    del data["rolling"]["prediction"]
    assert ModelConfig.from_json(data).rolling.prediction == "flow"
    data["rolling"]["prediction"] = ["flow"]
    with pytest.raises(InputError, match="'flow' or 'clean' is needed$"):
        ModelConfig.from_json(data)


@pytest.mark.parametrize("value", [5, None, [], "x", {}])
def test_a_section_that_is_none(value):
    data = PRESETS["tiny"].to_json() | {"dit": value}
    with pytest.raises(InputError, match="'dit'"):
        ModelConfig.from_json(data)


def test_whole_blocks_is_the_inverse_of_pixel_frames():
    config = PRESETS["tiny"]
    assert [config.whole_blocks(config.pixel_frames(n)) for n in range(4)] == [0, 1, 2, 3]
    assert [config.whole_blocks(n) for n in (8, 9, 20, 21)] == [0, 1, 1, 2]

"""The key maps against the release's own lists of tensors, at full size and without any weight."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rfjax.config import preset
from rfjax.weights.fill import check_fit, flatten
from rfjax.weights.names import identify, release_names
from rfjax.weights.parts import abstract_part, key_map
from rfjax.weights.release import StateDict
from rfjax.weights.release_config import read_config

LISTS = {"dit": "keys_full_dit.json", "vae": "keys_full_vae.json", "text": "keys_full_t5.json"}
CONFIG = preset("wan-1.3b")


@pytest.fixture(scope="module")
def full(golden) -> dict[str, dict]:
    """Each part's tensors at full size, all zeros that take no memory, by the names in the files."""

    def zeros(entry):
        return np.broadcast_to(np.float32(0), entry["shape"])

    lists = {part: json.loads((golden / name).read_text()) for part, name in LISTS.items()}
    return {part: {name: zeros(e) for name, e in content["keys"].items()} for part, content in lists.items()}


@pytest.mark.parametrize("part", LISTS)
def test_key_map_is_exact(golden, full, part):
    names = release_names(full[part])
    tensors = {names[name]: tensor for name, tensor in full[part].items()}
    params = flatten(abstract_part(part, CONFIG, jnp.bfloat16)[1])
    check_fit(part, key_map(part, CONFIG), params, tensors)
    total = json.loads((golden / LISTS[part]).read_text())["total_params"]
    assert sum(p.size for p in params.values()) == total
    assert identify(tensors) == part


def test_config_is_read_off_the_full_release(golden, full, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads((golden / LISTS["dit"]).read_text())["config"]))
    states = {
        part: StateDict(path, "bare", {new: full[part][old] for old, new in release_names(full[part]).items()})
        for part in full
    }
    assert read_config(path, states) == CONFIG


@pytest.mark.parametrize("part", LISTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_norms_and_the_vae_encoder_stay_float32(part, dtype):
    params = flatten(abstract_part(part, CONFIG, dtype)[1])
    for path, param in params.items():
        assert isinstance(param, jax.ShapeDtypeStruct)
        if re.search(r"norm|modulation", path) or path.startswith("encoder."):
            assert param.dtype == jnp.float32, path
        else:
            assert param.dtype in (dtype, jnp.float32)
    assert any(param.dtype == dtype for param in params.values())

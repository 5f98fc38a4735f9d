"""Checkpoints: what is saved comes back in the dtype asked for, and a damaged one is told in a line."""

import dataclasses
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rfjax import RollingForcingPipeline
from rfjax.config import PRESETS
from rfjax.errors import InputError
from rfjax.weights import store
from rfjax.weights.fill import flatten
from rfjax.weights.info import describe, info
from rfjax.weights.parts import abstract_part, load_parts

DTYPES = {"dit": "bfloat16", "vae": "bfloat16", "vae_encoder": "float32", "text": "float32"}
CONFIG = PRESETS["tiny"]


@pytest.fixture
def copy(tiny_checkpoint, tmp_path) -> Path:
    """A copy of the checkpoint to break."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")


def abstract(part: str, dtype: str = "float32"):
    return abstract_part(part, CONFIG, dtype)[1]


def test_parts_come_back_in_the_dtypes_asked_for(tiny_checkpoint):
    config, graphs, params = load_parts(tiny_checkpoint, dtypes=DTYPES)
    assert config == CONFIG and set(graphs) == set(params) == set(store.PARTS)
    asked = flatten(abstract("dit", "bfloat16"))
    exact = flatten(store.load_params(tiny_checkpoint, "dit", abstract("dit")))
    for name, leaf in flatten(params["dit"]).items():
        assert isinstance(leaf, jax.Array)
        assert leaf.dtype == asked[name].dtype
        assert np.array_equal(leaf, np.asarray(exact[name]).astype(leaf.dtype)), name
    vae = flatten(params["vae"])
    assert {leaf.dtype for name, leaf in vae.items() if name.startswith("encoder.")} == {jnp.dtype("float32")}
    assert any(leaf.dtype == jnp.bfloat16 for name, leaf in vae.items() if name.startswith("decoder."))


def test_sharding_of_the_abstract_state(tiny_checkpoint):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("head",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    _, _, params = load_parts(tiny_checkpoint, dtypes=DTYPES, sharding=sharding)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(params))


def test_saved_from_memory(tiny_checkpoint, tmp_path):
    path = tmp_path / "again"
    config, _, params = load_parts(tiny_checkpoint, dtypes=DTYPES)
    store.save(path, config, params, tiny_checkpoint / "tokenizer", {"source": "test"})
    _, _, again = load_parts(path, dtypes=DTYPES)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), params, again))
    assert store.load_json(path)["provenance"] == {"source": "test"}
    with pytest.raises(InputError, match="exists"):
        store.save(path, config, params, tiny_checkpoint / "tokenizer", {})


def test_nothing_runs_on_after_loading(tiny_checkpoint):
    before = set(threading.enumerate())
    store.load_params(tiny_checkpoint, "text", abstract("text"))
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)  # Orbax's last ones are about to end
        assert not thread.is_alive()


def test_model_of_another_size(tiny_checkpoint):
    wider = dataclasses.replace(CONFIG, dit=dataclasses.replace(CONFIG.dit, ffn_dim=512))
    with pytest.raises(InputError) as caught:
        store.load_params(tiny_checkpoint, "dit", abstract_part("dit", wider, "float32")[1])
    assert "blocks.ffn.up.kernel is [3, 192, 256], expected [3, 192, 512]" in str(caught.value)
    assert "blocks.ffn.down.kernel" in str(caught.value)
    with pytest.raises(InputError, match="is missing.*is unknown"):
        store.load_params(tiny_checkpoint, "dit", abstract("text"))


def largest_file(folder: Path) -> Path:
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


@pytest.mark.parametrize(
    "damage, said",
    [
        ("truncated", "has 1000 bytes of"),
        ("removed", "has 0 bytes of"),
        ("folder", "has 0 bytes of"),
        ("_METADATA", "text/_METADATA has other content"),
        ("manifest.ocdbt", "text/manifest.ocdbt has other content"),
    ],
)
def test_damaged_part(copy, damage, said):
    part = copy / "text"
    if damage == "truncated":
        file = largest_file(part)
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "removed":
        largest_file(part).unlink()
    elif damage == "folder":
        shutil.rmtree(part)
    else:
        (part / damage).write_bytes(bytes((part / damage).stat().st_size))
    with pytest.raises(InputError, match="convert the release again") as caught:
        store.load_params(copy, "text", abstract("text"))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_tokenizer(copy):
    file = copy / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(InputError, match=r"tokenizer/tokenizer.json has \d+ bytes of \d+"):
        RollingForcingPipeline.from_pretrained(copy)


def test_what_a_killed_process_left_is_removed(tmp_path):
    process = subprocess.Popen(["true"])
    process.wait()
    dead, alive, other = (
        tmp_path / f".{name}-{pid}"
        for name, pid in (("c.writing", process.pid), ("c.writing", os.getppid()), ("d.writing", process.pid))
    )
    for folder in (dead, alive, other):
        folder.mkdir()
    with store.staged(tmp_path / "c", 0, overwrite=False):
        assert not dead.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"c", alive.name, other.name}


def test_trouble_within_orbax_is_one_line(tiny_checkpoint, monkeypatch):
    def fail(*_):
        raise Exception("cannot read\nand more")

    monkeypatch.setattr(store, "_restore", fail)
    with pytest.raises(InputError, match=r"damaged in text/ \(cannot read\); convert"):
        store.load_params(tiny_checkpoint, "text", abstract("text"))


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "no rfjax checkpoint"),
        ('{"format": "other"}', "no rfjax checkpoint"),
        ('{"format": "rfjax", "format_version": 2}', "format version 2"),
        ('{"format": "rfjax", "format_version": 1}', "lacks model and files"),
        ('{"format": "rfjax", "format_version": 1, "files": {}, "model": {"dit": {}}}', "sections"),
    ],
)
def test_damaged_config(copy, content, said):
    (copy / "config.json").write_text(content)
    with pytest.raises(InputError, match=said):
        store.load_config(copy)


def test_what_is_no_checkpoint(golden, tmp_path):
    with pytest.raises(InputError, match="no such checkpoint"):
        store.load_config(tmp_path / "absent")
    with pytest.raises(InputError, match="rfjax convert"):
        store.load_config(golden / "tiny_a")


def test_info(golden, tiny_checkpoint):
    about = info(tiny_checkpoint)
    assert json.loads(json.dumps(about)) == about
    assert about["what"] == "rfjax checkpoint" and about["provenance"]["weights"] == "ema"
    assert {part: p["parameters"] for part, p in about["parts"].items()} == {
        "dit": 1539136, "vae": 529201, "text": 115264
    }  # fmt: skip
    assert "1,539,136 parameters" in describe(about) and "num_layers 3" in describe(about)


def test_info_on_a_release(golden):
    about = info(golden / "tiny_a")
    assert about["parts"]["dit"]["weights"] == ["ema", "raw"] and about["parts"]["text"]["weights"] == ["bare"]
    assert about["parts"]["text"]["dtypes"] == {"bfloat16": 115264}
    assert "ema and raw weights" in describe(about)
    file = info(golden / "tiny_a/checkpoints/rolling_forcing_dmd.pt")
    assert file["part"] == "dit" and file["bytes"] == 8340341
    assert "the Wan DiT: 1,539,136 parameters" in describe(file)
    with pytest.raises(InputError, match="there is no /nowhere"):
        info("/nowhere")

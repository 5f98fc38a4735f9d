"""`rfjax train` as its users meet it: from a file to a checkpoint that makes videos, cut and taken up again."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest

from rfjax import RollingForcingPipeline
from rfjax.cli import main
from rfjax.cli import train as command
from rfjax.cli.train import _use_fast_products as use_fast_products
from rfjax.train import encode, latents
from rfjax.train.loop import Stage
from rfjax.weights.store import load_json, stored_arrays


@pytest.fixture(scope="module", autouse=True)
def light_command():
    """The command leaves this process as it is, and trains by Adam alone, which compiles in half the time of Muon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "use_compile_cache", lambda: None)
        patch.setattr(command, "_use_fast_products", lambda: None)
        for stage in ("vae", "text", "first_block", "rollout"):
            patch.setattr(f"rfjax.train.{stage}.optimizer", lambda rate, adam_rate, steps: optax.adam(adam_rate))
        yield


@pytest.fixture(scope="module")
def run_folder(tiny_toml, light_command, tmp_path_factory) -> Path:
    """The folder of a run through all stages."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["train", "--config", str(tiny_toml), "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def cli(tiny_toml, capfd):
    """`cli(*words)` -> (code, stderr) of `rfjax train` on the tiny configuration."""

    def run(*words, config=tiny_toml):
        try:
            code = main(["train", "--config", str(config), *map(str, words)])
        except SystemExit as stop:
            code = stop.code
        return code, capfd.readouterr().err

    return run


@pytest.fixture
def run_copy(run_folder, tmp_path):
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


def test_every_stage_leaves_what_one_looks_at(run_folder):
    for stage, steps in {"vae": 4, "first": 3, "dit": 4, "rollout": 2, "decoder": 2}.items():
        rows = [json.loads(line) for line in (run_folder / stage / "log.jsonl").read_text().splitlines()]
        assert rows[-1]["step"] == steps
        assert (run_folder / stage / "curves.png").exists()
        assert (run_folder / stage / "samples" / f"{steps:06d}.png").exists()
    assert {"psnr_start", "psnr_steady", "std_steady"} <= set(rows_of(run_folder, "vae")[-1])
    assert {"score_all", "score_colour", "score_shape"} <= set(rows_of(run_folder, "dit")[-1])


def rows_of(folder, stage):
    return [json.loads(line) for line in (folder / stage / "log.jsonl").read_text().splitlines()]


def test_latents_are_normalised(run_folder):
    data = latents.read(run_folder / "encode")
    assert data.latents.shape == (5, 12, 4, 16, 16)
    steady = data.latents[:, 6:].astype(np.float32)
    # The statistics are those of 32 other videos, these are five.
    assert np.abs(steady.mean(axis=(0, 1, 3, 4))).max() < 1
    assert np.abs(steady.std(axis=(0, 1, 3, 4)) - 1).max() < 0.5
    statistics = encode.read_statistics(run_folder / "encode")
    model = load_json(run_folder / "checkpoint")["model"]
    assert tuple(model["vae"]["latents_mean"]) == statistics.mean
    assert tuple(model["vae"]["latents_std"]) == statistics.std


def test_encoding_that_was_cut_goes_on_bit_for_bit(run_copy, run_folder, cli):
    for number in (2, 3, 4):  # within a batch
        (run_copy / "encode" / f"{number:05d}.npz").unlink()
    assert cli("--out", run_copy, "--stage", "encode")[0] == 0
    for file in latents.files_of(run_folder / "encode"):
        with np.load(file) as wanted, np.load(run_copy / "encode" / file.name) as got:
            assert all((wanted[name] == got[name]).all() for name in ("latents", "prompts", "start"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_checkpoint_makes_videos(run_folder, dtype):
    pipe = RollingForcingPipeline.from_pretrained(run_folder / "checkpoint", dtype=dtype)
    video = pipe("a red circle moving left", num_frames=9, seed=0).frames[0]
    assert video.shape == (9, 64, 64, 3)  # the world's size, unasked
    assert np.isfinite(video).all() and video.std() > 0


def test_the_checkpoint_says_what_it_is(run_folder, tiny_toml):
    content = load_json(run_folder / "checkpoint")
    assert content["model"]["use"]["fps"] == 16 and "COLOUR" in content["model"]["use"]["prompt_hint"]
    provenance = content["provenance"]
    assert provenance["source"] == "rfjax train --config tiny"
    assert provenance["stages"]["dit"]["steps"] == provenance["stages"]["dit"]["of"] == 4
    assert provenance["config"]["rollout"]["own"] == [1, 1]
    assert str(run_folder) not in json.dumps(content)
    arrays = stored_arrays(run_folder / "checkpoint", "dit")
    assert {str(array.dtype) for array in arrays.values()} == {"float16", "float32"}
    assert arrays["head.kernel"].dtype == "float32"
    assert stored_arrays(run_folder / "checkpoint", "vae")["encoder.conv_in.kernel"].dtype == "float16"


def test_the_checkpoint_has_the_averaged_weights_of_the_last_stage(run_folder):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from rfjax.train.loop import load_average
    from rfjax.weights.parts import abstract_part, load_parts

    dtypes = dict.fromkeys(("dit", "vae", "vae_encoder", "text"), "float32")
    config, _, params = load_parts(run_folder / "checkpoint", dtypes=dtypes)
    like = {part: abstract_part(part, config, jnp.float32)[1] for part in ("dit", "text")}
    trained = load_average(run_folder / "rollout", like)
    for got, wanted in zip(jax.tree.leaves(params["dit"]), jax.tree.leaves(trained["dit"]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-6)
    vae = params["vae"]
    trained = load_average(run_folder / "decoder", nnx.State({"decoder": vae["decoder"]}))
    whole = load_average(run_folder / "vae", vae)
    for part, wanted in {"decoder": trained["decoder"], "encoder": whole["encoder"]}.items():
        for a, b in zip(jax.tree.leaves(vae[part]), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_what_is_finished_is_passed_over(run_copy, cli):
    states = [(run_copy / stage / "state.npz").stat().st_mtime_ns for stage in ("vae", "dit", "rollout")]
    code, err = cli("--out", run_copy)
    assert code == 0
    assert [f"{stage} is finished" in err for stage in ("vae", "encode", "dit", "rollout")] == [True] * 4
    assert "checkpoint: the weights of rollout at step 2" in err
    assert states == [(run_copy / stage / "state.npz").stat().st_mtime_ns for stage in ("vae", "dit", "rollout")]


def test_ctrl_c_saves_and_the_same_command_goes_on(run_copy, cli, monkeypatch):
    shutil.rmtree(run_copy / "rollout")
    steps = []

    def step(state, number):
        steps.append(number)
        if len(steps) == 1:
            signal.raise_signal(signal.SIGINT)
        return (state[0] + 1, state[1]), {"loss": 1.0}

    counting = Stage(lambda number: (np.zeros(1), np.zeros(1)), step, lambda *_: {})
    monkeypatch.setattr("rfjax.train.run.rollout_stage", lambda *_, **__: counting)
    code, err = cli("--out", run_copy, "--stage", "rollout")
    assert code == 130
    assert f"stopped, and saved in {run_copy}; the same command goes on" in err
    assert cli("--out", run_copy, "--stage", "rollout")[0] == 0
    assert steps == [0, 1]
    with np.load(run_copy / "rollout" / "state.npz") as state:
        assert state["a0"] == [2]


@pytest.mark.parametrize(
    "lost, stage, message",
    [
        ("vae", "encode", "encode needs vae, which is not finished; run --stage vae"),
        ("encode", "dit", "dit needs encode, which is not finished"),
        ("dit", "rollout", "rollout needs dit, which is not finished"),
    ],
)
def test_a_stage_without_the_one_before_is_refused(lost, stage, message, run_copy, cli):
    shutil.rmtree(run_copy / lost)
    code, err = cli("--out", run_copy, "--stage", stage)
    assert code == 2 and message in err


def test_export_before_training_is_refused(tmp_path, cli):
    code, err = cli("--out", tmp_path, "--stage", "export")
    assert code == 2 and "export needs dit, which has not begun; run --stage dit" in err


def test_a_stage_is_not_mixed_with_what_another_run_made(run_copy, write_toml, cli):
    config = write_toml("blocks = 4", "blocks = 4\nseed = 1")
    (run_copy / "encode" / "00004.npz").unlink()
    code, err = cli("--out", run_copy, "--stage", "encode", config=config)
    assert code == 2 and "encode was begun with another seed; remove it to begin again" in err


def test_a_changed_model_is_told_in_one_line(run_copy, write_toml, cli):
    config = write_toml("ffn_dim = 16", "ffn_dim = 32")
    code, err = cli("--out", run_copy, "--stage", "export", config=config)
    assert code == 2 and "is of another configuration" in err and "ffn" in err and err.count("\n") == 1


def test_bad_words_are_told_in_one_line(cli, tmp_path):
    for words, message in {
        ("--stage", "all"): "invalid choice: 'all'",
        ("--out", ""): "the name is empty",
    }.items():
        code, err = cli(*words)
        assert code == 2 and message in err
    code, err = cli(config=tmp_path / "nowhere.toml")
    assert code == 2 and "nowhere.toml: No such file" in err and err.count("\n") == 1


def test_a_missing_library_is_told_with_what_brings_it(cli, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == "optax" else find(name))
    code, err = cli()
    assert code == 2 and "training needs optax: pip install 'rfjax[train]'" in err


@pytest.fixture
def flags(monkeypatch):
    """`flags(version=..., machine=..., **environment)`: XLA_FLAGS after the command has looked for a CPU."""

    def ask(version="0.10.2", machine="x86_64", **environment):
        with monkeypatch.context() as patch:
            patch.setattr(command.importlib.metadata, "version", lambda name: version)
            patch.setattr(command.platform, "machine", lambda: machine)
            for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
                patch.setenv(name, environment.get(name, ""))
            use_fast_products()
            return os.environ["XLA_FLAGS"]

    return ask


def test_the_flag_for_cpus_is_set_only_where_it_serves(flags, monkeypatch):
    monkeypatch.setattr(command, "_contains", lambda file, text: True)
    wanted = f"--{command._FLAG}={command._VALUE}"
    assert flags(JAX_PLATFORMS="cpu") == wanted
    assert flags(JAX_PLATFORMS="cpu", XLA_FLAGS="--other=1") == f"--other=1 {wanted}"
    assert flags(JAX_PLATFORMS="cpu", XLA_FLAGS=f"--{command._FLAG}=0") == f"--{command._FLAG}=0"
    assert flags(JAX_PLATFORMS="cuda") == ""
    assert flags(JAX_PLATFORMS="cpu", version="0.9.2") == ""
    assert flags(JAX_PLATFORMS="cpu", version="0.10.0rc1", machine="arm64") == ""
    monkeypatch.setattr(command, "_contains", lambda file, text: False)
    assert flags(JAX_PLATFORMS="cpu") == ""


def test_jax_starts_with_the_flag_that_is_set_here():
    """A flag that XLA does not know would end the process."""
    code = "import rfjax.cli.train as t; t._use_fast_products(); import jax.numpy as n; print(n.ones(3) @ n.ones(3))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "3.0\n", run.stderr

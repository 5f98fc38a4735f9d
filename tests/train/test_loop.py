"""The loop: what is saved is all that matters, whenever a run ends."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rfjax.errors import InputError
from rfjax.train import loop
from rfjax.train.draw import contact_sheet, draw_curves
from rfjax.train.loop import Stage, load_average, seconds_spent, steps_done, train


def toy_stage(size=3, number_of=lambda number: 1 / (1 + number)):
    """Adds up numbers in float32, where the order counts; its log is `number_of` the step."""

    def step(state, number):
        params = state[0] + jnp.float32(1 / (3 + number))
        return (params, state[1] + 0.1 * (params - state[1])), {"loss": number_of(number), "other_a": 2.0}

    return Stage(lambda _: (jnp.zeros(size), jnp.ones(size)), step, lambda state, number, folder: {"score_x": 0.5})


def read_state(folder):
    with np.load(folder / "state.npz") as data:
        return {name: data[name] for name in data}


def read_log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def without_times(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert train(toy_stage(), folder, 10, log_every=2, save_every=4)
    return folder


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "finished"))


@pytest.fixture(autouse=True)
def no_curves(whole, monkeypatch):
    """Drawing them takes longer than all else; the folder above has some."""
    monkeypatch.setattr(loop, "draw_curves", lambda rows, path: None)


def assert_same(folder, other):
    states = read_state(folder), read_state(other)
    assert states[0].keys() == states[1].keys()
    assert all((states[0][name] == states[1][name]).all() for name in states[0])
    assert without_times(read_log(folder)) == without_times(read_log(other))


def test_a_run_leaves_a_checkpoint_a_log_and_curves(whole):
    assert steps_done(whole) == 10
    rows = read_log(whole)
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 6, 8, 10]
    assert [row["step"] for row in rows if "score_x" in row] == [4, 8, 10]
    assert rows[0]["loss"] == pytest.approx((1 + 1 / 2) / 2)
    assert (whole / "curves.png").stat().st_size > 1000
    assert (load_average(whole, np.zeros(3)) == read_state(whole)["a1"]).all()
    assert seconds_spent(whole) >= 0


@pytest.mark.parametrize("stop", [1, 4, 5, 8, 9])
def test_a_stopped_run_goes_on_bit_for_bit(stop, whole, tmp_path):
    asked = iter(range(1, 20))
    folder = tmp_path / "cut"
    assert not train(toy_stage(), folder, 10, log_every=2, save_every=4, stopped=lambda: next(asked) == stop)
    assert steps_done(folder) == stop
    assert train(toy_stage(), folder, 10, log_every=2, save_every=4)
    states = read_state(folder), read_state(whole)
    assert all((states[0][name] == states[1][name]).all() for name in states[0])
    if stop % 2 == 0:
        assert_same(folder, whole)


def test_a_run_killed_while_it_saves_goes_on_bit_for_bit(whole, tmp_path, monkeypatch):
    folder, savez, calls = tmp_path / "killed", np.savez, []

    def killed(file, **arrays):
        calls.append(file)
        if len(calls) == 2:
            file.write_bytes(b"PK half of it")
            raise KeyboardInterrupt
        savez(file, **arrays)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.np, "savez", killed)
        train(toy_stage(), folder, 10, log_every=2, save_every=4)
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    assert steps_done(folder) == 4
    assert train(toy_stage(), folder, 10, log_every=2, save_every=4)
    assert_same(folder, whole)


def test_a_finished_run_is_left_alone(finished):
    before = (finished / "state.npz").read_bytes()
    stage = Stage(lambda number: pytest.fail("built"), lambda state, number: pytest.fail("stepped"), lambda *_: {})
    assert train(stage, finished, 10)
    assert (finished / "state.npz").read_bytes() == before


def test_a_run_can_be_made_longer_but_not_shorter(finished):
    with pytest.raises(InputError, match="is at step 10, beyond the 8 of the configuration"):
        train(toy_stage(), finished, 8)
    assert train(toy_stage(), finished, 12)
    assert steps_done(finished) == 12


def test_a_changed_configuration_is_told_in_one_line(finished):
    with pytest.raises(InputError, match=r"of another configuration: \[0\] is \[3\] there and \[4\] now; go on with"):
        train(toy_stage(size=4), finished, 12)
    more = Stage(lambda _: (jnp.zeros(3),) * 3, toy_stage().step, toy_stage().show)
    with pytest.raises(InputError, match="it lacks 1 of 3 arrays"):
        train(more, finished, 12)


def test_a_damaged_checkpoint_is_told_in_one_line(finished):
    (finished / "state.npz").write_bytes(b"PK nothing")
    with pytest.raises(InputError, match=r"state.npz is damaged; remove it"):
        train(toy_stage(), finished, 12)


def test_a_run_that_diverges_ends_and_keeps_its_last_checkpoint(tmp_path):
    stage = toy_stage(number_of=lambda number: 1.0 if number < 5 else float("nan"))
    with pytest.raises(InputError, match=r"diverged, loss is not finite by step 6; lower .*goes on from step 4"):
        train(stage, tmp_path, 10, log_every=2, save_every=4)
    assert steps_done(tmp_path) == 4


def test_progress_is_said_at_each_checkpoint(tmp_path):
    lines = []
    train(toy_stage(), tmp_path / "vae", 4, log_every=2, save_every=2, say=lines.append)
    assert lines[0] == "vae, step 2 of 4: loss 0.75, other_a 2, score_x 0.5"
    assert len(lines) == 2


def test_curves_are_drawn_whatever_the_numbers(tmp_path):
    rows = [{"step": i, "loss0": 10.0**-i, "loss1": 1.0, "psnr": float("nan"), "score_a": 0.0} for i in range(1, 4)]
    draw_curves(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()


def test_contact_sheets_have_a_row_for_each_video(tmp_path):
    from PIL import Image

    rows = [np.full((3, 8, 8, 3), 255, np.uint8)] * 2
    contact_sheet(rows, tmp_path / "a" / "sheet.png", scale=2)
    with Image.open(tmp_path / "a" / "sheet.png") as sheet:
        assert sheet.size == (3 * 9 * 2, 2 * 9 * 2)
    contact_sheet(rows, tmp_path / "captions.png", scale=1, captions=("one", "two"))
    with Image.open(tmp_path / "captions.png") as sheet:
        assert sheet.size[0] > 3 * 9 + 100

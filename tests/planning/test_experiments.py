"""The layouts that scripts/experiments puts side by side are whole steps, and give one device's numbers."""

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "experiments"


@pytest.fixture(scope="module")
def compare():
    sys.path.insert(0, str(SCRIPTS))
    try:
        import compare
    finally:
        sys.path.remove(str(SCRIPTS))
    return compare


@pytest.mark.parametrize("number", range(5))
def test_every_layout_gives_the_numbers_of_one_device(compare, number):
    (experiment,) = compare.experiments()[number : number + 1]
    assert compare.largest_error(experiment) <= compare.TOLERANCE


def test_there_are_five(compare):
    assert len(compare.experiments()) == 5


def test_a_wrong_layout_is_told(compare, monkeypatch, capsys):
    monkeypatch.setattr(compare, "experiments", lambda: [object()])
    row = {"name": "a wrong one", "largest_error": float("nan"), "flops": 1, "flops_over_equal_share": 1.0,
           "collectives": {}, "resident_bytes": 1, "temporary_bytes": 1, "modelled_seconds": {"all": 1.0},
           "streams": 1}  # fmt: skip
    monkeypatch.setattr(compare, "figures", lambda _: row)
    monkeypatch.setattr(compare.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["compare.py"])
    assert compare.main() == 1
    assert "not the numbers of one device: a wrong one" in capsys.readouterr().err


def test_the_plot_draws_what_was_written(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import plot

    row = {"name": "one", "streams": 1, "modelled_seconds": {"linear": 0.1}}
    rows = [row | {"resident_bytes": 1e9, "temporary_bytes": 1e8}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "rows.json"), str(tmp_path / "plot.png")])
    assert plot.main() == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

"""scripts/kernel_report.py: what it prints is what docs/kernels.md shows, and its JSON is complete."""

import importlib.util
import json
from pathlib import Path

import pytest

from nki_ops import kernels
from nki_ops.simulator import nki as simulated

ROOT = Path(__file__).parents[3]
if kernels.nki is not simulated:
    pytest.skip("with AWS's package nothing is modelled", allow_module_level=True)


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("kernel_report", ROOT / "scripts/kernel_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_tables_that_the_command_prints(report, capsys):
    report.main([])
    page = (ROOT / "docs/kernels.md").read_text()
    tables = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(tables) > 10
    assert [line for line in tables if line not in page] == []


def test_json_has_every_kernel_with_its_limit_and_counts(report, capsys):
    report.main(["--json"])
    rows = json.loads(capsys.readouterr().out)
    assert {row["kernel"].split(",")[0] for row in rows} == {name for name in kernels.__all__ if name != "nki"}
    for row in rows:
        assert row["seconds"] == row["report"]["seconds"] == max(row["report"]["engine_seconds"].values())
        assert 0 < row["limit_seconds"] <= row["seconds"] * 1.0001
    published = {row["kernel"]: row["published_seconds"] for row in rows if row["published"]}
    assert published == {"rms_norm_rope_3d": 1.8e-3, "update_cache": 1.9e-3}

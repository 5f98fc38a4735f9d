"""Checkpoints that come with the package: found by name from a source tree and from an unpacked wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import rfjax
from rfjax import RollingForcingPipeline
from rfjax.errors import InputError
from rfjax.weights import bundled

ROOT = Path(__file__).parents[2]
ONE_BLOCK = """
from rfjax import RollingForcingPipeline
pipe = RollingForcingPipeline.from_pretrained("shapes-tiny", dtype="float32")
print(pipe("a red circle still", num_frames=9, seed=0).frames[0].shape, pipe.tokenizer.directory)
"""


@pytest.fixture
def tree(tmp_path, word_checkpoint):
    """A source tree with the stand-in checkpoint, and one that was converted there."""
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("rfjax", "nki_ops"):
        shutil.copytree(ROOT / folder, tmp_path / "tree" / folder, ignore=ignored)
    for file in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path / "tree")
    for name in ("shapes-tiny", "mine"):
        shutil.copytree(word_checkpoint, tmp_path / "tree" / "checkpoints" / name)
    (tmp_path / "tree" / "tests").mkdir()
    (tmp_path / "tree" / "tests" / "test_nothing.py").touch()
    return tmp_path / "tree"


def test_a_wheel_has_the_checkpoint_and_finds_it_where_it_is_installed(tree, word_checkpoint, tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    build = "import setuptools.build_meta as b; b.build_wheel('..')"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    inside = "rfjax/checkpoints/shapes-tiny"
    expected = {
        f"{inside}/{file.relative_to(word_checkpoint)}" for file in word_checkpoint.rglob("*") if file.is_file()
    }
    assert {name for name in names if name.startswith("rfjax/checkpoints/")} == expected
    assert {name.split("/")[0] for name in names} == {"rfjax", "nki_ops", "rfjax-0.1.0.dist-info"}
    shutil.rmtree(tree)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-c", ONE_BLOCK]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert ran.stdout == f"(9, 64, 64, 3) {tmp_path / 'installed' / inside / 'tokenizer'}\n"


def test_a_name_is_looked_up_where_there_is_no_such_path(tree, word_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(rfjax, "__file__", str(tree / "rfjax" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert bundled.find_checkpoint(Path("shapes-tiny")) == tree / "checkpoints" / "shapes-tiny"
    assert RollingForcingPipeline.from_pretrained("shapes-tiny").config.use.height == 64
    for path in (Path("no/shapes-tiny"), tmp_path / "nowhere"):
        assert bundled.find_checkpoint(path) == path
    shutil.copytree(word_checkpoint, "shapes-tiny")
    assert bundled.find_checkpoint(Path("shapes-tiny")) == Path("shapes-tiny")
    with pytest.raises(InputError, match="^shapes-huge: no such checkpoint; rfjax comes with mine, shapes-tiny$"):
        RollingForcingPipeline.from_pretrained("shapes-huge")

"""`install()`: kernel files written for AWS's package run unchanged where it is absent."""

import importlib
import sys

import numpy as np
import pytest

from nki_ops.simulator import SimulatorError, install

KERNEL_FILE = """
import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
from nki.isa import constants, oob_mode, reduce_cmd
from nki.isa.constants import dge_mode
from nki.language import NKIObject
import nki.collectives as ncc


class Scale(NKIObject):
    factor: float = 3.0


@nki.jit
def scaled(x: nt.tensor[4, 8], config: Scale = Scale()):
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x, dge_mode=dge_mode.none, oob_mode=oob_mode.error)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=config.factor)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def gathers(x):
    ncc.all_gather(x)
"""


@pytest.fixture(autouse=True)
def no_nki_left(monkeypatch, tmp_path):
    """Modules imported here go; an empty folder leads the path."""
    before = {n: m for n, m in sys.modules.items() if n == "nki" or n.startswith("nki.")}
    for name in before:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [n for n in sys.modules if n in ("nki", "kernel_file") or n.startswith("nki.")]:
        del sys.modules[name]
    sys.modules.update(before)


def write_package(folder, init="", isa=None):
    package = folder / "nki"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    if isa is not None:
        (package / "isa.py").write_text(isa)
    importlib.invalidate_caches()


def run_kernel_file(folder):
    (folder / "kernel_file.py").write_text(KERNEL_FILE)
    importlib.invalidate_caches()
    return importlib.import_module("kernel_file")


@pytest.mark.parametrize("placeholder", [False, True])
def test_kernel_files_run_unchanged(tmp_path, placeholder):
    if placeholder:
        write_package(tmp_path)  # what PyPI has under this name
    install()
    install()
    module = run_kernel_file(tmp_path)
    x = np.ones((4, 8), np.float32)
    nki = importlib.import_module("nki")
    np.testing.assert_array_equal(nki.simulate(module.scaled)(x), 3 * x)
    np.testing.assert_array_equal(module.scaled[2](x, module.Scale(2.0)), 2 * x)
    with pytest.raises(SimulatorError, match="nki.collectives.all_gather is not simulated"):
        module.gathers(x)


def test_the_real_package_is_left_alone(tmp_path):
    write_package(tmp_path, "def jit(f): return f", "def nc_matmul(): ...")
    with pytest.raises(SimulatorError, match=r"the real nki package is installed \(.*nki/__init__.py\)"):
        install()
    assert importlib.import_module("nki").__file__ == str(tmp_path / "nki" / "__init__.py")

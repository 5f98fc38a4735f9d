"""Shortcuts for kernels in tests: tensors on the chip, and arrays brought there and back."""

import numpy as np
import pytest

from nki_ops.simulator import nki, simulate

nl, nisa = nki.language, nki.isa


class Chip:
    """What test kernels are made of; all methods work inside a kernel, `run` outside."""

    @staticmethod
    def sb(*shape, dtype="float32", value=None, **kwargs):
        """An SBUF tensor, filled if a value is given."""
        tensor = nl.ndarray(shape, dtype, nl.sbuf, **kwargs)
        if value is not None:
            nisa.memset(tensor, value)
        return tensor

    @staticmethod
    def ps(*shape, dtype="float32", **kwargs):
        """A PSUM tensor."""
        return nl.ndarray(shape, dtype, nl.psum, **kwargs)

    @staticmethod
    def hbm(*shape, dtype="float32"):
        """A tensor in this core's HBM."""
        return nl.ndarray(shape, dtype, nl.private_hbm)

    @staticmethod
    def up(array):
        """An HBM tensor in a new SBUF tensor."""
        tile = nl.ndarray(array.shape, array.dtype, nl.sbuf)
        nisa.dma_copy(tile, array)
        return tile

    @staticmethod
    def down(tensor):
        """An on-chip tensor as an output of the kernel."""
        if tensor.buffer is nl.psum:
            tile = nl.ndarray(tensor.shape, tensor.dtype, nl.sbuf)
            nisa.tensor_copy(tile, tensor)
            tensor = tile
        out = nl.ndarray(tensor.shape, tensor.dtype, nl.shared_hbm)
        nisa.dma_copy(out, tensor)
        return out

    @staticmethod
    def run(body, *arrays, out=None):
        """Runs body(*SBUF tiles, dst) with dst a new tile of shape and dtype `out`; its contents as float64."""

        def kernel(*inputs):
            tiles = [Chip.up(x) for x in inputs]
            if out is None:
                return Chip.down(body(*tiles))
            dst = nl.ndarray(*out, nl.sbuf)
            body(*tiles, dst)
            return Chip.down(dst)

        return np.asarray(simulate(kernel)(*arrays)).astype(np.float64)


@pytest.fixture
def chip():
    return Chip


@pytest.fixture
def rng():
    return np.random.default_rng(0)

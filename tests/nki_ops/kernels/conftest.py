"""Runs kernels on AWS's simulator where the real `nki` is installed, and on this project's elsewhere."""

import os

import numpy as np
import pytest

from nki_ops.kernels import nki

os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")  # AWS's takes trn3 where it sees no device


@pytest.fixture(scope="session")
def run_kernel():
    """run_kernel(kernel, *arrays, cores=1, **options): the kernel's outputs; inputs it writes are changed in place."""

    def simulate(kernel, *arrays, cores=1, **options):
        return nki.simulate(kernel[cores])(*arrays, **options)

    return simulate


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def error():
    """error(got, expected): relative L2 distance."""

    def relative(got, expected):
        got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
        return np.linalg.norm(got - expected) / np.linalg.norm(expected)

    return relative

"""Which form of the operations runs: by device, by RFJAX_KERNELS, by `using`; and cuDNN's attention on CUDA."""

import logging
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nki_ops
from nki_ops import cuda, dispatch, xla


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("RFJAX_KERNELS", raising=False)
    dispatch._from_environment.cache_clear()


@pytest.mark.parametrize("device, expected", [("cpu", "xla"), ("gpu", "xla"), ("neuron", "nki")])
def test_the_device_chooses(monkeypatch, device, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    assert nki_ops.backend() == expected


@pytest.mark.parametrize("choice", ["xla", "nki", "simulate"])
def test_the_environment_overrides_the_device_and_is_said_once(monkeypatch, caplog, choice):
    monkeypatch.setenv("RFJAX_KERNELS", choice)
    for device in ("cpu", "neuron"):
        monkeypatch.setattr(jax, "default_backend", lambda device=device: device)
        assert nki_ops.backend() == choice
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"RFJAX_KERNELS={choice}" in caplog.text and "\n" not in caplog.records[0].getMessage()


def test_an_unknown_choice_is_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("RFJAX_KERNELS", "cuda")
    with pytest.raises(nki_ops.KernelError, match="^RFJAX_KERNELS=cuda .* xla, nki, simulate[^\n]*$"):
        nki_ops.rotate(jnp.ones((2, 4)), np.ones((2, 2)), np.ones((2, 2)))


def test_an_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("RFJAX_KERNELS", "")
    assert nki_ops.backend() == "xla"


def test_using_overrides_the_environment_and_ends(monkeypatch):
    monkeypatch.setenv("RFJAX_KERNELS", "simulate")
    with pytest.raises(ZeroDivisionError), nki_ops.using("nki"):
        assert nki_ops.backend() == "nki"
        raise ZeroDivisionError
    assert nki_ops.backend() == "simulate"


def block_attention(rng, dtype=jnp.bfloat16, dim=16):
    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    pools = [(draw(n, 2, 2, 4, dim), draw(n, 2, 2, 4, dim)) for n in (3, 1)]
    return draw(2, 6, 2, dim), pools, np.array([3, 0, 1], np.int32)


def test_the_xla_form_is_untouched_by_the_switch():
    q, pools, table = block_attention(np.random.default_rng(0), jnp.float32)
    texts = [jax.jit(f).lower(q, pools, table, np.int32(2)).as_text() for f in (nki_ops.attention, xla.attention)]
    assert texts[0] == texts[1]


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device as far as tracing and lowering can see; `gpu(cudnn=None)` is one without cuDNN."""
    cudnn = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def lower(*args, version: int | None = 91000):
        found = mock.Mock(return_value=version) if version else mock.Mock(side_effect=RuntimeError("no cuDNN"))
        with mock.patch(f"{cudnn}.check_cudnn_version", found), mock.patch(f"{cudnn}.check_compute_capability"):
            lowered = jax.jit(lambda *a: nki_ops.attention(*a)).trace(*args).lower(lowering_platforms=("cuda",))
        return "__cudnn" in lowered.as_text()

    return lower


def test_attention_on_cuda_is_cudnn_where_it_fits(gpu, monkeypatch):
    rng, n_valid = np.random.default_rng(0), np.int32(2)
    fits = block_attention(rng)
    assert gpu(*fits, n_valid)
    assert gpu(*block_attention(rng, jnp.float16), n_valid)
    assert not gpu(*block_attention(rng, jnp.float32), n_valid)
    assert not gpu(*block_attention(rng, dim=12), n_valid)
    assert not gpu(*fits, n_valid, version=None)
    monkeypatch.setenv("RFJAX_KERNELS", "xla")
    assert not gpu(*fits, n_valid)


@pytest.mark.parametrize("n_valid", [1, 2, 3])
def test_what_cudnn_is_asked_for_equals_the_xla_form(n_valid):
    """By JAX's own implementation of the same function; blocks that do not count hold NaN."""
    q, pools, table = block_attention(np.random.default_rng(1), jnp.float32)
    for block in set(range(4)) - set(table[:n_valid].tolist()):
        pool, place = divmod(block, 3)
        pools[pool] = tuple(x.at[place].set(np.nan) for x in pools[pool])
    out = cuda.fused(q, pools, table, np.int32(n_valid), "xla")
    np.testing.assert_allclose(out, xla.attention(q, pools, table, np.int32(n_valid)), rtol=0, atol=1e-5)

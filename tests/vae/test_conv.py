"""The 2-D forms against the 3-D convolution and the plain upsampling that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rfjax.vae import conv


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def reference(x, kernel):
    """The 3-D convolution tap by tap, in float64."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    (kt, kh, kw), (frames, height, width) = kernel.shape[:3], x.shape[1:4]
    x = np.pad(x, ((0, 0), (0, 0), (kh // 2, kh // 2), (kw // 2, kw // 2), (0, 0)))
    frames -= kt - 1
    return sum(
        x[:, t : t + frames, i : i + height, j : j + width] @ kernel[t, i, j] for t, i, j in np.ndindex(kt, kh, kw)
    )


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("channels, side", [(4, 4), (16, 4), (64, 20)], ids=["few_channels", "little", "much"])
def test_conv3d_is_a_3d_convolution(frames, channels, side):
    x = normal(0, 2, frames + 2, side, side + 2, 32)
    kernel = normal(1, 3, 3, 3, 32, channels) / 30
    np.testing.assert_allclose(conv.conv3d(x, kernel), reference(x, kernel), rtol=0, atol=1e-5)


def test_conv3d_over_time_alone():
    x, kernel = normal(0, 1, 6, 2, 3, 16), normal(1, 3, 1, 1, 16, 32) / 7
    np.testing.assert_allclose(conv.conv3d(x, kernel), reference(x, kernel), rtol=0, atol=1e-5)


def test_the_form_for_accelerators_is_the_same_function(monkeypatch):
    x, kernel = normal(0, 1, 6, 20, 22, 64), normal(1, 3, 3, 3, 64, 64) / 40
    here = conv.conv3d(x, kernel)
    monkeypatch.setattr(jax, "default_backend", lambda: "neuron")
    there = conv.conv3d(x, kernel)
    assert not (there == here).all()
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tile", [2, 3, 4])
def test_short_convolution_rounds_little(tile):
    """In float32, at most three times the error of the direct form."""
    x, kernel = normal(0, 1, tile + 2, 6, 6, 192), normal(1, 3, 3, 3, 192, 16) / 72
    exact = reference(x, kernel)

    def error(y):
        return np.sqrt(np.mean((y - exact) ** 2))

    assert error(conv._short(x, kernel, tile, (1, 1))) < 3 * error(conv._direct(x, kernel, (1, 1)))


def test_upsample_conv_is_doubling_then_convolution():
    x, kernel = normal(0, 2, 5, 6, 8), normal(1, 3, 3, 8, 4) / 8
    doubled = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
    expected = conv.conv2d(doubled, kernel, ((1, 1), (1, 1)))
    np.testing.assert_allclose(conv.upsample_conv(x, kernel), expected, rtol=0, atol=1e-5)


def test_halve_time_is_every_second_frame():
    x, kernel = normal(0, 2, 9, 2, 3, 16), normal(1, 3, 1, 1, 16, 16) / 7
    np.testing.assert_allclose(conv.halve_time(x, kernel), reference(x, kernel)[:, ::2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("tile", [2, 3, 4])
def test_gradients_of_the_short_convolution_are_those_of_the_direct_one(tile):
    """It is trained through, and has a backward pass of its own."""
    frames = 2 * tile
    x, kernel = normal(0, 2, frames + 2, 5, 6, 16), normal(1, 3, 3, 3, 16, 16) / 20
    weight = normal(2, 2, frames, 5, 6, 16)

    def loss(form):
        return lambda x, kernel: jnp.sum(weight * jnp.square(form(x, kernel)))

    def direct(x, kernel):
        return conv._direct(x, kernel, (1, 1))

    got = jax.grad(loss(lambda x, kernel: conv._short(x, kernel, tile, (1, 1))), (0, 1))(x, kernel)
    wanted = jax.grad(loss(direct), (0, 1))(x, kernel)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * float(jnp.abs(theirs).max()))

"""Where a video starts is said by its noise, and the noise stays noise."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rfjax.train.start import noise_for_start, start_patch

SHAPE, PATCH = (3, 4, 12, 8), (2, 1)


@pytest.fixture(scope="module")
def draw():
    """`draw(x0, sigma, starts [n, 2, 2])`: a batch of noises."""
    one = jax.jit(jax.vmap(partial(noise_for_start, patch=PATCH), in_axes=(0, None, None, 0)))

    def many(x0, sigma, starts):
        keys = jax.random.split(jax.random.key(0), len(starts))
        return np.asarray(one(keys, x0, jnp.float32(sigma), jnp.asarray(starts)))

    return many


def random_patches(n):
    return np.random.default_rng(0).integers((6, 8), size=(n, 2, 2)).astype(np.int32)


def test_noise_is_standard_normal(draw):
    noise = draw(jnp.zeros(SHAPE), 1.0, random_patches(2000))
    for values in (noise[:, :, 0], noise[:, :, 1], noise[:, :, 2:]):
        n = values.size
        assert abs(values.mean()) < 4 / np.sqrt(n)
        assert abs(values.var() - 1) < 4 * np.sqrt(2 / n)
        assert abs((values**4).mean() - 3) < 4 * np.sqrt(96 / n)
    neighbours = (noise[..., 1:] * noise[..., :-1]).mean()
    assert abs(neighbours) < 4 / np.sqrt(noise.size)


def test_its_maximum_stands_where_things_start(draw):
    patches = random_patches(50)
    for row, noise in zip(patches, draw(jnp.zeros(SHAPE), 1.0, patches), strict=True):
        assert (start_patch(noise, 0, PATCH) == row[0]).all() and (start_patch(noise, 1, PATCH) == row[1]).all()


def test_it_stands_there_with_the_estimate_mixed_in(draw):
    x0, sigma, patches = jax.random.normal(jax.random.key(1), SHAPE), 0.9, random_patches(200)
    noisy = (1 - sigma) * x0 + sigma * draw(x0, sigma, patches)
    found = np.array([[start_patch(x, thing, PATCH) for thing in (0, 1)] for x in noisy])
    assert (found == patches).all(axis=-1).mean() > 0.98


def test_a_thing_that_is_not_there_says_nothing(draw):
    patches = random_patches(500)
    patches[:, 1] = -1
    noise = draw(jnp.zeros(SHAPE), 1.0, patches)
    found = np.array([start_patch(x, 1, PATCH) for x in noise])
    assert len(np.unique(found, axis=0)) == 48


def test_a_boost_makes_it_easier_to_read():
    start, patch = jnp.array([[2, 2], [-1, -1]]), (2, 2)
    quiet, loud = (
        noise_for_start(jax.random.key(2), jnp.zeros(SHAPE), jnp.float32(1), start, patch, b) for b in (0, 2)
    )
    expected = np.zeros(SHAPE, np.float32)
    expected[:, 0, 4:6, 4:6] = 2
    np.testing.assert_allclose(loud - quiet, expected, atol=1e-6)

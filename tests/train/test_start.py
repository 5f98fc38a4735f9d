"""Where a video starts is said by its noise, and the noise stays noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rfjax.train.start import noise_for_start, start_cell

SHAPE = (3, 4, 6, 8)


@pytest.fixture(scope="module")
def draw():
    """`draw(x0, sigma, starts [n, 2, 2])`: a batch of noises."""
    one = jax.jit(jax.vmap(noise_for_start, in_axes=(0, None, None, 0)))

    def many(x0, sigma, starts):
        keys = jax.random.split(jax.random.key(0), len(starts))
        return np.asarray(one(keys, x0, jnp.float32(sigma), jnp.asarray(starts)))

    return many


def random_cells(n):
    return np.random.default_rng(0).integers((6, 8), size=(n, 2, 2)).astype(np.int32)


def test_noise_is_standard_normal(draw):
    noise = draw(jnp.zeros(SHAPE), 1.0, random_cells(2000))
    for values in (noise[:, :, 0], noise[:, :, 1], noise[:, :, 2:]):
        n = values.size
        assert abs(values.mean()) < 4 / np.sqrt(n)
        assert abs(values.var() - 1) < 4 * np.sqrt(2 / n)
        assert abs((values**4).mean() - 3) < 4 * np.sqrt(96 / n)
    neighbours = (noise[..., 1:] * noise[..., :-1]).mean()
    assert abs(neighbours) < 4 / np.sqrt(noise.size)


def test_its_maximum_stands_where_things_start(draw):
    cells = random_cells(50)
    for row, noise in zip(cells, draw(jnp.zeros(SHAPE), 1.0, cells), strict=True):
        assert (start_cell(noise, 0) == row[0]).all() and (start_cell(noise, 1) == row[1]).all()


def test_it_stands_there_with_the_estimate_mixed_in(draw):
    x0, sigma, cells = jax.random.normal(jax.random.key(1), SHAPE), 0.9, random_cells(200)
    noisy = (1 - sigma) * x0 + sigma * draw(x0, sigma, cells)
    found = np.array([[start_cell(x, thing) for thing in (0, 1)] for x in noisy])
    assert (found == cells).all(axis=-1).mean() > 0.98


def test_a_thing_that_is_not_there_says_nothing(draw):
    cells = random_cells(500)
    cells[:, 1] = -1
    noise = draw(jnp.zeros(SHAPE), 1.0, cells)
    found = np.array([start_cell(x, 1) for x in noise])
    assert len(np.unique(found, axis=0)) == 48

"""The attention of training gives what softmax gives, and so do its gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from rfjax.train.attention import attention


def test_values_and_gradients_are_those_of_a_softmax():
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (2 * jax.random.normal(key, (2, 3, n, 8)) for key, n in zip(keys, (10, 24, 24), strict=False))
    bias = jnp.where(jnp.arange(24) < 16, 0.0, -1e9)  # the last eight keys are masked
    pull = jax.random.normal(keys[3], q.shape)

    def plain(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bnqd,bnkd->bnqk", q, k) * q.shape[-1] ** -0.5 + bias)
        return jnp.einsum("bnqk,bnkd->bnqd", weights, v)

    out, pullback = jax.vjp(lambda *x: attention(*x, bias), q, k, v)
    expected, expected_pullback = jax.vjp(plain, q, k, v)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for got, wanted in zip(pullback(pull), expected_pullback(pull), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_large_scores_stay_finite():
    q = jnp.full((1, 1, 4, 8), 100.0)
    grads = jax.grad(lambda q: jnp.sum(attention(q, q, q, jnp.zeros(4))))(q)
    assert np.isfinite(grads).all()

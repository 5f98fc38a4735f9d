"""Attention for training on a CPU: its gradient is written out, over a table of scores that is computed again.

XLA's own gradient of a softmax goes over the scores, far the largest array of an update, about ten times; this one
does so four times (the backward pass of Dao et al., FlashAttention, 2022, algorithm 4, in one block). Scores stand
[keys, queries]: XLA's CPU backend finds maxima over the last axis one number at a time.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Saved = tuple[Array, Array, Array, Array, Array, Array]


@jax.custom_vjp
def attention(
    q: Float[Array, "B N Q D"], k: Float[Array, "B N K D"], v: Float[Array, "B N K D"], bias: Float[Array, " K"]
) -> Float[Array, "B N Q D"]:
    """softmax(q k^T / sqrt(D) + bias) v; no gradient goes to the bias."""
    return _forward(q, k, v, bias)[0]


def _forward(q: Array, k: Array, v: Array, bias: Array) -> tuple[Array, Saved]:
    scores = _scores(q, k, bias)
    peak = jnp.max(scores, axis=2, keepdims=True)
    with_sum = jnp.concatenate([v, jnp.ones((*v.shape[:-1], 1))], axis=-1)  # sums the weights in the same product
    out = jnp.einsum("bnkd,bnkq->bndq", with_sum, jnp.exp(scores - peak))
    total = out[:, :, -1:]
    out = (out[:, :, :-1] / total).swapaxes(2, 3)
    return out, (q, k, v, bias, out, peak + jnp.log(total))


def _backward(saved: Saved, grad: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, bias, out, log_total = saved
    weights = jnp.exp(_scores(q, k, bias) - log_total)
    mean = jnp.sum(grad * out, axis=-1)[:, :, None]
    by_score = weights * (jnp.einsum("bnkd,bnqd->bnkq", v, grad) - mean) * q.shape[-1] ** -0.5
    by_q = jnp.einsum("bnkd,bnkq->bndq", k, by_score).swapaxes(2, 3)
    by_k, by_v = (jnp.einsum("bnkq,bnqd->bnkd", x, y) for x, y in ((by_score, q), (weights, grad)))
    return by_q, by_k, by_v, None


def _scores(q: Array, k: Array, bias: Array) -> Float[Array, "B N K Q"]:
    return jnp.einsum("bnkd,bnqd->bnkq", k, q * q.shape[-1] ** -0.5) + bias[:, None]


attention.defvjp(_forward, _backward)

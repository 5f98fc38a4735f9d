"""Where a video starts is decided by its noise.

A prompt does not say where its things are, and a network that knows only relative positions has no way to choose: it
would draw the average over all places, which is nothing. So in training the noise says it: a thing starts in the
latent cell where one channel of the noisy first block, summed over the block's frames, is largest (channel 0 for the
first thing, 1 for the second). At inference the noise is what it is; every seed then starts elsewhere.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_DRAWS = 16


def start_cell(noisy: Float[Array, "f C h w"], thing: int) -> Int[Array, "2"]:
    """Row and column of the cell in which thing number `thing` starts, if `noisy` is a first block."""
    score = jnp.sum(noisy[:, thing], axis=0)
    return jnp.stack(jnp.unravel_index(jnp.argmax(score), score.shape))


def noise_for_start(
    key: Array, x0: Float[Array, "f C h w"], sigma: Float[Array, ""], start: Int[Array, "N 2"]
) -> Float[Array, "f C h w"]:
    """Noise that takes a first block to level `sigma` and says that its things start in the cells `start`.

    Draws are shifted on the torus so that their own maximum stands there, which leaves them standard normal; of
    several, the first is taken in which the maximum is there with x0 mixed in too.

    Args:
        key: of the random draw.
        x0: the clean estimate that the noise is mixed with.
        sigma: share of noise.
        start: row and column of each thing; channels of things with -1 are left as drawn.
    """
    draws = jax.random.normal(key, (_DRAWS, *x0.shape))
    noise = draws[0]
    for thing, cell in enumerate(start):
        channel = jax.vmap(lambda draw, thing=thing, cell=cell: _moved(draw[:, thing], cell))(draws)
        score = jnp.sum((1 - sigma) * x0[:, thing] + sigma * channel, axis=1).reshape(_DRAWS, -1)
        hits = jnp.argmax(score, axis=1) == cell[0] * x0.shape[-1] + cell[1]
        chosen = jnp.where(cell[0] < 0, draws[0, :, thing], channel[jnp.argmax(hits)])
        noise = noise.at[:, thing].set(chosen)
    return noise


def _moved(field: Float[Array, "f h w"], cell: Int[Array, "2"]) -> Float[Array, "f h w"]:
    """A field rolled so that the maximum of its sum over frames stands in `cell`."""
    shape = field.shape[1:]
    peak = jnp.stack(jnp.unravel_index(jnp.argmax(jnp.sum(field, axis=0)), shape))
    return jnp.roll(field, cell - peak, axis=(1, 2))

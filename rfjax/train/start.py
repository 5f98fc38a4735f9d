"""Where a video starts is decided by its noise.

A prompt does not say where its things are, and a network that knows only relative positions has no way to choose: it
would draw the average over all places, which is nothing. So in training the noise says it: a thing starts in the
patch, a token of the network, where one channel of the noisy first block is largest in the sum over the patch and the
block's frames (channel 0 for the first thing, 1 for the second). At inference the noise is what it is; every seed then
starts elsewhere.
"""

import jax
import jax.numpy as jnp
from einops import reduce
from jaxtyping import Array, Float, Int

_DRAWS = 16


def start_patch(noisy: Float[Array, "f C h w"], thing: int, patch: tuple[int, int]) -> Int[Array, "2"]:
    """Row and column of the patch in which thing number `thing` starts, if `noisy` is a first block."""
    score = _scores(noisy[:, thing], patch)
    return jnp.stack(jnp.unravel_index(jnp.argmax(score), score.shape))


def noise_for_start(
    key: Array,
    x0: Float[Array, "f C h w"],
    sigma: Float[Array, ""],
    start: Int[Array, "N 2"],
    patch: tuple[int, int],
    boost: Float[Array, ""] | float = 0.0,
) -> Float[Array, "f C h w"]:
    """Noise that takes a first block to level `sigma` and says that its things start in the patches `start`.

    Draws are shifted on the torus so that their own maximum stands there, which leaves them standard normal; of
    several, the first is taken in which the maximum is there with x0 mixed in too.

    Args:
        key: of the random draw.
        x0: the clean estimate that the noise is mixed with.
        sigma: share of noise.
        start: row and column of each thing; channels of things with -1 are left as drawn.
        patch: height and width of a patch in latents.
        boost: added to the noise of these patches, which makes it easier to read and is no longer standard normal.
    """
    draws = jax.random.normal(key, (_DRAWS, *x0.shape))
    noise = draws[0]
    for thing, place in enumerate(start):
        channel = jax.vmap(lambda draw, thing=thing, place=place: _moved(draw[:, thing], place, patch, boost))(draws)
        mixed = (1 - sigma) * x0[:, thing] + sigma * channel
        score = jax.vmap(lambda field: _scores(field, patch))(mixed)
        hits = jnp.argmax(score.reshape(_DRAWS, -1), axis=1) == place[0] * score.shape[-1] + place[1]
        chosen = jnp.where(place[0] < 0, draws[0, :, thing], channel[jnp.argmax(hits)])
        noise = noise.at[:, thing].set(chosen)
    return noise


def _scores(field: Float[Array, "f h w"], patch: tuple[int, int]) -> Float[Array, "h/p w/p"]:
    return reduce(field, "f (h p) (w q) -> h w", "sum", p=patch[0], q=patch[1])


def _moved(
    field: Float[Array, "f h w"], place: Int[Array, "2"], patch: tuple[int, int], boost: Array | float
) -> Float[Array, "f h w"]:
    """A field rolled by whole patches so that its best patch stands at `place`, and raised there."""
    score = _scores(field, patch)
    peak = jnp.stack(jnp.unravel_index(jnp.argmax(score), score.shape))
    field = jnp.roll(field, (place - peak) * jnp.array(patch), axis=(1, 2))
    bump = jnp.zeros(score.shape).at[place[0], place[1]].set(boost)
    return field + jnp.repeat(jnp.repeat(bump, patch[0], 0), patch[1], 1)

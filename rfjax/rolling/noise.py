"""Noise, drawn on the host from a counter, so that a seed means one video on any device, mesh and batch."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rfjax.errors import InputError

# (block, step) -> float32 [block frames, channels, h, w]. Step 0 is the initial noise of the block; step i >= 1 the
# re-noising before entry i of the step list.
NoiseFn = Callable[[int, int], np.ndarray]

MAX_SEED = 2**64 - 1


def check_seed(seed: Any) -> int:
    """The seed as a plain int.

    Raises:
        InputError: it is not an integer in 0 .. 2**64 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed <= MAX_SEED:
        raise InputError(f"seed {seed!r} is not an integer from 0 to {MAX_SEED}")
    return int(seed)


def counter_noise(seed: int, shape: tuple[int, ...]) -> NoiseFn:
    """Standard normal noise of `shape`, a pure function of (seed, block, step).

    Raises:
        InputError: the seed is not an integer in 0 .. 2**64 - 1.
    """
    key = check_seed(seed)

    def noise(block: int, step: int) -> np.ndarray:
        counter = np.random.Philox(key=key, counter=[0, 0, step, block])
        return np.random.Generator(counter).standard_normal(shape, dtype=np.float32)

    return noise


def checked_noise(noise: NoiseFn, shape: tuple[int, ...]) -> NoiseFn:
    """A user's noise function, each draw checked for shape, dtype and finite values.

    Raises:
        InputError: `noise` is no function; or, when drawing, what it gives is not such an array.
    """
    if not callable(noise):
        raise InputError(f"noise {noise!r:.60} is no function; pass one of (block, step) that gives an array")

    def draw(block: int, step: int) -> np.ndarray:
        values = np.asarray(noise(block, step))
        if values.shape != shape or values.dtype != np.float32:
            raise InputError(
                f"noise({block}, {step}) gave {values.dtype} {list(values.shape)}; float32 {list(shape)} is needed"
            )
        if not np.isfinite(values).all():
            raise InputError(f"noise({block}, {step}) has values that are not finite")
        return values

    return draw

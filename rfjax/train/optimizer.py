"""The optimizer of every stage: Muon for matrices and convolutions, Adam for the rest; an average of the weights."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

# What Adam takes although its array has two axes or more: tables, scales and shifts, and both ends of the DiT.
_NO_MATRIX = ("scale", "bias", "norm", "modulation", "embedding.embedding", "patch_embedding", "dit.head")


def _dimensions(path: tuple, leaf: Any) -> MuonDimensionNumbers | None:
    """Which axes of a parameter are summed over and which are outputs; None leaves it to Adam.

    Linear kernels are [in, out], those of a stack of layers [L, in, out], convolutions [*size, in, out].
    """
    name = ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
    if leaf.ndim < 2 or any(word in name for word in _NO_MATRIX):
        return None
    stacked = leaf.ndim == 3
    return MuonDimensionNumbers(tuple(range(1 if stacked else 0, leaf.ndim - 1)), leaf.ndim - 1)


def optimizer(learning_rate: float, adam_learning_rate: float, steps: int, warmup: int = 50) -> Any:
    """Muon and Adam under one schedule: a short linear rise, then a cosine to a hundredth over `steps`.

    Muon follows Jordan 2024: a matrix's update has singular values of `learning_rate`, more where outputs outnumber
    inputs. The norm of all gradients together is clipped to 1.
    """

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, min(warmup, steps // 2), steps, end_value=peak / 100)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            schedule(learning_rate),
            adam_learning_rate=schedule(adam_learning_rate),
            adam_b2=0.98,
            muon_weight_dimension_numbers=lambda params: jax.tree_util.tree_map_with_path(_dimensions, params),
        ),
    )


def averaged(average: Any, params: Any, step: jax.Array, decay: float) -> Any:
    """Exponential moving average of parameters, which forgets the first steps faster than `decay` would."""
    keep = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda a, p: a + (1 - keep) * (p - a), average, params)

"""Where each parameter of a model comes from in the PyTorch release.

Every model part has a `params.py` with `key_map(config) -> dict[str, Source]`: from the dotted path of an NNX
parameter ("blocks.self_attn.q.kernel") to the torch tensor, or the L tensors of a stacked layer, that fill it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


def identity(tensor: np.ndarray) -> np.ndarray:
    """The tensor as the release stores it."""
    return tensor


def linear(weight: np.ndarray) -> np.ndarray:
    """A torch Linear weight [out, in] as an NNX kernel [in, out]."""
    return weight.T


@dataclass(frozen=True)
class Source:
    """The tensors that fill one parameter.

    Attributes:
        keys: one torch key; with `stacked`, one key for each of the L layers, first layer first.
        transform: from the torch layout to that of the parameter (of one layer); must not depend on the values.
        stacked: the transformed arrays are stacked on a new axis 0.
    """

    keys: tuple[str, ...]
    transform: Callable[[np.ndarray], np.ndarray] = identity
    stacked: bool = False

    def __post_init__(self) -> None:
        if not self.keys or (len(self.keys) > 1 and not self.stacked):
            raise ValueError(f"a source takes one key, or several that are stacked, not {self.keys}")

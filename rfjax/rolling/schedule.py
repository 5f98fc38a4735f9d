"""Noise levels of the few-step schedule (flow matching with a shifted time, as the release uses it)."""

from typing import NamedTuple

import numpy as np

from rfjax.config import RollingConfig


class NoiseLevels(NamedTuple):
    """The entries of the step list, from pure noise to nearly clean; float32."""

    timesteps: np.ndarray  # 0..1000
    sigmas: np.ndarray  # share of noise: x_t = (1 - sigma) * x0 + sigma * noise


def shifted_sigmas(config: RollingConfig) -> np.ndarray:
    """Sigma of each training timestep, noisiest first: s * t / (1 + (s - 1) * t) for t = 1, 1 - 1/n, ...

    Computed in float32 as the release does: its timesteps carry that rounding, and the network sees them.
    """
    n, shift = config.num_train_timesteps, np.float32(config.timestep_shift)
    t = np.linspace(1.0, 0.0, n + 1, dtype=np.float32)[:-1]
    return shift * t / (1 + (shift - 1) * t)


def noise_levels(config: RollingConfig) -> NoiseLevels:
    """Timestep and sigma of each entry of the step list."""
    sigmas = shifted_sigmas(config)
    n = np.float32(config.num_train_timesteps)
    chosen = sigmas[config.num_train_timesteps - np.array(config.denoising_steps)]
    return NoiseLevels(chosen * n, chosen)

"""From a world's clips to a data set of latents, by a trained VAE."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from rfjax.config import ModelConfig
from rfjax.train import latents
from rfjax.train.vae import UNSEEN
from rfjax.weights.parts import abstract_part
from rfjax.worlds import World
from rfjax.worlds.shapes import Clip

_BATCH = 4
_MEASURED = 32  # clips

Encoder = Callable[[int], tuple[list[Clip], Float[np.ndarray, "B F C h w"]]]


@dataclass(frozen=True)
class EncodeRecipe:
    """What is encoded: so many videos of so many blocks. A video is a function of the seed and its number.

    Besides, the first blocks alone of `first_blocks` other videos, for the stage "first".
    """

    videos: int
    blocks: int
    seed: int = 0
    first_blocks: int = 0

    @property
    def of_first_blocks(self) -> "EncodeRecipe":
        """What is encoded for the stage "first"."""
        return EncodeRecipe(self.first_blocks, blocks=1, seed=self.seed + 1)


class Statistics(NamedTuple):
    """Mean and standard deviation of each latent channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def encode(
    world: World,
    model: ModelConfig,
    vae: nnx.State,
    recipe: EncodeRecipe,
    folder: Path,
    stopped: Callable[[], bool] = lambda: False,
    statistics: Statistics | None = None,
) -> bool:
    """Encodes what a data set still lacks.

    Args:
        world: whose clips.
        model: its VAE does not normalise: mean 0, deviation 1.
        vae: the VAE's parameters.
        recipe: what.
        folder: of the data set.
        stopped: asked before each batch; once it is true, nothing more is encoded.
        statistics: to normalise with; None measures them.

    Returns:
        Whether all videos are there.
    """
    encoder = _encoder(world, model, vae, recipe)
    folder.mkdir(parents=True, exist_ok=True)
    if read_statistics(folder) is None:
        _write_statistics(folder, statistics or _measure(encoder))
    statistics = read_statistics(folder)
    assert statistics is not None
    mean, std = (np.array(values, np.float32)[:, None, None] for values in statistics)
    first = len(latents.files_of(folder))

    def missing() -> Iterator[latents.Video]:
        # Batches begin at the same numbers however often the work is cut: a video then has the same bits always.
        for batch in range(first // _BATCH, -(-recipe.videos // _BATCH)):
            if stopped():
                return
            clips, encoded = encoder(batch)
            for number, (clip, latent) in enumerate(zip(clips, encoded, strict=True), batch * _BATCH):
                if number >= first:
                    yield latents.Video((latent - mean) / std, clip.prompts, clip.start)

    latents.write(folder, missing(), max(0, recipe.videos - first))
    return is_encoded(folder, recipe)


def is_encoded(folder: Path, recipe: EncodeRecipe) -> bool:
    """Whether a data set has all that the recipe asks for."""
    return read_statistics(folder) is not None and len(latents.files_of(folder)) >= recipe.videos


def read_statistics(folder: Path) -> Statistics | None:
    """What the latents of a data set were normalised with; None if it is not yet known."""
    file = folder / "statistics.json"
    if not file.exists():
        return None
    data = json.loads(file.read_text())
    return Statistics(tuple(data["mean"]), tuple(data["std"]))


def _measure(encoder: Encoder) -> Statistics:
    """Statistics of streams that have run for a while: the first latents of a video are smaller."""
    encoded = np.concatenate([encoder(UNSEEN + i)[1] for i in range(_MEASURED // _BATCH)])
    steady = encoded[:, encoded.shape[1] // 2 :]
    return Statistics(*(tuple(f((0, 1, 3, 4)).tolist()) for f in (steady.mean, steady.std)))


def _write_statistics(folder: Path, statistics: Statistics) -> None:
    new = folder / "statistics.new"
    new.write_text(json.dumps(statistics._asdict(), indent=2) + "\n")
    new.replace(folder / "statistics.json")


def _encoder(world: World, model: ModelConfig, vae: nnx.State, recipe: EncodeRecipe) -> Encoder:
    """(number of a batch) -> its clips and their latents."""
    graph, _ = abstract_part("vae", model, jnp.float32)

    @jax.jit
    def latents_of(params: nnx.State, pixels: Array) -> Array:
        return nnx.merge(graph, params).encode(pixels.astype(jnp.float32) / 127.5 - 1)

    def encode_batch(number: int) -> tuple[list[Clip], np.ndarray]:
        numbers = range(number * _BATCH, (number + 1) * _BATCH)
        clips = [world.clip(np.random.default_rng([recipe.seed, n]), recipe.blocks) for n in numbers]
        return clips, np.asarray(latents_of(vae, np.stack([clip.frames for clip in clips])))

    return encode_batch

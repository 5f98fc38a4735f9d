"""What a half-trained model shows: videos of a few prompts, by the product's own pipeline."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import UInt8

from rfjax.config import ModelConfig
from rfjax.dit.model import DiT
from rfjax.engine import Engine
from rfjax.pipeline import RollingForcingPipeline
from rfjax.text.model import UMT5Encoder
from rfjax.text.tokenizer import Tokenizer
from rfjax.train.draw import contact_sheet
from rfjax.train.loop import Metrics
from rfjax.vae.model import VAE

Videos = UInt8[np.ndarray, "B T H W 3"]
MODULES = {"dit": (DiT, "dit"), "vae": (VAE, "vae"), "text": (UMT5Encoder, "text")}


def graphs(config: ModelConfig) -> dict[str, nnx.GraphDef]:
    """The graph definition of each part of a model."""
    made = {}
    for part, (module, section) in MODULES.items():
        made[part] = nnx.graphdef(nnx.eval_shape(lambda m=module, s=section: m(getattr(config, s), rngs=nnx.Rngs(0))))
    return made


def show_samples(
    config: ModelConfig,
    vae: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    size: tuple[int, int],
    score: Callable[[Videos, Sequence[str]], Metrics] | None = None,
    num_frames: int = 81,
) -> Callable[[Mapping[str, Any], int, Path], Metrics]:
    """A stage's `show`: draws one row of frames for each of `prompts`, and scores the videos."""
    engine = Engine(config, graphs(config), {"vae": vae}, "float32")
    pipe = RollingForcingPipeline(engine, tokenizer)

    def show(params: Mapping[str, Any], number: int, folder: Path) -> Metrics:
        engine.params = {"vae": vae} | {part: jax.tree.map(jax.numpy.asarray, params[part]) for part in ("dit", "text")}
        height, width = size
        with pipe.stream(list(prompts), num_frames, height, width, seed=0) as stream:
            videos = np.concatenate([chunk.frames for chunk in stream], axis=1)
        picked = np.linspace(0, num_frames - 1, 10).astype(int)
        contact_sheet([video[picked] for video in videos], folder / "samples" / f"{number:06d}.png", scale=1)
        return {} if score is None else score(videos, prompts)

    return show

"""What a half-trained model shows: videos of a few prompts, by the product's own pipeline."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from rfjax.config import ModelConfig
from rfjax.engine import Engine
from rfjax.pipeline import RollingForcingPipeline
from rfjax.text.tokenizer import Tokenizer
from rfjax.train.draw import contact_sheet
from rfjax.train.loop import Metrics
from rfjax.weights.parts import abstract_part
from rfjax.weights.store import PARTS

Videos = UInt8[np.ndarray, "B T H W 3"]
_FRAMES_IN_A_ROW = 10


def show_samples(
    config: ModelConfig,
    vae: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    size: tuple[int, int],
    score: Callable[[Videos, Sequence[str]], Metrics] | None = None,
    num_frames: int = 81,
) -> Callable[[Mapping[str, Any], int, Path], Metrics]:
    """A stage's `show`: draws one row of frames for each of `prompts`, and scores the videos.

    Args:
        config: of the model.
        vae: its parameters.
        tokenizer: of the model.
        prompts: of the videos; all start from the same seeds, whatever the step.
        size: height and width, pixels.
        score: of videos made for prompts.
        num_frames: of each video.

    Returns:
        ({"dit", "text"} parameters, step number, the run's folder) -> scores.
    """
    graphs = {part: abstract_part(part, config, jnp.float32)[0] for part in PARTS}
    engine = Engine(config, graphs, {"vae": vae}, "float32")
    pipe = RollingForcingPipeline(engine, tokenizer)

    def show(params: Mapping[str, Any], number: int, folder: Path) -> Metrics:
        engine.params = {"vae": vae} | {part: jax.tree.map(jnp.asarray, params[part]) for part in ("dit", "text")}
        with pipe.stream(list(prompts), num_frames, *size, seed=0) as stream:
            videos = np.concatenate([chunk.frames for chunk in stream], axis=1)
        picked = np.linspace(0, num_frames - 1, _FRAMES_IN_A_ROW).astype(int)
        sheet = folder / "samples" / f"{number:06d}.png"
        contact_sheet([video[picked] for video in videos], sheet, scale=1, captions=prompts)
        return {} if score is None else score(videos, prompts)

    return show

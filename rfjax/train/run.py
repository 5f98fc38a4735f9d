"""A training run, in which each stage goes on where it stopped. Its folder holds

    tokenizer/                     of the world
    vae/ text/ first/ dit/ rollout/ decoder/    see `rfjax.train.loop`
    encode/                        the encoded videos and their statistics
    checkpoint/                    what is exported

Beside what a stage has made stands what it was made from, so that results of different runs are not mixed.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rfjax.config import ModelConfig
from rfjax.engine import checksum
from rfjax.errors import InputError
from rfjax.text.model import UMT5Encoder
from rfjax.text.tokenizer import Tokenizer
from rfjax.train import latents
from rfjax.train.config import TrainConfig
from rfjax.train.encode import encode, is_encoded, read_statistics
from rfjax.train.export import export
from rfjax.train.first_block import first_block_stage
from rfjax.train.initial import initial_dit
from rfjax.train.loop import Metrics, Stage, load_average, seconds_spent, steps_done, train
from rfjax.train.rollout import rollout_stage
from rfjax.train.samples import show_samples
from rfjax.train.text import text_stage, with_heads
from rfjax.train.vae import vae_stage
from rfjax.weights import store
from rfjax.weights.bundled import find_checkpoint
from rfjax.weights.parts import abstract_part
from rfjax.worlds import World, find_world

_LOG_EVERY = 20
_NEEDS = {"encode": "vae", "text": "encode", "first": "encode text", "dit": "encode text first", "rollout": "dit",
          "decoder": "vae"}  # fmt: skip
_SEEDS = {"dit": 0, "rollout": 1, "first": 2}


class Run:
    """A run of one configuration in one folder.

    Args:
        config: what to do.
        folder: where; made if it is not there.
        stopped: asked between steps; once it is true, what is done is saved and the run is left.
        say: told lines of progress.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        stopped: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.config, self.folder, self.stopped, self.say = config, folder, stopped, say

    def __call__(self, stage: str | None = None) -> bool:
        """Runs one stage, or all of them in order; those that are finished are passed over.

        Returns:
            Whether all is done; False if it was stopped.

        Raises:
            InputError: the configuration lacks the stage, an earlier one is not finished, or what is in the folder
                does not fit the configuration.
        """
        stages = self.config.stages
        if stage is not None and stage not in stages:
            raise InputError(f"--stage {stage}: the configuration {self.config.name} has {', '.join(stages)}")
        for name in stages if stage is None else [stage]:
            for needed in _NEEDS.get(name, "").split():
                if needed in stages and not self._finished(needed):
                    raise InputError(
                        f"{self.folder}: {name} needs {needed}, which is not finished; run --stage {needed}"
                    )
            if self._finished(name):
                self.say(f"{name} is finished")
            elif not getattr(self, f"_run_{name}")():
                return False
        return True

    def _finished(self, name: str) -> bool:
        if name == "encode":
            recipe = self.config.encode
            sets = (
                [] if recipe is None else [(self.folder / name, recipe), (self._first_blocks, recipe.of_first_blocks)]
            )
            return bool(sets) and all(is_encoded(*one) for one in sets if one[1].videos)
        return name != "export" and steps_done(self.folder / name) == self._steps(name)

    def _steps(self, name: str) -> int:
        recipe = getattr(self.config, name)
        return recipe.phases[-1].end if name in ("vae", "decoder") else recipe.steps

    def _run_vae(self) -> bool:
        assert self.config.vae is not None and self._world is not None
        return self._train("vae", vae_stage(self.config.model.vae, self.config.vae, self._world.streams))

    def _run_decoder(self) -> bool:
        assert self.config.decoder is not None and self._world is not None
        self._begin("decoder", {"vae": _checksum(self._vae)})
        return self._train(
            "decoder", vae_stage(self.config.model.vae, self.config.decoder, self._world.streams, self._vae)
        )

    def _run_encode(self) -> bool:
        recipe = self.config.encode
        assert recipe is not None and self._world is not None
        self._begin("encode", {"vae": _checksum(self._vae), "blocks": recipe.blocks, "seed": recipe.seed})
        args, folder = (self._world, self.config.model, self._vae), self.folder / "encode"
        done = encode(*args, recipe, folder, self.stopped)
        if not (done and recipe.first_blocks):
            return done
        statistics = read_statistics(folder)
        return encode(*args, recipe.of_first_blocks, self._first_blocks, self.stopped, statistics)

    def _run_text(self) -> bool:
        assert self.config.text is not None
        stage = text_stage(self._model.text, self.config.text, self._tokens(self._data), self._initial_part("text"))
        return self._train("text", stage)

    def _run_first(self) -> bool:
        own = self.config.encode is not None and self.config.encode.first_blocks > 0
        data = self._read(self._first_blocks) if own else self._data
        return self._train_dit("first", first_block_stage, data, self._initial)

    def _run_dit(self) -> bool:
        params = self._trained("first") if self.config.first else self._initial
        return self._train_dit("dit", rollout_stage, self._data, params)

    def _run_rollout(self) -> bool:
        return self._train_dit("rollout", rollout_stage, self._data, self._trained("dit"))

    def _run_export(self) -> bool:
        source = next((name for name in ("rollout", "dit") if steps_done(self.folder / name)), None)
        if source is None:
            raise InputError(f"{self.folder}: export needs dit, which has not begun; run --stage dit")
        path, params = self.folder / "checkpoint", self._trained(source) | {"vae": self._finished_vae}
        export(path, self._model, params, self._tokenizer.directory, self._provenance(), self.config.export.dtype)
        self.say(f"{path}: the weights of {source} at step {steps_done(self.folder / source)}")
        return True

    def _train_dit(
        self, name: str, stage: Callable[..., Stage], data: latents.LatentSet, params: dict[str, Any]
    ) -> bool:
        self._begin(name, {"vae": _checksum(self._vae), "weights": _checksum(params)})
        recipe, tokens = getattr(self.config, name), self._tokens(data)
        return self._train(name, stage(self._model, recipe, data, tokens, params, self._show, seed=_SEEDS[name]))

    def _train(self, name: str, stage: Stage) -> bool:
        every = self.config.samples.every
        return train(
            stage, self.folder / name, self._steps(name),
            log_every=_LOG_EVERY, save_every=every, stopped=self.stopped, say=self.say,
        )  # fmt: skip

    def _begin(self, name: str, origin: dict[str, Any]) -> None:
        """Notes what a stage is made from; a stage that has begun with something else is not mixed with it."""
        file = self.folder / name / "made_from.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(origin, indent=2) + "\n")
        before = json.loads(file.read_text())
        if changed := [key for key, value in origin.items() if before.get(key) != value]:
            raise InputError(f"{file.parent} was begun with another {' and '.join(changed)}; remove it to begin again")

    @cached_property
    def _world(self) -> World | None:
        return find_world(self.config.data.world) if self.config.data.world else None

    @cached_property
    def _checkpoint(self) -> Path:
        return find_checkpoint(Path(self.config.data.checkpoint))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self._world is None:
            return Tokenizer.from_dir(self._checkpoint / "tokenizer")
        folder = self.folder / "tokenizer"
        self._world.build_tokenizer(folder)
        return Tokenizer.from_dir(folder)

    @cached_property
    def _model(self) -> ModelConfig:
        """The configuration with all that had to be found out."""
        model = self.config.model
        if self._world is None:
            return model
        statistics = read_statistics(self.folder / "encode")
        if statistics is None:
            raise InputError(f"{self.folder / 'encode'} lacks statistics.json; remove it and run --stage encode")
        text = replace(model.text, vocab_size=self._tokenizer.vocab_size)
        vae = replace(model.vae, latents_mean=statistics.mean, latents_std=statistics.std)
        return replace(model, text=text, vae=vae)

    @cached_property
    def _vae(self) -> nnx.State:
        _, abstract = abstract_part("vae", self.config.model, jnp.float32)
        if self._world is None:
            return store.load_params(self._checkpoint, "vae", abstract)
        return load_average(self.folder / "vae", abstract)

    @property
    def _finished_vae(self) -> nnx.State:
        """The VAE with the decoder that was trained on, if it was."""
        if not steps_done(self.folder / "decoder"):
            return self._vae
        decoder = load_average(self.folder / "decoder", nnx.State({"decoder": self._vae["decoder"]}))
        return nnx.merge_state(self._vae, decoder)

    @property
    def _first_blocks(self) -> Path:
        return self.folder / "encode" / "first_blocks"

    @cached_property
    def _data(self) -> latents.LatentSet:
        """The encoded videos."""
        return self._read(self.folder / "encode" if self._world else Path(self.config.data.latents))

    def _read(self, folder: Path) -> latents.LatentSet:
        """A data set, checked against the model."""
        data, model = latents.read(folder), self._model
        frames, channels, *sides = data.latents.shape[1:]
        if frames != data.prompt_ids.shape[1] * model.rolling.block_frames:
            raise InputError(
                f"{folder}: {frames} latent frames with {data.prompt_ids.shape[1]} prompts; the model takes a prompt "
                f"for each block of {model.rolling.block_frames}"
            )
        if channels != model.vae.z_dim or any(side % model.dit.patch_size[1] for side in sides):
            raise InputError(
                f"{folder}: latents of {channels} channels and {sides[0]}x{sides[1]}; the model takes "
                f"{model.vae.z_dim} channels, and sides that are multiples of {model.dit.patch_size[1]}"
            )
        return data

    def _tokens(self, data: latents.LatentSet) -> tuple[np.ndarray, np.ndarray]:
        """Ids and lengths of a data set's prompts."""
        text_len = self._model.dit.text_len
        tokens = self._tokenizer(data.prompts, text_len)
        if any(tokens.dropped):
            needed = text_len + max(tokens.dropped)
            raise InputError(f"the prompts of the videos have up to {needed} tokens, dit.text_len is {text_len}")
        return tokens.ids, tokens.lengths

    @cached_property
    def _show(self) -> Callable[[Any, int, Path], Metrics]:
        samples, stride = self.config.samples, self._model.vae.spatial_stride
        height, width = (side * stride for side in self._data.latents.shape[-2:])
        score = self._world.score if self._world else None
        return show_samples(
            self._model, self._vae, self._tokenizer, samples.prompts, (height, width), score, samples.frames
        )

    @property
    def _initial(self) -> dict[str, nnx.State]:
        """The parameters that the DiT and its text encoder begin with."""
        text = self._initial_part("text")
        if self.config.text:
            text = load_average(self.folder / "text", with_heads(self._model.text, text))["text"]
        return {"dit": self._initial_part("dit"), "text": text}

    def _initial_part(self, part: str) -> nnx.State:
        if part not in self.config.fresh:
            return store.load_params(self._checkpoint, part, abstract_part(part, self._model, jnp.float32)[1])
        if part == "dit":
            return initial_dit(self._model.dit, seed=1)
        return nnx.state(UMT5Encoder(self._model.text, rngs=nnx.Rngs(2)))

    def _trained(self, name: str) -> dict[str, Any]:
        """The averaged DiT and text encoder of a stage."""
        like = {part: abstract_part(part, self._model, jnp.float32)[1] for part in ("dit", "text")}
        return load_average(self.folder / name, like)

    def _provenance(self) -> dict[str, Any]:
        stages: dict[str, Any] = {}
        for name in ("vae", "text", "first", "dit", "rollout", "decoder"):
            if getattr(self.config, name) is not None:
                done, wanted = steps_done(self.folder / name), self._steps(name)
                stages[name] = {"steps": done, "of": wanted, "seconds": seconds_spent(self.folder / name)}
        return {
            "source": f"rfjax train --config {self.config.name}",
            "weights": "ema",
            "stages": stages,
            "config": dict(self.config.content),
        }


def _checksum(params: Any) -> str:
    return checksum(jax.tree.leaves(params))

"""What a training run is told: a TOML file, read into frozen dataclasses and checked.

    [data]       world = "shapes"; or latents = a folder (see `rfjax.train.latents`) and checkpoint = the rfjax
                 checkpoint whose VAE and tokenizer go with them
    [model.*]    dit, vae, text, rolling: the fields of `rfjax.config`. vocab_size and the latents' statistics are
                 found out. With a checkpoint, its DiT and text encoder are trained on, and a section given here
                 makes a fresh one instead
    [vae]        VAERecipe        [encode]   EncodeRecipe        (for a world)
    [dit]        RolloutRecipe    [rollout]  RolloutRecipe, begins with the weights of [dit]
    [samples]    SampleConfig     [export]   ExportConfig

Every section but [data], [dit] and [samples] may be left out; a stage without a section is not run.
"""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np

from rfjax.config import ModelConfig, UseConfig
from rfjax.errors import InputError
from rfjax.train import STAGES
from rfjax.train.encode import EncodeRecipe
from rfjax.train.export import Storage
from rfjax.train.first_block import FirstBlockRecipe
from rfjax.train.rollout import RolloutRecipe
from rfjax.train.text import TextRecipe
from rfjax.train.vae import VAERecipe
from rfjax.weights.bundled import find_checkpoint
from rfjax.weights.store import load_config
from rfjax.worlds import World, find_world

_SHIPPED = Path(__file__).parent / "configs"
_MAY_BE_ZERO = ("chunks", "seed", "own", "own_steps", "latent_noise", "latent_weight")


@dataclass(frozen=True)
class DataConfig:
    """Where videos come from: a world; or encoded ones, and the checkpoint of the VAE that encoded them."""

    world: str = ""
    latents: str = ""
    checkpoint: str = ""


@dataclass(frozen=True)
class SampleConfig:
    """What is shown of the progress: videos of `prompts`, `frames` long, every `every` steps, with each checkpoint."""

    prompts: tuple[str, ...]
    frames: int = 81
    every: int = 250


@dataclass(frozen=True)
class ExportConfig:
    """How the checkpoint is stored."""

    dtype: Storage = "float16"


_SECTIONS = {
    "data": DataConfig, "vae": VAERecipe, "encode": EncodeRecipe, "text": TextRecipe, "first": FirstBlockRecipe,
    "dit": RolloutRecipe, "rollout": RolloutRecipe, "decoder": VAERecipe, "samples": SampleConfig,
    "export": ExportConfig,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A checked training configuration.

    Attributes:
        name: of the file.
        content: as it was read.
        model: with a world, vocab_size and the latents' statistics are stand-ins until they are known.
        fresh: "dit" and "text", those of the two that begin with random weights.
    """

    name: str
    content: Mapping[str, Any]
    data: DataConfig
    model: ModelConfig
    fresh: tuple[str, ...]
    dit: RolloutRecipe
    samples: SampleConfig
    vae: VAERecipe | None = None
    encode: EncodeRecipe | None = None
    text: TextRecipe | None = None
    first: FirstBlockRecipe | None = None
    rollout: RolloutRecipe | None = None
    decoder: VAERecipe | None = None
    export: ExportConfig = ExportConfig()

    @property
    def stages(self) -> tuple[str, ...]:
        """Those that this configuration has, in order."""
        return tuple(stage for stage in STAGES if getattr(self, stage) is not None)


def shipped_configs() -> dict[str, Path]:
    """The configurations that come with rfjax, by name."""
    return {file.stem: file for file in sorted(_SHIPPED.glob("*.toml"))}


def read_config(name: str) -> TrainConfig:
    """Reads a configuration.

    Args:
        name: a file that ends in .toml, or the name of one that comes with rfjax.

    Raises:
        InputError: there is none, or a key is missing, unknown, of the wrong type or of no use.
    """
    file = Path(name) if name.endswith(".toml") else shipped_configs().get(name)
    if file is None:
        raise InputError(f"no configuration {name!r}; rfjax has {', '.join(shipped_configs())}, or give a .toml file")
    try:
        content = tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: {error}") from None
    try:
        return _parse(file.stem, content)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def _parse(name: str, content: Mapping[str, Any]) -> TrainConfig:
    _refuse_unknown("", content, [*_SECTIONS, "model"])
    for needed in ("data", "dit", "samples"):
        if needed not in content:
            raise InputError(f"section [{needed}] is missing")
    sections = {key: _read(kind, content[key], key) for key, kind in _SECTIONS.items() if key in content}
    tables = content.get("model", {})
    if not isinstance(tables, Mapping) or not all(isinstance(table, Mapping) for table in tables.values()):
        raise InputError("model is not made of sections [model.dit], [model.vae], [model.text], [model.rolling]")
    _refuse_unknown("model", tables, ["dit", "vae", "text", "rolling"])
    data = sections["data"]
    if (bool(data.world), bool(data.latents), bool(data.checkpoint)) not in (
        (True, False, False),
        (False, True, True),
    ):
        raise InputError("[data] needs either world, or both latents and checkpoint")
    model = _world_model(data, tables) if data.world else _checkpoint_model(data, tables)
    fresh = tuple(part for part in ("dit", "text") if data.world or part in tables)
    config = TrainConfig(name=name, content=content, model=model, fresh=fresh, **sections)
    for fault, found in (_faults_of_data(config) | _faults_of_recipes(config)).items():
        if found:
            raise InputError(fault)
    if config.encode:
        _check_world(find_world(data.world), config, config.encode.blocks)
    return config


def _check_world(world: World, config: TrainConfig, blocks: int) -> None:
    for prompt in config.samples.prompts:
        world.check_prompt(prompt)
    frames, needed = len(world.clip(np.random.default_rng(0), blocks).frames), config.model.pixel_frames(blocks)
    if frames != needed:
        raise InputError(
            f"{blocks} blocks are {needed} frames to the model, but {frames} in the world's clips; leave the VAE's "
            "strides in time and block_frames as they are"
        )


def _world_model(data: DataConfig, tables: Mapping[str, Any]) -> ModelConfig:
    world = find_world(data.world)
    channels = tables.get("vae", {}).get("z_dim", 16)
    known = {"latents_mean": [0.0] * channels, "latents_std": [1.0] * channels} if type(channels) is int else {}
    for section, field in (("text", "vocab_size"), ("vae", "latents_mean"), ("vae", "latents_std")):
        if field in tables.get(section, {}):
            raise InputError(f"model.{section}.{field} is found out in training; leave it out")
    use = UseConfig(height=world.size, width=world.size, fps=world.fps, prompt_hint=world.prompt_hint)
    return ModelConfig.from_json(
        {
            "dit": tables.get("dit", {}),
            "vae": {**tables.get("vae", {}), **known},
            "text": {**tables.get("text", {}), "vocab_size": 1},
            "rolling": tables.get("rolling", {}),
            "use": dataclasses.asdict(use),
        }
    )


def _checkpoint_model(data: DataConfig, tables: Mapping[str, Any]) -> ModelConfig:
    if "vae" in tables:
        raise InputError("model.vae: the VAE is that of data.checkpoint; leave the section out")
    sections = load_config(find_checkpoint(Path(data.checkpoint))).to_json()
    if "text" in tables:
        tables = {**tables, "text": {**tables["text"], "vocab_size": sections["text"]["vocab_size"]}}
    return ModelConfig.from_json({**sections, **tables})


def _faults_of_data(config: TrainConfig) -> dict[str, bool]:
    world = config.data.world
    return {
        "[vae] and [encode] go together": (config.vae is None) != (config.encode is None),
        "[vae] and [encode] are needed to train on a world": bool(world) and config.vae is None,
        "[vae] and [encode]: the data are encoded already (data.latents); leave them out": (
            not world and config.vae is not None
        ),
        "[decoder] goes on from the VAE of [vae], which is missing": config.decoder is not None and config.vae is None,
        "samples.prompts is empty": not config.samples.prompts,
    }


def _faults_of_phases(config: TrainConfig, name: str) -> dict[str, bool]:
    recipe = getattr(config, name)
    phases = recipe.phases if recipe else ()
    ends = [0, *(phase.end for phase in phases)]
    space, time = config.model.vae.spatial_stride, config.model.vae.temporal_stride
    return {
        f"{name}.phases is empty": recipe is not None and not phases,
        f"{name}.phases: end must grow from phase to phase": any(a >= b for a, b in pairwise(ends)),
        f"{name}.phases: size must be a multiple of {space}, the VAE's stride": any(p.size % space for p in phases),
        f"{name}.phases: chunk_frames must be a multiple of {time}, the VAE's stride": any(
            phase.chunk_frames % time for phase in phases
        ),
    }


def _faults_of_recipes(config: TrainConfig) -> dict[str, bool]:
    faults = _faults_of_phases(config, "vae") | _faults_of_phases(config, "decoder")
    for name in ("vae", "text", "first", "dit", "rollout", "decoder"):
        recipe = getattr(config, name)
        faults[f"{name}.average must be below 1"] = recipe is not None and recipe.average >= 1
    for name in ("first", "dit", "rollout"):
        recipe = getattr(config, name)
        faults[f"{name}.own must be shares from 0 to 1"] = recipe is not None and max(recipe.own) > 1
    return faults


def _refuse_unknown(section: str, table: Mapping[str, Any], known: list[str]) -> None:
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise InputError(f"unknown key {f'{section}.{key}' if section else key}; {hint}")


def _read(kind: Any, value: Any, key: str) -> Any:
    """A value of TOML as one of an annotated type; `key` is its name in the file."""
    if dataclasses.is_dataclass(kind):
        return _read_table(kind, value, key)
    if get_origin(kind) is tuple and isinstance(value, list):
        kinds = get_args(kind)
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        if len(kinds) == len(value):
            return tuple(_read(k, v, key) for k, v in zip(kinds, value, strict=True))
    elif get_origin(kind) is Literal and value in get_args(kind) or kind is str and isinstance(value, str):
        return value
    elif kind in (int, float) and _is_number(value, kind, key):
        return kind(value)
    raise InputError(f"{key} is {value!r:.60}; {_wanted(kind, key)} is needed")


def _read_table(kind: Any, table: Any, key: str) -> Any:
    if not isinstance(table, Mapping):
        raise InputError(f"{key} is {table!r:.60}; a table is needed")
    fields = dataclasses.fields(kind)
    _refuse_unknown(key, table, [field.name for field in fields])
    for field in fields:
        if field.name not in table and field.default is dataclasses.MISSING:
            raise InputError(f"{key}.{field.name} is missing")
    return kind(**{f.name: _read(f.type, table[f.name], f"{key}.{f.name}") for f in fields if f.name in table})


def _is_number(value: Any, kind: type, key: str) -> bool:
    zero = key.rpartition(".")[2] in _MAY_BE_ZERO
    return type(value) in (int, kind) and math.isfinite(value) and (value >= 0 if zero else value > 0)


def _wanted(kind: Any, key: str) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        *kinds, last = get_args(kind)
        return f"a list of {_wanted(kinds[0], key)}" if last is ... else f"a list of {len(kinds) + 1} numbers"
    if dataclasses.is_dataclass(kind):
        return "table"
    if kind is str:
        return "text"
    return f"{kind.__name__} {'of 0 or more' if key.rpartition('.')[2] in _MAY_BE_ZERO else 'above 0'}"

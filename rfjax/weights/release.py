"""Finds the files of a release and reads what they say: state dicts and model sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from rfjax.errors import InputError
from rfjax.weights.files import read_weights
from rfjax.weights.names import TITLES, identify, image_to_video, release_names

Weights = Literal["ema", "raw"]
Kind = Literal["ema", "raw", "bare"]

# The entries of a training save: the averaged weights, and those the optimizer holds.
_ENTRIES: dict[str, Kind] = {"generator_ema": "ema", "generator": "raw"}
_SUFFIXES = (".pt", ".pth", ".safetensors")


@dataclass(frozen=True)
class StateDict:
    """The tensors of one part, by the release's names; `kind` is "bare" if the file offered no choice."""

    path: Path
    kind: Kind
    tensors: Mapping[str, np.ndarray]


def read_state_dicts(path: Path) -> dict[Kind, StateDict]:
    """Reads each set of weights in a file, in any layout of `rfjax.weights.names`, by its kind.

    Args:
        path: a torch file, a safetensors file or the index of a sharded one.

    Raises:
        InputError: the file cannot be read or holds something else.
    """
    content = read_weights(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, not a state dict")
    sets: dict[Kind, dict] = {
        kind: content[entry] for entry, kind in _ENTRIES.items() if isinstance(content.get(entry), dict)
    }
    return {kind: _state_dict(path, kind, tensors) for kind, tensors in (sets or {"bare": content}).items()}


def _state_dict(path: Path, kind: Kind, tensors: Mapping[str, np.ndarray]) -> StateDict:
    strange = [str(name) for name, value in tensors.items() if not isinstance(value, np.ndarray)]
    if strange or not tensors:
        raise InputError(
            f"{path} is not a state dict of tensors: it holds {', '.join(strange[:5]) or 'nothing'}; "
            f"expected tensors, or {' and '.join(_ENTRIES)}"
        )
    try:
        names = release_names(tensors)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return StateDict(path, kind, {new: tensors[name] for name, new in names.items()})


def read_state_dict(path: Path, weights: Weights) -> StateDict:
    """Reads the weights of one part.

    Args:
        path: as for `read_state_dicts`.
        weights: which to take if the file holds both averaged and raw ones.

    Raises:
        InputError: as `read_state_dicts`, or the file lacks those weights.
    """
    sets = read_state_dicts(path)
    if "bare" in sets:
        return sets["bare"]
    if weights not in sets:
        raise InputError(f"{path} has no {weights} weights; choose --weights {' or '.join(sets)}")
    return sets[weights]


def check_part(part: str, state: StateDict) -> None:
    """Refuses the weights of another part or of another kind of model.

    Raises:
        InputError: says what the file holds instead.
    """
    if part == "dit" and image_to_video(state.tensors):
        raise InputError(f"{state.path} is an image-to-video model; only text-to-video ones are supported")
    found = identify(state.tensors)
    if found != part:
        known = f"holds {TITLES[found]}" if found else f"holds tensors such as {next(iter(state.tensors))}"
        raise InputError(f"{state.path} {known}, where {TITLES[part]} is needed")


@dataclass(frozen=True)
class ReleaseFiles:
    """One file (of weights or config) or folder (of the tokenizer) for each thing a model needs."""

    dit: Path
    vae: Path
    text: Path
    tokenizer: Path
    config: Path

    @property
    def weights(self) -> dict[str, Path]:
        return {part: getattr(self, part) for part in TITLES}


def find_release(src: Path | None, **named: Path | None) -> ReleaseFiles:
    """Finds the files of a release.

    Args:
        src: a folder laid out as Rolling Forcing's (`checkpoints/*.pt` and `wan_models/<name>/`) or as diffusers
            saves (`model_index.json`); or the DiT's weights file; None if everything is named.
        named: `dit`, `vae`, `text`, `tokenizer`, `config`: files to take in place of those in `src`.

    Raises:
        InputError: there is no `src`; or names all that was not found.
    """
    if src is not None and not src.exists():
        raise InputError(f"there is no {src}")
    found: dict[str, list[Path]] = {name: [] for name in ("dit", "vae", "text", "tokenizer", "config")}
    if src is not None and src.is_dir():
        diffusers = (src / "model_index.json").is_file()
        found |= _in_diffusers_folder(src) if diffusers else _in_release_folder(src)
    elif src is not None:
        found["dit"] = [src]
    found |= {name: [path] for name, path in named.items() if path is not None}
    lacking = [f"{name} (found {len(paths)})" for name, paths in found.items() if len(paths) != 1]
    if lacking:
        where = f"in {src}" if src else "among the files named"
        raise InputError(f"no single file {where} for: {', '.join(lacking)}; name each of them by its option")
    files = ReleaseFiles(**{name: paths[0] for name, paths in found.items()})
    absent = [str(path) for path in (*files.weights.values(), files.config) if not path.is_file()]
    if not (files.tokenizer / "tokenizer.json").is_file():
        absent.append(str(files.tokenizer / "tokenizer.json"))
    if absent:
        raise InputError(f"no such file: {', '.join(absent)}")
    return files


def _in_release_folder(src: Path) -> dict[str, list[Path]]:
    configs = sorted(src.glob("wan_models/*/config.json")) or sorted(src.glob("config.json"))
    wan = configs[0].parent if len(configs) == 1 else src / "wan_models"
    return {
        "dit": _weights_in(src / "checkpoints"),
        "vae": [path for path in _weights_in(wan) if "VAE" in path.name],
        "text": [path for path in _weights_in(wan) if path.name.startswith("models_t5")],
        "tokenizer": [path.parent for path in wan.glob("google/*/tokenizer.json")],
        "config": configs,
    }


def _in_diffusers_folder(src: Path) -> dict[str, list[Path]]:
    folders = {"dit": "transformer", "vae": "vae", "text": "text_encoder"}
    return {
        **{part: _weights_in(src / folder) for part, folder in folders.items()},
        "tokenizer": [path.parent for path in src.glob("tokenizer/tokenizer.json")],
        "config": sorted(src.glob("transformer/config.json")),
    }


def _weights_in(folder: Path) -> list[Path]:
    """The weights files in a folder; of a sharded one, its index alone."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    return indices or sorted(path for path in folder.glob("*") if path.suffix in _SUFFIXES)

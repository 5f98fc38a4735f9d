"""Converts a PyTorch release into a checkpoint that rfjax runs from."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal, get_args

import ml_dtypes
import numpy as np
from tqdm import tqdm

from rfjax.config import ModelConfig
from rfjax.errors import InputError
from rfjax.weights import parts, store
from rfjax.weights.fill import check_fit, fill, flatten
from rfjax.weights.names import TITLES
from rfjax.weights.release import Kind, StateDict, Weights, check_part, find_release, read_state_dict
from rfjax.weights.release_config import read_config

Dtype = Literal["float32", "bfloat16", "float16"]
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


@dataclass(frozen=True)
class Conversion:
    """What a conversion made.

    Attributes:
        path: the checkpoint.
        weights: which of the release's weights it has; "bare" if the file held one set and no choice.
        config: of the model.
        dtypes: in which each part's matmul weights are stored.
        parameters: how many each part has.
        nbytes: what the arrays take on disk.
    """

    path: Path
    weights: Kind
    config: ModelConfig
    dtypes: Mapping[str, str]
    parameters: Mapping[str, int]
    nbytes: int


def convert(
    src: str | PathLike[str] | None,
    dst: str | PathLike[str],
    *,
    weights: Weights = "ema",
    dtype: Dtype | None = None,
    dit: str | PathLike[str] | None = None,
    vae: str | PathLike[str] | None = None,
    text: str | PathLike[str] | None = None,
    tokenizer: str | PathLike[str] | None = None,
    config: str | PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Conversion:
    """Converts a release, one part in memory at a time.

    Everything is checked before anything is written, and the checkpoint appears only when it is complete.

    Args:
        src: the release's folder (Rolling Forcing's layout, or diffusers'), or the DiT's weights file, or None.
        dst: the folder to make.
        weights: "ema" (averaged, what the release runs) or "raw", if the DiT's file has both.
        dtype: of the matmul and convolution weights; None keeps each part's own, so that nothing is lost. Norms,
            and the VAE's encoder, are float32 always.
        dit, vae, text: weights files to take in place of those in `src`.
        tokenizer: the folder with tokenizer.json.
        config: the DiT's config.json.
        overwrite: replace a checkpoint that stands at `dst`.
        progress: show a bar on a terminal.

    Raises:
        InputError: a file is missing, damaged, or of another model; a weight is not finite; `dst` is taken or its
            disk full. All tensors that do not fit are named.
    """
    if weights not in get_args(Weights):
        raise InputError(f"weights {weights!r}: choose {' or '.join(get_args(Weights))}")
    if dtype is not None and dtype not in _DTYPES:
        raise InputError(f"dtype {dtype!r}: choose {', '.join(_DTYPES)}")
    named = {"dit": dit, "vae": vae, "text": text, "tokenizer": tokenizer, "config": config}
    files = find_release(_path(src), **{name: _path(path) for name, path in named.items()})
    states = {part: read_state_dict(path, weights) for part, path in files.weights.items()}
    for part, state in states.items():
        check_part(part, state)
    model = read_config(files.config, states)
    dtypes = {part: _DTYPES[dtype] if dtype else _main_dtype(state) for part, state in states.items()}
    params = {part: flatten(parts.abstract_part(part, model, dtypes[part])[1]) for part in states}
    _check_all(model, states, params)

    nbytes = sum(p.size * p.dtype.itemsize for leaves in params.values() for p in leaves.values())
    provenance = {
        "weights": states["dit"].kind,
        "dtypes": {part: str(d) for part, d in dtypes.items()},
        "files": {part: {"name": p.name, "bytes": p.stat().st_size} for part, p in files.weights.items()},
    }
    bar = tqdm(total=nbytes, unit="B", unit_scale=True, disable=None if progress else True)
    with bar, store.staged(Path(dst), nbytes, overwrite=overwrite) as folder:
        for part, state in states.items():
            bar.set_description(part)
            key_map = parts.key_map(part, model)
            store.save_part(folder, part, fill(str(state.path), key_map, params[part], state.tensors, bar.update))
        store.save_rest(folder, model, files.tokenizer, provenance)
    return Conversion(
        path=Path(dst),
        weights=states["dit"].kind,
        config=model,
        dtypes=provenance["dtypes"],
        parameters={part: sum(p.size for p in leaves.values()) for part, leaves in params.items()},
        nbytes=nbytes,
    )


def _check_all(model: ModelConfig, states: Mapping[str, StateDict], params: Mapping[str, Mapping]) -> None:
    problems = []
    for part, state in states.items():
        try:
            check_fit(f"{state.path} as {TITLES[part]}", parts.key_map(part, model), params[part], state.tensors)
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("; ".join(problems))


def _main_dtype(state: StateDict) -> np.dtype:
    """The dtype of most of a part's bytes, if a part can be stored in it; else float32."""
    sizes: Counter[np.dtype] = Counter()
    for tensor in state.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    main = sizes.most_common(1)[0][0]
    return main if main in _DTYPES.values() else _DTYPES["float32"]


def _path(path: str | PathLike[str] | None) -> Path | None:
    return None if path is None else Path(path)

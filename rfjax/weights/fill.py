"""Fills the parameters of a model from the tensors of a file: everything is checked before anything is read."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rfjax.errors import InputError
from rfjax.keymap import Source

_NAMED_PROBLEMS = 20
_CHUNK = 1 << 24  # elements checked at a time, so that the check needs no second array of a tensor's size
_STRIP = 16

Flat = dict[str, Any]
Nested = dict[str, Any]


def flatten(state: Any) -> Flat:
    """The leaves of an NNX state, or of nested dicts, by dotted path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {".".join(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)): leaf for path, leaf in leaves}


def nest(flat: Mapping[str, Any]) -> Nested:
    """The nested dicts that `flatten` takes apart."""
    nested: Nested = {}
    for path, leaf in flat.items():
        *parents, name = path.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return nested


def check_fit(
    title: str, key_map: Mapping[str, Source], params: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    """Checks that the tensors of a file are exactly those a model needs, reading none of them.

    Args:
        title: what is loaded from where, for the message.
        key_map: where each parameter comes from.
        params: the shape and dtype of each parameter, by the same paths.
        tensors: the file's tensors by the release's names.

    Raises:
        InputError: names all tensors that are missing, unknown, of another shape, or not floating-point.
    """
    if set(key_map) != set(params):
        raise ValueError(f"the key map and the model differ in {sorted(set(key_map) ^ set(params))}")
    needed = {key for source in key_map.values() for key in source.keys}
    problems = {
        "missing": sorted(needed - set(tensors)),
        "unknown": sorted(set(tensors) - needed),
        "of another shape or type": [
            problem
            for path, source in key_map.items()
            for key in source.keys
            if key in tensors and (problem := _misfit(key, source, params[path], tensors[key]))
        ],
    }
    problems = {kind: names for kind, names in problems.items() if names}
    if problems:
        raise InputError(f"{title} does not fit: {'; '.join(_listed(problems))}")


def _misfit(key: str, source: Source, param: Any, tensor: np.ndarray) -> str | None:
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        return f"{key} is {tensor.dtype}"
    needed = param.shape[1:] if source.stacked else param.shape
    try:
        given = source.transform(np.broadcast_to(np.zeros((), np.int8), tensor.shape)).shape
    except (ValueError, IndexError):
        given = None
    if given == needed:
        return None
    return f"{key} is {list(tensor.shape)} for a parameter {list(needed)}"


def _listed(problems: Mapping[str, list[str]]) -> list[str]:
    """One phrase for each kind of problem; names all of them if they are few."""
    few = sum(map(len, problems.values())) <= _NAMED_PROBLEMS
    phrases = []
    for kind, names in problems.items():
        named = names if few else names[: _NAMED_PROBLEMS // len(problems)]
        rest = f" and {len(names) - len(named)} more" if len(named) < len(names) else ""
        phrases.append(f"{len(names)} {kind} ({', '.join(named)}{rest})")
    return phrases


def fill(
    title: str,
    key_map: Mapping[str, Source],
    params: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    progress: Callable[[int], object] = lambda n: None,
) -> Flat:
    """Reads the parameters of a model, one at a time, straight into arrays of their final shape and dtype.

    Args:
        title, key_map, params, tensors: as `check_fit` accepted them.
        progress: called with the bytes of each tensor just filled.

    Returns:
        The arrays by dotted path.

    Raises:
        InputError: a weight is not finite, or too large for the parameter's dtype.
    """
    arrays = {}
    for path, source in key_map.items():
        array = np.empty(params[path].shape, params[path].dtype)
        for i, key in enumerate(source.keys):
            part = array[i : i + 1] if source.stacked else array[np.newaxis]
            with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused by name below
                _copy(part, source.transform(tensors[key])[np.newaxis])
            if not _all_finite(part):
                raise InputError(f"{title}: {_not_finite(key, tensors[key], array.dtype)}")
            progress(part.nbytes)
        arrays[path] = array
    return arrays


def _copy(target: np.ndarray, tensor: np.ndarray) -> None:
    """Copies a tensor and casts it; a transposed one in strips of a cache line, five times as fast as at once."""
    strip = target.shape[-1] if tensor.flags.c_contiguous else _STRIP
    for i in range(0, target.shape[-1], strip):
        target[..., i : i + strip] = tensor[..., i : i + strip]


def _all_finite(array: np.ndarray) -> bool:
    flat = array.reshape(-1)
    return all(np.isfinite(flat[i : i + _CHUNK]).all() for i in range(0, flat.size, _CHUNK))


def _not_finite(key: str, tensor: np.ndarray, dtype: np.dtype) -> str:
    count = int(tensor.size - np.isfinite(tensor).sum())
    if count:
        return f"{key} has {count} values that are NaN or infinite; the file is damaged or the training diverged"
    return f"{key} has values beyond the range of {dtype}; convert to bfloat16 or float32"

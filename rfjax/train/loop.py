"""The loop of every stage: steps, a log, checkpoints to resume from, and what is shown on the way.

A stage gives functions of plain pytrees; the loop knows nothing of models. A run's folder holds

    state.npz     the newest checkpoint: everything the next step depends on
    log.jsonl     one line of numbers every few steps
    curves.png    those numbers, drawn
    samples/      what the stage draws of its progress
"""

import contextlib
import json
import math
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from rfjax.errors import InputError
from rfjax.train.draw import draw_curves

Metrics = dict[str, float]

STATE, LOG = "state.npz", "log.jsonl"
_COUNTERS = ("step", "seconds")


@dataclass(frozen=True)
class Stage:
    """What a stage of training does. Its state begins with the parameters and their average.

    Attributes:
        init: (step number) -> the state before the first step; for a later one, a state of the same structure.
        step: (state, step number) -> (state, metrics); all randomness is a function of the number.
        show: (state, step number, folder): evaluates, and draws into the folder.
    """

    init: Callable[[int], Any]
    step: Callable[[Any, int], tuple[Any, dict[str, Any]]]
    show: Callable[[Any, int, Path], Metrics]


def train(
    stage: Stage,
    folder: Path,
    steps: int,
    *,
    log_every: int = 20,
    save_every: int = 200,
    stopped: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda line: None,
) -> bool:
    """Runs a stage to its end, from its newest checkpoint if the folder has one.

    Args:
        stage: what to do.
        folder: of the run.
        steps: in all, those of earlier runs included.
        log_every, save_every: steps.
        stopped: asked after each step; once it is true, the state is saved and the run is left.
        say: told a line of progress at each checkpoint.

    Returns:
        Whether all steps are done.

    Raises:
        InputError: the checkpoint does not fit the stage, or a number of the log is not finite.
    """
    done = steps_done(folder)
    if done > steps:
        raise InputError(f"{folder} is at step {done}, beyond the {steps} of the configuration")
    if done == steps:
        return True
    folder.mkdir(parents=True, exist_ok=True)
    state = _load(folder / STATE, stage.init(done)) if done else stage.init(0)
    rows = _rows(folder, done)
    _write_log(folder, rows)
    began = time.monotonic() - _seconds(rows)
    recent: list[dict[str, Any]] = []
    ending = False
    with tqdm(total=steps, initial=done, desc=folder.name, unit="step", dynamic_ncols=True, disable=None) as bar:
        while done < steps and not ending:
            state, metrics = stage.step(state, done)
            done += 1
            recent.append(metrics)
            bar.update()
            ending, whole = stopped(), done % save_every == 0 or done == steps
            if whole or ending or done % log_every == 0:
                numbers = {"step": done, "seconds": round(time.monotonic() - began, 1)} | _means(recent)
                _check_finite(numbers, folder)
                _log(folder, rows, numbers)
                bar.set_postfix_str(_listed(numbers), refresh=False)
                recent = []
            if whole or ending:
                _save(folder, done, state)
            if whole:
                shown = stage.show(state, done, folder)
                _log(folder, rows, {"step": done} | shown)
                draw_curves(rows, folder / "curves.png")
                say(f"{folder.name}, step {done} of {steps}: {_listed(rows[-2] | shown)}")
    return done == steps


def steps_done(folder: Path) -> int:
    """Steps behind the newest checkpoint in a run's folder; 0 without one."""
    file = folder / STATE
    return int(_arrays(file, ["step"])[0]) if file.exists() else 0


def seconds_spent(folder: Path) -> float:
    """Time that the steps behind the newest checkpoint took, in all runs."""
    return _seconds(_rows(folder, steps_done(folder)))


def load_average(folder: Path, params: Any) -> Any:
    """The averaged parameters in the newest checkpoint of a run.

    Args:
        folder: of the run.
        params: a pytree of the same structure and shapes.

    Raises:
        InputError: the checkpoint is damaged or of another model.
    """
    return _load(folder / STATE, params, first=len(jax.tree.leaves(params)))


def _seconds(rows: list[Metrics]) -> float:
    return max((row.get("seconds", 0.0) for row in rows), default=0.0)


def _means(recent: list[dict[str, Any]]) -> Metrics:
    names = dict.fromkeys(name for metrics in recent for name in metrics)
    return {name: float(np.mean([m[name] for m in recent if name in m])) for name in names}


def _check_finite(numbers: Metrics, folder: Path) -> None:
    bad = [name for name, value in numbers.items() if not math.isfinite(value)]
    if bad:
        raise InputError(
            f"{folder}: the training diverged, {' and '.join(bad)} is not finite by step {numbers['step']}; lower the "
            f"learning rates (the run goes on from step {steps_done(folder)})"
        )


def _listed(numbers: Metrics) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if name not in _COUNTERS)


def _log(folder: Path, rows: list[Metrics], numbers: Metrics) -> None:
    rows.append({name: round(value, 6) for name, value in numbers.items()})
    with (folder / LOG).open("a") as file:
        file.write(json.dumps(rows[-1]) + "\n")


def _write_log(folder: Path, rows: list[Metrics]) -> None:
    new = folder / f"{LOG}.new"
    new.write_text("".join(json.dumps(row) + "\n" for row in rows))
    new.replace(folder / LOG)


def _rows(folder: Path, step: int) -> list[Metrics]:
    """The log up to a step, without later lines (their steps will be done again) and without half ones."""
    rows = []
    for line in (folder / LOG).read_text().splitlines() if (folder / LOG).exists() else []:
        with contextlib.suppress(ValueError):  # the run was killed while it wrote the line
            row = json.loads(line)
            if isinstance(row, dict) and row.get("step", math.inf) <= step:
                rows.append(row)
    return rows


def _save(folder: Path, step: int, state: Any) -> None:
    """Writes beside the old checkpoint, then takes its place: a run may be stopped at any moment."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    new, old = folder / f"new.{STATE}", folder / STATE
    np.savez(new, step=step, **{f"a{i}": leaf for i, leaf in enumerate(leaves)})  # pyright: ignore[reportArgumentType]
    new.replace(old)


def _load(file: Path, like: Any, first: int = 0) -> Any:
    """Arrays of a checkpoint, from number `first` on, in the structure of `like`."""
    paths, tree = jax.tree_util.tree_flatten_with_path(like)
    arrays = _arrays(file, [f"a{first + i}" for i in range(len(paths))])
    for (path, leaf), array in zip(paths, arrays, strict=True):
        if array.shape != leaf.shape:
            raise InputError(
                f"{file} is of another configuration: {jax.tree_util.keystr(path)} is {list(array.shape)} there and "
                f"{list(leaf.shape)} now; go on with the one that it was made with, or choose another folder (--out)"
            )
    return jax.tree.unflatten(tree, [jnp.array(array) for array in arrays])


def _arrays(file: Path, names: list[str]) -> list[np.ndarray]:
    try:
        with np.load(file) as data:
            lacking = [name for name in names if name not in data]
            if not lacking:
                return [data[name] for name in names]
    except (zipfile.BadZipFile, EOFError, ValueError):
        raise InputError(f"{file} is damaged; remove it to begin the stage again") from None
    raise InputError(
        f"{file} is of another configuration: it lacks {len(lacking)} of {len(names)} arrays; go on with the one that "
        "it was made with, or choose another folder (--out)"
    )

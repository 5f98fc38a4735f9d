"""The loop of every stage: steps, a log, checkpoints to resume from, and what is shown on the way.

A stage gives two functions of plain pytrees; the loop knows nothing of models. A run's folder holds

    state.npz     the newest checkpoint: everything the next step depends on
    log.jsonl     one line of numbers every few steps
    curves.png    those numbers, drawn
    samples/      what the stage draws of its progress
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

Metrics = dict[str, float]


@dataclass(frozen=True)
class Stage:
    """What a stage of training does.

    Attributes:
        init: (step number) -> the state before the first step; for a later one, a state of the same structure.
        step: (state, step number) -> (state, metrics); all randomness is a function of the number.
        show: (state, step number, folder): evaluates, and draws into the folder.
    """

    init: Callable[[int], Any]
    step: Callable[[Any, int], tuple[Any, dict[str, Any]]]
    show: Callable[[Any, int, Path], Metrics]


def train(stage: Stage, folder: Path, steps: int, *, log_every: int = 20, save_every: int = 200) -> Any:
    """Runs a stage to its end, from its newest checkpoint if the folder has one.

    Args:
        stage: what to do.
        folder: of the run.
        steps: in all, those of earlier runs included.
        log_every, save_every: steps.

    Returns:
        The last state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start, state = _resume(folder, stage)
    recent: list[dict[str, Any]] = []
    began = time.monotonic()
    with tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True) as bar:
        for number in range(start, steps):
            state, metrics = stage.step(state, number)
            recent.append(metrics)
            bar.update()
            done = number + 1
            if done % log_every == 0 or done == steps:
                means = {k: float(np.mean([m[k] for m in recent if k in m])) for k in set().union(*recent)}
                bar.set_postfix({k: f"{v:.4g}" for k, v in means.items()}, refresh=False)
                _log(folder, {"step": done, "seconds": round(time.monotonic() - began, 1)} | means)
                recent = []
            if done % save_every == 0 or done == steps:
                _save(folder, done, state)
                _log(folder, {"step": done} | stage.show(state, done, folder))
                draw_curves(folder)
    return state


def _log(folder: Path, numbers: Metrics) -> None:
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps({k: round(v, 6) for k, v in numbers.items()}) + "\n")


def _save(folder: Path, step: int, state: Any) -> None:
    """Writes beside the old checkpoint, then takes its place: a run may be stopped at any moment."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    new, old = folder / "state.new.npz", folder / "state.npz"
    np.savez(new, step=step, **{f"a{i}": leaf for i, leaf in enumerate(leaves)})
    new.replace(old)


def _resume(folder: Path, stage: Stage) -> tuple[int, Any]:
    file = folder / "state.npz"
    if not file.exists():
        return 0, stage.init(0)
    with np.load(file) as data:
        step = int(data["step"])
        leaves, tree = jax.tree.flatten(stage.init(step))
        return step, jax.tree.unflatten(tree, [jnp.asarray(data[f"a{i}"]) for i in range(len(leaves))])


def draw_curves(folder: Path) -> None:
    """Draws every number of the log over the steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    names = sorted({name for row in rows for name in row} - {"step", "seconds"})
    figure, axes = pyplot.subplots(len(names), 1, figsize=(8, 2 * len(names)), sharex=True, squeeze=False)
    for axis, name in zip(axes[:, 0], names, strict=True):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axis.plot(*zip(*points, strict=True))
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=80)
    pyplot.close(figure)

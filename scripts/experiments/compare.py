"""Ways to cut a rolling step over the eight cores of a Trainium2 chip, side by side.

python scripts/experiments/compare.py                      (table in Markdown; that of docs/parallelism.md)
python scripts/experiments/compare.py --json layouts.json  (and all numbers, for plot.py)

Each layout first runs the tiny model for a full window and must give the estimates of one device. Then it is compiled
for the 1.3B model at 832x480 in bfloat16, with abstract arrays: FLOPs and collectives are counted in the compiled
program, memory is XLA's, and the time is a model (rfjax/planning/trainium2.py). Nothing was run on a Trainium.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import flax.nnx as nnx  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from layouts import DEVICES, Experiment, example, experiments  # noqa: E402

from rfjax.bench.flops import dit_tokens, rolling_step_flops  # noqa: E402
from rfjax.config import preset  # noqa: E402
from rfjax.dit.model import DiT, TextKV  # noqa: E402
from rfjax.engine import Shape  # noqa: E402
from rfjax.planning import trainium2  # noqa: E402
from rfjax.planning.hlo import Program  # noqa: E402
from rfjax.rolling.step import init_state, rolling_step, rotary_of, token_grid  # noqa: E402
from rfjax.weights.parts import abstract_part  # noqa: E402

REAL, SMALL = Shape(1, 60, 104), Shape(1, 8, 16)
STEPS = 7  # ramp-up, and two steps of a full window
TOLERANCE = 1e-5


def largest_error(experiment: Experiment) -> float:
    """Of the estimates of the tiny model after some steps, against one device."""
    config = preset("tiny")
    graph, params = nnx.split(DiT(config.dit, rngs=nnx.Rngs(0)))
    dit, text_len = config.dit, config.dit.text_len
    text = TextKV(*jax.random.normal(jax.random.key(0), (2, dit.num_layers, 1, dit.num_heads, text_len, dit.head_dim)))
    grid = token_grid(config, *SMALL[1:])

    @jax.jit
    def alone(params: Any, state: Any, plan: Any, noise: Any) -> Any:
        return rolling_step(config, nnx.merge(graph, params), state, text, plan, noise, rotary_of(config, plan, grid))

    cut = experiment.lower(config, graph, params, "float32", SMALL).compile()
    ours = experiment.state(config, SMALL, "float32")
    theirs = init_state(config, *SMALL, dtype="float32")
    fixed = params, text
    if experiment.streams > 1:
        ours, fixed = _stacked(ours), _stacked(fixed)
    for number in range(STEPS):
        plan, noise = example(config, SMALL, number)
        varying = _stacked((plan, noise)) if experiment.streams > 1 else (plan, noise)
        placed = jax.device_put((fixed[0], ours, fixed[1], *varying), cut.input_shardings[0])
        ours = cut(*placed)
        theirs = alone(params, theirs, plan, noise)
    return float(np.abs(np.asarray(ours.x0) - np.asarray(theirs.x0)).max())


def _stacked(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * DEVICES), tree)


def figures(experiment: Experiment) -> dict[str, Any]:
    """What a layout takes at the real shapes."""
    config, dtype = preset("wan-1.3b"), "bfloat16"
    graph, params = abstract_part("dit", config, dtype)
    compiled = experiment.lower(config, graph, params, dtype, REAL).compile()
    program, memory = Program(compiled.as_text(), sends_bfloat16=True), compiled.memory_analysis()
    block = config.rolling.block_frames * dit_tokens(config, *REAL[1:])
    tokens = (config.rolling.window_blocks + 1) * block * experiment.streams / DEVICES
    keys, stored = (share * block * config.dit.dim for share in experiment.keys)
    parts = trainium2.step_parts(program, config, tokens, keys, stored, 2)
    useful = rolling_step_flops(config, *REAL[1:]) * experiment.streams / DEVICES
    return {
        "name": experiment.name,
        "about": experiment.about,
        "streams": experiment.streams,
        "largest_error": largest_error(experiment),
        "flops": program.flops,
        "flops_over_equal_share": program.flops / useful,
        "collectives": program.traffic(),
        "resident_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "modelled_seconds": parts,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The figures in Markdown."""
    lines = [
        "| layout | largest difference from one device, tiny model | TFLOP a core | over an equal share | collectives "
        "| MB sent a core | GB a core: resident, temporary | modelled ms | steps a second and chip |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        kinds = row["collectives"].items()
        counts = ", ".join(f"{count} {kind}" for kind, (count, _) in kinds) or "none"
        sent = sum(size for _, size in row["collectives"].values()) / 1e6
        seconds = sum(row["modelled_seconds"].values())
        lines.append(
            f"| {row['name']} | {row['largest_error']:.0e} | {row['flops'] / 1e12:.1f} "
            f"| {row['flops_over_equal_share']:.2f} | {counts} | {sent:.0f} | {row['resident_bytes'] / 1e9:.2f}, "
            f"{row['temporary_bytes'] / 1e9:.2f} | {1e3 * seconds:.0f} | {row['streams'] / seconds:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rows = [figures(experiment) for experiment in experiments()]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    print(table(rows))
    wrong = [row["name"] for row in rows if not row["largest_error"] <= TOLERANCE]
    if wrong:
        print(f"not the numbers of one device: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Benchmarks: that the counts are right, and that the figures mean what they say."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rfjax.bench import measure, model, release
from rfjax.bench.flops import rolling_step_flops
from rfjax.bench.report import as_text
from rfjax.cli import main
from rfjax.config import PRESETS, VAEConfig, preset
from rfjax.dit.model import DiT
from rfjax.rolling.plan import Roll, plan_step
from rfjax.rolling.step import init_state, rolling_step, rotary_of, token_grid

# A VAE of little code, as compiling takes longest.
SMALL = replace(preset("tiny"), vae=VAEConfig(dim=4, dim_mult=(1, 2), num_res_blocks=1, temporal_downsample=(True,)))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measure, "MATMUL_SIZE", 128)
    monkeypatch.setattr(measure, "_QUEUE_SECONDS", 0.001)
    monkeypatch.setattr(measure, "_SAMPLE_SECONDS", 0.001)
    monkeypatch.setattr("rfjax.cli.bench.use_compile_cache", lambda: None)


def product_flops(jaxpr) -> int:
    """FLOPs of all matrix products in a program, scans unrolled."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted])
            total += 2 * int(depth) * equation.outvars[0].aval.size
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if isinstance(inner, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                total += times * product_flops(getattr(inner, "jaxpr", inner))
    return total


def test_step_flops_are_those_of_the_program():
    config = preset("tiny")
    graph, params = nnx.split(nnx.eval_shape(lambda: DiT(config.dit, rngs=nnx.Rngs(0))))
    state = init_state(config, 2, 4, 6, jnp.float32)
    context = jnp.zeros((2, config.dit.text_len, config.dit.text_dim))
    kv = jax.eval_shape(lambda p: nnx.merge(graph, p).text_keys_values(context), params)
    plan = plan_step(40, Roll(0, None), config.rolling, config.dit.head_dim, config.dit.rope_theta)

    def step(params, state, kv, plan, noise):
        rotary = rotary_of(config, plan, token_grid(config, 4, 6))
        return rolling_step(config, nnx.merge(graph, params), state, kv, plan, noise, rotary)

    program = jax.make_jaxpr(step)(params, state, kv, plan, state.x0)
    assert rolling_step_flops(config, 4, 6, batch=2) == product_flops(program.jaxpr)


def test_step_flops_agree_with_the_release():
    dit = release.CONFIG.dit
    embedding = 2 * dit.text_len * (dit.text_dim + dit.dim) * dit.dim  # which the release repeats in both calls
    ours = rolling_step_flops(release.CONFIG, *release.DIT_LATENT) + 2 * embedding
    assert ours / 1e9 == pytest.approx(release.RELEASE_STEP_GFLOP, rel=1e-3)


def test_figures_of_the_release_are_the_recorded_ones(golden):
    recorded = json.loads((golden / "timing_upstream_cpu.json").read_text())
    dit, vae = recorded["dit"], recorded["vae_decode"]
    assert release.RELEASE_STEP.seconds == np.min(dit["denoise_s"]) + np.min(dit["update_s"])
    assert release.RELEASE_DECODE.seconds == np.min(vae["steady_s"])
    assert release.RELEASE_STEP_GFLOP == sum(dit["gflop_estimate"].values())
    assert release.RELEASE_STEP.sgemm_gflops_per_s == max(recorded["env"]["sgemm_2048_gflops"])
    assert tuple(dit["config"]["latent_hw"]) == release.DIT_LATENT
    assert tuple(vae["config"]["latent_hw"]) == release.VAE_LATENT
    assert {name: getattr(release.CONFIG.dit, name) for name in ("dim", "ffn_dim", "num_layers", "text_len")} == {
        name: dit["config"][name] for name in ("dim", "ffn_dim", "num_layers", "text_len")
    }


def test_rates():
    matmul = measure.Matmul("float32")
    matmul.per_wall, matmul.per_processor = 200.0, 100.0
    rate = measure.Rate(600, [12.0, 4.0, 6.0], matmul, processor_seconds=[24.0, 8.0, 9.0])
    assert rate.efficiency == 600 / 4 / 200
    assert rate.processor_efficiency == 600 / 8 / 100
    assert rate.matmul_work == 4 * 200
    assert rate.to_json()["seconds_median"] == 6.0


def test_compilations_of_eager_operations_count():
    counter = measure.Compilations()
    jax.jit(lambda x: x * 3 + 1)(np.float32(1))
    first = counter.count
    jnp.arange(17) + 5
    assert first >= 1 and counter.count > first


def test_a_pipeline_compiles_nothing_after_warm_up(pipe):
    figures = model.bench_model(pipe, height=64, width=96, repeats=2, long=True)
    assert figures["compilations"]["after_warm_up"] == 0
    assert figures["parameters"]["dit"] == 1_539_136
    assert figures["long"]["live_bytes_growth"] == 0
    fps = figures["pixel_fps"]
    assert fps["dit"] > fps["dit_vae"] > 0 and fps["text_dit_vae_whole_video"] > 0
    assert figures["peak_memory"]["process_bytes"] > 1e8
    json.dumps(figures)
    text = as_text(figures)
    assert "0 after it" in text and "DiT step: " in text and "VAE decode: " in text


def test_the_case_of_the_release_on_a_tiny_model(monkeypatch, capsys):
    monkeypatch.setattr(release, "CONFIG", SMALL)
    monkeypatch.setattr(release, "DIT_LATENT", (4, 4))
    monkeypatch.setattr(release, "VAE_LATENT", (2, 2))
    assert main(["bench", "--case", "release-cpu", "--repeats", "1", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert list(stages) == ["dit", "vae"]
    assert all(stage["efficiency"] > 0 and stage["speed_over_release"] > 0 for stage in stages.values())
    assert main(["bench", "--case", "release-cpu", "--repeats", "1", "--stage", "dit"]) == 0
    assert "times the release's speed" in capsys.readouterr().out


def test_random_weights_of_a_preset(monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "tiny", SMALL)
    assert main(["bench", "--preset", "tiny", "--size", "16x8", "--repeats", "1"]) == 0
    assert "size 16x8, parameters: dit 1,539,136" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--preset tiny --case release-cpu", "one of --checkpoint"),
        ("--preset huge", "no preset 'huge'; the presets are"),
        ("--preset tiny --size 40x32", "the nearest valid size is"),
        ("--preset tiny --repeats 0", "--repeats 0: at least 1"),
        ("--preset tiny --stage dit", "--stage dit is for --case"),
        ("--case release-cpu --size 32x32", "--size: the case release-cpu fixes the work"),
        ("--case release-cpu --long", "--long: the case"),
    ],
)
def test_bad_options(words, expected, capsys):
    assert main(["bench", *words.split()]) == 2
    err = capsys.readouterr().err
    assert expected in err and err.count("\n") == 1

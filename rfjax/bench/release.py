"""The case `release-cpu`: the work that was timed on the PyTorch release, on one CPU.

That is one steady step of a 6-layer DiT of full width and the decoding of one latent frame, both float32, batch 1.
Its times come from another machine, so only times over that machine's own matrix product are compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from rfjax.bench.flops import rolling_step_flops
from rfjax.bench.measure import Rate, machine, measure, peak_memory
from rfjax.bench.random_weights import random_model
from rfjax.config import preset
from rfjax.dit.model import DiT, TextKV
from rfjax.layers import precision
from rfjax.rolling.plan import Roll, StepPlan, plan_step
from rfjax.rolling.step import RollingState, init_state, rolling_step, rotary_of, token_grid
from rfjax.vae.flops import decode_flops
from rfjax.vae.model import VAE, init_decoder_state

DTYPE = "float32"
DIT_LATENT = (16, 26)
VAE_LATENT = (12, 20)
_WAN = preset("wan-1.3b")
CONFIG = replace(_WAN, dit=replace(_WAN.dit, num_layers=6))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Fastest figures of the release's runs (all of them: tests/golden/timing_upstream_cpu.json)."""

    seconds: float
    sgemm_gflops_per_s: float = 350.5

    @property
    def matmul_gflop(self) -> float:
        return self.seconds * self.sgemm_gflops_per_s


RELEASE_STEP = Recorded(seconds=3.6354936959999122 + 0.8060307650000595)
RELEASE_STEP_GFLOP = 944.8 + 196.0  # its own count, with the text embedding that it recomputes in every call
RELEASE_DECODE = Recorded(seconds=2.0928592989998833)


def bench_release(stages: Sequence[str], repeats: int) -> dict[str, Any]:
    """The stages of the case that are asked for, of "dit" and "vae"."""
    benches = {"dit": bench_step, "vae": bench_decode}
    return {
        "machine": machine(),
        "dtype": DTYPE,
        "stages": {stage: benches[stage](repeats) for stage in stages},
        "peak_memory": peak_memory(),
    }


def bench_step(repeats: int) -> dict[str, Any]:
    """A steady step against the release's denoising call and cache update together."""
    run = _steady_step(*random_model(lambda: DiT(CONFIG.dit, dtype=DTYPE, rngs=nnx.Rngs(0))))
    flops = rolling_step_flops(CONFIG, *DIT_LATENT)
    return _against(measure(run, flops, DTYPE, repeats), RELEASE_STEP, RELEASE_STEP_GFLOP)


def _steady_step(graph: nnx.GraphDef, params: nnx.State) -> Callable[[], Any]:
    def step(params: nnx.State, state: RollingState, kv: TextKV, plan: StepPlan, noise: jax.Array) -> RollingState:
        rotary = rotary_of(CONFIG, plan, token_grid(CONFIG, *DIT_LATENT))
        return rolling_step(CONFIG, nnx.merge(graph, params), state, kv, plan, noise, rotary)

    state = init_state(CONFIG, 1, *DIT_LATENT, dtype=DTYPE)
    text = np.resize(np.array([0.5, -1.0, 0.25], np.float32), (1, CONFIG.dit.text_len, CONFIG.dit.text_dim))
    kv = jax.jit(lambda params, text: nnx.merge(graph, params).text_keys_values(text))(params, text)
    noise = np.random.default_rng(1).standard_normal(state.x0.shape, np.float32)
    plan = plan_step(40, Roll(0, None), CONFIG.rolling, CONFIG.dit.head_dim, CONFIG.dit.rope_theta)
    with precision(DTYPE):
        compiled = jax.jit(step, donate_argnums=1).lower(params, state, kv, plan, noise).compile()

    def run() -> jax.Array:
        nonlocal state
        state = compiled(params, state, kv, plan, noise)
        return state.x0

    return run


def bench_decode(repeats: int) -> dict[str, Any]:
    """Steady decoding of one latent frame to 4 pixel frames."""
    run = _steady_decode(*random_model(lambda: VAE(CONFIG.vae, dtype=DTYPE, rngs=nnx.Rngs(0))))
    flops = decode_flops(CONFIG.vae, *VAE_LATENT, frames=1, first=False)
    return _against(measure(run, flops, DTYPE, repeats), RELEASE_DECODE, flops / 1e9)


def _steady_decode(graph: nnx.GraphDef, params: nnx.State) -> Callable[[], Any]:
    def decode(params: nnx.State, latents: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return nnx.merge(graph, params).decode(latents, state, first=False)

    state = init_decoder_state(CONFIG.vae, 1, *VAE_LATENT, dtype=DTYPE)
    latents = np.random.default_rng(1).standard_normal((1, 1, CONFIG.vae.z_dim, *VAE_LATENT), np.float32)
    with precision(DTYPE):
        compiled = jax.jit(decode, donate_argnums=2).lower(params, latents, state).compile()

    def run() -> jax.Array:
        nonlocal state
        pixels, state = compiled(params, latents, state)
        return pixels

    return run


def _against(rate: Rate, release: Recorded, release_gflop: float) -> dict[str, Any]:
    return rate.to_json() | {
        "release_efficiency": release_gflop / release.matmul_gflop,
        "release_cost_in_matmul_gflop": release.matmul_gflop,
        "speed_over_release": release.matmul_gflop * 1e9 / rate.matmul_work,
    }

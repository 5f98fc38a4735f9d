"""Training the DiT on rolling windows: the engine's own step, and what each place of the window is asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rfjax.dit.model import DiT, patchify
from rfjax.rolling.plan import Roll, plan_step
from rfjax.rolling.step import init_state, rolling_step, rotary_of, token_grid
from rfjax.text.model import UMT5Encoder
from rfjax.train.latents import LatentSet
from rfjax.train.loop import train
from rfjax.train.rollout import DenseAttention, RolloutRecipe, clock, rollout_stage

BLOCKS, WINDOW, LANES = 6, 5, 2
STEPS = BLOCKS + WINDOW - 1  # of one video
CHANGE = 3  # the block from which on the prompt is another
SIDE = 4
PATCH = (2, 2)


@pytest.fixture(scope="module")
def params(tiny_model):
    modules = {"dit": DiT(tiny_model.dit, rngs=nnx.Rngs(1)), "text": UMT5Encoder(tiny_model.text, rngs=nnx.Rngs(2))}
    return {part: jax.tree.map(np.asarray, nnx.state(module)) for part, module in modules.items()}


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    still = rng.standard_normal((3, 1, 4, SIDE, SIDE)).repeat(3 * BLOCKS, 1)
    return LatentSet(
        latents=still.astype(np.float16),
        prompt_ids=np.repeat([[0, 1]], 3, 0).repeat(CHANGE, 1).astype(np.int32),
        prompts=["before", "after"],
        start=rng.integers(SIDE, size=(3, 2, 2)).astype(np.int32),
    )


@pytest.fixture(scope="module")
def stage(tiny_model, data, params):
    """The first videos run on the data, all later ones on what the network says."""
    recipe = RolloutRecipe(
        steps=100, batch=2, lanes=LANES, learning_rate=0.05, adam_learning_rate=0.02, average=0.9,
        own=(0, 1), own_steps=(LANES * STEPS - 1, LANES * STEPS),
    )  # fmt: skip
    tokens = np.array([[3, 4, 1, 0, 0, 0], [5, 1, 0, 0, 0, 0]], np.int32), np.array([3, 2], np.int32)
    return rollout_stage(tiny_model, recipe, data, tokens, params, lambda *_: {"seen": 1.0})


def copied(state):
    return jax.tree.map(jnp.copy, state)


def run(stage, first, last, state=None):
    """The state after the steps first .. last - 1, and what each gave."""
    state, metrics = stage.init(0) if state is None else copied(state), []
    for number in range(first, last):
        state, numbers = stage.step(state, number)
        metrics.append(numbers)
    return state, metrics


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_lanes_take_turns_and_stand_at_different_steps(lanes):
    length = 12
    for lane in range(lanes):
        times = [clock(number, lanes, length) for number in range(lane, 4 * lanes * length, lanes)]
        assert all(at.lane == lane for at in times)
        assert (times[0].episode, times[0].step) == (0, 0)
        for before, after in zip(times, times[1:], strict=False):
            expected = (before.episode, before.step + 1), (before.episode + 1, 0)
            assert (after.episode, after.step) in expected
        assert sum(at.episode == 1 for at in times) == length
    now = [clock(number, lanes, length).step for number in range(lanes * length, lanes * length + lanes)]
    assert len(set(now)) == lanes


def test_dense_attention_is_window_attention(tiny_model):
    """On every step of a roll that is long enough for the cache to come round."""
    config, blocks = tiny_model, 11
    graph, state_dit = nnx.split(DiT(config.dit, rngs=nnx.Rngs(0)))
    text = jax.random.normal(jax.random.key(0), (2, 6, config.dit.text_dim))

    def one(params, state, plan, noise, attention):
        dit = nnx.merge(graph, params)
        rotary = rotary_of(config, plan, token_grid(config, SIDE, SIDE))
        return rolling_step(config, dit, state, dit.text_keys_values(text), plan, noise, rotary, attention)

    one = jax.jit(one, static_argnames="attention")
    state = jax.tree.map(jnp.asarray, init_state(config, 2, SIDE, SIDE, dtype=jnp.float32))
    for step in range(blocks + WINDOW - 1):
        plan = plan_step(step, Roll(0, blocks - 1), config.rolling, config.dit.head_dim, config.dit.rope_theta)
        noise = jax.random.normal(jax.random.key(step), state.x0.shape)
        ours = one(state_dit, state, plan, noise, attention=DenseAttention)
        state = one(state_dit, state, plan, noise, attention=None)
        for got, wanted in zip(ours, state, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_the_first_videos_run_on_the_data(stage, data):
    state, _ = run(stage, 0, 2 * LANES + 1)  # lane 0 is at step 2 of its video: three blocks have come in
    window = np.asarray(state.lanes[0].x0)
    latents = data.latents.astype(np.float32).reshape(3, BLOCKS, 3, 4, SIDE, SIDE)
    blocks = patchify(latents, PATCH)
    for shown in window[:, WINDOW - 3 :]:
        assert any((shown == video[:3]).all() for video in blocks)


def test_later_videos_run_on_what_the_network_says(stage, data):
    first = LANES * STEPS
    state, _ = run(stage, 0, first)
    state, (numbers,) = run(stage, first, first + 1, state)
    said = np.asarray(state.lanes[0].x0)[:, WINDOW - 1]
    asked = patchify(data.latents.astype(np.float32)[:, :3], PATCH)
    errors = np.array([[np.mean((x - y) ** 2) for y in asked] for x in said])
    assert errors.min() > 0
    # The logged error is that of what goes on to the next step.
    pairs = [(errors[0, i] + errors[1, j]) / 2 for i in range(3) for j in range(3)]
    assert np.abs(np.array(pairs) - numbers["ramp4"]).min() < 1e-4


def test_what_a_prompt_cannot_tell_is_not_asked(stage):
    _, metrics = run(stage, 0, LANES * STEPS)
    asked = [set(numbers) for numbers in metrics[::LANES]]  # of lane 0
    assert asked[0] == {"ramp4"}
    assert asked[2] == {"ramp2", "ramp3", "ramp4"}
    # Block 3, the first of the new motion, comes in at step 3; the prompt changes when it stands at place 2.
    assert asked[3] == {"ramp1", "ramp2", "ramp3"}
    assert asked[4] == {"ramp0", "ramp1", "ramp2"}
    assert asked[5] == {f"roll{i}" for i in range(WINDOW)}
    assert asked[STEPS - 1] == {"roll0"}  # the last block leaves


def test_what_is_not_asked_teaches_nothing(stage, data):
    number = 3 * LANES  # lane 0 at step 3, where block 3 stands at the last place
    state, _ = run(stage, 0, number)

    def taught(block):
        """The parameters after a step in which a block of the data was another."""
        frames = data.latents[:, 3 * block : 3 * block + 3]
        kept = frames.copy()
        frames += 1
        after, _ = run(stage, number, number + 1, state)
        frames[:] = kept
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(after.params)])

    not_shown, not_told, told = taught(5), taught(CHANGE), taught(CHANGE - 1)
    assert (not_shown == not_told).all()
    assert not (not_shown == told).all()


def test_loss_falls(stage):
    _, metrics = run(stage, 0, 100)

    def error(part):
        return np.mean([value for numbers in part for value in numbers.values()])

    assert error(metrics[-LANES * STEPS :]) < 0.6 * error(metrics[: LANES * STEPS])


def test_a_stopped_run_goes_on_bit_for_bit(stage, tmp_path):
    """Stopped in the middle of videos, and where the share of own roll-outs has changed."""
    steps, folder, numbers = 2 * LANES * STEPS, tmp_path / "cut", iter(range(1, 1000))
    assert train(stage, tmp_path / "whole", steps, save_every=steps)
    for stop in (3, LANES * STEPS + 5):
        assert not train(stage, folder, steps, save_every=steps, stopped=lambda n=stop: next(numbers) == n)
    assert train(stage, folder, steps, save_every=steps)
    with np.load(tmp_path / "whole" / "state.npz") as whole, np.load(folder / "state.npz") as cut:
        assert set(whole) == set(cut)
        assert all((whole[name] == cut[name]).all() for name in whole)

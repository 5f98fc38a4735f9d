"""The judge of the shapes world: right on exact and on spoilt videos, and every kind of fault found."""

import numpy as np
import pytest

from rfjax.errors import InputError
from rfjax.worlds.judge import border_ratio, judge, read
from rfjax.worlds.shapes import (
    COLOURS,
    MOTIONS,
    SHAPES,
    SIZE,
    Motion,
    Scene,
    Thing,
    parse,
    render,
    sample_scene,
    trajectory,
)

RED = "a red circle moving right on a blue background"
TWO = "a red circle moving right and a green square moving down slowly on a blue background"
FLAGS = ("background", "colour", "shape", "direction", "speed")


def paths(scene, frames=81, start=((20.3, 31.6), (50.1, 8.2))):
    """Centres [T, N, 2] of a scene whose motions never change."""
    velocities = np.array([thing.motion.velocity for thing in scene.things])
    start = np.array(start[: len(velocities)])
    return trajectory(start, np.broadcast_to(velocities, (frames, *velocities.shape)))


def film(prompt, frames=81, **kw):
    scene = parse(prompt)
    return render(scene, paths(scene, frames, **kw))


def random_film(rng, things, frames):
    """A scene, its centres and its exact video; two things start apart, and may meet."""
    scene = sample_scene(rng, things)
    apart = 0.0
    while apart < 24:
        start = rng.uniform(0, SIZE, (things, 2))
        apart = np.hypot(*((start[0] - start[-1] + 32) % SIZE - 32)) if things == 2 else 24
    centres = paths(scene, frames, start=start)
    return scene, centres, render(scene, centres)


def blurred(frames, sigma):
    taps = np.exp(-(np.arange(-4, 5) ** 2) / (2 * sigma**2))
    for axis in (1, 2):
        frames = sum(tap / taps.sum() * np.roll(frames, i - 4, axis) for i, tap in enumerate(taps.astype(np.float32)))
    return frames


def spoilt(rng, frames, noise=12, blur=1.2, tint=0):
    frames = blurred(frames.astype(np.float32), blur) + noise * rng.standard_normal(frames.shape, np.float32) + tint
    return np.clip(np.rint(frames), 0, 255).astype(np.uint8)


def failed(verdict):
    return {flag for flag in FLAGS if not getattr(verdict, flag)}


def off(a, b):
    """Distances on the torus."""
    return np.linalg.norm((a - b + 32) % SIZE - 32, axis=-1)


@pytest.mark.parametrize("things", [1, 2])
def test_exact_videos_pass(things):
    rng = np.random.default_rng(things)
    for _ in range(25):
        scene, centres, frames = random_film(rng, things, frames=81)
        verdict = judge(frames, scene)
        assert verdict.all and verdict.background, scene
        assert verdict.psnr > 30
        assert verdict.reading.flicker < 1 and verdict.reading.stray.max() == 0
        for i, thing in enumerate(scene.things):
            seen = next(t for t in verdict.reading.things if t.colour == thing.colour)
            assert (seen.shape, seen.motion) == (thing.shape, thing.motion)
            assert seen.presence > 0.95 and np.nanmax(off(seen.centres, centres[:, i])) < 1.5


@pytest.mark.parametrize("motion", MOTIONS, ids=str)
def test_every_motion_and_shape_passes_in_few_frames(motion):
    for shape in SHAPES:
        scene = Scene((Thing("yellow", shape, motion),), "magenta")
        verdict = judge(render(scene, paths(scene, frames=12)), scene)
        assert verdict.all and verdict.reading.things[0].motion == motion


@pytest.mark.parametrize("colour", COLOURS)
def test_every_pair_of_colours_passes(colour):
    for background in set(COLOURS) - {colour}:
        prompt = f"a {colour} triangle still on a {background} background"
        assert judge(film(prompt, frames=4), prompt).all


@pytest.mark.parametrize("things", [1, 2])
def test_soft_noisy_videos_pass(things):
    rng = np.random.default_rng(10 + things)
    passed = []
    for _ in range(50):
        scene, centres, frames = random_film(rng, things, frames=36)
        verdict = judge(spoilt(rng, frames), scene)
        passed.append(verdict.all)
        for seen in verdict.reading.things:
            velocity = next(t.motion.velocity for t in scene.things if t.colour == seen.colour)
            assert np.hypot(*np.subtract(seen.velocity, velocity)) < 0.02
            assert seen.jitter < 0.3
    assert np.mean(passed) >= 0.98


def test_colours_somewhat_off_pass():
    rng = np.random.default_rng(0)
    for tint in ([-25, 25, 25], [25, 25, -25]):
        assert judge(spoilt(rng, film(TWO), noise=8, tint=np.float32(tint)), TWO).all


@pytest.mark.parametrize(
    ("shown", "wrong"),
    [
        ("a yellow circle moving right on a blue background", {"colour"}),
        ("a red square moving right on a blue background", {"shape"}),
        ("a red triangle moving right on a blue background", {"shape"}),
        ("a red circle moving left on a blue background", {"direction"}),
        ("a red circle moving down on a blue background", {"direction"}),
        ("a red circle moving right fast on a blue background", {"speed"}),
        ("a red circle moving right slowly on a blue background", {"speed"}),
        ("a red circle still on a blue background", {"direction", "speed"}),
        ("a red circle moving right on a cyan background", {"background", "colour"}),
        ("a green square moving up fast", set(FLAGS)),
    ],
)
@pytest.mark.parametrize("noisy", [False, True])
def test_a_wrong_video_fails_in_what_is_wrong(shown, wrong, noisy):
    frames = film(shown)
    assert failed(judge(spoilt(np.random.default_rng(0), frames) if noisy else frames, RED)) == wrong


def test_motion_where_stillness_is_asked_fails():
    assert failed(judge(film(RED), RED.replace("moving right", "still"))) == {"direction", "speed"}
    crawling = render(parse(RED), trajectory(np.array([[20.0, 30.0]]), np.full((81, 1, 2), [0.2, 0.0])))
    assert failed(judge(crawling, RED.replace("moving right", "still"))) == {"speed"}


@pytest.mark.parametrize(
    ("shown", "wrong"),
    [
        ("a red square moving right and a green circle moving down slowly on a blue background", {"shape"}),
        (
            "a red circle moving down slowly and a green square moving right on a blue background",
            {"direction", "speed"},
        ),
        ("a red circle moving right and a green square moving down on a blue background", {"speed"}),
        ("a red circle moving right and a yellow square moving down slowly on a blue background", {"colour"}),
        ("a red circle moving right on a blue background", {"colour", "shape", "direction", "speed"}),
    ],
)
def test_each_of_two_things_must_be_right(shown, wrong):
    assert failed(judge(film(shown), TWO)) == wrong


def test_a_second_thing_that_nobody_asked_for_fails():
    assert not judge(film(TWO), RED).all


def blend(frames, others, share):
    return np.rint(frames * (1.0 - share) + others * share).astype(np.uint8)


def empty(prompt, frames=81):
    return np.broadcast_to(np.uint8(COLOURS[parse(prompt).background]), (frames, SIZE, SIZE, 3))


@pytest.mark.parametrize("prompt", [RED, TWO])
@pytest.mark.parametrize("noisy", [False, True])
def test_nothing_to_see_fails_all_but_the_background(prompt, noisy):
    frames = spoilt(np.random.default_rng(0), empty(prompt)) if noisy else empty(prompt)
    verdict = judge(frames, prompt)
    assert failed(verdict) == {"colour", "shape", "direction", "speed"}
    assert verdict.reading.things == () and np.isnan(verdict.psnr)


def test_a_thing_that_vanishes_fails():
    frames = film(RED)
    assert "colour" in failed(judge(np.where(np.arange(81)[:, None, None, None] < 60, frames, empty(RED)), RED))
    early = judge(np.where(np.arange(81)[:, None, None, None] < 30, frames, empty(RED)), RED)
    assert failed(early) == {"colour", "shape", "direction", "speed"}
    (seen,) = early.reading.things
    assert seen.presence == pytest.approx(30 / 81) and np.isnan(seen.centres[30:]).all()


@pytest.mark.parametrize("prompt", [RED, "a white triangle moving up", "a magenta square still on a green background"])
@pytest.mark.parametrize("share", [0.35, 0.5, 0.65])
def test_a_faded_thing_fails(prompt, share):
    assert not judge(blend(film(prompt), empty(prompt), share), prompt).colour


@pytest.mark.parametrize("share", [0.35, 0.5, 1.0])
def test_a_ghost_fails(share):
    frames = film(RED).astype(np.float32)
    ghost = film(RED, start=((38.0, 45.0),))
    alpha = share * (ghost == COLOURS["red"]).all(axis=-1, keepdims=True)
    verdict = judge(np.rint(frames * (1 - alpha) + ghost * alpha).astype(np.uint8), RED)
    assert not verdict.colour and verdict.reading.stray.min() > 50


@pytest.mark.parametrize("gap", [8, 16])
def test_a_thing_in_two_pieces_fails(gap):
    scene = parse(RED)
    centres = paths(scene)
    left, right = (render(scene, centres + [side * gap / 2, 0]) for side in (-1, 1))
    is_left = (np.arange(SIZE) + 0.5 - centres[:, :, 0] + 32) % SIZE < 32
    verdict = judge(np.where(is_left[:, None, :, None], left, right), RED)
    assert not (verdict.colour and verdict.shape)


def test_a_thing_that_blinks_fails_and_one_that_pulses_flickers():
    frames = film(RED)
    frame = np.arange(81)[:, None, None, None]
    assert "colour" in failed(judge(np.where(frame % 8 > 0, frames, empty(RED)), RED))
    pulsing = blend(frames, np.full_like(frames, 128), 0.2 * (frame % 2))
    assert judge(pulsing, RED).all
    assert read(pulsing, 1).flicker > 10 * max(1, read(frames, 1).flicker)


def test_a_drifting_background_is_measured_and_fails_once_far_off():
    drift = np.linspace(0, 100, 81, dtype=np.float32)
    frames = np.clip(film(RED) + drift[:, None, None, None] * [0, 1, 0], 0, 255).astype(np.uint8)
    assert failed(judge(frames, RED)) == {"background", "colour"}
    moved = read(frames, 1).background_rgb - COLOURS["blue"]
    np.testing.assert_allclose(moved[:, 1], drift, atol=2)
    assert judge(frames[:40], RED).all


def test_a_thing_is_followed_around_the_torus():
    scene = parse("a cyan triangle moving down fast")
    centres = paths(scene)
    (seen,) = read(render(scene, centres), 1).things
    assert off(seen.centres, centres[:, 0]).max() < 0.1
    assert np.ptp(seen.centres[:, 1]) > 60
    np.testing.assert_allclose(seen.velocity, [0, 1.5], atol=1e-3)


def test_a_motion_that_changes_is_read_right_on_each_half():
    scene = parse(RED)
    turned = scene.with_motions([Motion("up", "fast")])
    velocities = np.repeat([[scene.things[0].motion.velocity], [turned.things[0].motion.velocity]], 36, axis=0)
    frames = render(scene, trajectory(np.array([[40.0, 20.0]]), velocities))
    assert judge(frames[:36], scene).all and judge(frames[36:], turned).all
    assert failed(judge(frames[36:], scene)) == {"direction", "speed"}
    assert not judge(frames, scene).all and not judge(frames, turned).all


def test_what_passes_behind_the_other_is_hidden_and_not_absent():
    scene = parse("a red triangle moving right and a white square still")
    centres = paths(scene, start=((10.0, 30.0), (40.0, 32.0)))
    frames = render(scene, centres)
    verdict = judge(frames, scene)
    seen = next(t for t in verdict.reading.things if t.colour == "red")
    assert verdict.all and seen.presence == 1
    assert seen.hidden[30] and 5 < seen.hidden.sum() < 25
    assert off(seen.centres, centres[:, 0]).max() < 1.5
    gone = np.where(np.arange(81)[:, None, None, None] < 30, frames, render(Scene(scene.things[1:]), centres[:, 1:]))
    assert not judge(gone, scene).colour


def test_a_thing_hidden_for_more_than_half_the_way_around_is_found_again():
    scene = parse("a green circle moving right fast and a yellow circle moving right")
    centres = paths(scene, start=((5.0, 30.0), (20.0, 31.0)))
    verdict = judge(render(scene, centres), scene)
    seen = next(t for t in verdict.reading.things if t.colour == "green")
    assert verdict.all and seen.hidden.sum() * 1.5 > SIZE / 2
    assert off(seen.centres, centres[:, 0]).max() < 0.5


def test_psnr_measures_the_picture_at_the_measured_place():
    frames = film(RED)
    noisy = np.clip(frames + np.random.default_rng(0).normal(0, 12, frames.shape), 0, 255).astype(np.uint8)
    expected = 10 * np.log10(255**2 / np.mean(np.square(noisy.astype(float) - frames)))
    assert judge(frames, RED).psnr > 40
    assert judge(noisy, RED).psnr == pytest.approx(expected, abs=0.2)


def test_uneven_steps_are_measured_as_jitter():
    scene = parse(RED)
    centres = paths(scene) + np.random.default_rng(0).normal(0, 0.5, (81, 1, 2))
    (seen,) = read(render(scene, centres), 1).things
    assert seen.jitter == pytest.approx(0.5 * 2, rel=0.2)  # two axes, two frames a move
    assert seen.motion == Motion("right")


def test_block_borders_stand_out_only_where_they_jump():
    frames = film(RED)
    borders = range(9, 81, 12)
    assert border_ratio(frames, borders) == pytest.approx(1, abs=0.05)
    block = (np.arange(81) + 3) // 12
    steps = np.clip(frames + 8.0 * (block % 2)[:, None, None, None], 0, 255).astype(np.uint8)
    assert border_ratio(steps, borders) > 2
    assert border_ratio(empty(RED), borders) == 1


def test_bad_input_is_named():
    frames = film(RED, frames=4)
    for bad in (frames.astype(np.float32), frames[:1], frames[0], frames[:, :32]):
        with pytest.raises(InputError, match=r"frames of .*\["):
            judge(bad, RED)
    with pytest.raises(InputError, match="things=3"):
        read(frames, 3)
    with pytest.raises(InputError, match="a red fox"):
        judge(frames, "a red fox")
    with pytest.raises(InputError, match="one colour"):
        judge(frames, "a red circle still and a red square still")
    for borders, message in (([4], "border 4"), ([0], "border 0"), ([], "borders"), ([1, 2, 3], "borders")):
        with pytest.raises(InputError, match=message):
            border_ratio(frames, borders)

"""The shapes world: prompts, sampled scenes, paths and exact frames."""

import numpy as np
import pytest

from rfjax.errors import InputError
from rfjax.worlds.shapes import (
    COLOURS,
    MOTIONS,
    SHAPES,
    SIZE,
    Motion,
    Scene,
    Thing,
    coverage,
    distance,
    parse,
    render,
    sample_scene,
    trajectory,
)

AREAS = {"circle": 314.2, "square": 302.8, "triangle": 199.7}  # pi 10^2, 17.4^2, 3 sqrt(3) 6.2^2


@pytest.mark.parametrize("things", [1, 2])
def test_a_prompt_describes_its_scene(things):
    rng = np.random.default_rng(things)
    for _ in range(200):
        scene = sample_scene(rng, things)
        assert parse(scene.prompt()) == parse(scene.prompt(name_background=True)) == scene


def test_prompts_are_read_whatever_their_case_and_spaces():
    scene = parse("  A red CIRCLE moving   left slowly and a white triangle still ")
    assert scene == Scene(
        (Thing("red", "circle", Motion("left", "slowly")), Thing("white", "triangle", Motion())), background="black"
    )


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "a red fox moving left",
        "a purple circle still",
        "a red circle",
        "a red circle moving",
        "a red circle still slowly",
        "a red circle moving left quickly",
        "a red circle still and",
        "a red circle still on a pink background",
        "a red circle still and a blue square still and a green square still",
        "red circle still",
    ],
)
def test_a_prompt_outside_the_grammar_is_refused_in_one_line_that_quotes_it(prompt):
    with pytest.raises(InputError) as error:
        parse(prompt)
    assert repr(prompt) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "prompt", ["a black square still", "a red circle still and a blue square still on a blue background"]
)
def test_a_thing_that_cannot_be_seen_is_refused(prompt):
    with pytest.raises(InputError, match="cannot be seen"):
        parse(prompt)


def test_sampled_scenes_are_repeatable_varied_and_visible():
    scenes = [sample_scene(np.random.default_rng(seed), 2) for seed in range(500)]
    assert scenes == [sample_scene(np.random.default_rng(seed), 2) for seed in range(500)]
    for scene in scenes:
        assert len({scene.background, *(thing.colour for thing in scene.things)}) == 3
    things = [thing for scene in scenes for thing in scene.things]
    assert {thing.colour for thing in things} == set(COLOURS)
    assert {thing.shape for thing in things} == set(SHAPES)
    assert {thing.motion for thing in things} == set(MOTIONS)
    assert 0.5 < np.mean([scene.background == "black" for scene in scenes]) < 0.62


def test_motions_change_and_things_stay():
    scene = parse("a red circle still and a blue square moving up on a white background")
    changed = scene.with_motions([Motion("down", "fast"), Motion()])
    assert changed.prompt() == "a red circle moving down fast and a blue square still on a white background"
    with pytest.raises(ValueError):
        scene.with_motions([Motion()])


def test_speed_words_are_pixels_a_frame_and_y_grows_downwards():
    assert Motion().velocity == (0, 0)
    assert Motion("right", "slowly").velocity == (0.5, 0)
    assert Motion("left").velocity == (-1, 0)
    assert Motion("up", "fast").velocity == (0, -1.5)
    assert Motion("down").velocity == (0, 1)


def test_trajectory_starts_unmoved_turns_and_wraps():
    velocities = np.array([[[9, 9]], [[1.5, 0]], [[1.5, 0]], [[0, -1]]])
    centres = trajectory(np.array([[62.0, 0.5]]), velocities)
    assert centres[:, 0].tolist() == [[62, 0.5], [63.5, 0.5], [1, 0.5], [1, 63.5]]
    assert velocities[0, 0].tolist() == [9, 9]  # the argument is left alone


@pytest.mark.parametrize("shape", SHAPES)
def test_coverage_is_the_same_all_over_the_torus(shape):
    centres = np.random.default_rng(0).uniform(0, SIZE, (20, 2))
    expected = coverage(shape, centres)
    np.testing.assert_allclose(coverage(shape, centres + [SIZE, -SIZE]), expected, atol=1e-5)
    moved = np.roll(expected, (7, -30), axis=(2, 1))
    np.testing.assert_allclose(coverage(shape, centres + [7, -30]), moved, atol=1e-5)
    np.testing.assert_allclose(expected.sum(axis=(1, 2)), AREAS[shape], rtol=0.01)


def test_shapes_have_their_sizes():
    middle = np.array([[32.0, 32.0]])
    circle, square, triangle = (coverage(shape, middle)[0] for shape in SHAPES)
    row = 32  # the one just below the centre
    np.testing.assert_allclose([circle[row].sum(), square[row].sum()], [20, 17.4], atol=0.05)
    widths = triangle.sum(axis=1)
    assert widths.argmax() == 37 and 19 < widths[37] < 21.5  # the base is below
    assert np.flatnonzero(widths > 0.2)[0] in (20, 21)  # the tip is 12.4 above the centre
    np.testing.assert_array_equal(triangle, triangle[:, ::-1])


def test_distance_is_signed_and_may_be_coarse():
    centre = np.array([[30.0, 20.0]])
    x, y = np.meshgrid(np.arange(1.0, SIZE, 2), np.arange(1.0, SIZE, 2))
    expected = np.hypot((x - 30 + 32) % 64 - 32, (y - 20 + 32) % 64 - 32) - 10
    np.testing.assert_allclose(distance("circle", centre, cell=2)[0], expected, atol=1e-5)
    assert distance("circle", centre).shape == (1, SIZE, SIZE)


@pytest.mark.parametrize("background", COLOURS)
def test_colours_are_exact(background):
    for colour in set(COLOURS) - {background}:
        frames = render(Scene((Thing(colour, "square", Motion()),), background), np.array([[[32.0, 32.0]]]))
        assert frames.shape == (1, SIZE, SIZE, 3) and frames.dtype == np.uint8
        assert tuple(frames[0, 32, 32]) == COLOURS[colour]
        assert tuple(frames[0, 2, 2]) == COLOURS[background]
        edge = frames[0, 32, 23]  # the square ends at 23.3: .7 of this pixel
        expected = 0.7 * np.array(COLOURS[colour]) + 0.3 * np.array(COLOURS[background])
        np.testing.assert_allclose(edge, expected, atol=1)


def test_the_second_thing_passes_in_front():
    scene = parse("a red square still and a blue square still")
    frame = render(scene, np.array([[[30.0, 32.0], [36.0, 32.0]]]))[0]
    assert tuple(frame[32, 33]) == COLOURS["blue"]
    assert tuple(frame[32, 24]) == COLOURS["red"]

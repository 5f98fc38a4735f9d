"""The shapes world: one or two flat shapes that move over a plain background, 64x64 pixels at 16 frames a second.

The picture is a torus: what leaves on one side comes back on the other. A prompt follows a fixed grammar,

    a COLOUR SHAPE MOTION [and a COLOUR SHAPE MOTION] [on a COLOUR background]

with MOTION `moving right|left|up|down [slowly|fast]` or `still`. It describes one block of a video (9 frames, then
12); a new prompt may change the motions, never the shapes. The second shape passes in front of the first.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

from rfjax.errors import InputError

SIZE = 64  # pixels, both sides
FPS = 16
PATCH = 16  # pixels a token of the diffusion model stands for, both sides
COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "cyan": (0, 255, 255),
    "magenta": (255, 0, 255),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}  # x, y; y grows downwards
SPEEDS = {"slowly": 0.5, "": 1.0, "fast": 1.5}  # pixels a frame
DEFAULT_BACKGROUND = "black"

_FIRST_FRAMES, _BLOCK_FRAMES = 9, 12  # pixel frames of the first block and of every other

# Sizes in pixels, for shapes of about equal weight.
_RADIUS, _HALF_SIDE, _INRADIUS = 10.0, 8.7, 6.2  # circle, square, triangle (tip up)


@dataclass(frozen=True)
class Motion:
    """A direction (None: still) and a speed word."""

    direction: str | None = None
    speed: str = ""

    @property
    def velocity(self) -> tuple[float, float]:
        """Pixels a frame along x and y."""
        if self.direction is None:
            return 0.0, 0.0
        x, y = DIRECTIONS[self.direction]
        return x * SPEEDS[self.speed], y * SPEEDS[self.speed]

    def __str__(self) -> str:
        return "still" if self.direction is None else f"moving {self.direction} {self.speed}".rstrip()


MOTIONS = (Motion(), *(Motion(d, s) for d in DIRECTIONS for s in SPEEDS))


@dataclass(frozen=True)
class Thing:
    """One moving shape."""

    colour: str
    shape: str
    motion: Motion

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape} {self.motion}"


@dataclass(frozen=True)
class Scene:
    """What one prompt describes."""

    things: tuple[Thing, ...]
    background: str = DEFAULT_BACKGROUND

    def __str__(self) -> str:
        return self.prompt()

    def prompt(self, name_background: bool | None = None) -> str:
        """The prompt that describes the scene; the default background is named only if asked."""
        named = self.background != DEFAULT_BACKGROUND if name_background is None else name_background
        things = " and ".join(str(thing) for thing in self.things)
        return f"{things} on a {self.background} background" if named else things

    def with_motions(self, motions: Sequence[Motion]) -> "Scene":
        """The same things, moving in another way."""
        return replace(self, things=tuple(replace(t, motion=m) for t, m in zip(self.things, motions, strict=True)))


_THING = (
    rf"a ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) (?:(still)|moving ({'|'.join(DIRECTIONS)})(?: (slowly|fast))?)"
)
_PROMPT = re.compile(rf"{_THING}(?: and {_THING})?(?: on a ({'|'.join(COLOURS)}) background)?")


def parse(prompt: str) -> Scene:
    """The scene that a prompt describes.

    Raises:
        InputError: the prompt does not follow the grammar, or a shape has the background's colour.
    """
    match = _PROMPT.fullmatch(" ".join(prompt.lower().split()))
    if match is None:
        raise InputError(
            f"prompt {prompt!r:.80} does not read: a COLOUR SHAPE MOTION [and a COLOUR SHAPE MOTION] "
            "[on a COLOUR background]"
        )
    *fields, background = match.groups()
    background = background or DEFAULT_BACKGROUND
    things = []
    for colour, shape, _still, direction, speed in (fields[:5], fields[5:]):
        if colour == background:
            raise InputError(f"prompt {prompt!r:.80}: a {colour} {shape} cannot be seen on a {background} background")
        if colour is not None:
            things.append(Thing(colour, shape, Motion(direction, speed or "")))
    return Scene(tuple(things), background)


def sample_scene(rng: np.random.Generator, things: int = 1) -> Scene:
    """A random scene of one or two things; all colours differ, and half of all backgrounds are the default one."""
    background = DEFAULT_BACKGROUND if rng.random() < 0.5 else str(rng.choice(list(COLOURS)))
    colours = rng.permutation([c for c in COLOURS if c != background])[:things]
    return Scene(
        tuple(Thing(str(c), str(rng.choice(SHAPES)), MOTIONS[rng.integers(len(MOTIONS))]) for c in colours), background
    )


def trajectory(
    start: Float[np.ndarray, "N 2"], velocities: Float[np.ndarray, "T N 2"], size: int = SIZE
) -> Float[np.ndarray, "T N 2"]:
    """Centres of N things in T frames, in pixels on a torus of `size`.

    Args:
        start: centres in the first frame, x and y.
        velocities: of each frame, pixels; frame t is the one before moved by velocities[t], the first is not moved.
    """
    moves = np.asarray(velocities, np.float64).copy()
    moves[0] = 0
    return (start + np.cumsum(moves, axis=0)) % size


def distance(
    shape: str, centres: Float[np.ndarray, "T 2"], cell: int = 1, size: int = SIZE
) -> Float[np.ndarray, "T size/cell size/cell"]:
    """Signed distance of every pixel from the outline of a shape on a torus of `size`, in pixels, negative inside.

    It is the distance from the nearest side's line: beyond the corners of squares and triangles it is smaller than
    the Euclidean one.

    Args:
        centres: pixels, x and y.
        cell: measure at the middles of blocks of cell x cell pixels instead.
    """
    middles = np.arange(cell / 2, size, cell)
    offsets = ((middles - centres[..., None] + size / 2) % size - size / 2).astype(np.float32)  # [T, xy, pixel]
    x, y = offsets[:, 0, None, :], offsets[:, 1, :, None]
    if shape == "circle":
        return np.sqrt(x * x + y * y) - np.float32(_RADIUS)
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - np.float32(_HALF_SIDE)
    return np.maximum(y, np.float32(np.sqrt(3) / 2) * np.abs(x) - y / 2) - np.float32(_INRADIUS)


def coverage(shape: str, centres: Float[np.ndarray, "T 2"], size: int = SIZE) -> Float[np.ndarray, "T {size} {size}"]:
    """How much of each pixel a shape covers, 0 .. 1, with edges one pixel soft."""
    return np.clip(0.5 - distance(shape, centres, size=size), 0, 1)


def render(scene: Scene, centres: Float[np.ndarray, "T N 2"], size: int = SIZE) -> UInt8[np.ndarray, "T S S 3"]:
    """The exact video of a scene whose things stand at `centres`.

    Args:
        scene: the colours and shapes; its motions are not used.
        centres: pixels, x and y, of every thing in every frame.
        size: of the frames, in pixels.
    """
    planes = np.empty((3, len(centres), size, size), np.float32)
    planes[:] = np.reshape(COLOURS[scene.background], (3, 1, 1, 1))
    for i, thing in enumerate(scene.things):
        alpha = coverage(thing.shape, centres[:, i], size)
        for plane, value in zip(planes, COLOURS[thing.colour], strict=True):
            plane += alpha * (value - plane)
    return np.stack([np.rint(plane).astype(np.uint8) for plane in planes], axis=-1)


def random_streams(seed: int, batch: int, size: int, frames: int) -> UInt8[np.ndarray, "B T S S 3"]:
    """Videos of random scenes for training a VAE: half of one thing, half of two, now and then in another motion."""
    rng = np.random.default_rng([seed, batch, size, frames])
    return np.stack([_random_stream(rng, size, frames) for _ in range(batch)])


def _random_stream(rng: np.random.Generator, size: int, frames: int) -> UInt8[np.ndarray, "T S S 3"]:
    scene = sample_scene(rng, things=int(rng.integers(1, 3)))
    n = len(scene.things)
    changes = np.cumsum(rng.random(frames) < 1 / 40)
    motions = rng.integers(len(MOTIONS), size=(changes[-1] + 1, n))
    velocities = np.array([motion.velocity for motion in MOTIONS])[motions[changes]]
    return render(scene, trajectory(rng.uniform(0, size, (n, 2)), velocities, size), size)


def block_of_frame(frames: int) -> Int[np.ndarray, " T"]:
    """The block that each frame of a video belongs to: 9 frames, then 12 a block."""
    return np.maximum(np.arange(frames) - _FIRST_FRAMES, -1) // _BLOCK_FRAMES + 1


class Clip(NamedTuple):
    """A video with the prompt of each of its blocks."""

    frames: UInt8[np.ndarray, "T 64 64 3"]
    prompts: list[str]
    start: Int[np.ndarray, "N 2"]  # row and column of the patch that each thing starts in


def random_clip(rng: np.random.Generator, blocks: int) -> Clip:
    """A video to train the diffusion model on: whole blocks of one or two things that now and then move in a new way.

    Every thing starts in the middle of a patch, so that the noise can say where (see `rfjax.train.start`).
    """
    scene = sample_scene(rng, things=int(rng.integers(1, 3)))
    n = len(scene.things)
    patches = rng.integers(SIZE // PATCH, size=(n, 2))  # row, column
    scenes = [scene]
    for block in range(1, blocks):
        if block > 1 and rng.random() < 1 / 5:
            scene = scene.with_motions([MOTIONS[i] for i in rng.integers(len(MOTIONS), size=n)])
        scenes.append(scene)
    frames = _FIRST_FRAMES + _BLOCK_FRAMES * (blocks - 1)
    velocities = np.array([[thing.motion.velocity for thing in s.things] for s in scenes])[block_of_frame(frames)]
    centres = trajectory((patches[:, ::-1] + 0.5) * PATCH, velocities)
    named = rng.random() < (0.3 if scene.background == DEFAULT_BACKGROUND else 1)
    return Clip(render(scene, centres), [s.prompt(name_background=named) for s in scenes], patches)

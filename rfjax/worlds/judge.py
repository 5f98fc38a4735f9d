"""Reads a video of the shapes world from its frames alone, and says whether it shows what a prompt asks for.

Everything is measured on means of 2x2 pixels. Each is taken as a mixture of the colours found (the renderer's soft
edges are one), which gives every thing a soft mask; a shape's template with wide soft edges is fitted to the mask by
least squares where the other thing does not hide it. So soft edges, noise and colours somewhat off do no harm.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8

from rfjax.errors import InputError
from rfjax.worlds.shapes import COLOURS, DIRECTIONS, SHAPES, SIZE, SPEEDS, Motion, Scene, distance, parse, render

COLOUR_TOLERANCE = 64  # of 255, on every channel
STRAY_TOLERANCE = 32  # pixels; shapes cover 200 to 314
FIT_TOLERANCE = 0.75  # overlap of a mask and its template; a blur of 2 pixels leaves that much
SPEED_TOLERANCE = 0.2, 0.15  # of the speed asked for, and pixels a frame; the larger counts
SHARE_OF_FRAMES = 0.95  # in which the colours must be right
_LEAST_AREA = 40  # pixels of a colour, mean of all frames, for a thing to be looked for
_CELL = 2  # pixels, both sides of what is averaged
_NAMES = {4 * (r > 0) + 2 * (g > 0) + (b > 0): name for name, (r, g, b) in COLOURS.items()}  # channels as bits

_Planes = Float[np.ndarray, "3 T 32 32"]
_Mask = Float[np.ndarray, "T 32 32"]


@dataclass(frozen=True)
class ThingReading:
    """What was seen of one thing.

    Attributes:
        centres: pixels, x and y, in every frame; where hidden the place expected, where absent NaN.
        present: frames that show it in its colour: the visible middle of its template is within COLOUR_TOLERANCE of
            the colour on every channel, and at least a third of all the middle.
        hidden: frames where it is not present, and the other thing covers most of the place where it is expected from
            the frames before and after.
        fit: overlap (intersection over union) of its mask with its template, mean over the frames where present.
        velocity: x and y, pixels a frame: the median slope between frames half of the video apart; NaN if it is
            present in fewer than two.
        jitter: root mean square of the moves between consecutive frames less `velocity`, pixels.
    """

    colour: str
    shape: str
    centres: Float[np.ndarray, "T 2"]
    present: Bool[np.ndarray, "T"]
    hidden: Bool[np.ndarray, "T"]
    fit: float
    velocity: tuple[float, float]
    jitter: float

    @property
    def presence(self) -> float:
        """The share of frames where it is present, among those where it is not hidden."""
        return float(self.present.sum() / max(1, (~self.hidden).sum()))

    @property
    def speed(self) -> float:
        """Pixels a frame."""
        return float(np.hypot(*self.velocity))

    @property
    def motion(self) -> Motion:
        """The nearest speed word (still below .25 pixels a frame), and the direction of the larger component."""
        if not self.speed >= min(SPEEDS.values()) / 2:
            return Motion()
        direction = max(DIRECTIONS, key=lambda d: np.dot(DIRECTIONS[d], self.velocity))
        return Motion(direction, min(SPEEDS, key=lambda s: abs(SPEEDS[s] - self.speed)))


@dataclass(frozen=True)
class Reading:
    """What was seen in a video.

    Attributes:
        background: the colour of most pixels.
        background_rgb: mean of the pixels of each frame that are nearest its most frequent colour, 0 .. 255.
        things: the things found, the largest first; fewer than expected if not all were found.
        stray: pixels of each frame that differ from its background by more than COLOUR_TOLERANCE on a channel and lie
            more than 3 pixels outside all things: ghosts, splits, things of other colours.
        flicker: mean absolute change between consecutive frames, 0 .. 255, of what is left when a plain background and
            the templates where the things were seen are taken away: what motion does not explain. Below 1 on exact
            video; noise and edges that change count.
    """

    background: str
    background_rgb: Float[np.ndarray, "T 3"]
    things: tuple[ThingReading, ...]
    stray: Float[np.ndarray, "T"]
    flicker: float


@dataclass(frozen=True)
class Verdict:
    """Whether a video shows what was asked for. Things are matched by colour; each must be as described.

    Attributes:
        background: in 95 % of frames the background is within COLOUR_TOLERANCE of the colour asked for.
        colour: in 95 % of frames, all at once: the background is right, every thing is present in the colour asked
            for (or hidden by the other), and at most STRAY_TOLERANCE pixels show anything else.
        shape: the template that fits best is that of the shape asked for, and its fit is FIT_TOLERANCE or more.
        direction: the direction read is the one asked for; still is one, below .25 pixels a frame.
        speed: within 20 % or .15 pixels a frame of the one asked for.
        psnr: dB, against the exact render of what was asked for at the measured places, over the frames where every
            thing has one; NaN if there are none. At most 100.

    A thing that is present in less than half of the frames that do not hide it fails everything but the background.
    """

    background: bool
    colour: bool
    shape: bool
    direction: bool
    speed: bool
    psnr: float
    reading: Reading

    @property
    def all(self) -> bool:
        return self.colour and self.shape and self.direction and self.speed


def read(frames: UInt8[np.ndarray, "T 64 64 3"], things: int) -> Reading:
    """What a video shows, from its frames alone.

    Things are looked for in the most frequent colours beside the background's, those that fill 40 pixels a frame on
    average. One thing is looked for in each colour.

    Args:
        frames: consecutive frames in which no motion changes.
        things: how many things to look for, 1 or 2.

    Raises:
        InputError: the frames are not such, or things is neither 1 nor 2.
    """
    _check(frames)
    if things not in (1, 2):
        raise InputError(f"things={things!r}: a scene has 1 or 2")
    small = _small(frames)
    background, background_rgb, colours = _colours(small, things)
    masks = _masks(small, background_rgb, colours)
    rest = small - _plane_values(COLOURS[background])
    readings, outside = [], np.ones(small.shape[1:], bool)
    for i, colour in enumerate(colours):
        visible = np.prod(1 - np.delete(masks, i, axis=0), axis=0)
        thing = _thing(small, colour, masks[i], visible)
        readings.append(thing)
        span = distance(thing.shape, thing.centres, _CELL)
        outside &= ~(span < 3)  # also where the centre is NaN
        alpha = np.nan_to_num(np.clip(0.5 - span / _CELL, 0, 1)) * visible
        rest -= alpha * _plane_values(np.subtract(COLOURS[colour], COLOURS[background]))
    differs = np.abs(small - _plane_values(background_rgb)).max(axis=0) > COLOUR_TOLERANCE
    stray = (differs & outside).reshape(len(frames), -1).sum(axis=1) * float(_CELL**2)
    flicker = float(np.abs(np.diff(rest, axis=1)).mean())
    return Reading(background, background_rgb, tuple(readings), stray, flicker)


def judge(frames: UInt8[np.ndarray, "T 64 64 3"], asked: str | Scene) -> Verdict:
    """Whether a video shows what a prompt or scene asks for.

    Args:
        frames: consecutive frames throughout which `asked` holds: of a stream whose motions change, a part.

    Raises:
        InputError: the frames are not such, the prompt does not read, or it has two things of one colour, which
            cannot be told apart.
    """
    scene = parse(asked) if isinstance(asked, str) else asked
    if len({thing.colour for thing in scene.things}) < len(scene.things):
        raise InputError(f"{scene.prompt()!r}: things of one colour cannot be told apart; give them two")
    reading = read(frames, len(scene.things))
    seen = _match(scene, reading)
    off = np.abs(reading.background_rgb - COLOURS[scene.background]).max(axis=1)
    background = off <= COLOUR_TOLERANCE
    background_right = bool(background.mean() >= SHARE_OF_FRAMES)
    if len(seen) < len(scene.things):
        return Verdict(background_right, False, False, False, False, float("nan"), reading)
    pairs = list(zip(scene.things, seen, strict=True))
    right = background & (reading.stray <= STRAY_TOLERANCE)
    for thing, found in pairs:
        right &= (found.present | found.hidden) & (found.colour == thing.colour)
    return Verdict(
        background=background_right,
        colour=bool(right.mean() >= SHARE_OF_FRAMES),
        shape=all(found.shape == thing.shape and found.fit >= FIT_TOLERANCE for thing, found in pairs),
        direction=all(found.motion.direction == thing.motion.direction for thing, found in pairs),
        speed=all(_speed_is_right(found.speed, thing.motion) for thing, found in pairs),
        psnr=_psnr(frames, scene, np.stack([found.centres for found in seen], axis=1)),
        reading=reading,
    )


def border_ratio(frames: UInt8[np.ndarray, "T 64 64 3"], borders: Sequence[int]) -> float:
    """How much more a video changes at the borders of its blocks than within them; 1 is seamless.

    It is the mean absolute difference of consecutive frames over the borders, divided by that over all other frames.
    Motion counts as change, so a border where it becomes faster stands out too. Where nothing ever changes it is 1.

    Args:
        borders: the first frame of each block but the first: 9, 21, 33, ...

    Raises:
        InputError: the frames are not such, a border is not inside the video, or there is no border or nothing else.
    """
    _check(frames)
    changes = np.abs(np.diff(frames.astype(np.float32), axis=0)).mean(axis=(1, 2, 3))
    at_border = np.zeros(len(changes), bool)
    for border in borders:
        if not 0 < border < len(frames):
            raise InputError(f"border {border} is not inside a video of {len(frames)} frames")
        at_border[border - 1] = True
    if at_border.all() or not at_border.any():
        raise InputError(
            f"borders {list(borders)} of {len(frames)} frames: some, but not all, frames must begin a block"
        )
    border, interior = changes[at_border].mean(), changes[~at_border].mean()
    return float(border / interior) if interior else float("inf") if border else 1.0


def _check(frames: np.ndarray) -> None:
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1:] != (SIZE, SIZE, 3) or len(frames) < 2:
        raise InputError(
            f"frames of {frames.dtype} {list(frames.shape)}: give uint8 [T, {SIZE}, {SIZE}, 3], two frames or more"
        )


def _small(frames: UInt8[np.ndarray, "T 64 64 3"]) -> _Planes:
    """Means of 2x2 pixels, one plane a channel."""
    rows = frames[:, ::2].astype(np.float32) + frames[:, 1::2]
    return np.ascontiguousarray(np.moveaxis((rows[:, :, ::2] + rows[:, :, 1::2]) / 4, -1, 0))


def _plane_values(rgb: np.ndarray | Sequence[float]) -> Float[np.ndarray, "3 T 1 1"]:
    """A colour, or one for each frame, to compute with planes."""
    return np.asarray(rgb, np.float32).reshape(-1, 3).T[..., None, None]


def _mean(values: Float[np.ndarray, "*channels T 32 32"], weights: np.ndarray) -> Float[np.ndarray, "*channels T"]:
    """Weighted mean over the pixels of each frame; 0 where there is no weight."""
    weights = weights.astype(np.float32)
    return np.einsum("...tyx,tyx->...t", values, weights) / np.maximum(np.einsum("tyx->t", weights), 1e-6)


def _colours(small: _Planes, things: int) -> tuple[str, Float[np.ndarray, "T 3"], list[str]]:
    """The background's name and mean in each frame, and the names of the most frequent other colours."""
    red, green, blue = small > 127.5
    codes = 4 * red + 2 * green + blue
    frame = np.arange(len(codes))[:, None, None]
    counts = np.bincount((codes + 8 * frame).ravel(), minlength=8 * len(codes)).reshape(-1, 8)
    background_rgb = _mean(small, codes == counts.argmax(axis=1)[:, None, None]).T
    area = counts.mean(axis=0) * _CELL**2
    background, *others = np.argsort(-area)
    return _NAMES[background], background_rgb, [_NAMES[code] for code in others[:things] if area[code] >= _LEAST_AREA]


def _masks(
    small: _Planes, background_rgb: Float[np.ndarray, "T 3"], colours: Sequence[str]
) -> Float[np.ndarray, "N T 32 32"]:
    """How much of each colour is in each pixel, 0 .. 1, taken as a mixture of the background and these colours."""
    palette = np.array([COLOURS[c] for c in colours], np.float32).reshape(-1, 3)
    unmix = np.linalg.pinv(palette - background_rgb[:, None])  # [T, rgb, N]
    return np.clip(np.einsum("tcn,ctyx->ntyx", unmix, small - _plane_values(background_rgb)), 0, 1)


def _thing(small: _Planes, colour: str, mask: _Mask, visible: _Mask) -> ThingReading:
    """Reads one thing, given its soft mask and how much of each pixel the other does not hide."""
    start = _coarse_centres(mask, visible)
    fits = {shape: _fit(shape, mask, visible, start) for shape in SHAPES}
    shape = min(SHAPES, key=lambda s: fits[s][1])
    centres, _ = fits[shape]
    span = distance(shape, centres, _CELL)
    core, clear = span < -3, (visible > 0.8).astype(np.float32)
    right_colour = np.abs(_mean(small, core * clear).T - COLOURS[colour]).max(axis=1) <= COLOUR_TOLERANCE
    present = right_colour & (_mean(clear, core) >= 1 / 3)
    velocity, jitter, expected = _motion(centres, present)
    hidden = ~present & (_mean(clear, distance(shape, expected, _CELL) < -3) < 1 / 2)
    # Both with edges a pixel soft, so that blur counts little and the grid not at all.
    sharp, template = np.clip(2 * mask - 0.5, 0, 1), np.clip(0.5 - span, 0, 1)
    union = _mean(np.maximum(sharp, template), visible)
    overlap = _mean(np.minimum(sharp, template), visible) / np.maximum(union, 1e-6)
    return ThingReading(
        colour,
        shape,
        centres=np.select([present[:, None], hidden[:, None]], [centres, expected], np.nan),
        present=present,
        hidden=hidden,
        fit=float(overlap[present].mean()) if present.any() else 0.0,
        velocity=velocity,
        jitter=jitter,
    )


def _coarse_centres(mask: _Mask, visible: _Mask) -> Float[np.ndarray, "T 2"]:
    """Where a square of 16 pixels holds most of the mask and least of the visible rest, to two pixels."""
    evidence = 2 * mask - visible
    for axis in (1, 2):
        for shift in (1, 2, 4):  # sums of 2, 4, 8 neighbours
            evidence = evidence + np.roll(evidence, -shift, axis)
    y, x = np.divmod(evidence.reshape(len(mask), -1).argmax(axis=1), SIZE // _CELL)
    return (np.stack([x, y], axis=1) + 4.0) * _CELL % SIZE


def _fit(
    shape: str, mask: _Mask, visible: _Mask, centres: Float[np.ndarray, "T 2"]
) -> tuple[Float[np.ndarray, "T 2"], float]:
    """Centres of least squared difference between mask and template where visible, and the sum of the differences.

    Gauss-Newton; the template's edges are 6 pixels soft, so that it feels a mask some pixels off.
    """
    frames = len(mask)
    visible = visible.reshape(frames, 1, -1)
    for _ in range(3):
        template = np.clip(0.5 - distance(shape, centres, _CELL) / 6, 0, 1)
        error = (mask - template).reshape(frames, -1, 1)
        slopes = np.stack([np.roll(template, 1, axis) - np.roll(template, -1, axis) for axis in (2, 1)], axis=1)
        slopes = slopes.reshape(frames, 2, -1) / (2 * _CELL)
        weighted = slopes * visible
        normal = weighted @ slopes.swapaxes(1, 2) + 0.02 * np.eye(2, dtype=np.float32)  # all hidden: no step
        step = np.linalg.solve(normal, weighted @ error)[..., 0]
        centres = (centres + np.clip(step, -3, 3)) % SIZE
    error = (mask - np.clip(0.5 - distance(shape, centres, _CELL) / _CELL, 0, 1)).ravel()
    return centres, float(np.dot(error * visible.ravel(), error))


def _motion(
    centres: Float[np.ndarray, "T 2"], present: Bool[np.ndarray, "T"]
) -> tuple[tuple[float, float], float, Float[np.ndarray, "T 2"]]:
    """Velocity and jitter, and where the thing is expected in every frame: on straight lines between those seen."""
    when = np.flatnonzero(present)
    if len(when) < 2:
        return (np.nan, np.nan), np.nan, centres
    # While it is hidden it may go half around the torus: unwrapped is only what differs from the usual step.
    steps = (np.diff(centres[when], axis=0) + SIZE / 2) % SIZE - SIZE / 2
    usual = np.outer(when, np.median(steps / np.diff(when)[:, None], axis=0))
    places = np.unwrap(centres[when] - usual, period=SIZE, axis=0) + usual
    half = len(when) // 2
    velocity = np.median((places[half:] - places[:-half]) / (when[half:] - when[:-half])[:, None], axis=0)
    frames = np.arange(len(centres))
    expected = np.stack([np.interp(frames, when, axis) for axis in places.T], axis=1)
    expected += np.outer(frames - np.clip(frames, when[0], when[-1]), velocity)
    moves = np.diff(places, axis=0)[np.diff(when) == 1]
    jitter = np.sqrt(np.square(moves - velocity).sum(axis=1).mean()) if len(moves) else np.nan
    return (float(velocity[0]), float(velocity[1])), float(jitter), expected % SIZE


def _match(scene: Scene, reading: Reading) -> list[ThingReading]:
    """For each thing asked for the one seen in its colour, else one in a colour not asked for; fewer if some lack."""
    seen = {t.colour: t for t in reading.things if t.presence >= 0.5 and np.isfinite(t.speed)}
    asked = {thing.colour for thing in scene.things}
    others = iter([thing for colour, thing in seen.items() if colour not in asked])
    matches = [seen.get(thing.colour) or next(others, None) for thing in scene.things]
    return [match for match in matches if match is not None]


def _speed_is_right(speed: float, asked: Motion) -> bool:
    target = np.hypot(*asked.velocity)
    share, least = SPEED_TOLERANCE
    return bool(abs(speed - target) <= max(share * target, least))


def _psnr(frames: UInt8[np.ndarray, "T 64 64 3"], scene: Scene, centres: Float[np.ndarray, "T N 2"]) -> float:
    placed = ~np.isnan(centres).any(axis=(1, 2))
    if not placed.any():
        return float("nan")
    error = np.subtract(frames[placed], render(scene, centres[placed]), dtype=np.float32).ravel()
    return float(10 * np.log10(255**2 / max(np.dot(error, error) / error.size, 255**2 / 1e10)))

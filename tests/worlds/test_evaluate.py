"""The evaluation, on a pipeline that draws what it is asked for, and on ones that do one thing wrong."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from rfjax import RollingForcingPipeline
from rfjax.config import preset
from rfjax.worlds import evaluate
from rfjax.worlds.shapes import parse, render
from rfjax.worlds.sheet import Row, write_sheet

SCRIPT = Path(__file__).parents[2] / "scripts" / "evaluate.py"
LAG = 4  # blocks until a new prompt shows


class ExactPipe:
    """Draws the scenes of its prompts exactly, but for what `spoil(frames, block)` does to the frames of a block."""

    config = preset("tiny")

    def __init__(self, spoil=lambda frames, block: frames, start=None):
        self.spoil, self.start, self.batches = spoil, start, []

    def stream(self, prompts, num_frames, seed):
        self.batches.append((list(prompts), seed, num_frames))
        return ExactStream(self, prompts, num_frames, seed)


class ExactStream:
    def __init__(self, pipe, prompts, num_frames, seeds):
        self.pipe, self.blocks = pipe, pipe.config.whole_blocks(num_frames)
        self.scenes, self.coming = [parse(prompt) for prompt in prompts], []
        n = len(self.scenes[0].things)
        self.places = [
            np.random.default_rng(s if pipe.start is None else pipe.start).uniform(0, 64, (n, 2)) for s in seeds
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def set_prompt(self, prompts):
        self.coming.append((self.done + LAG, [parse(prompt) for prompt in prompts]))

    def __iter__(self):
        for block in range(self.blocks):
            self.done = block + 1
            if self.coming and self.coming[0][0] == block:
                self.scenes = self.coming.pop(0)[1]
            frames = [self.draw(i, 12 if block else 9) for i in range(len(self.scenes))]
            yield SimpleNamespace(index=block, frames=self.pipe.spoil(np.stack(frames), block))

    def draw(self, i, frames):
        moves = np.array([thing.motion.velocity for thing in self.scenes[i].things])
        centres = self.places[i] + moves * np.arange(frames)[:, None, None]
        self.places[i] = self.places[i] + moves * frames
        return render(self.scenes[i], centres % 64)


def test_exact_videos_pass_everything():
    one = evaluate.cold_start(ExactPipe(), 10, batch=4)
    assert {one.figures[fact] for fact in evaluate.FACTS} == {1.0}
    assert one.figures["videos"] == 10 and one.figures["psnr_median"] > 35 and one.figures["background_drift_max"] == 0
    assert [video.seed for video in one.videos] == list(range(10)) and one.videos[0].frames.shape == (81, 64, 64, 3)
    assert not any(video.wrong for video in one.videos)
    two = evaluate.cold_start(ExactPipe(), 10, things=2)
    assert two.figures["all"] >= 0.9 and all(" and " in video.prompt for video in two.videos)


def test_batches_are_of_one_size_and_hold_every_prompt_once():
    pipe = ExactPipe()
    part = evaluate.cold_start(pipe, 5, blocks=2, batch=3)
    assert [(len(prompts), seeds, frames) for prompts, seeds, frames in pipe.batches] == [
        (3, [0, 1, 2], 21), (3, [3, 4, 4], 21),
    ]  # fmt: skip
    assert [video.prompt for video in part.videos] == [str(scene) for scene in evaluate.unseen_scenes(5)]


def test_of_a_long_video_the_end_is_judged():
    def late(frames, block):  # the first half shows nothing at all
        return frames if block >= 6 else np.full_like(frames, 128)

    part = evaluate.endless(ExactPipe(late), 4, blocks=12, last=6)
    assert part.figures["all"] == 1 and part.figures["blocks"] == 12
    assert part.videos[0].frames.shape == (72, 64, 64, 3)

    def drifting(frames, block):
        return np.clip(frames.astype(int) + block, 0, 255).astype(np.uint8)

    part = evaluate.endless(ExactPipe(drifting), 4, blocks=12, last=6)
    assert part.figures["background_drift_max"] == 11


def test_what_is_wrong_is_named():
    def swapped(frames, block):
        return frames[..., ::-1, :]  # right is left

    part = evaluate.cold_start(ExactPipe(swapped), 12)
    moves = [("right" in video.prompt or "left" in video.prompt) for video in part.videos]
    assert [video.wrong for video in part.videos] == [("direction",) if m else () for m in moves]
    assert 0 < sum(moves) < 12 and part.figures["direction"] == pytest.approx(1 - sum(moves) / 12)
    assert part.figures["all"] == part.figures["direction"]
    videos = np.stack([video.frames for video in part.videos])
    scores = evaluate.score(videos, [video.prompt for video in part.videos])
    assert scores == {fact: part.figures[fact] for fact in evaluate.FACTS}


def test_a_switch_is_timed_and_judged_apart_from_what_must_stay():
    part = evaluate.switches(ExactPipe(), 6)
    assert part.figures["blocks_until_it_holds"] == {str(LAG): 6}
    assert all(part.figures[name] == 1 for name in ("all", "old_motion", "new_motion", "colour", "shape"))
    assert all(a != b for a, b in (video.prompt.split("  ->  ") for video in part.videos))

    def vanishing(frames, block):
        background = np.median(frames, axis=(2, 3), keepdims=True).astype(np.uint8)
        return np.broadcast_to(background, frames.shape) if 5 <= block < 8 else frames

    part = evaluate.switches(ExactPipe(vanishing), 6)
    assert (part.figures["new_motion"], part.figures["colour"], part.figures["all"]) == (1, 0, 0)


def test_a_switch_that_never_shows_fails(monkeypatch):
    monkeypatch.setattr(ExactStream, "set_prompt", lambda *_: None)
    figures = evaluate.switches(ExactPipe(), 4).figures
    assert (figures["all"], figures["new_motion"], figures["blocks_until_it_holds"]) == (0, 0, {"never": 4})
    assert figures["colour"] == figures["shape"] == 1


def test_start_places_tell_seeds_that_differ_from_those_that_do_not():
    spread = evaluate.start_places(ExactPipe(), 24).figures
    assert spread["seen"] == 24 and spread["cells_of_8_pixels"] > 12 and 18 < spread["mean_pixels_apart"] < 31
    same = evaluate.start_places(ExactPipe(start=0), 6).figures
    assert same["mean_pixels_apart"] < 0.5 and same["cells_of_8_pixels"] == 1
    nothing = evaluate.start_places(ExactPipe(lambda frames, block: frames * 0), 4).figures
    assert nothing["seen"] == 0 and nothing["mean_pixels_apart"] == 0


def test_the_vae_is_scored_on_streamed_decoding(word_pipe, monkeypatch):
    figures = evaluate.codec(word_pipe, 2, frames=21, steady=9, batch=1).figures
    assert figures["streams"] == 2 and 0 < figures["psnr_9_to_21_worst_stream"] <= figures["psnr_9_to_21"] < 30
    monkeypatch.setattr(evaluate, "_through_vae", lambda pipe, videos: videos / 127.5 - 1 + 0.02)
    figures = evaluate.codec(word_pipe, 3, frames=21, steady=9, batch=2).figures
    assert figures["psnr_9_to_21"] == pytest.approx(40, abs=0.01)
    assert figures["border_ratio"] == pytest.approx(figures["border_ratio_of_exact_video"], rel=0.05)


def test_failures_are_marked_on_the_sheet(tmp_path):
    frames = np.full((30, 64, 64, 3), 90, np.uint8)
    write_sheet([Row("a", ("shape",), frames), Row("b", (), frames)], tmp_path / "new" / "x.png", columns=3)
    with Image.open(tmp_path / "new" / "x.png") as sheet:
        pixels = np.asarray(sheet).astype(int)
    assert pixels.shape == (160, 6 + 3 * 66, 3) and (pixels[20:60, 10:60] == 90).all()
    (wrong, right) = pixels[40, 0], pixels[120, 0]
    assert wrong[0] > 2 * wrong[1] and right[1] > 2 * right[0]


def test_the_script_writes_scores_and_sheets(word_pipe, word_checkpoint, tmp_path, monkeypatch, capsys):
    words = f"{SCRIPT} {word_checkpoint} --parts seeds,speed --seeds 2 --batch 1 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", words.split())
    monkeypatch.setattr(evaluate, "_start_up", lambda *_: {})
    monkeypatch.setattr(RollingForcingPipeline, "from_pretrained", lambda path, dtype: word_pipe)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stop.value.code == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert list(scores) == ["checkpoint", "seeds", "speed"] and len(scores["seeds"]["failures"]) == 2
    assert scores["speed"]["pixel_fps"] > 0 and 0 < scores["speed"]["checkpoint_mb"] < 2
    with Image.open(tmp_path / "seeds.png") as sheet:
        assert sheet.size == (6 + 12 * 66, 160)
    assert "mean_pixels_apart" in capsys.readouterr().out


def test_mistakes_of_the_script_get_one_line(monkeypatch, capsys):
    for words, expected in {"--parts cold,warm": "no part 'warm'; the parts are", "--batch 0": "--batch 0"}.items():
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words.split()])
        with pytest.raises(SystemExit):
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert expected in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "nowhere"])
    with pytest.raises(SystemExit, match="evaluate: nowhere: no such checkpoint"):
        runpy.run_path(str(SCRIPT), run_name="__main__")

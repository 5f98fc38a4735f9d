"""What a checkpoint says of its use: the size it was trained at is its default, and another one is noticed."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rfjax import RollingForcingPipeline
from rfjax.config import ModelConfig, UseConfig, preset
from rfjax.engine import Engine, Shape
from rfjax.errors import InputError

PROMPT = "a red circle moving right"


def test_the_trained_size_is_the_default_and_says_nothing(word_pipe, caplog, count_compilations):
    word_pipe.warmup()
    with count_compilations() as counts:
        assert word_pipe(PROMPT, num_frames=9, seed=0).frames[0].shape == (9, 64, 64, 3)
        with word_pipe.stream(PROMPT, seed=0) as stream:
            assert (stream.height, stream.width) == (64, 64)
    assert counts == [] and caplog.records == []


@pytest.mark.parametrize(("size", "said"), [({"height": 48, "width": 32}, "32x48"), ({"height": 48}, "64x48")])
def test_another_size_runs_and_gets_one_line(word_pipe, caplog, size, said):
    out = word_pipe(PROMPT, num_frames=9, seed=0, **size)
    assert out.frames[0].shape == (9, 48, size.get("width", 64), 3)
    assert [record.message for record in caplog.records] == [
        f"size {said}: this model was trained at 64x64, at other sizes it may do badly"
    ]


def test_the_release_keeps_its_size_and_takes_any_other_in_silence(pipe, caplog, monkeypatch):
    asked = []
    monkeypatch.setattr(pipe.engine, "executables", asked.append)
    pipe.warmup()
    pipe.warmup(width=96)
    assert asked == [Shape(1, 60, 104), Shape(1, 60, 12)] and caplog.records == []


def test_it_is_kept_in_the_checkpoint_and_may_be_absent(word_pipe, tiny_checkpoint, tmp_path):
    word_pipe.save(tmp_path / "copy")
    copy = RollingForcingPipeline.from_pretrained(tmp_path / "copy", dtype="float32")
    assert copy.config == word_pipe.config and copy.config.use == UseConfig(
        height=64, width=64, fps=16, prompt_hint=word_pipe.config.use.prompt_hint
    )
    model = json.loads((tiny_checkpoint / "config.json").read_text())["model"]
    assert "use" not in model and ModelConfig.from_json(model).use is None


def test_a_stream_goes_on_whatever_is_said_of_the_use(word_pipe, tmp_path):
    with word_pipe.stream(PROMPT, seed=0) as stream:
        next(stream)
        stream.save(tmp_path / "s")
        expected = next(stream).frames
    engine = word_pipe.engine
    silent = Engine(replace(engine.config, use=None), engine.graphs, engine.params, "float32")
    with RollingForcingPipeline(silent, word_pipe.tokenizer).resume(tmp_path / "s") as stream:
        np.testing.assert_array_equal(next(stream).frames, expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"height": 64}, "'use': .*width"),
        ({"height": 64, "width": "64"}, "width is '64'; int above 0 is needed"),
        ({"height": 64, "width": 60}, "use has width 60 and height 64; they must be multiples of 16"),
        ({"height": 64, "width": 64, "fps": 0}, "fps is 0; int above 0"),
        ({"height": 64, "width": 64, "prompt_hint": "a\nb"}, "prompt_hint is .*; text of one line is needed"),
        ({"height": 64, "width": 64, "hint": "a"}, "unknown fields .*hint"),
        (None, "'use' is None"),
    ],
)
def test_a_section_that_was_edited_into_nonsense_is_refused(fields, message):
    data = json.loads(json.dumps(preset("tiny").to_json())) | {"use": fields}
    with pytest.raises(InputError, match=message):
        ModelConfig.from_json(data)

"""The command line as users meet it: what it writes, what it says, and one clear line for every mistake."""

import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import jax
import numpy as np
import pytest
from PIL import Image

from rfjax.cli import main
from rfjax.cli.interrupts import Interrupts
from rfjax.cli.session import use_compile_cache
from rfjax.stream import VideoStream

SIZE = ("--size", "96x64")  # shared with other tests, as compiling takes longest


@pytest.fixture
def cli(pipe, tiny_checkpoint, tmp_path, monkeypatch, capfd):
    """Runs a command in an empty folder, on the session's pipeline: `cli(*words) -> (code, stdout, stderr)`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rfjax.cli.session.use_compile_cache", lambda: None)
    monkeypatch.setattr("rfjax.pipeline.RollingForcingPipeline.from_pretrained", lambda path, dtype, mesh: pipe)

    def run(*words, model=True):
        try:
            code = main([str(word) for word in words] + (["-c", str(tiny_checkpoint)] if model else []))
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def word_cli(cli, word_pipe, word_checkpoint, monkeypatch):
    """Runs a command where the checkpoint that comes with rfjax is its stand-in, on that pipeline."""
    monkeypatch.setattr("rfjax.weights.bundled.bundled_checkpoints", lambda: {"shapes-tiny": word_checkpoint})
    monkeypatch.setattr("rfjax.pipeline.RollingForcingPipeline.from_pretrained", lambda path, dtype, mesh: word_pipe)
    return lambda *words: cli(*words, model=False)


@pytest.fixture
def ctrl_c(monkeypatch):
    """`ctrl_c(n)`: while block n of the next stream is computed, Ctrl-C is pressed (or another signal comes)."""

    compute = VideoStream.__next__

    def arrange(block, number=signal.SIGINT):
        def pressed(stream):
            if stream._next_block == block:
                signal.raise_signal(number)
            return compute(stream)

        monkeypatch.setattr(VideoStream, "__next__", pressed)

    return arrange


@pytest.fixture
def piped(cli, monkeypatch):
    """Runs a command with `-o -` into a pipe: `piped(*words) -> (code, frames, stderr)`."""

    def run(*words):
        with open("pipe", "w") as stdout, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            code, _, err = cli(*words, "-o", "-")
        with av.open("pipe", format="yuv4mpegpipe") as container:
            return code, np.stack([frame.to_ndarray() for frame in container.decode(video=0)]), err

    return run


def read_video(path):
    """Frames [T H W 3], frame rate and pixel format of a video file."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return np.stack(frames), stream.average_rate, stream.pix_fmt


def test_generate_writes_the_exact_video(cli, tmp_path):
    code, out, err = cli("generate", "a red circle", *SIZE, "--num-frames", 21, "--seed", 7, "-o", "x.mp4")
    frames, rate, pixels = read_video("x.mp4")
    assert (code, out) == (0, "")
    assert (frames.shape, rate, pixels) == ((21, 64, 96, 3), 16, "yuv420p")
    assert err.startswith("rfjax: 21 frames of 96x64 in x.mp4, seed 7, ")
    assert os.listdir(tmp_path) == ["x.mp4"]


@pytest.mark.parametrize("command", ["generate", "stream"])
def test_a_mesh_reaches_the_pipeline(cli, pipe, command, monkeypatch):
    meshes = []
    load = lambda path, dtype, mesh: meshes.append(mesh) or pipe  # noqa: E731
    monkeypatch.setattr("rfjax.pipeline.RollingForcingPipeline.from_pretrained", load)
    assert cli(command, "a", *SIZE, "--num-frames", 9, "--mesh", "2x3", "-o", "x.mp4")[0] == 0
    assert [dict(mesh.shape) for mesh in meshes] == [{"data": 1, "seq": 3, "head": 2}]


@pytest.mark.parametrize("command", ["generate", "stream"])
def test_options_that_trade_memory_reach_the_pipeline(cli, pipe, command, monkeypatch):
    given = {}
    load = lambda path, dtype, mesh, **options: given.update(options) or pipe  # noqa: E731
    monkeypatch.setattr("rfjax.pipeline.RollingForcingPipeline.from_pretrained", load)
    options = ["--cache-cut", "head", "--cache-dtype", "float8_e5m2", "--text-encoder", "host"]
    assert cli(command, "a", *SIZE, "--num-frames", 9, *options, "-o", "x.mp4")[0] == 0
    assert given == {"cache_cut": "head", "cache_dtype": "float8_e5m2", "text_encoder": "host"}


@pytest.mark.parametrize(
    ("option", "count", "frames", "dropped"),
    [
        ("--num-frames", 1, 1, 8),
        ("--num-frames", 2, 2, 7),
        ("--num-frames", 80, 80, 1),
        ("--num-latent-frames", 4, 13, 8),
    ],
)
def test_lengths_inside_a_block_are_trimmed_exactly_and_said(cli, option, count, frames, dropped):
    code, _, err = cli("generate", "a red circle", *SIZE, option, count, "--seed", 7, "-o", "x.mp4")
    assert code == 0
    assert len(read_video("x.mp4")[0]) == frames
    assert f"the last {dropped} dropped" in err


def test_default_length_is_81_and_default_name_is_safe(cli, tmp_path):
    code, _, err = cli("generate", "../../a b: Füchse/ *?", *SIZE, "--seed", 3)
    assert code == 0
    assert os.listdir(tmp_path) == ["a-b-fuchse-3.mp4"]
    assert "81 frames" in err


def test_json_summary(cli):
    code, out, err = cli("generate", "a red circle", *SIZE, "--num-frames", 21, "--seed", 7, "-o", "x.mp4", "--json")
    summary = json.loads(out)
    assert (code, err) == (0, "")
    assert summary["pixel_fps"] > 0 and summary["first_frame_s"] > 0
    expected = {"file": "x.mp4", "prompt": "a red circle", "seed": 7, "width": 96, "height": 64, "frames": 21}
    assert summary | expected == summary


def test_a_drawn_seed_is_said_and_makes_the_same_video_again(cli):
    _, out, err = cli("generate", "a red circle", *SIZE, "--num-frames", 9, "-o", "x.mkv", "--json", "--quiet")
    seed = json.loads(out)["seed"]
    assert err == f"rfjax: seed {seed}\n"
    assert cli("generate", "a red circle", *SIZE, "--num-frames", 9, "-o", "y.mkv", "--seed", seed)[0] == 0
    np.testing.assert_array_equal(read_video("x.mkv")[0], read_video("y.mkv")[0])


def test_prompts_file_makes_one_video_a_line(cli):
    Path("prompts.txt").write_text("\ufeffa red circle\n\n  a blue square \n", encoding="utf-8")
    os.mkdir("out")
    code, out, _ = cli(
        "generate", "--prompts_file", "prompts.txt", *SIZE, "--num_frames=9", "--seed", 5, "-o", "out", "--json"
    )
    made = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(m["prompt"], m["seed"]) for m in made] == [("a red circle", 5), ("a blue square", 6)]
    assert sorted(os.listdir("out")) == ["a-blue-square-6.mp4", "a-red-circle-5.mp4"]


def test_prompts_that_the_model_cannot_read_whole_are_said(cli):
    code, _, err = cli("generate", "red " * 100, *SIZE, "--num-frames", 9, "--seed", 1, "-o", "x.mp4")
    assert code == 0 and "longer than 32 tokens" in err
    code, _, err = cli("generate", " ", *SIZE, "--num-frames", 9, "--seed", 1, "-o", "y.mp4")
    assert code == 0 and "an empty prompt" in err


def test_the_first_command_needs_only_a_prompt(word_cli):
    code, _, err = word_cli("generate", "a red circle moving right", "--num-frames", 21, "--seed", 1)
    assert code == 0, err
    assert err.startswith("rfjax: 21 frames of 64x64 in a-red-circle-moving-right-1.mp4") and err.count("\n") == 1
    frames, rate, _ = read_video("a-red-circle-moving-right-1.mp4")
    assert (frames.shape, rate) == ((21, 64, 64, 3), 16)
    code, out, _ = word_cli("info")
    assert code == 0 and "use: height 64, width 64, fps 16, prompt_hint a prompt reads: a COLOUR SHAPE" in out


def test_words_and_sizes_that_the_model_does_not_know_are_one_line_each(word_cli):
    Path("prompts.txt").write_text("a red dragon\na red dragon swimming\na red circle right\n")
    os.mkdir("out")
    code, _, err = word_cli(
        "generate", "--prompts-file", "prompts.txt", "--size", "32x48", "--num-frames", 9, "--seed", 1,
        "-o", "out", "--quiet",
    )  # fmt: skip
    assert code == 0
    size, dragon, swimming = err.splitlines()
    assert size == "rfjax: size 32x48: this model was trained at 64x64, at other sizes it may do badly"
    assert dragon.startswith('rfjax: the prompt has words this model does not know: "dragon"; it knows: a, and, on, ')
    assert '"dragon", "swimming"; it knows' in swimming
    assert all("; a prompt reads: a COLOUR SHAPE MOTION [" in line for line in (dragon, swimming))


def test_files_play_at_the_rate_the_checkpoint_was_trained_at(word_cli, word_checkpoint, monkeypatch):
    shutil.copytree(word_checkpoint, "slow")
    content = json.loads(Path("slow/config.json").read_text())
    content["model"]["use"]["fps"] = 8
    Path("slow/config.json").write_text(json.dumps(content))
    words = ("stream", "a red circle still", "-c", "slow", "--num-frames", 9, "--seed", 1, "-o", "x.mp4")
    assert word_cli(*words)[0] == 0
    assert read_video("x.mp4")[1] == 8


def test_image_begins_the_video(cli):
    _, _, _ = cli("generate", "a red circle", *SIZE, "--num-frames", 9, "--seed", 1, "-o", "first.mp4")
    code, _, err = cli(
        "generate", "a red circle", *SIZE, "--num-frames", 21, "--seed", 1, "-o", "x.mp4", "--video", "first.mp4"
    )
    assert code == 0, err
    assert len(read_video("x.mp4")[0]) == 21
    code, _, err = cli("generate", "a", *SIZE, "--seed", 1, "-o", "first.mp4", "--video", "./first.mp4", "--force")
    assert code == 2 and "--video ./first.mp4: -o is the same file" in err
    assert len(read_video("first.mp4")[0]) == 9


MISTAKES = {
    "size not a multiple": ("--size 100x50", "must be multiples of 16; the nearest valid size is 96x48"),
    "size not a size": ("--size 64", "'64' is not a size; write WIDTHxHEIGHT"),
    "size zero": ("--size 0x32", "size 0x32"),
    "half a size": ("--width 64", "--width and --height go together"),
    "size twice": ("--size 32x32 --width 32 --height 32", "give one of the two"),
    "no frames": ("--num-frames 0", "num_frames=0: the number of frames must be an integer of at least 1"),
    "negative frames": ("--num-frames -1", "num_frames=-1"),
    "frames not a number": ("--num-frames 2.5", "'2.5' is not an integer"),
    "frames twice": ("--num-frames 9 --num-latent-frames 3", "give one of the two"),
    "seed": ("--seed -1", "seed -1 is not an integer from 0 to"),
    "dtype": ("--dtype float64", "float64"),
    "mesh not a mesh": ("--mesh 4by2", "'4by2' is not a mesh; write HEADxSEQ"),
    "heads of a mesh": ("--mesh 5x1", "heads do not divide by head=5; head can be 1, 2"),
    "mesh without devices": ("--mesh 4x4", "a mesh of 1 x 4 x 4 needs 16 devices, there are 8"),
    "width of a mesh": ("--size 80x64 --mesh 1x4", "a width of 80 does not divide among 4 devices; the nearest"),
    "mistyped option": ("--num-frame 9", "--num-frame is not an option of rfjax generate; did you mean --num-frames?"),
    "unknown option": ("--zzz", "--zzz is not an option of rfjax generate; rfjax generate --help lists"),
    "prompt without quotes": ("cat", "unexpected argument 'cat'; put a prompt of several words in quotes"),
    "two prompts": ("--prompt cat", "two prompts, 'a' and 'cat'"),
    "prompt and file": ("--prompts-file prompts.txt", "and one of them only"),
    "ending": ("-o x.avi", "must end in .mp4"),
    "no such folder": ("-o no/x.mp4", "there is no directory 'no'"),
    "no such folder either": ("-o no/", "no/: there is no such folder"),
    "file exists": ("-o here.mp4", "'here.mp4' exists; give another name, or overwrite it (--force"),
    "empty name": ("-o=", "-o/--output: the name is empty"),
    "negative size": ("--size -16x16", "size -16x16"),
    "unlike every option": ("--nope", "--nope is not an option of rfjax generate; rfjax generate --help lists"),
    "folder for an image": ("--image .", "--image .: it is a folder"),
    "longer beginning": ("--image red.png --num-frames 9", "makes the first 9 frames; ask for more than that"),
    "prompt of a broken terminal": ("--prompt \udcff", "UTF-8"),
    "stdout twice": ("-o - --json", "both print on standard output"),
    "no image": ("--image no.png", "--image no.png: there is no such file"),
    "broken image": ("--image here.mp4", "cannot read 'here.mp4'"),
    "image and video": ("--image here.mp4 --video here.mp4", "begins with one of them"),
    "option of the release": ("--use_ema", "--use-ema: weights are chosen when they are converted"),
    "guidance": ("--guidance_scale 5", "--guidance-scale: the model is distilled"),
    "negative prompt": ("--negative-prompt blurry", "--negative-prompt: the model is distilled"),
    "latent frames": ("--num_output_frames=21", "which is --num-latent-frames here"),
    "checkpoint": ("--checkpoint nowhere", "nowhere: no such checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line_and_leaves_no_file(cli, mistake, tiny_checkpoint, monkeypatch):
    def load(*_):
        raise AssertionError("weights are loaded before the mistake is found")

    monkeypatch.setattr("rfjax.pipeline.RollingForcingPipeline.from_pretrained", load)
    words, expected = MISTAKES[mistake]
    Path("here.mp4").write_bytes(b"precious")
    Image.new("RGB", (96, 64), "red").save("red.png")
    common = () if "--size" in words or "--width" in words else SIZE
    model = () if "--checkpoint" in words else ("-c", tiny_checkpoint)
    seed = () if "--seed" in words else ("--seed", 1)
    prompt = () if "\udcff" in words else ("a",)
    code, out, err = cli("generate", *prompt, *common, *model, *seed, *words.split(), model=False)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.startswith("rfjax: ") and err.count("\n") == 1
    assert sorted(os.listdir()) == ["here.mp4", "red.png"] and Path("here.mp4").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a\0b", "NUL"),
        (b"", "prompts.txt has no prompts"),
        (b" \n\n", "has no prompts"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (None, "prompts.txt: No such file"),
    ],
)
def test_prompts_files_that_cannot_be_read(cli, content, expected):
    if content is not None:
        Path("prompts.txt").write_bytes(content)
    code, _, err = cli("generate", "--prompts-file", "prompts.txt", *SIZE)
    assert code == 2 and expected in err and err.count("\n") == 1


def test_commands_without_what_they_need(cli, word_cli):
    for words, expected in {
        (): "required: COMMAND",
        ("paint",): "'paint'",
        ("generate",): "needs a PROMPT",
        ("generate", "a", "-c", "no/where"): "no/where: no such checkpoint",
        ("generate", "a", "-c", "nowhere"): "nowhere: no such checkpoint; rfjax comes with shapes-tiny",
        ("stream",): "stream needs a PROMPT",
        ("convert",): "required: DST",
        ("info", "nowhere"): "nowhere: no such checkpoint",
        ("bench", "--preset", "tiny", "--case", "release-cpu"): "bench takes one of",
        ("convert", "nowhere", "dst"): "nowhere",
        ("stream", "a", "--prompt-at", "soon:b"): "'soon:b' is not FRAME:TEXT",
    }.items():
        code, _, err = cli(*words, model=False)
        assert code == 2 and expected in err and err.count("\n") == 1, err
    code, _, err = cli("stream", *SIZE)
    assert code == 2 and "stream needs a PROMPT" in err


def test_the_pipe_carries_the_video_and_nothing_else(piped):
    code, frames, err = piped("generate", "a", *SIZE, "--num-frames", 21, "--seed", 1)
    assert code == 0 and "21 frames of 96x64 in standard output" in err
    assert frames.shape == (21, 96, 96)  # of 4:2:0: luma above chroma


def test_force_overwrites(cli):
    Path("x.mp4").write_bytes(b"old")
    assert cli("generate", "a", *SIZE, "--num-frames", 9, "--seed", 1, "-o", "x.mp4", "--force")[0] == 0
    assert len(read_video("x.mp4")[0]) == 9


@pytest.fixture
def no_nohup():
    """These tests may run under nohup, which the command would respect."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_a_playable_file(cli, ctrl_c, no_nohup, number, expected):
    ctrl_c(2, number)
    code, _, err = cli("generate", "a", *SIZE, "--seed", 1, "-o", "x.mp4", "--quiet")
    frames = read_video("x.mp4")[0]
    assert code == expected
    assert len(frames) == 9 + 12 + 12
    assert err.startswith("rfjax: stopped; 33 frames of 96x64 in x.mp4, seed 1") and err.count("\n") == 1


def test_a_second_ctrl_c_says_what_is_lost(cli, monkeypatch):
    def pressed_twice(stream):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(VideoStream, "__next__", pressed_twice)
    code, _, err = cli("stream", "a", *SIZE, "--seed", 1, "--save-state", "s")
    assert (code, os.listdir()) == (130, [])
    assert err == "rfjax: interrupted inside a block: the stream is not saved to s\nrfjax: interrupted\n"


def test_imports_are_not_cut():
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.delayed():
            signal.raise_signal(signal.SIGTERM)
            finished = True
    assert finished and interrupts.received == [signal.SIGTERM]


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
        assert interrupts.received == [] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_compile_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        use_compile_cache()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    err = capfd.readouterr().err
    assert err.startswith("rfjax: compiled programs are not kept") and err.count("\n") == 1


def test_ctrl_c_before_the_first_frame_leaves_no_file(cli, monkeypatch):
    monkeypatch.setattr("rfjax.cli.generate.load_pipeline", lambda args, mesh: signal.raise_signal(signal.SIGINT))
    code, _, err = cli("generate", "a", *SIZE, "--seed", 1)
    assert (code, err, os.listdir()) == (130, "rfjax: interrupted\n", [])


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 9 bytes")]
)
def test_a_device_without_room_gets_one_line(cli, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr("rfjax.cli.generate.load_pipeline", full)
    code, _, err = cli("generate", "a", *SIZE, "--seed", 1)
    assert (code, os.listdir()) == (2, [])
    assert "out of memory; use a smaller --size" in err and err.count("\n") == 1


def test_a_stream_changes_its_prompt(cli):
    code, _, err = cli(
        "stream", "a red circle", *SIZE, "--seed", 1, "--num-frames", 45, "-o", "x.mp4",
        "--prompt-at", "30:a blue square", "--prompt-at", "9:a green square", "--prompt-at", "400:never",
    )  # fmt: skip
    assert code == 0
    assert len(read_video("x.mp4")[0]) == 45
    assert "the prompt is now 'a green square'; it can show from frame 9 on" in err
    assert "the prompt is now 'a blue square'; it can show from frame 33 on" in err
    assert "--prompt-at 400:never was not reached" in err


def test_typed_lines_become_prompts(cli, monkeypatch):
    ours, theirs = os.pipe()
    os.write(theirs, b"never seen\na blue square\n\n")
    os.close(theirs)
    with os.fdopen(ours) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        code, _, err = cli("stream", "a", *SIZE, "--seed", 1, "--num-frames", 21, "-o", "x.mp4", "--interactive")
    assert code == 0
    assert "the prompt is now 'a blue square'; it can show from frame 0 on" in err
    assert "no block sees the prompt 'a': 'a blue square' comes before the next one" in err
    assert "no block sees the prompt 'never seen'" in err


def test_a_prompt_after_the_last_block_is_not_announced(cli):
    code, _, err = cli("stream", "a", *SIZE, "--seed", 1, "--num-frames", 9, "-o", "x.mp4", "--prompt-at", "9:late")
    assert code == 0
    assert "is now" not in err and "--prompt-at 9:late was not reached" in err


def test_a_complete_stream_does_not_go_on(cli):
    words = ("stream", "a", *SIZE, "--seed", 1, "--num-frames", 9, "-o", "x.mp4", "--save-state", "s")
    code, _, err = cli(*words)
    assert code == 0 and "saved the stream to s, which is complete" in err
    code, _, err = cli("stream", "--resume", "s", "-o", "y.mp4")
    assert (code, err) == (2, "rfjax: s: the saved stream is complete, with all of its 9 frames\n")


def test_a_stream_without_frames_is_found_before_weights_load(cli, pipe, monkeypatch):
    with pipe.stream("a", height=64, width=96, seed=1, decode=False) as stream:
        stream.save("s")
    monkeypatch.setattr("rfjax.cli.stream.load_pipeline", None)  # not reached
    code, _, err = cli("stream", "--resume", "s", "-o", "y.mp4")
    assert code == 2 and "without frames" in err and err.count("\n") == 1


def test_warnings_are_shown_once(cli, monkeypatch):
    root = logging.getLogger()
    shown = logging.StreamHandler()
    root.addHandler(shown)  # as absl does
    try:
        _, _, err = cli("generate", " ", *SIZE, "--num-frames", 9, "--seed", 1, "-o", "y.mp4")
    finally:
        root.removeHandler(shown)
    assert err.count("an empty prompt") == 1


def test_a_saved_stream_goes_on_as_if_never_stopped(cli, piped, ctrl_c):
    ctrl_c(2)
    whole = piped("stream", "a", *SIZE, "--seed", 1)[1]
    ctrl_c(1)
    code, before, err = piped("stream", "a", *SIZE, "--seed", 1, "--save-state", "s")
    assert code == 130 and "saved the stream to s" in err
    ctrl_c(2)
    code, after, _ = piped("stream", "--resume", "s")
    assert code == 130 and len(before) == 21
    Path("broken").write_bytes(b"broken")
    Path("s.mp4").write_bytes(b"precious")
    np.testing.assert_array_equal(np.concatenate([before, after]), whole)

    for words, expected in {
        ("--resume", "s", "--seed", "2"): "--seed: the saved stream fixes it",
        ("--resume", "no"): "no: there is no such file",
        ("--resume", "broken"): "broken is not a saved stream",
        ("a", "--save-state", "s"): "--save-state s: the file exists",
        ("a", "--save-state", "no/s"): "--save-state no/s",
        ("a", "--save-state", ".", "--force"): "--save-state .: it is a folder",
        ("a", "--save-state", "z.mkv"): "--save-state z.mkv: -o is the same file",
        ("--resume", "s", "-o", "s.mp4"): "'s.mp4' exists",
        ("a", "--prompt-at", "9:b", "--prompt-at", "9:c"): "--prompt-at 9: there are two prompts",
        ("a", "--prompt-at", "٣:x"): "is not FRAME:TEXT",
        ("a", "--prompt-at", "9:x\0"): "NUL",
    }.items():
        output = () if "-o" in words else ("-o", "z.mkv")
        code, _, err = cli("stream", *words, *(SIZE if "a" in words else ()), *output)
        assert code == 2 and expected in err and err.count("\n") == 1, err
    assert not os.path.exists("z.mkv")


def test_convert_and_info(cli, golden):
    code, out, _ = cli("convert", golden / "tiny_a", "ckpt", "--weights", "raw", "--dtype", "bfloat16", model=False)
    assert code == 0 and out.startswith("ckpt: raw weights; dit 1,539,136 parameters in bfloat16")
    code, out, _ = cli("info", "ckpt", "--json", model=False)
    assert code == 0 and json.loads(out)["provenance"]["weights"] == "raw"
    assert "raw" in cli("info", "ckpt", model=False)[1]

    code, _, err = cli("convert", golden / "tiny_a", "ckpt", model=False)
    assert code == 2 and "--force" in err and err.count("\n") == 1
    code, out, _ = cli("convert", golden / "tiny_a", "ckpt", "--force", "--json", model=False)
    assert code == 0 and json.loads(out)["weights"] == "ema"


# The rest runs the program itself.


def run_program(*words, **options):
    command = [sys.executable, "-m", "rfjax", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_help_and_mistakes_need_no_jax():
    script = """
import sys
from rfjax.cli import main
for words in (["--help"], ["generate", "--help"], ["generate", "a", "--zzz"], ["stream", "--size", "3"]):
    try:
        main(words)
    except SystemExit:
        pass
assert not {"jax", "numpy", "av"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("generate a --seed 1 -o - 2>&1 >&-", b"standard output is closed"),
        ("generate --prompts-file - 2>&1 <&-", b"standard input is closed"),
        ("info nowhere 2>&-", b""),
    ],
)
def test_closed_standard_streams(tiny_checkpoint, words, expected):
    model = f"-c {shlex.quote(str(tiny_checkpoint))} --size 32x32" if "generate" in words else ""
    command = f"{shlex.quote(sys.executable)} -m rfjax {words.replace('generate', f'generate {model}')}"
    ran = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert ran.returncode == 2
    assert expected in ran.stdout and ran.stdout.count(b"\n") == bool(expected)


def test_program_stops_at_ctrl_c_and_when_its_reader_leaves(tiny_checkpoint, tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    words = ("stream", "a red circle", "-c", tiny_checkpoint, "--size", "32x32", "--seed", 1)
    program = run_program(*words, "-o", tmp_path / "x.mp4", env=environment)
    while program.poll() is None and not (tmp_path / "x.mp4").exists():
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    out, err = program.communicate()
    assert (program.returncode, out) == (130, b"")
    assert f" {len(read_video(tmp_path / 'x.mp4')[0])} frames of 32x32 ".encode() in err
    assert b"Traceback" not in err
    assert any((tmp_path / "cache" / "rfjax" / "xla").iterdir())

    program = run_program(*words, "-o", "-", env=environment)
    assert program.stdout.read(10) == b"YUV4MPEG2 "
    program.stdout.close()
    assert program.wait() == 0
    assert program.stderr.read().startswith(b"rfjax: ")
    program.stderr.close()

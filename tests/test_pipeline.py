"""The Python API on the tiny release: parity, streaming properties, compilations, bad input."""

from typing import Any

import jax
import numpy as np
import pytest

from rfjax import RollingForcingPipeline
from rfjax.engine import Engine
from rfjax.errors import InputError
from rfjax.rolling.noise import counter_noise
from rfjax.weights.info import describe, info

SIZE = {"height": 64, "width": 96}
PROMPT = "A small red fox walks slowly across the frozen lake."


def frames_of(stream):
    with stream:
        return np.concatenate([chunk.frames for chunk in stream])


@pytest.fixture(scope="module")
def whole(pipe):
    """45 frames in one call."""
    return pipe(PROMPT, num_frames=45, seed=5, **SIZE)


def test_prompt_to_latents_equals_the_release(pipe, load_golden, assert_parity, recorded_noise):
    out = pipe(PROMPT, num_latent_frames=36, noise=recorded_noise("pipeline_F36"), output_type="latent", **SIZE)
    recorded = load_golden("pipeline_F36")[0]["output"][0]
    assert_parity("latents, 36 frames, from the prompt", out.frames[0], recorded, 2e-5)


def test_latents_to_pixels_equal_the_release(pipe, load_golden, assert_parity):
    # The release's 6-frame latents are of a half-denoised video, but their decoding is a golden all the same.
    arrays, _ = load_golden("pipeline_F6")
    from rfjax.engine import Shape

    shape = Shape(1, 8, 12)
    run, latents = pipe.engine.executables(shape), arrays["output"]
    first, state = run.decode_first(pipe.engine.params["vae"], latents[:, :3])
    later, _ = run.decode_next(pipe.engine.params["vae"], latents[:, 3:], state)
    video = np.concatenate([first.unit[0], later.unit[0]]) * 0.5 + 0.5
    expected = arrays["video_u16"][0].transpose(0, 2, 3, 1) / 65535
    assert_parity("pixels, 0 to 1 (recorded in 16 bits)", video, expected, 2e-5)


def test_streamed_equals_whole(pipe, whole):
    with pipe.stream(PROMPT, 45, seed=5, **SIZE) as stream:
        chunks = list(stream)
    assert [chunk.index for chunk in chunks] == [0, 1, 2, 3]
    assert [chunk.first_frame for chunk in chunks] == [0, 9, 21, 33]
    assert [len(chunk.frames) for chunk in chunks] == [9, 12, 12, 12]
    assert all(chunk.prompt == PROMPT and chunk.latents.shape == (3, 16, 8, 12) for chunk in chunks)
    streamed = np.concatenate([chunk.frames_float for chunk in chunks])
    np.testing.assert_array_equal(streamed, whole.frames[0])
    assert whole.frames[0].shape == (45, 64, 96, 3) and whole.frames[0].dtype == np.float32
    assert whole.frames[0].min() >= 0 and whole.frames[0].max() <= 1
    eight_bit = np.concatenate([chunk.frames for chunk in chunks])
    assert eight_bit.dtype == np.uint8
    np.testing.assert_allclose(eight_bit / 255, streamed, rtol=0, atol=0.51 / 255)


def test_the_same_seed_gives_the_same_video_and_another_another(pipe, whole):
    assert whole.seed == 5
    np.testing.assert_array_equal(pipe(PROMPT, num_frames=45, seed=5, **SIZE).frames[0], whole.frames[0])
    assert np.abs(pipe(PROMPT, num_frames=45, seed=6, **SIZE).frames[0] - whole.frames[0]).max() > 0.1


def test_a_longer_video_begins_the_same(pipe, whole):
    """Up to the blocks that the end of the video comes near to: they see other neighbours."""
    endless = pipe.stream(PROMPT, seed=5, **SIZE)
    first = next(endless)
    np.testing.assert_array_equal(next(pipe.stream(PROMPT, 9 + 12 * 20, seed=5, **SIZE)).frames, first.frames)


def test_interleaved_streams_equal_isolated_ones(pipe):
    prompts = ["a red fox", "a paper boat"]
    alone = [frames_of(pipe.stream(p, 33, seed=i, **SIZE)) for i, p in enumerate(prompts)]
    streams = [pipe.stream(p, 33, seed=i, **SIZE) for i, p in enumerate(prompts)]
    pairs = list(zip(*streams, strict=True))
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate([pair[i].frames for pair in pairs]), alone[i])


def test_a_batch_item_equals_its_solo_run(pipe, whole):
    both = pipe([PROMPT, "a paper boat"], num_frames=45, seed=5, **SIZE)
    assert both.seed == [5, 6] and len(both.frames) == 2
    np.testing.assert_allclose(both.frames[0], whole.frames[0], rtol=0, atol=2e-5)
    boat = pipe("a paper boat", num_frames=45, seed=6, **SIZE)
    np.testing.assert_allclose(both.frames[1], boat.frames[0], rtol=0, atol=2e-5)


def test_nothing_compiles_after_warm_up(pipe, count_compilations):
    pipe.warmup(**SIZE)
    before = pipe.engine.compilations
    with count_compilations() as counts:
        frames_of(pipe.stream(PROMPT, 9 + 12 * 6, seed=1, **SIZE))  # ramp-up, steady state, ramp-down
        with pipe.stream("a second prompt", seed=2, **SIZE) as stream, pipe.stream("a third", 21, **SIZE) as other:
            next(stream)
            stream.set_prompt("something else")
            next(other)
            next(stream)
    assert counts == [] and pipe.engine.compilations == before


def test_a_resolution_costs_one_step_and_two_decoders(tiny_checkpoint):
    pipe = RollingForcingPipeline.from_pretrained(tiny_checkpoint, dtype="float32")
    pipe.warmup(32, 32)
    assert pipe.engine.compilations == 5  # text encoder, text keys and values, step, first and later decode
    pipe.warmup(32, 48)
    assert pipe.engine.compilations == 9  # the text encoder serves every resolution
    pipe.warmup(32, 32)
    assert pipe.engine.compilations == 9


def test_a_new_prompt_shows_from_the_frame_it_says(pipe):
    unchanged = frames_of(pipe.stream(PROMPT, 57, seed=9, **SIZE))
    with pipe.stream(PROMPT, 57, seed=9, **SIZE) as stream:
        chunks = [next(stream), next(stream)]
        first = stream.set_prompt("a paper boat")
        chunks += list(stream)
    changed = np.concatenate([chunk.frames for chunk in chunks])
    assert first == 21 == chunks[2].first_frame
    np.testing.assert_array_equal(changed[:first], unchanged[:first])
    difference = np.abs(changed.astype(int) - unchanged).max(axis=(1, 2, 3))
    assert (difference[first:] > 0).all()
    assert [chunk.prompt for chunk in chunks] == [PROMPT, PROMPT, *["a paper boat"] * 3]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_saved_stream_goes_on_bit_for_bit(pipe, tmp_path, after):
    path = tmp_path / "stream.safetensors"
    with pipe.stream(PROMPT, 57, seed=4, **SIZE) as stream:
        for _ in range(after):
            next(stream)
        stream.set_prompt("a lighthouse")
        stream.save(path)
        expected = [(chunk.index, chunk.frames) for chunk in stream]
    with pipe.resume(path) as resumed:
        assert resumed.seed == 4 and resumed.prompt == "a lighthouse"
        got = [(chunk.index, chunk.frames) for chunk in resumed]
    assert [index for index, _ in got] == [index for index, _ in expected] == list(range(after, 5))
    for (_, ours), (_, theirs) in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [file.name for file in tmp_path.iterdir()] == ["stream.safetensors"]
    about = info(path)
    assert about["what"] == "saved stream" and about["stream"]["next_block"] == after
    assert "saved stream" in describe(about) and "prompt: a lighthouse" in describe(about)


def test_a_conditioned_stream_can_be_saved_at_its_beginning(pipe, tmp_path):
    image = np.full((64, 96, 3), 0.5)
    with pipe.stream(PROMPT, 33, seed=4, image=image, **SIZE) as stream:
        stream.save(tmp_path / "s")
        expected = np.concatenate([chunk.frames for chunk in stream])
    np.testing.assert_array_equal(frames_of(pipe.resume(tmp_path / "s")), expected)


@pytest.mark.parametrize(("n_frames", "n_blocks"), [(1, 1), (2, 1), (9, 1), (10, 2), (80, 7), (81, 7)])
def test_any_number_of_frames_is_exact(pipe, caplog, n_frames, n_blocks):
    chunks = []
    out = pipe(PROMPT, n_frames, seed=0, callback_on_block_end=lambda *args: chunks.append(args), **SIZE)
    assert len(out.frames[0]) == n_frames
    assert [(p is pipe, index, chunk.index) for p, index, chunk in chunks] == [(True, i, i) for i in range(n_blocks)]
    whole = 9 + 12 * (n_blocks - 1)
    said = [r.message for r in caplog.records]
    assert said == ([] if whole == n_frames else [
        f"a length of {n_frames} frame{'s' * (n_frames > 1)} ends inside a block: {whole} are generated and the last "
        f"{whole - n_frames} dropped"
    ])  # fmt: skip


def test_latent_length_is_exact(pipe):
    out = pipe(PROMPT, num_latent_frames=7, seed=0, output_type="latent", **SIZE)
    assert out.frames[0].shape == (7, 16, 8, 12) and out.frames[0].dtype == np.float32
    assert pipe(PROMPT, num_latent_frames=7, seed=0, **SIZE).frames[0].shape == (25, 64, 96, 3)


def test_pil_output(pipe, whole):
    images = pipe(PROMPT, num_frames=45, seed=5, output_type="pil", **SIZE).frames[0]
    assert len(images) == 45 and images[0].size == (96, 64)
    np.testing.assert_allclose(np.asarray(images[7]) / 255, whole.frames[0][7], rtol=0, atol=0.51 / 255)


def test_an_image_becomes_the_clean_first_block(pipe):
    image = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    with pipe.stream(PROMPT, 45, seed=3, image=image, **SIZE) as stream:
        chunks = list(stream)
    assert [chunk.first_frame for chunk in chunks] == [0, 9, 21, 33]
    given = pipe.engine.encode_video(np.repeat(image[None, None], 9, axis=1).astype(np.float32) / 127.5 - 1)
    np.testing.assert_array_equal(chunks[0].latents, given[0])
    # What follows depends on it, on the prompt and on the seed.
    for other in ({"image": image[::-1]}, {"prompt": "a boat"}, {"seed": 4}):
        arguments = {"prompt": PROMPT, "num_frames": 45, "seed": 3, "image": image} | SIZE | other
        second = list(pipe.stream(**arguments))[1]
        assert np.abs(second.latents - chunks[1].latents).max() > 1e-3


def test_a_length_is_checked_before_anything_is_encoded(pipe, monkeypatch):
    monkeypatch.setattr(pipe.engine, "encode_video", None)
    with pytest.raises(InputError, match="fills 1 block, the whole video is to have 1; ask for at least 10 frames"):
        pipe.stream(PROMPT, 9, seed=0, image=np.zeros((64, 96, 3)), **SIZE)


def test_a_given_video_goes_on_from_its_end(pipe, caplog):
    video = np.random.default_rng(1).random((23, 64, 96, 3))
    chunks = list(pipe.stream(PROMPT, 33, seed=3, video=video, **SIZE))
    assert [r.message for r in caplog.records] == [
        "of the given video's 23 frames the last 21 are used: they fill whole blocks"
    ]
    pixels = np.rint(video[None, 2:] * 255).astype(np.float32) / 127.5 - 1
    given = pipe.engine.encode_video(pixels)[0]
    np.testing.assert_array_equal(np.concatenate([chunk.latents for chunk in chunks[:2]]), given)
    assert len(chunks) == 3 and np.isfinite(chunks[2].latents).all()


def test_a_closed_stream_says_so(pipe):
    with pipe.stream(PROMPT, seed=0, **SIZE) as stream:
        next(stream)
    for use in (
        stream.__enter__,
        lambda: next(stream),
        lambda: stream.set_prompt("x"),
        lambda: stream.save("nowhere"),
    ):
        with pytest.raises(InputError, match="closed"):
            use()


def test_a_finished_stream_stops_and_stays_stopped(pipe):
    stream = pipe.stream(PROMPT, 9, seed=0, **SIZE)
    assert len(list(stream)) == 1 and list(stream) == []
    with pytest.raises(InputError, match="all of its 9 frames"):
        stream.set_prompt("too late")


def test_what_things_are_can_be_read(pipe):
    stream = pipe.stream(PROMPT, 21, seed=0, **SIZE)
    next(stream)
    chunk = next(stream)
    assert repr(pipe) == "<RollingForcingPipeline of width 192, 3 layers, float32>"
    assert repr(stream) == f"<VideoStream 96x64, frame 21 of 21, prompt {PROMPT!r}>"
    assert repr(chunk) == f"<Chunk 1: frames 9 to 20, prompt {PROMPT!r}>"
    assert chunk.frames is chunk.frames
    with pytest.raises(TypeError):
        stream.metadata["seed"] = 1


def test_a_missing_seed_is_drawn_printed_and_returned(pipe, capsys):
    out = pipe(PROMPT, num_frames=9, output_type="latent", **SIZE)
    assert capsys.readouterr().err == f"rfjax: seed {out.seed}\n"
    again = pipe(PROMPT, num_frames=9, output_type="latent", seed=out.seed, **SIZE)
    np.testing.assert_array_equal(out.frames[0], again.frames[0])


def test_a_long_prompt_is_cut_and_an_empty_one_noticed(pipe, caplog):
    pipe(" ".join(["fox"] * 60), num_frames=9, seed=0, output_type="latent", **SIZE)
    pipe("", num_frames=9, seed=0, output_type="latent", **SIZE)
    cut, empty = (record.message for record in caplog.records)
    assert "longer than 32 tokens" in cut and "ignored" in cut
    assert empty == "an empty prompt: the video will follow no text"


def test_an_injected_noise_is_used_for_whole_blocks_only(pipe):
    calls = []
    inner = counter_noise(0, (3, 16, 8, 12))

    def noise(block, step):
        calls.append((block, step))
        return inner(block, step)

    out = pipe(PROMPT, num_frames=21, noise=noise, output_type="latent", **SIZE)
    assert sorted(calls) == [(block, step) for block in range(2) for step in range(5)]
    assert out.seed is None and pipe.stream(["a", "b"], 9, noise=noise, **SIZE).seed is None
    same = pipe(PROMPT, num_frames=21, seed=0, output_type="latent", **SIZE)
    np.testing.assert_array_equal(out.frames[0], same.frames[0])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"height": 50}, "size 96x50: .* multiples of 16; the nearest valid size is 96x48"),
    ({"width": 0}, "size 0x64: .* nearest valid size is 16x64"),
    ({"width": -16}, "size -16x64"),
    ({"width": 96.0}, "must be integers"),
    ({"num_frames": 0}, "num_frames=0: .* at least 1"),
    ({"num_frames": -1}, "num_frames=-1: .* at least 1"),
    ({"num_frames": 8.5}, "num_frames=8.5"),
    ({"num_latent_frames": 0}, "num_latent_frames=0"),
    ({"num_frames": 9, "num_latent_frames": 3}, "give one of the two"),
    ({"prompt": None}, "prompt None"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", 3]}, "prompt"),
    ({"seed": -1}, "seed -1"),
    ({"seed": 1.5}, "seed 1.5"),
    ({"seed": [1, 2]}, "2 seeds for 1 prompt;"),
    ({"prompt": "a \ud83d fox"}, "not UTF-8"),
    ({"prompt": "a\0fox"}, "NUL"),
    ({"height": 2**40}, "at most 16384 pixels"),
    ({"noise": 5}, "noise 5 is no function"),
    ({"noise": lambda block, step: np.full((3, 16, 8, 12), np.nan, np.float32)}, "not finite"),
    ({"callback_on_block_end": 5}, "callback_on_block_end 5"),
    ({"video": [np.zeros((64, 96, 3)), np.zeros((64, 80, 3))]}, "frames of one size"),
    ({"seed": 1, "noise": lambda block, step: None}, "both given"),
    ({"noise": lambda block, step: np.zeros((3, 16, 8, 12))}, r"noise\(0, 0\) gave float64"),
    (
        {"noise": lambda block, step: np.zeros((3, 16, 8, 8), np.float32)},
        r"noise\(0, 0\) gave float32 \[3, 16, 8, 8\]",
    ),
    ({"guidance_scale": 5.0}, "guidance_scale=5.0: .* distilled"),
    ({"negative_prompt": "ugly"}, "negative_prompt='ugly': .* distilled"),
    ({"image": "missing.png"}, "missing.png"),
    ({"image": np.zeros((3, 4))}, "shape"),
    ({"image": np.zeros((2, 64, 96, 3))}, "3 axes are needed"),
    ({"image": np.zeros((64, 96, 3)), "video": np.zeros((9, 64, 96, 3))}, "both image and video"),
    ({"video": np.zeros((8, 64, 96, 3))}, "has 8 frames; at least 9 are needed"),
    ({"video": np.zeros((1, 64, 96, 3))}, "has 1 frame;"),
    ({"video": np.zeros((21, 64, 96, 3)), "num_frames": 21}, "ask for at least 22 frames"),
    ({"output_type": "pt"}, "output_type 'pt'"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[str(list(b)) + str(i) for i, (b, _) in enumerate(BAD)])
def test_bad_input_gets_one_clear_line(pipe, bad, message):
    valid: dict[str, Any] = {"prompt": PROMPT, "height": 64, "width": 96, "seed": None if "noise" in bad else 0}
    with pytest.raises(InputError, match=message) as caught:
        pipe(**(valid | bad))
    assert "\n" not in str(caught.value)


def test_guidance_of_one_is_what_the_model_does(pipe):
    pipe(PROMPT, num_frames=1, seed=0, guidance_scale=1.0, output_type="latent", **SIZE)


def test_a_broken_or_foreign_snapshot_is_refused(pipe, tiny_checkpoint, tmp_path):
    path = tmp_path / "s"
    with pytest.raises(InputError, match="no such file"):
        pipe.resume(path)
    with pipe.stream(PROMPT, seed=0, **SIZE) as stream:
        stream.save(path)
        with pytest.raises(InputError, match="cannot write"):
            stream.save(tmp_path / "no" / "folder")
    with pytest.raises(InputError, match="pass no noise"):
        pipe.resume(path, noise=lambda block, step: None)
    half = RollingForcingPipeline.from_pretrained(tiny_checkpoint, dtype="bfloat16")
    with pytest.raises(InputError, match="with dtype float32, this one has bfloat16"):
        half.resume(path)
    with pytest.raises(InputError, match="folder"):
        pipe.resume(tmp_path)
    whole = path.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole.replace(b'next_block\\": 0', b'next_block\\": 5')):
        assert damaged != whole
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="damaged: its checksum differs"):
            pipe.resume(path)
    path.write_bytes(whole[:-1000])
    with pytest.raises(InputError, match="damaged"):
        pipe.resume(path)
    path.write_bytes(b"<html>")
    with pytest.raises(InputError, match="not a saved stream"):
        pipe.resume(path)


def test_a_stream_goes_on_with_its_own_weights_only(pipe, tmp_path):
    with pipe.stream(PROMPT, seed=0, **SIZE) as stream:
        stream.save(tmp_path / "s")
    engine = pipe.engine
    same = Engine(pipe.config, engine.graphs, jax.tree.map(np.array, engine.params), "float32")
    assert same.fingerprint == engine.fingerprint
    others = engine.params | {"dit": jax.tree.map(lambda leaf: np.nextafter(leaf, 1), engine.params["dit"])}
    other = Engine(pipe.config, engine.graphs, others, "float32")
    with pytest.raises(InputError, match="with weights .* this one has"):
        RollingForcingPipeline(other, pipe.tokenizer).resume(tmp_path / "s")


def test_a_saved_stream_disturbs_no_other_file(pipe, tmp_path):
    target, link, bystander = tmp_path / "target", tmp_path / "link", tmp_path / "link.partial"
    bystander.write_text("mine")
    link.symlink_to(target)
    seeds = [np.int64(1), np.int64(2)]
    with pipe.stream(["a", "b"], seed=seeds, **SIZE) as stream:
        assert all(type(seed) is int for seed in stream.seed)
        stream.save(link)
    assert link.is_symlink() and bystander.read_text() == "mine" and len(list(tmp_path.iterdir())) == 3
    assert target.stat().st_mode == bystander.stat().st_mode
    assert pipe.resume(link).seed == [1, 2]


@pytest.mark.parametrize("path", [None, "", "a" * 300, 5])
def test_a_bad_path_is_refused(pipe, path):
    uses = [lambda: pipe.stream(PROMPT, seed=0, **SIZE).save(path), lambda: pipe.resume(path)]
    uses += [lambda: pipe.save(path), lambda: pipe.from_pretrained(path)]
    for use in uses:
        with pytest.raises(InputError):
            use()


@pytest.mark.parametrize("batch", [0, "1", 1.0])
def test_a_bad_batch_is_refused(pipe, batch):
    with pytest.raises(InputError, match="batch="):
        pipe.warmup(**SIZE, batch=batch)


def test_bfloat16_follows_float32(pipe, tiny_checkpoint):
    half = RollingForcingPipeline.from_pretrained(tiny_checkpoint)  # bfloat16 is the default
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half.engine.params["dit"])} == {"bfloat16", "float32"}
    ours = half(PROMPT, num_frames=21, seed=0, **SIZE).frames[0]
    theirs = pipe(PROMPT, num_frames=21, seed=0, **SIZE).frames[0]
    assert 0 < np.abs(ours - theirs).mean() < 0.02


def test_a_saved_pipeline_is_the_same_pipeline(pipe, tmp_path):
    pipe.save(tmp_path / "copy")
    with pytest.raises(InputError):
        pipe.save(tmp_path / "copy")
    copy = RollingForcingPipeline.from_pretrained(tmp_path / "copy", dtype="float32")
    out, again = (p(PROMPT, num_frames=9, seed=0, output_type="latent", **SIZE).frames[0] for p in (pipe, copy))
    np.testing.assert_array_equal(out, again)


@pytest.mark.parametrize(("path", "dtype"), [("/nowhere", "float32"), (None, "float16"), (None, "int8"), (None, "")])
def test_a_bad_checkpoint_or_dtype_is_refused(tiny_checkpoint, path, dtype):
    with pytest.raises(InputError):
        RollingForcingPipeline.from_pretrained(path or tiny_checkpoint, text_dtype=dtype)


def test_an_interrupt_leaves_a_stream_that_works_or_says_it_is_closed(pipe, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    stream = pipe.stream(PROMPT, seed=0, **SIZE)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr("rfjax.stream.plan_step", interrupt)  # before the step has taken the caches over
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert next(stream).index == 1
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipe.engine, "step", interrupt)
        next(stream)
    with pytest.raises(InputError, match="closed"):
        next(stream)

"""Streams that join and leave a running batch: each is the stream it would be alone, and nothing compiles."""

import numpy as np
import pytest

from rfjax import InputError, RollingForcingPipeline, make_mesh

SIZE = {"height": 64, "width": 96}
FOX, BOAT, WOLF = ("a red fox", 3), ("a paper boat on a pond", 8), ("a grey wolf in the snow", 2**40)


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)


def run(slots, steps=1, into=None):
    """Steps, and what came of them: stream -> chunks."""
    chunks = {} if into is None else into
    for _ in range(steps):
        for stream, chunk in slots.step():
            chunks.setdefault(stream, []).append(chunk)
    return chunks


def joined(chunks):
    return tuple(np.concatenate([getattr(c, name) for c in chunks]) for name in ("latents", "frames_float"))


@pytest.fixture(scope="module")
def alone(pipe):
    """`alone(prompt, seed, n_frames, **more)`: latents and pixels of a stream that has a slot batch to itself."""

    def video(prompt, seed, num_frames, **more):
        with pipe.slots(3, **SIZE) as slots:
            stream = slots.join(prompt, num_frames, seed, **more)
            chunks = {}
            while stream.running:
                run(slots, into=chunks)
            return joined(chunks[stream])

    return video


def test_who_else_is_there_makes_no_difference(pipe, alone, image, count_compilations):
    pipe.slots(3, **SIZE).close()
    with pipe.slots(3, **SIZE) as slots:
        slots.join("first of all", seed=1)  # leaves its keys and values behind
        run(slots, 7)
        slots.streams[0].leave()
        pipe.stream(FOX[0], 21, seed=0, **SIZE, image=image)  # compiles the encoder for an image
        with count_compilations() as counts:
            fox = slots.join(FOX[0], 69, FOX[1])
            chunks = run(slots, 2)
            boat = slots.join(BOAT[0], None, BOAT[1])
            run(slots, 4, chunks)
            still = slots.join("an old barn", 45, 5, image=image)
            while fox.running:
                run(slots, into=chunks)
            wolf = slots.join(WOLF[0], 30, WOLF[1])  # takes the fox's slot over
            assert wolf.slot == fox.slot
            while wolf.running:
                run(slots, into=chunks)
        assert counts == []
        assert slots.streams == [boat] and not still.running
    longer = boat.frames_done + 48  # the end of a video is made otherwise than the middle of an endless one
    for stream, asked in ((fox, (*FOX, 69)), (wolf, (*WOLF, 30)), (boat, (*BOAT, longer))):
        for ours, theirs in zip(joined(chunks[stream]), alone(*asked), strict=True):
            np.testing.assert_array_equal(ours, theirs[: len(ours)])
    for ours, theirs in zip(joined(chunks[still]), alone("an old barn", 5, 45, image=image), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("given", [False, True])
def test_a_slot_makes_the_video_of_a_stream(pipe, alone, image, given):
    more = {"image": image} if given else {}
    with pipe.stream(*FOX[:1], 69, seed=FOX[1], **SIZE, **more) as stream:
        chunks = list(stream)
    for ours, theirs in zip(alone(*FOX, 69, **more), joined(chunks), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def test_chunks_say_what_they_are(pipe):
    with pipe.slots(2, **SIZE) as slots:
        fox = slots.join(FOX[0], 30, FOX[1])
        assert run(slots, 4) == {}  # the ramp-up
        chunks = run(slots, 3)[fox]
    assert [(c.index, c.first_frame, len(c.frames), c.prompt) for c in chunks] == [
        (0, 0, 9, FOX[0]), (1, 9, 12, FOX[0]), (2, 21, 9, FOX[0]),
    ]  # fmt: skip
    assert fox.frames_done == 30 and fox.seed == FOX[1] and not fox.running


def test_a_prompt_changes_one_stream(pipe):
    def videos(change):
        with pipe.slots(2, **SIZE) as slots:
            fox, boat = slots.join(*FOX[:1], seed=FOX[1]), slots.join(*BOAT[:1], seed=BOAT[1])
            chunks = run(slots, 6)
            if change:
                fox.set_prompt("a blue whale")
            run(slots, 6, chunks)
            return joined(chunks[fox])[0], joined(chunks[boat])[0], chunks[fox][-1].prompt

    (fox, boat, _), (other, same, prompt) = videos(False), videos(True)
    np.testing.assert_array_equal(boat, same)
    np.testing.assert_array_equal(fox[:6], other[:6])
    assert np.abs(fox[6:] - other[6:]).max() > 0.1 and prompt == "a blue whale"


def test_on_a_mesh_with_a_data_axis(pipe, tiny_checkpoint, alone, count_compilations):
    meshed = RollingForcingPipeline.from_pretrained(
        tiny_checkpoint, dtype="float32", mesh=make_mesh(data=2, head=2, seq=1)
    )
    with meshed.slots(2, **SIZE) as slots, count_compilations() as counts:
        fox = slots.join(FOX[0], 33, FOX[1])
        chunks = run(slots, 2)
        boat = slots.join(BOAT[0], 33, BOAT[1])
        while slots.streams:
            run(slots, into=chunks)
    assert counts == []
    for stream, asked in ((fox, FOX), (boat, BOAT)):
        for ours, theirs in zip(joined(chunks[stream]), alone(*asked, 33), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def test_what_is_refused(pipe):
    with pipe.slots(2, **SIZE) as slots:
        with pytest.raises(InputError, match="no stream is there; let one join"):
            slots.step()
        with pytest.raises(InputError, match="a slot has one prompt"):
            slots.join(["a", "b"])  # pyright: ignore[reportArgumentType]
        fox = slots.join("a fox", seed=1)
        slots.join("a boat", seed=2)
        with pytest.raises(InputError, match="all 2 slots are taken"):
            slots.join("a wolf")
        fox.leave()
        with pytest.raises(InputError, match="has left its slot"):
            fox.set_prompt("a whale")
        with pytest.raises(InputError, match="seed -1"):
            slots.join("a wolf", seed=-1)
        assert len(slots.streams) == 1
    with pytest.raises(InputError, match="closed"):
        slots.join("a wolf")
    with pytest.raises(InputError, match="count"):
        pipe.slots(0, **SIZE)

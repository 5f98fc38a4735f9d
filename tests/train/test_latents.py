"""Data sets of encoded videos: what is written is read, and what is none is told in a line."""

from itertools import repeat

import numpy as np
import pytest

from rfjax.errors import InputError
from rfjax.train import latents
from rfjax.train.latents import Video


def video(seed=0, frames=6, prompts=("a", "b"), start=((1, 2),)):
    values = np.random.default_rng(seed).standard_normal((frames, 4, 2, 3)).astype(np.float16)
    return Video(values, list(prompts), np.array(start, np.int64).reshape(-1, 2))


def test_round_trip(tmp_path):
    videos = [video(0), video(1, prompts=("b", "c"), start=((0, 0), (1, 1))), video(2, start=())]
    latents.write(tmp_path, iter(videos[:1]), 1)
    latents.write(tmp_path, iter(videos[1:]), 5)  # fewer come
    data = latents.read(tmp_path)
    assert len(data) == 3
    assert (data.latents == np.stack([v.latents for v in videos])).all()
    assert [[data.prompts[i] for i in row] for row in data.prompt_ids] == [["a", "b"], ["b", "c"], ["a", "b"]]
    assert data.start.tolist() == [[[1, 2], [-1, -1]], [[0, 0], [1, 1]], [[-1, -1], [-1, -1]]]


def test_start_may_be_left_out(tmp_path):
    np.savez(tmp_path / "x.npz", latents=video().latents, prompts=np.array(["a"]))
    assert (latents.read(tmp_path).start == -1).all()


def test_a_killed_writer_leaves_no_half_video(tmp_path):
    def cut():
        yield video()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        latents.write(tmp_path, cut(), 2)
    (tmp_path / "00001.part").write_bytes(b"half")
    latents.write(tmp_path, repeat(video(1)), 1)
    assert len(latents.read(tmp_path)) == 2
    assert not list(tmp_path.glob("*.part"))


def test_no_data_is_told(tmp_path):
    with pytest.raises(InputError, match=r"no encoded videos \(\*\.npz\) in"):
        latents.read(tmp_path / "nowhere")


def test_videos_of_two_shapes_are_refused(tmp_path):
    latents.write(tmp_path, iter([video(), video(frames=4)]), 2)
    with pytest.raises(InputError, match=r"differ in shape: \[4, 4, 2, 3\] with 2 prompts, \[6, 4, 2, 3\]"):
        latents.read(tmp_path)


GOOD = {"latents": np.zeros((6, 4, 2, 3), np.float16), "prompts": np.array(["a", "b"])}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"latents": np.zeros((6, 4, 2, 3), np.int32)}, "latents are int32"),
        ({"latents": np.zeros((4, 2, 3), np.float32)}, r"not floating-point \[F, C, h, w\]"),
        ({"latents": np.full((6, 4, 2, 3), np.nan, np.float32)}, "not finite"),
        ({"prompts": np.array(["a"] * 4)}, "4 prompts do not divide 6 latent frames"),
        ({"start": np.array([[2, 0]])}, "start lies outside"),
        ({"start": np.zeros((3, 2), int)}, r"start is int64 \[3, 2\], not int \[N, 2\] with N up to 2"),
        ({"prompts": None}, "prompts is not a file"),
    ],
)
def test_what_is_no_video_is_told_with_its_file(change, message, tmp_path):
    arrays = {name: array for name, array in (GOOD | change).items() if array is not None}
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(InputError, match=rf"x\.npz is no encoded video.*{message}"):
        latents.read(tmp_path)


def test_a_damaged_file_is_told(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK")
    with pytest.raises(InputError, match=r"x\.npz is no encoded video"):
        latents.read(tmp_path)

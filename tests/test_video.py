"""Video files: colours, tags, what is left after a failure, pipes; and images and videos read back."""

import io
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from fractions import Fraction

import av
import numpy as np
import pytest

from rfjax.errors import InputError
from rfjax.video import VideoWriter, fit, read_image, read_video, safe_stem, to_pixels

HEIGHT, WIDTH = 64, 96
FORMATS = [".mp4", ".mkv", ".webm"]
SATURATED = np.array([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 0, 0), (255, 255, 255)], np.uint8)


def flat_frames(colour, count=1):
    return np.broadcast_to(np.asarray(colour, np.uint8), (count, HEIGHT, WIDTH, 3))


def moving_frames(count):
    """A bright square that takes one step a frame."""
    frames = np.full((count, HEIGHT, WIDTH, 3), 40, np.uint8)
    for i in range(count):
        left = 2 * (i % 32)
        frames[i, 16:48, left : left + 16] = 220
    return frames


def yuv(colour, kr, kb):
    """Limited-range integers of ITU-R BT.601 or BT.709."""
    r, g, b = (float(c) / 255 for c in colour)
    y = kr * r + (1 - kr - kb) * g + kb * b
    return 16 + 219 * y, 128 + 112 * (b - y) / (1 - kb), 128 + 112 * (r - y) / (1 - kr)


def planes(frame):
    i420 = frame.to_ndarray(format=frame.format.name).reshape(-1)
    pixels = frame.height * frame.width
    return i420[:pixels], i420[pixels : pixels * 5 // 4], i420[pixels * 5 // 4 :]


def write(path, frames, **options):
    with VideoWriter(path, *frames.shape[1:3], **options) as writer:
        writer.write(frames)


# Writing files


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("colour", SATURATED, ids=str)
def test_colours_are_bt709(tmp_path, ending, colour):
    path = tmp_path / f"flat{ending}"
    write(path, flat_frames(colour, 3))
    with av.open(path) as container:
        frame = next(container.decode(video=0))
    for plane, expected in zip(planes(frame), yuv(colour, 0.2126, 0.0722), strict=True):
        np.testing.assert_allclose(plane, expected, atol=1.5)


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_has_its_tags_size_rate_and_frames(tmp_path, ending):
    path = tmp_path / f"video{ending}"
    with VideoWriter(path, HEIGHT, WIDTH, title="a fox, naïve", comment='{"seed": 3}') as writer:
        for frames in np.split(moving_frames(33), [9, 21]):
            writer.write(frames)
        assert writer.num_frames == 33
    with av.open(path) as container:
        stream = container.streams.video[0]
        codec = stream.codec_context
        assert (codec.height, codec.width, codec.pix_fmt) == (HEIGHT, WIDTH, "yuv420p")
        assert (codec.colorspace, codec.color_primaries, codec.color_trc, codec.color_range) == (1, 1, 1, 1)
        assert stream.average_rate == 16
        tags = {key.lower(): value for key, value in container.metadata.items()}
        assert tags["title"] == "a fox, naïve" and tags["comment"] == '{"seed": 3}'
        times = [frame.time for frame in container.decode(stream)]
    np.testing.assert_allclose(times, np.arange(33) / 16, atol=1e-3)


@pytest.mark.parametrize("ending", FORMATS)
def test_pixels_come_back(tmp_path, ending):
    frames = moving_frames(25)
    write(tmp_path / f"video{ending}", frames)
    read = read_video(tmp_path / f"video{ending}", HEIGHT, WIDTH)
    assert read.shape == frames.shape
    assert np.abs(read.astype(int) - frames).mean() < 1.5


def test_a_closed_mp4_is_an_ordinary_one(tmp_path):
    write(tmp_path / "video.mp4", moving_frames(80))
    content, boxes = (tmp_path / "video.mp4").read_bytes(), []
    while content:
        size, name = struct.unpack(">I4s", content[:8])
        boxes.append(name)
        content = content[size:]
    assert boxes == [b"ftyp", b"free", b"mdat", b"moov"]


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_exception_the_file_plays(tmp_path, ending, error):
    path = tmp_path / f"video{ending}"
    with pytest.raises(error), VideoWriter(path, HEIGHT, WIDTH) as writer:
        writer.write(moving_frames(9))
        raise error
    assert len(read_video(path, HEIGHT, WIDTH)) == 9


@pytest.mark.parametrize("ending", FORMATS)
def test_after_a_kill_the_file_plays(tmp_path, ending):
    path = tmp_path / f"video{ending}"
    code = f"""
import os, signal, numpy as np
from rfjax.video import VideoWriter
writer = VideoWriter({str(path)!r}, {HEIGHT}, {WIDTH})
for _ in range(16):
    writer.write(np.zeros((12, {HEIGHT}, {WIDTH}, 3), np.uint8))  # a still picture makes few bytes
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    with av.open(path) as container:
        frames = container.decode(video=0)
        assert len([next(frames) for _ in range(96)]) == 96  # later ones may be cut short


@pytest.mark.parametrize("name", ["file:x.mp4", "concat:x.mp4", "tee:x.mkv"])
def test_a_path_is_a_path(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / name.partition(":")[2]
    other.write_bytes(b"old")
    write(name, moving_frames(2))
    assert other.read_bytes() == b"old"
    assert len(read_video(name, HEIGHT, WIDTH)) == 2


def test_a_file_that_cannot_begin_is_not_left(tmp_path):
    with pytest.raises(UnicodeEncodeError), VideoWriter(tmp_path / "x.mp4", HEIGHT, WIDTH, title="\udcff") as writer:
        writer.write(moving_frames(1))
    assert not list(tmp_path.iterdir())


def test_without_frames_there_is_no_file(tmp_path):
    with VideoWriter(tmp_path / "video.mp4", HEIGHT, WIDTH):
        pass
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line_and_what_was_written_plays(tmp_path):
    path = tmp_path / "video.mp4"
    noise = np.random.default_rng(0).integers(0, 256, (12, HEIGHT, WIDTH, 3), np.uint8)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, unlimited[1]))
    try:
        with pytest.raises(InputError, match=r"cannot write '.*video.mp4': \S") as error:
            with VideoWriter(path, HEIGHT, WIDTH) as writer:
                for _ in range(50):
                    writer.write(noise)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "\n" not in str(error.value)
    assert len(read_video(path, HEIGHT, WIDTH, max_frames=32)) == 32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("video.avi", r"must end in \.mp4, \.mkv, \.webm"),
        ("video", r"must end in"),
        ("here.mp4", r"'.*here.mp4' exists"),
        ("folder.mp4", r"'.*folder.mp4' is a directory"),
        ("nowhere/video.mp4", r"no directory '.*nowhere'"),
    ],
)
def test_a_bad_path_is_refused_at_once(tmp_path, name, message):
    (tmp_path / "here.mp4").write_bytes(b"old")
    (tmp_path / "folder.mp4").mkdir()
    with pytest.raises(InputError, match=message):
        VideoWriter(tmp_path / name, HEIGHT, WIDTH)
    assert (tmp_path / "here.mp4").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2


def test_a_directory_that_is_not_writable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root
    with pytest.raises(InputError, match="is not writable"):
        VideoWriter(tmp_path / "video.mp4", HEIGHT, WIDTH)


def test_overwriting_replaces_only_when_frames_come(tmp_path):
    path = tmp_path / "video.mp4"
    path.write_bytes(b"old")
    with VideoWriter(path, HEIGHT, WIDTH, overwrite=True) as writer:
        assert path.read_bytes() == b"old"
        writer.write(moving_frames(2))
    assert len(read_video(path, HEIGHT, WIDTH)) == 2


@pytest.mark.parametrize(("height", "width", "fps"), [(63, 96, 16), (64, 0, 16), (64, 96, 0)])
def test_bad_sizes_are_refused(tmp_path, height, width, fps):
    with pytest.raises(InputError, match="63|0"):
        VideoWriter(tmp_path / "video.mp4", height, width, fps=fps)


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((1, HEIGHT, WIDTH, 3), np.float32),
        np.zeros((HEIGHT, WIDTH, 3), np.uint8),
        np.zeros((1, WIDTH, HEIGHT, 3), np.uint8),
        np.zeros((1, HEIGHT, WIDTH, 4), np.uint8),
    ],
    ids=["dtype", "dimensions", "size", "channels"],
)
def test_bad_frames_are_refused_and_the_file_goes_on(tmp_path, frames):
    with VideoWriter(tmp_path / "video.mp4", HEIGHT, WIDTH) as writer:
        writer.write(moving_frames(2))
        with pytest.raises(InputError, match="expected uint8"):
            writer.write(frames)
        writer.write(moving_frames(2))
    assert len(read_video(tmp_path / "video.mp4", HEIGHT, WIDTH)) == 4


def test_a_closed_writer_takes_no_frames(tmp_path):
    writer = VideoWriter(tmp_path / "video.mp4", HEIGHT, WIDTH)
    writer.close()
    writer.close()
    with pytest.raises(InputError, match="closed"):
        writer.write(moving_frames(1))


# Pipes

PIPE = f"""
import signal, sys, numpy as np
from rfjax.video import VideoWriter
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
try:
    with VideoWriter("-", {HEIGHT}, {WIDTH}) as writer:
        for _ in range(int(sys.argv[1])):
            writer.write(np.broadcast_to(np.uint8([255, 0, 0]), (3, {HEIGHT}, {WIDTH}, 3)))
except BrokenPipeError:
    sys.exit(7)
"""


def test_a_pipe_carries_yuv4mpeg2():
    stream = subprocess.run([sys.executable, "-c", PIPE, "2"], capture_output=True, check=True).stdout
    header, rest = stream.split(b"\n", 1)
    assert header == f"YUV4MPEG2 W{WIDTH} H{HEIGHT} F16:1 Ip A1:1 C420jpeg XCOLORRANGE=LIMITED".encode()
    assert len(rest) == 6 * (len(b"FRAME\n") + HEIGHT * WIDTH * 3 // 2)
    with av.open(io.BytesIO(stream)) as container:
        frames = list(container.decode(video=0))
    assert len(frames) == 6
    for plane, expected in zip(planes(frames[-1]), yuv(SATURATED[0], 0.299, 0.114), strict=True):
        np.testing.assert_allclose(plane, expected, atol=0.51)


def test_a_broken_pipe_ends_quietly():
    process = subprocess.Popen([sys.executable, "-c", PIPE, "1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(100)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 7


def test_an_interrupt_gets_through_a_full_pipe():
    process = subprocess.Popen([sys.executable, "-c", PIPE, "1000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(100)
    time.sleep(0.3)  # nobody reads on: the writer waits
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == -signal.SIGINT
    assert b"KeyboardInterrupt" in process.stderr.read()
    process.stdout.close()
    process.stderr.close()


def test_a_terminal_is_no_place_for_video(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with pytest.raises(InputError, match="terminal"):
        VideoWriter("-", HEIGHT, WIDTH)


# Reading


def encode_still(path, pixels, codec, pix_fmt):
    context = av.CodecContext.create(codec, "w")
    context.height, context.width, context.pix_fmt = *pixels.shape[:2], pix_fmt
    context.time_base = Fraction(1, 1)
    frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=pix_fmt)
    path.write_bytes(b"".join(bytes(p) for p in [*context.encode(frame), *context.encode(None)]))
    return path


@pytest.fixture
def picture():
    """Left half red, right half blue but for its green lower quarter: every turn and flip looks different."""
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:, :30], pixels[:, 30:], pixels[30:, 30:] = (200, 20, 20), (20, 20, 200), (20, 180, 20)
    return pixels


def test_a_png_of_the_right_size_comes_exact(tmp_path, picture):
    path = encode_still(tmp_path / "still.png", picture, "png", "rgb24")
    np.testing.assert_array_equal(read_image(path, 40, 60), picture)


@pytest.mark.parametrize(("height", "width"), [(20, 20), (80, 80), (32, 64), (37, 41)])
def test_an_image_is_scaled_to_cover_and_cut_about_its_centre(tmp_path, picture, height, width):
    path = encode_still(tmp_path / "still.png", picture, "png", "rgb24")
    image = read_image(path, height, width)
    assert image.shape == (height, width, 3) and image.dtype == np.uint8
    middle = width // 2
    np.testing.assert_allclose(image[height // 4, middle - 4], picture[0, 0], atol=12)
    np.testing.assert_allclose(image[height // 4, middle + 4], picture[0, -1], atol=12)
    np.testing.assert_array_equal(fit(picture, height, width), image)


def test_fine_stripes_shrink_to_grey():
    stripes = np.zeros((240, 320, 3), np.uint8)
    stripes[:, ::2] = 255
    np.testing.assert_allclose(fit(stripes, 60, 80)[:, 4:-4], 127.5, atol=3)


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, -1), (8, 1)])
def test_a_photograph_is_turned_upright(tmp_path, picture, orientation, turns):
    path = encode_still(tmp_path / "still.jpg", picture, "mjpeg", "yuvj444p")
    jpeg = path.read_bytes()
    tag = struct.pack(">2sHIHHHIHHI", b"MM", 42, 8, 1, 0x112, 3, 1, orientation, 0, 0)
    exif = b"\xff\xe1" + struct.pack(">H", len(tag) + 8) + b"Exif\0\0" + tag
    path.write_bytes(jpeg[:2] + exif + jpeg[2:])
    upright = np.rot90(picture, turns)
    read = read_image(path, *upright.shape[:2])
    assert np.abs(read.astype(int) - upright).mean() < 3


def test_a_video_at_another_rate_keeps_its_speed(tmp_path):
    frames = np.arange(0, 240, 4, dtype=np.uint8)[:, None, None, None] + np.zeros((1, HEIGHT, WIDTH, 3), np.uint8)
    write(tmp_path / "32fps.mkv", frames, fps=32)
    read = read_video(tmp_path / "32fps.mkv", HEIGHT, WIDTH)
    np.testing.assert_allclose(read[:, 0, 0, 0], frames[::2, 0, 0, 0], atol=3)
    write(tmp_path / "8fps.mkv", frames[:12], fps=8)
    read = read_video(tmp_path / "8fps.mkv", HEIGHT, WIDTH)
    np.testing.assert_allclose(read[::2, 0, 0, 0], frames[:12, 0, 0, 0], atol=3)
    assert len(read) == 23


def test_reading_stops_where_it_is_told(tmp_path):
    write(tmp_path / "video.mp4", moving_frames(20))
    whole = read_video(tmp_path / "video.mp4", HEIGHT, WIDTH)
    assert len(whole) == 20
    np.testing.assert_array_equal(read_video(tmp_path / "video.mp4", HEIGHT, WIDTH, max_frames=7), whole[:7])
    np.testing.assert_array_equal(read_image(tmp_path / "video.mp4", HEIGHT, WIDTH), whole[0])


@pytest.mark.parametrize("content", [None, b"", b"not a picture at all", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_a_bad_file_is_one_line(tmp_path, content):
    path = tmp_path / "still.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"still.png") as error:
        read_image(path, HEIGHT, WIDTH)
    assert "\n" not in str(error.value)


# Arrays


def test_pixels_from_arrays():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    assert to_pixels(pixels) is pixels
    np.testing.assert_array_equal(to_pixels(pixels / 255), pixels)
    np.testing.assert_array_equal(to_pixels((pixels / 255).astype(np.float32)[None]), pixels[None])


def test_pixels_from_pil():
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.new("RGBA", (7, 5), (10, 20, 30, 255))
    np.testing.assert_array_equal(to_pixels(image), np.broadcast_to(np.uint8([10, 20, 30]), (5, 7, 3)))


@pytest.mark.parametrize("mode", ["RGB", "L", "I;16", "P"])
def test_a_pil_image_equals_its_file(tmp_path, mode):
    image_module = pytest.importorskip("PIL.Image")
    grey = np.arange(40 * 60, dtype=np.uint16).reshape(40, 60) * 27
    image = image_module.fromarray(grey if mode == "I;16" else (grey >> 8).astype(np.uint8))
    image = image if mode == "I;16" else image.convert(mode)
    exif = image_module.Exif()
    exif[0x112] = 6
    image.save(tmp_path / "x.png", exif=exif)
    with image_module.open(tmp_path / "x.png") as opened:
        pixels = to_pixels(opened)
    assert pixels.shape == (60, 40, 3)
    np.testing.assert_allclose(pixels, read_image(tmp_path / "x.png", 60, 40), atol=1)


def test_dropped_transparency_is_said(tmp_path, caplog):
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.new("RGBA", (8, 8), (10, 20, 30, 0))
    image.save(tmp_path / "x.png")
    to_pixels(image)
    read_image(tmp_path / "x.png", 8, 8)
    assert [record.message.partition(" is ")[0] for record in caplog.records] == [
        "the transparency of an image or a video"
    ] * 2


@pytest.mark.parametrize("mode", ["I", "F"])
def test_a_pil_image_of_no_known_range_is_refused(mode):
    image_module = pytest.importorskip("PIL.Image")
    with pytest.raises(InputError, match=f"mode {mode}"):
        to_pixels(image_module.new(mode, (8, 8)))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((3, 8, 8), np.uint8), r"shape \(3, 8, 8\)"),
        (np.zeros((8, 8), np.uint8), "shape"),
        (np.zeros((0, 8, 3), np.uint8), "shape"),
        (None, "shape"),
        (np.zeros((8, 8, 3), np.int32), "int32"),
        (np.full((8, 8, 3), -1.0), "-1.0"),
        (np.full((8, 8, 3), 255.0), "255.0"),
        (np.full((8, 8, 3), np.nan), "nan"),
    ],
)
def test_bad_pixels_are_refused(image, message):
    with pytest.raises(InputError, match=message):
        to_pixels(image)


def test_the_right_size_fits_unchanged():
    video = moving_frames(3)
    np.testing.assert_array_equal(fit(video, HEIGHT, WIDTH), video)
    assert fit(video, 30, 50).shape == (3, 30, 50, 3)


# Names


@pytest.mark.parametrize(
    ("prompt", "stem"),
    [
        ("A small red Fox, walking!", "a-small-red-fox-walking"),
        ("Café été", "cafe-ete"),
        ("../../etc/passwd", "etc-passwd"),
        ("C:\\temp\\x", "c-temp-x"),
        ("-rf *", "rf"),
        ("", "video"),
        ("一只猫", "video"),
        ("a\0b\nc", "a-b-c"),
        ("word " * 100, ("word-" * 12)[:59]),
    ],
)
def test_safe_stems(prompt, stem):
    assert safe_stem(prompt) == stem and len(stem) <= 60

"""Frames to video files as they come, and images and videos to frames.

Pixels are uint8 RGB everywhere here; height and width are in pixels.
"""

import contextlib
import logging
import os
import re
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
from av.error import FFmpegError
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation, VideoReformatter
from jaxtyping import UInt8

from rfjax.errors import InputError

logger = logging.getLogger("rfjax")

FPS = 16  # frames a second of the videos Wan2.1 was trained on

_UNTAGGED = 2  # colour space of a frame that does not say
_EXACT = Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP


@dataclass(frozen=True)
class _Format:
    container: str
    codec: str
    options: dict[str, str]  # of the encoder
    container_options: dict[str, str] = field(default_factory=dict)


_H264 = {"crf": "18"}
_VP9 = {"crf": "24", "deadline": "realtime", "cpu-used": "6", "row-mt": "1"}
# FFmpeg would keep up to 256 KiB to itself, which is minutes of a still picture; and begin clusters 5 s apart.
_PROMPT = {"flush_packets": "1"}
_CLUSTERS = _PROMPT | {"cluster_time_limit": "2000"}
# Written in fragments, so that what a killed process leaves behind plays; closing makes it an ordinary mp4. The header
# waits for the first fragment, to say that the video starts at time 0 although B-frames come early.
_FRAGMENTS = _PROMPT | {"movflags": "hybrid_fragmented+frag_keyframe+delay_moov"}
_FORMATS = {
    ".mp4": _Format("mp4", "libx264", _H264, _FRAGMENTS),
    ".mkv": _Format("matroska", "libx264", _H264, _CLUSTERS),
    ".webm": _Format("webm", "libvpx-vp9", _VP9, _CLUSTERS),
}


class VideoWriter:
    """Writes frames to a video file as they come; a context manager.

    The file has exactly the size given, 4:2:0 chroma (which every player takes), and BT.709 limited-range colours,
    tagged so. It is created at the first frame. Leaving the `with` block, by an exception (Ctrl-C) too, completes
    it: what was written plays. A killed process loses the last seconds at most.

    The path "-" pipes uncompressed frames to standard output as YUV4MPEG2, which `ffplay -`, `mpv -` and
    `ffmpeg -i -` read: C420jpeg, limited range, and BT.601 colours, which is what readers take where none can be
    named.
    """

    def __init__(
        self,
        path: str | Path,
        height: int,
        width: int,
        *,
        fps: int = FPS,
        title: str = "",
        comment: str = "",
        overwrite: bool = False,
    ):
        """Checks all it can before the first frame is computed; opens nothing.

        Args:
            path: a file ending in .mp4, .mkv (both H.264) or .webm (VP9), or "-".
            height: of every frame; even.
            width: of every frame; even.
            fps: frames a second.
            title: metadata of the file, such as the prompt ("-" has no place for metadata).
            comment: metadata of the file, such as the seed and the settings.
            overwrite: an existing file may be replaced.

        Raises:
            InputError: unknown ending, existing file, no such or no writable directory, odd size, no encoder.
        """
        for name, value in (("height", height), ("width", width)):
            if value <= 0 or value % 2:
                raise InputError(f"{name} {value} is not a positive even number, as video files need")
        if fps <= 0:
            raise InputError(f"fps {fps} is not positive")
        self.path = str(path)
        self.num_frames = 0
        self._height, self._width, self._fps = height, width, fps
        self._metadata = {key: text for key, text in (("title", title), ("comment", comment)) if text}
        self._format = check_destination(path, overwrite)
        self._reformatter = VideoReformatter()
        self._sink: _File | _Pipe | None = None
        self._closed = False

    def __enter__(self) -> "VideoWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A second error must not hide the one that is under way.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(InputError):
            self.close()

    def write(self, frames: UInt8[np.ndarray, "T H W 3"]) -> None:
        """Encodes frames and writes what is ready of them.

        Raises:
            InputError: the frames are not uint8 of the writer's size, the writer is closed, or the file cannot be
                written (a full disk).
            BrokenPipeError: the program that reads standard output has ended.
        """
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1:] != (self._height, self._width, 3):
            raise InputError(
                f"frames of type {frames.dtype} and shape {frames.shape}; "
                f"expected uint8 [T, {self._height}, {self._width}, 3]"
            )
        if self._closed:
            raise InputError(f"the writer of {self.path!r} is closed")
        with self._clear_errors():
            if self._sink is None:
                self._sink = self._open()
            for frame in frames:
                self._sink.write(self._to_yuv(frame))
                self.num_frames += 1

    def close(self) -> None:
        """Completes the file; harmless when repeated.

        Raises:
            InputError: the file cannot be written.
        """
        self._closed = True
        sink, self._sink = self._sink, None
        if sink is not None:
            with self._clear_errors():
                sink.close()

    def _open(self) -> "_File | _Pipe":
        if self._format is None:
            return _Pipe(self._height, self._width, self._fps)
        return _File(self.path, self._format, self._height, self._width, self._fps, self._metadata)

    def _to_yuv(self, frame: UInt8[np.ndarray, "H W 3"]) -> av.VideoFrame:
        yuv = self._reformatter.reformat(
            av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24"),
            format="yuv420p",
            dst_colorspace=Colorspace.ITU601 if self._format is None else Colorspace.ITU709,
            src_color_range=ColorRange.JPEG,
            dst_color_range=ColorRange.MPEG,
            interpolation=Interpolation.AREA | _EXACT,  # chroma is the mean of 2x2 pixels
        )
        yuv.pts, yuv.time_base = self.num_frames, Fraction(1, self._fps)
        return yuv

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except (OSError, FFmpegError) as error:
            raise InputError(f"cannot write {self.path!r}: {error.strerror or error}") from None


class _File:
    """A video file under way."""

    def __init__(self, path: str, form: _Format, height: int, width: int, fps: int, metadata: dict[str, str]):
        self._container = av.open(_local(path), "w", format=form.container, container_options=form.container_options)
        try:
            self._stream = self._start(form, height, width, fps, metadata)
        except BaseException:
            self._container.close()
            os.remove(path)
            raise

    def _start(self, form: _Format, height: int, width: int, fps: int, metadata: dict[str, str]) -> av.VideoStream:
        self._container.metadata.update(metadata)
        stream = cast(av.VideoStream, self._container.add_stream(form.codec, rate=fps, options=form.options))
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        codec = stream.codec_context
        codec.gop_size = 2 * fps
        codec.color_range, codec.colorspace = ColorRange.MPEG, Colorspace.ITU709
        codec.color_primaries, codec.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        self._container.start_encoding()
        return stream

    def write(self, frame: av.VideoFrame | None) -> None:
        self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        try:
            self.write(None)  # what the encoder holds back
        finally:
            self._container.close()


class _Pipe:
    """A YUV4MPEG2 stream under way on standard output.

    Not written by FFmpeg, so that Ctrl-C gets through while the pipe is full; not through Python's buffer, so that
    nothing is left to flush (and to fail again) when the program ends.
    """

    def __init__(self, height: int, width: int, fps: int):
        self._descriptor = sys.stdout.fileno()
        self._send(f"YUV4MPEG2 W{width} H{height} F{fps}:1 Ip A1:1 C420jpeg XCOLORRANGE=LIMITED\n".encode())

    def write(self, frame: av.VideoFrame) -> None:
        self._send(b"FRAME\n" + frame.to_ndarray().tobytes())

    def close(self) -> None:
        pass

    def _send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


def _local(path: str | Path) -> str:
    """A path as FFmpeg takes it, which would read `concat:x`, `http:x` and the like as more than a name."""
    return f"file:{path}"


def check_destination(path: str | Path, overwrite: bool) -> _Format | None:
    """What `VideoWriter` checks of a path; the format of the file, None for the pipe.

    Raises:
        InputError: as `VideoWriter`.
    """
    return _check_pipe() if str(path) == "-" else _check_file(Path(path), overwrite)


def _check_pipe() -> None:
    if sys.stdout is None:
        raise InputError("output '-': standard output is closed; pipe it, as in: ... | ffplay -")
    if sys.stdout.isatty():
        raise InputError("output '-' is raw video and standard output is a terminal; pipe it, as in: ... | ffplay -")


def _check_file(path: Path, overwrite: bool) -> _Format:
    form = _FORMATS.get(path.suffix.lower())
    if form is None:
        raise InputError(f"output {str(path)!r} must end in {', '.join(_FORMATS)}, or be '-' for a pipe")
    if path.is_dir():
        raise InputError(f"output {str(path)!r} is a directory; give a file in it")
    if path.exists() and not overwrite:
        raise InputError(f"output {str(path)!r} exists; give another name, or overwrite it (--force, overwrite=True)")
    if not path.parent.is_dir():
        raise InputError(f"there is no directory {str(path.parent)!r} for output {path.name!r}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"directory {str(path.parent)!r} is not writable; give another place for the output")
    if form.codec not in av.codecs_available:
        raise InputError(f"this build of PyAV cannot write {path.suffix} ({form.codec} is missing); pip install av")
    return form


def read_image(path: str | Path, height: int, width: int) -> UInt8[np.ndarray, "H W 3"]:
    """An image (or the first frame of a video) scaled and cropped to a size; see `read_video`.

    Raises:
        InputError: as `read_video`.
    """
    return read_video(path, height, width, max_frames=1)[0]


def read_video(
    path: str | Path, height: int, width: int, max_frames: int | None = None, *, fps: int = FPS
) -> UInt8[np.ndarray, "T H W 3"]:
    """The frames of a video, scaled and cropped to a size, at the frame rate of the model.

    The picture is turned upright by its rotation tag, scaled with its proportions kept (Lanczos) until it covers
    `height` x `width`, and cut about its centre. Transparency is dropped, and said. Of a
    video at another rate, the frames nearest after each 1/`fps` of a second are taken, so that motion keeps its
    speed.

    Args:
        path: any file that FFmpeg decodes.
        height: of the result.
        width: of the result.
        max_frames: where to stop; all frames if None.
        fps: frames a second of the result.

    Raises:
        InputError: the file is missing, damaged or without pictures.
    """
    name, frames = str(path), []
    try:
        with av.open(_local(name)) as container:
            if not container.streams.video:
                raise InputError(f"{name!r} has no picture in it")
            for frame in _at_rate(container.decode(container.streams.video[0]), fps):
                if not frames and any(component.is_alpha for component in frame.format.components):
                    _say_transparency()
                frames.append(_cover(frame, height, width))
                if len(frames) == max_frames:
                    break
    except (OSError, FFmpegError) as error:
        raise InputError(f"cannot read {name!r} as an image or a video: {error.strerror or error}") from None
    if not frames:
        raise InputError(f"{name!r} has no picture in it")
    return np.stack(frames)


def to_pixels(image: Any) -> UInt8[np.ndarray, "*T H W 3"]:
    """An image or a video given as an array, or a PIL image, as uint8 RGB.

    Args:
        image: a PIL image, which is turned upright by its EXIF tag; or an array [H, W, 3] or [T, H, W, 3] of uint8
            or of floats from 0 to 1.

    Raises:
        InputError: other shapes, types or values.
    """
    pixels = _from_pil(image) if hasattr(image, "convert") else np.asarray(image)
    if pixels.ndim not in (3, 4) or pixels.shape[-1] != 3 or not pixels.size:
        raise InputError(f"an image has shape {pixels.shape}; expected [H, W, 3], or [T, H, W, 3] for a video")
    if pixels.dtype.kind == "f":
        if not np.all((pixels >= 0) & (pixels <= 1)):
            raise InputError(f"float pixels from {pixels.min()} to {pixels.max()}; expected 0 to 1, or uint8")
        return np.rint(pixels * 255).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise InputError(f"pixels of type {pixels.dtype}; expected uint8, or floats from 0 to 1")
    return pixels


def _from_pil(image: Any) -> UInt8[np.ndarray, "H W 3"]:
    from PIL import ImageOps

    if image.mode in ("I", "F"):
        raise InputError(f"a PIL image of mode {image.mode} has no known range; pass one of mode RGB")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        grey = np.rint(np.asarray(image) / 257).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=-1)
    if "A" in image.mode or "transparency" in image.info:
        _say_transparency()
    return np.asarray(image.convert("RGB"))


def _say_transparency() -> None:
    logger.warning("the transparency of an image or a video is dropped: what it hides is seen")


def fit(pixels: UInt8[np.ndarray, "*T h w 3"], height: int, width: int) -> UInt8[np.ndarray, "*T H W 3"]:
    """Scales and crops an image or a video to a size, as `read_video` does; the same size returns the same pixels."""
    if pixels.ndim == 4:
        return np.stack([fit(frame, height, width) for frame in pixels])
    return _cover(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24"), height, width)


def _cover(frame: av.VideoFrame, height: int, width: int) -> UInt8[np.ndarray, "H W 3"]:
    turns = round(frame.rotation / 90) % 4  # counter-clockwise quarters that make the picture upright
    size = np.array([frame.height, frame.width])
    target = np.array([width, height] if turns % 2 else [height, width])
    rows, columns = np.maximum(np.rint(size * np.max(target / size)).astype(int), target)
    # Untagged video is BT.709 from 720 lines up, by custom; FFmpeg would take it for BT.601.
    untagged_hd = frame.colorspace == _UNTAGGED and frame.height >= 720 and not frame.format.is_rgb
    rgb = frame.reformat(
        width=int(columns),
        height=int(rows),
        format="rgb24",
        src_colorspace=Colorspace.ITU709 if untagged_hd else None,
        interpolation=Interpolation.LANCZOS | _EXACT,
    )
    pixels = np.rot90(rgb.to_ndarray(), turns)
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return np.ascontiguousarray(pixels[top : top + height, left : left + width])


def _at_rate(frames: Iterator[av.VideoFrame], fps: int) -> Iterator[av.VideoFrame]:
    start, count = None, 0
    for frame in frames:
        if frame.time is None:  # a still
            yield frame
            continue
        start = frame.time if start is None else start
        # Some containers round times to milliseconds.
        while count / fps <= frame.time - start + 0.002:
            yield frame
            count += 1


def safe_stem(prompt: str) -> str:
    """A file name without ending, made of a prompt: lower-case ASCII letters, digits and dashes, at most 60.

    Different prompts may give the same name; "video" stands for a prompt that has no such letters.
    """
    ascii_text = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", ascii_text)[:60].strip("-") or "video"

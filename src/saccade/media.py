"""Files and bytes to frames, with limits.

PyAV decodes videos, Pillow images and animations. The bytes are taken to be hostile: only listed
containers and codecs are read, nothing that the bytes name is opened, and every limit is checked on
what the file declares before a decoder starts, then again on what comes out of it. Time is what the
packets say (pts), never a header's frame count. Knows nothing of models, processors or addresses.
"""

import contextlib
import math
import re
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import av
import numpy as np
from av.container.core import Flags
from av.error import FFmpegError
from av.stream import Disposition
from av.video.reformatter import VideoReformatter
from jaxtyping import Float64, UInt8
from PIL import Image as PILImage
from PIL import ImageOps

from saccade.errors import VideoInputCode, VideoInputError

Frames = UInt8[np.ndarray, "frame height width 3"]
Image = UInt8[np.ndarray, "height width 3"]
Seconds = Float64[np.ndarray, "frame"]
Progress = Callable[[int, int | None], None]

DEFAULT_FPS, DEFAULT_MIN_FRAMES, FOLDER_FPS = 2.0, 4, 1.0
MAX_PACKETS = 4_000_000  # 37 hours at 30 fps: bounds the memory a timeline takes
MAX_ASPECT = 200  # longest side over shortest; image processors refuse more
MIN_SIDE = 4  # image processors take a side of 1 or 3 pixels for channels
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
CODECS = frozenset(
    "h264 hevc av1 vp8 vp9 vvc mpeg4 h263 mpeg1video mpeg2video mjpeg prores dvvideo ffv1 rawvideo"
    " png gif qtrle huffyuv ffvhuff utvideo msmpeg4v2 msmpeg4v3 theora".split()
)
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
READABLE = "MP4, MOV, MKV, WebM, AVI, GIF, WebP, PNG or JPEG"


@runtime_checkable
class Readable(Protocol):
    """A file object; it is read from where it stands, to its end."""

    def read(self, size: int = -1, /) -> bytes: ...


Source = str | Path | bytes | Readable


@dataclass(frozen=True)
class Limits:
    """What may be read; 0 or None means no limit.

    `max_memory` bounds the bytes of the chosen frames. A sampling rate that passes `max_frames` or
    `max_memory` is lowered, with a warning; a count is refused. Only files inside `root` are read.
    """

    max_bytes: int | None = 2 << 30
    max_pixels: int | None = 50_000_000
    max_frames: int | None = 768
    max_duration_s: float | int | None = 12 * 3600
    max_memory: int | None = 1 << 30
    root: Path | None = None


@dataclass(frozen=True)
class Sampling:
    """The moments to take: by `fps`, by `num_frames` or `every`, from `start` to `end` seconds.

    With none of the three: 2 frames a second, at least 4. No source frame is taken twice to reach
    a count. A folder of images gives them all, `fps` being the rate they were taken at (default 1).
    """

    fps: float | int | None = None
    num_frames: int | None = None
    start: float | int | None = None
    end: float | int | None = None
    every: bool = False

    def __post_init__(self) -> None:
        for name in ("fps", "start", "end"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 <= value <= 1e9):
                raise _bad(f"{name} must be a number, 0 or more and finite")
        if self.fps is not None and not 1e-4 <= self.fps <= 1000:
            raise _bad("fps must be between 0.0001 and 1000", 1000)
        if self.num_frames is not None and (
            type(self.num_frames) is not int or self.num_frames < 1
        ):
            raise _bad("num_frames must be a whole number, 1 or more")
        if self.end is not None and self.end <= (self.start or 0):
            raise _bad("end must come after start")
        if (self.fps is not None) + (self.num_frames is not None) + self.every > 1:
            raise _bad("give only one of fps, num_frames and every")


@dataclass(frozen=True, eq=False)
class Clip:
    """The chosen frames and when each appears, in seconds from the source's first frame."""

    frames: Frames
    timestamps: Seconds
    duration: float  # of the whole source
    fps: float  # the source's average rate
    source_frames: int  # counted from packets
    sampled_fps: float  # the rate at which `frames` follow each other
    warnings: tuple[str, ...] = ()

    @property
    def metadata(self) -> dict[str, Any]:
        """What transformers' `VideoMetadata` takes, with `do_sample_frames=False`.

        Processors compute the rate as len(indices) / total * fps (Qwen2.5-VL) and the times as
        index / fps (Qwen3-VL). With a whole number of ticks per sampled frame the first is exact
        and the second good to half a millisecond; one tick is enough for evenly spaced frames.
        A fresh dict each time: processors write to it.
        """
        number = self.timestamps * self.sampled_fps
        even = np.abs(np.rint(number) - number).max() <= 5e-4 * self.sampled_fps
        ticks = 1 if even else math.ceil(1000 / self.sampled_fps)
        n, height, width, _ = self.frames.shape
        return {
            "total_num_frames": n * ticks,
            "fps": self.sampled_fps * ticks,
            "frames_indices": np.rint(number * ticks).astype(int).tolist(),
            "duration": self.duration,
            "height": height,
            "width": width,
        }


def read(
    source: Source,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Clip:
    """Frames of a video, an animation, an image or a folder of images; "-" is standard input.

    `progress(done, total)` is called as frames are kept, and may raise to stop. Whatever is wrong
    with the input is a `VideoInputError`.
    """
    sampling, limits = sampling or Sampling(), limits or Limits()
    if limits.max_frames and (sampling.num_frames or 0) > limits.max_frames:
        raise _bad(f"num_frames may be at most {limits.max_frames}", limits.max_frames)
    if isinstance(source, str | Path) and source != "-":
        path = _allowed(source, limits)
        if path.is_dir():
            folder = _Folder(path, float(sampling.fps or FOLDER_FPS), limits)
            if not (sampling.num_frames or sampling.every):
                sampling = replace(sampling, fps=folder.rate)
            return _sample(folder, sampling, limits, progress)
    with _opened(source, limits) as file:
        reel = (_Animation if file.kind == "image" else _Video)(file, limits)
        return _sample(reel, sampling, limits, progress)


def read_image(source: Source, limits: Limits | None = None) -> Image:
    """One image, upright, on white where it is transparent; of an animation, the first frame."""
    limits = limits or Limits()
    with _opened(source, limits) as file:
        if file.kind != "image":
            raise file.error("is not an image; give a PNG, JPEG, WebP, GIF or BMP", "unsupported")
        with _image(file, limits) as image, _blame(file):
            return _enlarged(_rgb(image))


# Choosing frames


@runtime_checkable
class _Reel(Protocol):
    """A source whose timeline is known, and whose frames can be fetched by number, ascending."""

    label: str
    times: Seconds  # when each frame appears
    tick: float  # what `times` were rounded to
    duration: float
    rate: float
    size: tuple[int, int]  # width, height
    notes: list[str]

    def fetch(self, wanted: Sequence[int]) -> Iterator[tuple[int, Image]]: ...


def _sample(reel: _Reel, sampling: Sampling, limits: Limits, progress: Progress | None) -> Clip:
    _check(reel.label, limits, size=reel.size, seconds=reel.duration)
    moments, rate = _moments(reel, sampling, limits)
    # The frame shown at a moment is the last one to have appeared by then.
    shown = np.searchsorted(reel.times, moments + _slack(reel), side="right") - 1
    shown = np.maximum(shown, 0)
    held = np.diff(shown, prepend=-1) == 0
    timestamps = np.where(held, moments, np.maximum(reel.times[shown], sampling.start or 0.0))
    frames, got = _collect(reel, shown, limits, progress)
    if not got.all():
        lost = int((~got).sum())
        reel.notes.append(f"{lost} of {len(got)} frames could not be decoded and were left out")
        frames, timestamps = frames[got], timestamps[got]
    count, notes = len(reel.times), tuple(reel.notes)
    return Clip(frames, timestamps, reel.duration, reel.rate, count, rate, notes)


def _moments(reel: _Reel, sampling: Sampling, limits: Limits) -> tuple[Seconds, float]:
    """The times to look at, and the rate at which they follow each other."""
    start, end = sampling.start or 0.0, min(sampling.end or math.inf, reel.duration)
    if start >= reel.duration:
        raise _bad(f"start is {start:g} s but {reel.label} is {reel.duration:.2f} s long")
    slack = _slack(reel)
    first = max(int(np.searchsorted(reel.times, start + slack, side="right")) - 1, 0)
    last = max(int(np.searchsorted(reel.times, end - slack, side="left")), first + 1)
    available = last - first

    count, rate = available, 0.0
    if sampling.num_frames:
        count = min(sampling.num_frames, available)
        if count < sampling.num_frames:
            reel.notes.append(f"took all {count} frames, there are no more")
    elif not sampling.every:
        # A moment counts when it comes at least half a frame before the end.
        rate = float(sampling.fps or DEFAULT_FPS)
        count = math.ceil((end - start - 0.5 / reel.rate) * rate)
        least = 1 if sampling.fps else DEFAULT_MIN_FRAMES
        if count < least:
            count, rate = least, rate if least == 1 else 0.0
        count = min(count, available)

    width, height = reel.size
    room = limits.max_memory // max(width * height * 3, 1) if limits.max_memory else sys.maxsize
    cap = min(limits.max_frames or sys.maxsize, room)
    if count > cap and (sampling.every or sampling.num_frames or not room):
        what = f"would give {count} frames of {width}x{height} and {cap} are allowed: ask for fewer"
        code: VideoInputCode = "too_long" if room else "too_many_pixels"
        raise _error(reel.label, f"{what}, or give start and end", code, cap)
    if count > cap:
        reel.notes.append(f"took {cap} frames, evenly spaced, instead of {count}")
        count, rate = cap, 0.0

    if count == available:
        times = reel.times[first:last]
        beyond = reel.times[last] if last < len(reel.times) else reel.duration
        return times, _near(count / max(beyond - times[0], 1e-6), reel.rate)
    rate = rate or count / (end - start)
    return start + np.arange(count) / rate, rate


def _slack(reel: _Reel) -> float:
    """How far a time may be off: half of what it was rounded to, and little next to a frame."""
    return min(reel.tick / 2, 0.1 / reel.rate) + 1e-9


def _collect(
    reel: _Reel, shown: np.ndarray, limits: Limits, progress: Progress | None
) -> tuple[Frames, Any]:
    """The frames `shown`, of equal size, and which of them could be decoded."""
    frames, got = np.empty((0, 0, 0, 3), np.uint8), np.zeros(len(shown), bool)
    resized = False
    for number, image in reel.fetch(np.unique(shown).tolist()):
        image = _enlarged(image)
        if not got.any():
            if limits.max_memory and len(shown) * image.nbytes > limits.max_memory:
                what = "has larger frames than it declares: convert it again"
                raise _error(reel.label, what, "too_many_pixels", limits.max_memory)
            frames = np.empty((len(shown), *image.shape), np.uint8)
        if image.shape != frames.shape[1:]:
            height, width = frames.shape[1:3]
            image, resized = np.asarray(PILImage.fromarray(image).resize((width, height))), True
        rows = slice(*np.searchsorted(shown, [number, number + 1]))
        frames[rows], got[rows] = image, True
        if progress:
            progress(int(got.sum()), len(shown))
    if not got.any():
        raise _error(
            reel.label, "is damaged, or its frames are too large: none can be decoded", "damaged"
        )
    if resized:
        reel.notes.append("the frame size changes: all frames were resized to the first")
    return frames, got


# Opening


@dataclass
class _File:
    """An open input, the name to use in messages, and what its first bytes look like."""

    handle: BufferedIOBase
    label: str
    kind: str | None  # "image", the name of a video container, or unknown

    def error(self, what: str, code: VideoInputCode) -> VideoInputError:
        return _error(self.label, what, code)


class _Nameless:
    """A file that FFmpeg can read and seek but not name: it may take a name for an address."""

    def __init__(self, handle: BufferedIOBase) -> None:
        self.read, self.seek, self.tell = handle.read, handle.seek, handle.tell
        self.seek(0)


def _allowed(path: str | Path, limits: Limits) -> Path:
    """The resolved path, if there is something there that may be read."""
    if re.match("[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise _error("an address", "is not opened: download it and give the file", "not_allowed")
    label = _label(Path(path).name)
    try:
        resolved = Path(path).resolve()
        if limits.root and not resolved.is_relative_to(limits.root.resolve()):
            raise _error(label, "is outside the folder that may be read", "not_allowed")
        mode = resolved.stat().st_mode
    except PermissionError:
        raise _error(label, "may not be read: change its permissions", "unreadable") from None
    except (OSError, ValueError, RuntimeError):  # ValueError: a zero byte; RuntimeError: a loop
        raise _error(label, "does not exist: check the path", "missing") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe would block, a device never end
        raise _error(label, "is not a file; give a video file or '-'", "not_a_video")
    return resolved


@contextlib.contextmanager
def _opened(source: Source, limits: Limits) -> Iterator[_File]:
    with contextlib.ExitStack() as stack:
        if isinstance(source, str | Path) and source != "-":
            path = _allowed(source, limits)
            label, size = _label(Path(source).name), path.stat().st_size
            try:
                handle: BufferedIOBase = stack.enter_context(path.open("rb"))
            except OSError:
                what = "cannot be opened: it must be a file you may read"
                raise _error(label, what, "unreadable") from None
        else:
            label = "standard input" if isinstance(source, str | Path) else "the input"
            if not isinstance(source, bytes):
                pipe: Readable = sys.stdin.buffer if isinstance(source, str | Path) else source
                source = pipe.read(limits.max_bytes + 1 if limits.max_bytes else -1)
            handle, size = BytesIO(source), len(source)
        _check(label, limits, nbytes=size)
        if not size:
            raise _error(label, "is empty: give a video or an image", "empty")
        head = handle.read(64)
        file = _File(handle, label, _kind(head))
        if problem := _refusal(head):
            raise file.error(*problem)
        yield file


def _kind(head: bytes) -> str | None:
    if head.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM")) or head[8:12] == b"WEBP":
        return "image"
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "MP4 or MOV"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "MKV or WebM"
    return "AVI" if head.startswith(b"RIFF") and head[8:12] == b"AVI " else None


def _refusal(head: bytes) -> tuple[str, VideoInputCode] | None:
    """What is wrong with these first bytes, for what is given by mistake or with intent."""
    text = head.removeprefix(b"\xef\xbb\xbf").strip()
    if all(32 <= byte < 127 or byte in b"\t\r\n" for byte in text):  # web pages, playlists
        line = text.decode("ascii").split("\n")[0].strip()[:30]
        start = line[: line.find(">") + 1] or line
        return f"is not a video (starts with {start}): give {READABLE}", "not_a_video"
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"mif1", b"avif", b"avis"):
        return "is a HEIC or AVIF image; convert it to JPEG or PNG", "unsupported"
    if head.startswith((b"ID3", b"fLaC")) or head[:4] + head[8:12] == b"RIFFWAVE":
        return f"has no video stream (sound only): give {READABLE}", "no_video_stream"
    if head.startswith((b"OggS", b"FLV", b"0&\xb2u", b"\0\0\1\xba", b"%PDF", b"PK\3\4")):
        return f"is of a kind that is not read; convert it to {READABLE}", "unsupported"
    return None


# Videos


def _refuse(url: str, flags: int, options: dict[str, str]) -> None:
    raise PermissionError("a video may not open another file")


class _Video:
    """A pass over the packets gives the timeline; a second pass decodes only what is needed."""

    def __init__(self, file: _File, limits: Limits) -> None:
        self.file, self.limits, self.label = file, limits, file.label
        self.notes: list[str] = []
        self.scaler = VideoReformatter()  # one for all frames: setting one up costs a millisecond
        ticks, decode_ticks, key, seen, length, end = [], [], [], [], 0, 0.0
        with _blame(file), self._stream() as (container, stream):
            codec, unit = stream.codec_context, float(stream.time_base)
            header_rate, declared = float(stream.average_rate or 0), (container.duration or 0) / 1e6
            _check(self.label, limits, size=(codec.width, codec.height), seconds=declared)
            units = {s.index: float(s.time_base or 0) for s in container.streams}
            for packet in self._packets(container, *container.streams):
                at, took = packet.dts if packet.pts is None else packet.pts, packet.duration or 0
                end = max(end, ((at or 0) + took) * units[packet.stream_index])
                if packet.stream_index != stream.index:
                    continue
                if not codec.width:  # some headers leave the size to the first frame
                    with contextlib.suppress(FFmpegError):
                        codec.decode(packet)
                ticks.append(packet.pts)
                decode_ticks.append(packet.dts)
                key.append(packet.is_keyframe)
                seen.append(not packet.is_discard)
                length = took or length
                if len(ticks) > MAX_PACKETS:
                    raise file.error("has too many frames; cut it into parts", "too_long")
            self.size = (codec.width, codec.height)
            announced = stream.frames
        if end < 0.98 * declared - 2 / (header_rate or 1) or len(ticks) < 0.98 * announced - 1:
            read = f"{end:.1f} of {declared:.1f} seconds"
            self.notes.append(f"cut short or damaged: read {read}, {len(ticks)} frames")

        # AVI gives no display times: the n-th frame out of the decoder is then the n-th shown.
        self.ordinal = None in ticks
        if self.ordinal:
            ticks = decode_ticks
        if None in ticks:
            ticks, unit, length = list(range(len(ticks))), 1 / (header_rate or 25), 1
        pts = np.array(ticks, np.int64)
        order = np.flatnonzero(seen)
        order = order[np.argsort(pts[order], kind="stable")]
        if not len(order):
            raise file.error("is cut short or damaged: it holds no frame", "truncated")
        self.pts, self.tick, self.starts = pts[order], unit, _run_starts(pts, key)[order]
        if self.ordinal:
            self.starts[:] = 0
        self.times = (self.pts - float(self.pts[0])) * unit
        gap = float(np.median(np.diff(self.times))) if len(order) > 1 else 0.0
        self.duration = float(self.times[-1]) + (length * unit or gap or 1 / (header_rate or 1))
        self.rate = _near(len(order) / self.duration, header_rate)

    def fetch(self, wanted: Sequence[int]) -> Iterator[tuple[int, Image]]:
        """Decode from the keyframe before each wanted frame; skip the packets in between."""
        todo = list(wanted[::-1])
        shown: Any = None  # the last good frame in this run, unless an error came after it
        running, out = False, 0
        with self._stream() as (container, stream):
            codec = stream.codec_context
            for i, packet in enumerate(self._packets(container, stream, drain=True)):
                if not todo:
                    return
                if packet is not None and self.starts[todo[-1]] > i:
                    if running:
                        codec.flush_buffers()
                    running, shown = False, None
                    continue
                running = True
                try:
                    decoded = codec.decode(packet)
                except FFmpegError:
                    decoded, shown = [], None
                for frame in decoded:
                    here = self.pts[min(out, len(self.pts) - 1)] if self.ordinal else frame.pts
                    out += 1
                    if here is None or frame.is_corrupt:
                        shown = None
                        continue
                    while todo and self.pts[todo[-1]] < here:
                        number = todo.pop()
                        if shown is not None:  # a packet with no picture of its own (VP8)
                            yield number, self._array(shown)
                    if todo and self.pts[todo[-1]] == here:
                        yield todo.pop(), self._array(frame)
                    shown = frame

    def _array(self, frame: Any) -> Image:
        with _blame(self.file):
            array = self.scaler.reformat(frame, format="rgb24").to_ndarray()
            return np.rot90(array, round(frame.rotation / 90))

    @contextlib.contextmanager
    def _stream(self) -> Iterator[tuple[Any, Any]]:
        """The container and its first video stream, before any decoder has run."""
        options = {"format_whitelist": CONTAINERS, "codec_whitelist": "none"}
        try:
            file = _Nameless(self.file.handle)
            container: Any = av.open(file, "r", options=options, io_open=_refuse)
        except (FFmpegError, OSError, ValueError):
            raise self._unreadable() from None
        with container:
            if not container.streams:
                raise self._unreadable()
            # Else FFmpeg makes up display times where there are none, wrong ones for B-frames.
            container.flags &= ~Flags.gen_pts.value
            for stream in container.streams.video:
                if not stream.disposition & Disposition.attached_pic:  # a cover is no video
                    break
            else:
                what = f"has no video stream (sound only?): give {READABLE}"
                raise self.file.error(what, "no_video_stream")
            codec = stream.codec_context
            if codec is None or codec.codec.canonical_name not in CODECS:
                what = "uses a video codec that is not read; convert it to H.264"
                raise self.file.error(what, "unsupported")
            if self.limits.max_pixels:
                codec.options = {"max_pixels": str(self.limits.max_pixels)}
            yield container, stream

    def _unreadable(self) -> VideoInputError:
        if self.file.kind is None:
            what = f"is not a video that can be read: give {READABLE}"
            return self.file.error(what, "not_a_video")
        what = f"begins like {self.file.kind} but is cut short or damaged: copy it again"
        return self.file.error(what, "truncated")

    def _packets(self, container: Any, *streams: Any, drain: bool = False) -> Iterator[Any]:
        """Whole packets in decoding order, as far as they can be read, then None for `drain`."""
        with contextlib.suppress(FFmpegError):
            for packet in container.demux(*streams):
                if packet.size and not packet.is_corrupt:
                    yield packet
        if drain:
            yield None


def _run_starts(pts: np.ndarray, key: list[bool]) -> np.ndarray:
    """Per packet, the one to start decoding at: the last keyframe that is also shown no later.

    Pictures that follow a keyframe but are shown before it need the run before.
    """
    starts, here, before = np.zeros(len(pts), np.int64), 0, 0
    for i, tick in enumerate(pts):
        if key[i]:
            before, here = here, i
        starts[i] = here if pts[here] <= tick else before
    return starts


# Images

_warnings_lock = threading.Lock()


@contextlib.contextmanager
def _blame(file: _File) -> Iterator[None]:
    """Turn any failure of a library into ours: their messages can hold memory addresses."""
    try:
        yield
    except VideoInputError:
        raise
    except MemoryError:
        raise file.error("needs more memory than there is: scale it down", "too_large") from None
    except Exception:  # decoders raise almost anything on hostile bytes
        raise file.error("is damaged or cut short: copy it again", "truncated") from None


@contextlib.contextmanager
def _image(file: _File, limits: Limits) -> Iterator[Any]:
    """An image of which only the header has been read, and whose size is allowed."""
    with contextlib.ExitStack() as stack:
        with _blame(file), _warnings_lock, warnings.catch_warnings():
            warnings.simplefilter("error", PILImage.DecompressionBombWarning)
            file.handle.seek(0)
            try:
                opened: Any = PILImage.open(file.handle, formats=IMAGE_FORMATS)  # type: ignore[arg-type]
                image = stack.enter_context(opened)
            except (PILImage.DecompressionBombWarning, PILImage.DecompressionBombError):
                cap = min(limits.max_pixels or sys.maxsize, PILImage.MAX_IMAGE_PIXELS or 0)
                raise _too_many(file.label, cap) from None
        _check(file.label, limits, size=image.size)
        yield image


def _rgb(image: Any) -> Image:
    """Upright 8-bit RGB, on white where transparent."""
    with contextlib.suppress(Exception):  # broken EXIF is no reason to refuse a picture
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits of grey
        return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        white = PILImage.new("RGBA", image.size, "white")
        image = PILImage.alpha_composite(white, image.convert("RGBA"))
    return np.array(image.convert("RGB"))


class _Animation:
    """An animated GIF, WebP or PNG; or any one image, shown for a second."""

    def __init__(self, file: _File, limits: Limits) -> None:
        self.file, self.limits, self.label, self.tick = file, limits, file.label, 1e-3
        self.notes: list[str] = []
        seconds: list[float] = []
        with _image(file, limits) as image:
            self.size = image.size
            with _blame(file):
                count = image.n_frames if image.format in ("GIF", "WEBP", "PNG") else 1
            if count > MAX_PACKETS // 100:
                raise file.error("has too many frames; cut it into parts", "too_long")
            with contextlib.suppress(VideoInputError), _blame(file):
                while len(seconds) < count:
                    image.seek(len(seconds))
                    image.load()  # a WebP frame tells its length only then
                    # Like browsers, show a frame of length 0 for a tenth of a second.
                    seconds.append((image.info.get("duration") or 100) / 1000 if count > 1 else 1.0)
        if not seconds:
            raise file.error("is damaged or cut short: copy it again", "truncated")
        if len(seconds) < count:
            self.notes.append(f"cut short or damaged: read {len(seconds)} of {count} frames")
        self.times = np.cumsum([0.0, *seconds[:-1]])
        self.duration, self.rate = sum(seconds), len(seconds) / sum(seconds)

    def fetch(self, wanted: Sequence[int]) -> Iterator[tuple[int, Image]]:
        with _image(self.file, self.limits) as image:
            for number in wanted:
                with _blame(self.file):
                    image.seek(number)
                    array = _rgb(image)
                yield number, array


class _Folder:
    """Images in natural order: frame2 before frame10."""

    def __init__(self, folder: Path, rate: float, limits: Limits) -> None:
        self.limits, self.label, self.rate, self.tick = limits, _label(folder.name), rate, 1e-6
        self.notes: list[str] = []
        try:
            self.paths = sorted(
                (p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES),
                key=lambda p: [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", p.name)],
            )
            _check(self.label, limits, nbytes=sum(p.stat().st_size for p in self.paths))
        except OSError:
            raise _error(
                self.label, "may not be read: change its permissions", "unreadable"
            ) from None
        if not self.paths:
            raise _error(self.label, "holds no PNG, JPEG or WebP image", "empty")
        with _opened(self.paths[0], limits) as file, _image(file, limits) as image:
            self.size = image.size
        self.times, self.duration = np.arange(len(self.paths)) / rate, len(self.paths) / rate

    def fetch(self, wanted: Sequence[int]) -> Iterator[tuple[int, Image]]:
        for number in wanted:
            yield number, read_image(self.paths[number], self.limits)


# Checks and small things


def _error(
    label: str, what: str, code: VideoInputCode, limit: int | float | None = None
) -> VideoInputError:
    return VideoInputError(f"{label} {what}", code, limit)


def _bad(message: str, limit: int | float | None = None) -> VideoInputError:
    return VideoInputError(message, "bad_option", limit)


def _too_many(label: str, limit: int) -> VideoInputError:
    what = f"has more than {limit} pixels in a frame: scale it down first"
    return _error(label, what, "too_many_pixels", limit)


def _check(
    label: str,
    limits: Limits,
    nbytes: int = 0,
    size: tuple[int, int] = (0, 0),
    seconds: float = 0.0,
) -> None:
    if limits.max_bytes and nbytes > limits.max_bytes:
        what = f"is larger than {limits.max_bytes} bytes: cut it or compress it"
        raise _error(label, what, "too_large", limits.max_bytes)
    if limits.max_pixels and size[0] * size[1] > limits.max_pixels:
        raise _too_many(label, limits.max_pixels)
    if min(size) and max(size) > MAX_ASPECT * min(size):
        what = f"is {size[0]}x{size[1]}, one side over {MAX_ASPECT} times the other: crop it"
        raise _error(label, what, "unsupported", MAX_ASPECT)
    if limits.max_duration_s and seconds > limits.max_duration_s:
        what = f"is {seconds:.0f} s long and {limits.max_duration_s:g} s is the limit: cut it"
        raise _error(label, what, "too_long", limits.max_duration_s)


def _label(name: str) -> str:
    """A file's own name, safe to print."""
    return "".join(c if c.isprintable() else "?" for c in name)[:80] or "the folder"


def _enlarged(image: Image) -> np.ndarray:
    """Repeat the pixels of an image so small that a side could be taken for channels."""
    times = math.ceil(MIN_SIDE / min(image.shape[:2]))
    return image if times <= 1 else image.repeat(times, axis=0).repeat(times, axis=1)


def _near(rate: float, nominal: float) -> float:
    """The nominal rate where the measured one is within 1 % of it: MKV rounds to milliseconds."""
    return float(nominal if nominal and abs(rate / nominal - 1) < 0.01 else rate)

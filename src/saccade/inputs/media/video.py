"""Videos, read by PyAV in two passes: all packets for the timeline, then only the frames wanted.

Only listed containers and codecs are decoded, and nothing that the bytes name is opened. Time is
what the packets say (pts), never a header's frame count. Knows no paths, and not why a frame is
wanted.
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import av
import numpy as np
from av.container.core import Flags
from av.error import FFmpegError
from av.stream import Disposition
from av.video.reformatter import VideoReformatter

from saccade.core.errors import VideoInputCode, VideoInputError
from saccade.inputs.media.clip import Image, near
from saccade.inputs.media.limits import Limits
from saccade.inputs.media.opening import READABLE, File, blame

FASTEST = 4e9  # pixels a second that no decoder exceeds
MAX_PACKETS = 4_000_000  # 37 hours at 30 fps: bounds the memory a timeline takes
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
CODECS = frozenset(
    "h264 hevc av1 vp8 vp9 vvc mpeg4 h263 mpeg1video mpeg2video mjpeg prores dvvideo ffv1 rawvideo"
    " png gif qtrle huffyuv ffvhuff utvideo msmpeg4v2 msmpeg4v3 theora".split()
)


class Video:
    """A pass over the packets gives the timeline; a second pass decodes only what is needed."""

    def __init__(self, file: File, limits: Limits) -> None:
        self.file, self.limits, self.label = file, limits, file.label
        self.notes: list[str] = []
        self.scaler = VideoReformatter()  # one for all frames: setting one up costs a millisecond
        ticks, decode_ticks, key, seen, length, end = [], [], [], [], 0, 0.0
        with blame(file), self._stream() as (container, stream):
            codec, unit = stream.codec_context, float(stream.time_base)
            header_rate, declared = float(stream.average_rate or 0), (container.duration or 0) / 1e6
            limits.check(self.label, size=(codec.width, codec.height), seconds=declared)
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
                    raise file.refusal("has too many frames; cut it into parts", "too_long")
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
            raise file.refusal("is cut short or damaged: it holds no frame", "truncated")
        self.pts, self.tick, self.starts = pts[order], unit, _run_starts(pts, key)[order]
        self.packets = order
        if self.ordinal:
            self.starts[:] = 0
        self.times = (self.pts - float(self.pts[0])) * unit
        gap = float(np.median(np.diff(self.times))) if len(order) > 1 else 0.0
        self.duration = float(self.times[-1]) + (length * unit or gap or 1 / (header_rate or 1))
        self.rate = near(len(order) / self.duration, header_rate)

    def fetch(self, wanted: Sequence[int]) -> Iterator[tuple[int, Image]]:
        """Decode from the keyframe before each wanted frame; skip the packets in between."""
        todo = list(wanted[::-1])
        runs = dict(zip(self.starts[todo[::-1]], self.packets[todo[::-1]], strict=True))
        touched = sum(int(last) - int(start) + 1 for start, last in runs.items())
        work = self.size[0] * self.size[1] * touched / FASTEST
        self.limits.check(self.label, work=work)
        shown: Any = None  # the last good frame in this run, unless an error came after it
        running, out = False, 0
        with self._stream() as (container, stream):
            codec = stream.codec_context
            # The last, None, has the decoder give what it still holds.
            for i, packet in enumerate(chain(self._packets(container, stream), [None])):
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
        with blame(self.file):
            array = self.scaler.reformat(frame, format="rgb24").to_ndarray()
            return _upright(array, frame.side_data.get("DISPLAYMATRIX"))

    @contextlib.contextmanager
    def _stream(self) -> Iterator[tuple[Any, Any]]:
        """The container and its first video stream, before any decoder has run."""
        options = {"format_whitelist": CONTAINERS, "codec_whitelist": "none"}
        try:
            self.file.handle.seek(0)
            container: Any = av.open(self.file.handle, "r", options=options, io_open=_refuse)
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
                raise self._lacking(what, "no_video_stream")
            codec = stream.codec_context
            if codec is None or codec.codec.canonical_name not in CODECS:
                what = "uses a video codec that is not read; convert it to H.264"
                raise self._lacking(what, "unsupported")
            if self.limits.max_pixels:
                codec.options = {"max_pixels": str(self.limits.max_pixels)}
            yield container, stream

    def _lacking(self, what: str, code: VideoInputCode) -> VideoInputError:
        """What is not there may have been cut off."""
        cut = self.file.kind == "MP4 or MOV" and not _is_whole(self.file)
        return self._unreadable() if cut else self.file.refusal(what, code)

    def _unreadable(self) -> VideoInputError:
        if self.file.kind is None:
            what = f"is not a video that can be read: give {READABLE}"
            return self.file.refusal(what, "not_a_video")
        what = f"begins like {self.file.kind} but is cut short or damaged: copy it again"
        return self.file.refusal(what, "truncated")

    def _packets(self, container: Any, *streams: Any) -> Iterator[Any]:
        """Whole packets in decoding order, as far as they can be read."""
        with contextlib.suppress(FFmpegError):
            for packet in container.demux(*streams):
                self.file.check()
                if packet.size and not packet.is_corrupt:
                    yield packet


def _upright(image: Image, matrix: Any) -> Image:
    """The image as a player shows it: turned, mirrored or both, in whole quarters of a turn.

    ``matrix`` are FFmpeg's nine 32-bit integers a, b, u, c, d, v, x, y, w. They put the pixel
    (x, y) to (ax + cy, bx + dy); only the signs and the larger diagonal count here.
    """
    if matrix is None:
        return image
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].astype(int).tolist()
    from_x, from_y = a, d  # What gives the shown column, and what the shown row.
    if abs(b) + abs(c) > abs(a) + abs(d):
        image, from_x, from_y = image.swapaxes(0, 1), c, b
    return image[:: -1 if from_y < 0 else 1, :: -1 if from_x < 0 else 1]


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


def _is_whole(file: File) -> bool:
    """Whether an MP4's outermost boxes, each of which begins with its length, end with the file."""
    at = 0
    while at < file.size:
        file.handle.seek(at)
        head = file.handle.read(16).ljust(16, b"\0")
        length = int.from_bytes(head[:4])
        if length == 0:  # it goes on to the end
            return True
        at += max(int.from_bytes(head[8:]) if length == 1 else length, 8)
    return at == file.size


def _refuse(url: str, flags: int, options: dict[str, str]) -> None:
    raise PermissionError("a video may not open another file")

"""Reads videos with PyAV in two passes: all packets for the timeline, then the requested frames.

Only listed containers and codecs are decoded, and no other file is opened, even if the video names
one. Times come from the packets (pts), never from a header's frame count. This module gets open
files (:class:`File`) and knows no paths.
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
from saccade.inputs.media.clip import Image, snap_rate
from saccade.inputs.media.limits import Limits
from saccade.inputs.media.media_file import READABLE_TYPES, File, translate_errors

# No decoder is taken to be faster than this. A video that would take too long even at this speed is
# refused before it is decoded.
MAX_PIXELS_PER_SECOND = 4e9
MAX_PACKETS = 4_000_000  # 37 hours at 30 fps. It bounds the memory of a timeline.
ASSUMED_FPS = 25  # The rate of a video whose packets have no times and whose header has no rate.
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
CODECS = frozenset(
    "h264 hevc av1 vp8 vp9 vvc mpeg4 h263 mpeg1video mpeg2video mjpeg prores dvvideo ffv1 rawvideo"
    " png gif qtrle huffyuv ffvhuff utvideo msmpeg4v2 msmpeg4v3 theora".split()
)


class Video:
    """A video file as a ``FrameSource``: its timeline, and a decoder of requested frames.

    The constructor reads all packets for the timeline. :meth:`fetch` decodes only what is needed.
    """

    def __init__(self, file: File, limits: Limits) -> None:
        self.file, self.limits, self.label = file, limits, file.label
        self.warnings: list[str] = []
        self.scaler = VideoReformatter()  # It is shared, since making one costs a millisecond.
        # For each packet of the video: display time and decode time in ticks of ``unit`` seconds,
        # whether it is a keyframe, and whether it is displayed.
        ticks, decode_ticks, is_key, is_displayed = [], [], [], []
        packet_ticks = 0  # The duration of the last packet that has one, in ticks.
        end = 0.0  # When the last packet of any stream ends, in seconds.
        with translate_errors(file), self._stream() as (container, stream):
            codec = stream.codec_context
            unit = float(stream.time_base)
            header_rate = float(stream.average_rate or 0)
            declared = (container.duration or 0) / 1e6  # The duration in the header, in seconds.
            limits.check(self.label, size=(codec.width, codec.height), seconds=declared)
            units = {s.index: float(s.time_base or 0) for s in container.streams}
            for packet in self._packets(container, *container.streams):
                start = packet.dts if packet.pts is None else packet.pts
                duration = packet.duration or 0
                end = max(end, ((start or 0) + duration) * units[packet.stream_index])
                if packet.stream_index != stream.index:
                    continue
                if not codec.width:  # Some headers leave the size to the first frame.
                    with contextlib.suppress(FFmpegError):
                        codec.decode(packet)
                ticks.append(packet.pts)
                decode_ticks.append(packet.dts)
                is_key.append(packet.is_keyframe)
                is_displayed.append(not packet.is_discard)
                packet_ticks = duration or packet_ticks
                if len(ticks) > MAX_PACKETS:
                    raise file.refusal("has too many frames; cut it into parts", "too_long")
            self.size = (codec.width, codec.height)
            declared_frames = stream.frames  # The number of frames in the header; 0 if unknown.
        # A header may be a little wrong, so a small difference from it is no sign of damage.
        lacks_time = end < 0.98 * declared - 2 / (header_rate or 1)  # by over 2 % and two frames
        lacks_frames = len(ticks) < 0.98 * declared_frames - 1  # by over 2 % and one frame
        if lacks_time or lacks_frames:
            part = f"{end:.1f} of {declared:.1f} seconds"
            self.warnings.append(f"cut short or damaged: read {part}, {len(ticks)} frames")

        # Where packets have no display times, as in AVI, their decode times are taken instead. A
        # decoder returns frames in the order of display, so its n-th frame gets the n-th time.
        self.has_no_display_times = None in ticks
        if self.has_no_display_times:
            ticks = decode_ticks
        if None in ticks:  # There are no times at all, so a packet counts as one tick.
            ticks = list(range(len(ticks)))
            packet_ticks = 1
            unit = 1 / (header_rate or ASSUMED_FPS)
        pts = np.array(ticks, np.int64)
        # Packets come in decoding order. ``order`` has the displayed ones in the order of display.
        order = np.flatnonzero(is_displayed)
        order = order[np.argsort(pts[order], kind="stable")]
        if not len(order):
            raise file.refusal("is cut short or damaged: it holds no frame", "truncated")
        self.pts = pts[order]
        self.tick = unit  # In seconds; ``pts`` counts in ticks.
        # For each frame, the packet at which to start decoding, and the frame's own packet.
        self.start_packets = _decoding_starts(pts, is_key)[order]
        self.packets = order
        if self.has_no_display_times:
            # ``fetch`` counts decoded frames, so it decodes from the first one.
            self.start_packets[:] = 0
        self.times = (self.pts - float(self.pts[0])) * unit
        # The last frame is on display for a packet's duration if packets have one, else for the
        # usual time between frames, else for the time between frames at the header's rate.
        gap = float(np.median(np.diff(self.times))) if len(order) > 1 else 0.0
        last_frame_seconds = packet_ticks * unit or gap or 1 / (header_rate or 1)
        self.duration = float(self.times[-1]) + last_frame_seconds
        self.rate = snap_rate(len(order) / self.duration, header_rate)

    def fetch(self, numbers: Sequence[int]) -> Iterator[tuple[int, Image]]:
        """Yields each of these frame numbers, which ascend, with its frame.

        A frame that cannot be decoded is left out. Decoding starts at the keyframe before a
        requested frame. Packets that no requested frame needs are skipped.
        """
        ascending = list(numbers)
        todo = ascending[::-1]  # The next frame to yield is the last entry.
        # For each packet at which decoding starts, the packet of the last frame that is wanted. The
        # frames ascend, so each later one of the same start replaces the one before in the dict.
        last_packet_by_start = dict(
            zip(self.start_packets[ascending], self.packets[ascending], strict=True)
        )
        packet_count = sum(
            int(last) - int(start) + 1 for start, last in last_packet_by_start.items()
        )
        # How many seconds the fastest decoder would need.
        least_seconds = self.size[0] * self.size[1] * packet_count / MAX_PIXELS_PER_SECOND
        self.limits.check(self.label, work=least_seconds)
        # The frame before the one that is decoded next. It stays on display where a packet gives no
        # picture. It is None if it was skipped or is damaged.
        previous: Any = None
        is_decoding = False  # Whether the packet before was decoded, and not skipped.
        decoded_count = 0
        with self._stream() as (container, stream):
            codec = stream.codec_context
            # The last packet is None, with which the decoder returns the frames it still buffers.
            for i, packet in enumerate(chain(self._packets(container, stream), [None])):
                if not todo:
                    return
                if packet is not None and self.start_packets[todo[-1]] > i:
                    # Decoding for the next frame starts at a later packet, so this one is skipped.
                    if is_decoding:
                        codec.flush_buffers()
                    is_decoding = False
                    previous = None
                    continue
                is_decoding = True
                try:
                    decoded = codec.decode(packet)
                except FFmpegError:
                    decoded, previous = [], None
                for frame in decoded:
                    pts = frame.pts
                    if self.has_no_display_times:
                        pts = self.pts[min(decoded_count, len(self.pts) - 1)]
                    decoded_count += 1
                    if pts is None or frame.is_corrupt:
                        previous = None
                        continue
                    while todo and self.pts[todo[-1]] < pts:
                        number = todo.pop()
                        # The packet of this number gave no picture, as some of VP8 do not. The
                        # picture before it stays on display.
                        if previous is not None:
                            yield number, self._array(previous)
                    if todo and self.pts[todo[-1]] == pts:
                        yield todo.pop(), self._array(frame)
                    previous = frame
            while todo and previous is not None:  # The last packets gave no picture.
                yield todo.pop(), self._array(previous)

    def _array(self, frame: Any) -> Image:
        with translate_errors(self.file):
            array = self.scaler.reformat(frame, format="rgb24").to_ndarray()
            return _upright(array, frame.side_data.get("DISPLAYMATRIX"))

    @contextlib.contextmanager
    def _stream(self) -> Iterator[tuple[Any, Any]]:
        """Yields the container and its first video stream, before any decoder has run."""
        # FFmpeg may run decoders while it opens a file. No decoder is named "none", so none is run
        # before the codec has been compared with ``CODECS``.
        options = {"format_whitelist": CONTAINERS, "codec_whitelist": "none"}
        try:
            self.file.handle.seek(0)
            container: Any = av.open(self.file.handle, "r", options=options, io_open=_refuse_open)
        except (FFmpegError, OSError, ValueError):
            raise self._unreadable_error() from None
        with container:
            if not container.streams:
                raise self._unreadable_error()
            # With this flag FFmpeg would invent missing display times, wrong ones for B-frames.
            container.flags &= ~Flags.gen_pts.value
            for stream in container.streams.video:
                if not stream.disposition & Disposition.attached_pic:  # A cover image is no video.
                    break
            else:
                what = f"has no video stream (sound only?): give {READABLE_TYPES}"
                raise self._missing_error(what, "no_video_stream")
            codec = stream.codec_context
            if codec is None or codec.codec.canonical_name not in CODECS:
                what = "uses a video codec that is not read; convert it to H.264"
                raise self._missing_error(what, "unsupported")
            if self.limits.max_pixels:
                codec.options = {"max_pixels": str(self.limits.max_pixels)}
            yield container, stream

    def _missing_error(self, what: str, code: VideoInputCode) -> VideoInputError:
        """Returns the error for something missing, which may have been cut off the file's end."""
        is_cut = self.file.kind == "MP4 or MOV" and not _is_whole(self.file)
        return self._unreadable_error() if is_cut else self.file.refusal(what, code)

    def _unreadable_error(self) -> VideoInputError:
        if self.file.kind is None:
            what = f"is not a video that can be read: give {READABLE_TYPES}"
            return self.file.refusal(what, "not_a_video")
        what = f"begins like {self.file.kind} but is cut short or damaged: copy it again"
        return self.file.refusal(what, "truncated")

    def _packets(self, container: Any, *streams: Any) -> Iterator[Any]:
        """Yields whole packets in decoding order, as far as they can be read."""
        with contextlib.suppress(FFmpegError):
            for packet in container.demux(*streams):
                self.file.check_time()
                if packet.size and not packet.is_corrupt:
                    yield packet


def _upright(image: Image, matrix: Any) -> Image:
    """Returns the image as a player displays it: turned by whole quarters, mirrored, or both.

    ``matrix`` has nine 32-bit integers of FFmpeg; None leaves the image as it is. Of these, a, b, c
    and d are the numbers 0, 1, 3 and 4. They move the pixel (x, y) to (ax + cy, bx + dy). Two
    things count here: if b and c are larger than a and d, x and y change places, and a negative
    factor mirrors.
    """
    if matrix is None:
        return image
    a, b, _, c, d = np.frombuffer(bytes(matrix), np.int32)[:5].astype(int).tolist()
    # The axes change places first, if they do. Each axis of the image is then mirrored if its
    # factor, ``x_factor`` or ``y_factor``, is negative.
    x_factor, y_factor = a, d
    if abs(b) + abs(c) > abs(a) + abs(d):
        image = image.swapaxes(0, 1)
        # Here a and d count as 0, so the displayed x is cy, and the displayed y is bx.
        x_factor = c
        y_factor = b
    return image[:: -1 if y_factor < 0 else 1, :: -1 if x_factor < 0 else 1]


def _decoding_starts(pts: np.ndarray, is_key: list[bool]) -> np.ndarray:
    """Returns, for each packet, the packet at which to start decoding.

    Packets are in decoding order. Decoding starts at the last keyframe up to the packet. But a
    frame that is displayed before that keyframe may refer to earlier frames too, so for such a
    frame decoding starts one keyframe earlier.
    """
    starts = np.zeros(len(pts), np.int64)
    last_key = key_before = 0
    for i, tick in enumerate(pts):
        if is_key[i]:
            key_before, last_key = last_key, i
        starts[i] = last_key if pts[last_key] <= tick else key_before
    return starts


def _is_whole(file: File) -> bool:
    """Whether an MP4's outermost boxes, each of which begins with its length, fill the file.

    A length is 4 bytes. A 1 there says that the 8 bytes after the box's type have the length.
    """
    at = 0
    while at < file.size:
        file.handle.seek(at)
        head = file.handle.read(16).ljust(16, b"\0")
        length = int.from_bytes(head[:4])
        if length == 0:  # Such a box goes on to the end.
            return True
        if length == 1:
            length = int.from_bytes(head[8:])
        at += max(length, 8)  # A box has at least 8 bytes, for its length and type.
    return at == file.size


def _refuse_open(url: str, flags: int, options: dict[str, str]) -> None:
    raise PermissionError("a video may not open another file")

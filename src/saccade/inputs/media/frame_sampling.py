"""Takes frames from a video, an animation or a list of images, and returns them as a `Clip`.

It chooses moments in time, and takes the frame that is displayed at each. The choice uses only the
times at which the frames of a `FrameSource` appear. How they are decoded is left to the source.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image as PILImage

from saccade.core.errors import VideoInputCode
from saccade.inputs.media.clip import (
    Clip,
    Frames,
    FrameSampling,
    Image,
    Seconds,
    enlarge,
    snap_rate,
)
from saccade.inputs.media.limits import Limits, bad_option, refusal

# Where a `FrameSampling` says neither how many frames nor how often, it takes this many a second,
# and at least so many in all.
DEFAULT_FPS = 2.0
DEFAULT_MIN_FRAMES = 4

Progress = Callable[[int, int], None]
"""Called with the number of frames taken so far, and the number of all."""


@runtime_checkable
class FrameSource(Protocol):
    """A source of frames: when each appears is known, and frames can be fetched by number."""

    label: str
    times: Seconds  # When each frame appears; the first is 0.
    tick: float  # The seconds to which `times` are rounded.
    duration: float  # In seconds.
    rate: float  # The average number of frames a second.
    size: tuple[int, int]  # Width and height in pixels.
    warnings: list[str]

    def fetch(self, numbers: Sequence[int]) -> Iterator[tuple[int, Image]]:
        """Yields each of these frame numbers, which ascend, with its frame.

        A damaged frame may be left out.
        """
        ...


def sample(
    frame_source: FrameSource, sampling: FrameSampling, limits: Limits, progress: Progress | None
) -> Clip:
    """Returns the frames that `sampling` asks for, within `limits`, as far as they decode."""
    limits.check(frame_source.label, size=frame_source.size, seconds=frame_source.duration)
    moments, rate = _moments(frame_source, sampling, limits)
    # The frame displayed at a moment is the last one that has appeared by then.
    displayed = (
        np.searchsorted(frame_source.times, moments + _slack(frame_source), side="right") - 1
    )
    # The timestamp of a frame is the time when it appears. A frame that is taken again has the
    # moment that took it instead: if one frame appears at 0 s and is taken at the moments 0.1 and
    # 0.5 s, the timestamps are 0 and 0.5.
    is_repeated = np.diff(displayed, prepend=-1) == 0
    appearances = np.maximum(frame_source.times[displayed], sampling.start or 0.0)
    timestamps = np.where(is_repeated, moments, appearances)
    frames, is_decoded = _decode(frame_source, displayed, limits, progress)
    if not is_decoded.all():
        lost = int((~is_decoded).sum())
        frame_source.warnings.append(
            f"{lost} of {len(is_decoded)} frames could not be decoded and were left out"
        )
        frames = frames[is_decoded]
        timestamps = timestamps[is_decoded]
    return Clip(
        frames,
        timestamps,
        duration=frame_source.duration,
        fps=frame_source.rate,
        source_frames=len(frame_source.times),
        sampled_fps=rate,
        warnings=tuple(frame_source.warnings),
    )


def _moments(
    frame_source: FrameSource, sampling: FrameSampling, limits: Limits
) -> tuple[Seconds, float]:
    """Returns the moments to sample, in seconds, and how many of them there are a second.

    Raises VideoInputError for a start after the end of the source, for a number of frames above
    ``limits`` that was asked for (at a rate fewer are taken), and for a frame that is too large.
    """
    start = sampling.start or 0.0
    end = min(sampling.end or math.inf, frame_source.duration)
    if start >= frame_source.duration:
        raise bad_option(
            f"start is {start:g} s but {frame_source.label} is {frame_source.duration:.2f} s long"
        )
    # The frames numbered ``first`` to ``stop`` - 1 are on display between ``start`` and ``end``.
    slack = _slack(frame_source)
    first = int(np.searchsorted(frame_source.times, start + slack, side="right")) - 1
    stop = max(int(np.searchsorted(frame_source.times, end - slack, side="left")), first + 1)
    available = stop - first

    count = available
    # In moments a second. 0 stands for the rate at which ``count`` moments fill the time from
    # ``start`` to ``end``.
    rate = 0.0
    if sampling.num_frames:
        count = min(sampling.num_frames, available)
        if count < sampling.num_frames:
            frame_source.warnings.append(f"took all {count} frames, there are no more")
    elif not sampling.every:
        # A moment counts if it is more than half a frame before the end. So 10 seconds at 2 moments
        # a second give 20 moments, the last one at 9.5 s, even where a file of 30 frames a second
        # says that it is 10.01 seconds long.
        rate = float(sampling.fps or DEFAULT_FPS)
        count = math.ceil((end - start - 0.5 / frame_source.rate) * rate)
        min_count = 1 if sampling.fps else DEFAULT_MIN_FRAMES
        if count < min_count:
            count = min_count
            # At the default rate some of these moments would be too late to count, so the moments
            # are spaced evenly instead. At a chosen rate the count is 1 here, and the one moment is
            # ``start`` whatever the rate.
            if not sampling.fps:
                rate = 0.0
        count = min(count, available)

    width, height = frame_source.size
    frames_in_memory = sys.maxsize
    if limits.max_memory:
        frames_in_memory = limits.max_memory // max(width * height * 3, 1)
    max_count = min(limits.max_frames or sys.maxsize, frames_in_memory)
    # With ``every`` or ``num_frames``, too many frames are refused. With a rate, fewer are taken.
    number_is_fixed = sampling.every or sampling.num_frames is not None
    not_even_one_fits = frames_in_memory == 0
    if count > max_count and (number_is_fixed or not_even_one_fits):
        what = f"would give {count} frames of {width}x{height} and {max_count} are allowed"
        code: VideoInputCode = "too_many_pixels" if not_even_one_fits else "too_long"
        advice = "ask for fewer, or give start and end"
        if not_even_one_fits:
            advice = "scale the video down"
        # The limit that the error names is in bytes of memory where not even one frame fits.
        # Otherwise it is a number of frames.
        exceeded_limit = limits.max_memory if not_even_one_fits else max_count
        raise refusal(frame_source.label, f"{what}: {advice}", code, exceeded_limit)
    if count > max_count:
        frame_source.warnings.append(f"took {max_count} frames, evenly spaced, instead of {count}")
        count, rate = max_count, 0.0

    if count == available:  # Every frame is taken once, at its own time.
        times = frame_source.times[first:stop]
        times_end = frame_source.duration
        if stop < len(frame_source.times):
            times_end = frame_source.times[stop]
        return times, snap_rate(count / max(times_end - times[0], 1e-6), frame_source.rate)
    rate = rate or count / (end - start)
    return start + np.arange(count) / rate, rate


def _slack(frame_source: FrameSource) -> float:
    """Returns by how many seconds two times may differ and still count as equal.

    That is half a tick, because times are rounded to ticks, but at most a tenth of a frame.
    """
    return min(frame_source.tick / 2, 0.1 / frame_source.rate) + 1e-9


def _decode(
    frame_source: FrameSource, displayed: np.ndarray, limits: Limits, progress: Progress | None
) -> tuple[Frames, Any]:
    """Returns the `displayed` frames, all of one size, and which of them could be decoded.

    ``displayed`` has frame numbers, which ascend and may repeat. A frame is decoded once only.
    """
    frames = np.empty((0, 0, 0, 3), np.uint8)
    is_decoded = np.zeros(len(displayed), bool)
    is_resized = False
    check_time = limits.start_timer(frame_source.label)
    for number, image in frame_source.fetch(np.unique(displayed).tolist()):
        check_time()
        image = enlarge(image)
        if not is_decoded.any():
            if limits.max_memory and len(displayed) * image.nbytes > limits.max_memory:
                what = "has larger frames than its header declares: encode it again"
                raise refusal(frame_source.label, what, "too_many_pixels", limits.max_memory)
            frames = np.empty((len(displayed), *image.shape), np.uint8)
        if image.shape != frames.shape[1:]:
            height, width = frames.shape[1:3]
            image = np.asarray(PILImage.fromarray(image).resize((width, height)))
            is_resized = True
        # The rows of this frame: with ``displayed`` [3, 5, 5, 8] and number 5 they are 1 and 2.
        start, stop = np.searchsorted(displayed, [number, number + 1])
        rows = slice(start, stop)
        frames[rows] = image
        is_decoded[rows] = True
        if progress:
            progress(int(is_decoded.sum()), len(displayed))
    if not is_decoded.any():
        what = "is damaged, or its frames are too large: none can be decoded"
        raise refusal(frame_source.label, what, "damaged")
    if is_resized:
        frame_source.warnings.append("the frame size changes: all frames were resized to the first")
    return frames, is_decoded

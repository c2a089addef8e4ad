"""Which frames to take: the moments asked for, the frame on screen at each, and those collected.

Knows a source by its timeline only, as a `Reel`; not what it is or how its frames are decoded.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image as PILImage

from saccade.core.errors import VideoInputCode
from saccade.inputs.media.clip import Clip, Frames, FrameSampling, Image, Seconds, enlarged, near
from saccade.inputs.media.limits import Limits, bad_option, refusal

DEFAULT_FPS, DEFAULT_MIN_FRAMES = 2.0, 4

Progress = Callable[[int, int], None]


@runtime_checkable
class Reel(Protocol):
    """A source whose timeline is known, and whose frames can be fetched by number, ascending."""

    label: str
    times: Seconds  # when each frame appears, the first at 0
    tick: float  # what `times` were rounded to
    duration: float
    rate: float
    size: tuple[int, int]  # width, height
    notes: list[str]

    def fetch(self, wanted: Sequence[int]) -> Iterator[tuple[int, Image]]: ...


def sample(reel: Reel, sampling: FrameSampling, limits: Limits, progress: Progress | None) -> Clip:
    """The frames that `sampling` asks for, as far as `limits` allow and they can be decoded."""
    limits.check(reel.label, size=reel.size, seconds=reel.duration)
    moments, rate = _moments(reel, sampling, limits)
    # The frame shown at a moment is the last one to have appeared by then.
    shown = np.searchsorted(reel.times, moments + _slack(reel), side="right") - 1
    held = np.diff(shown, prepend=-1) == 0
    timestamps = np.where(held, moments, np.maximum(reel.times[shown], sampling.start or 0.0))
    frames, got = _collect(reel, shown, limits, progress)
    if not got.all():
        lost = int((~got).sum())
        reel.notes.append(f"{lost} of {len(got)} frames could not be decoded and were left out")
        frames, timestamps = frames[got], timestamps[got]
    count, notes = len(reel.times), tuple(reel.notes)
    return Clip(frames, timestamps, reel.duration, reel.rate, count, rate, notes)


def _moments(reel: Reel, sampling: FrameSampling, limits: Limits) -> tuple[Seconds, float]:
    """The times to look at, and the rate at which they follow each other."""
    start, end = sampling.start or 0.0, min(sampling.end or math.inf, reel.duration)
    if start >= reel.duration:
        raise bad_option(f"start is {start:g} s but {reel.label} is {reel.duration:.2f} s long")
    slack = _slack(reel)
    first = int(np.searchsorted(reel.times, start + slack, side="right")) - 1
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
        raise refusal(reel.label, f"{what}, or give start and end", code, cap)
    if count > cap:
        reel.notes.append(f"took {cap} frames, evenly spaced, instead of {count}")
        count, rate = cap, 0.0

    if count == available:
        times = reel.times[first:last]
        beyond = reel.times[last] if last < len(reel.times) else reel.duration
        return times, near(count / max(beyond - times[0], 1e-6), reel.rate)
    rate = rate or count / (end - start)
    return start + np.arange(count) / rate, rate


def _slack(reel: Reel) -> float:
    """How far a time may be off: half of what it was rounded to, and little next to a frame."""
    return min(reel.tick / 2, 0.1 / reel.rate) + 1e-9


def _collect(
    reel: Reel, shown: np.ndarray, limits: Limits, progress: Progress | None
) -> tuple[Frames, Any]:
    """The frames `shown`, of equal size, and which of them could be decoded."""
    frames, got = np.empty((0, 0, 0, 3), np.uint8), np.zeros(len(shown), bool)
    resized, check = False, limits.watch(reel.label)
    for number, image in reel.fetch(np.unique(shown).tolist()):
        check()
        image = enlarged(image)
        if not got.any():
            if limits.max_memory and len(shown) * image.nbytes > limits.max_memory:
                what = "has larger frames than it declares: convert it again"
                raise refusal(reel.label, what, "too_many_pixels", limits.max_memory)
            frames = np.empty((len(shown), *image.shape), np.uint8)
        if image.shape != frames.shape[1:]:
            height, width = frames.shape[1:3]
            image, resized = np.asarray(PILImage.fromarray(image).resize((width, height))), True
        rows = slice(*np.searchsorted(shown, [number, number + 1]))
        frames[rows], got[rows] = image, True
        if progress:
            progress(int(got.sum()), len(shown))
    if not got.any():
        what = "is damaged, or its frames are too large: none can be decoded"
        raise refusal(reel.label, what, "damaged")
    if resized:
        reel.notes.append("the frame size changes: all frames were resized to the first")
    return frames, got

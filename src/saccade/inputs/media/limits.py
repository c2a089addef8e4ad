"""Limits on what may be read, and the errors for what exceeds them.

This module knows sizes and durations, and no file, decoder or frame.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from saccade.core.errors import VideoInputCode, VideoInputError

Refusal = tuple[str, VideoInputCode]
"""What is wrong with a source, as a text that follows the source's name, and the error's code."""
TOO_SLOW: Refusal = (
    "took too long to read: take a part, take fewer frames or scale it down",
    "too_slow",
)
MAX_ASPECT = 200  # The longest side over the shortest. Image processors refuse more.


@dataclass(frozen=True)
class Limits:
    """Limits on what may be read; 0 or None means no limit.

    If frames are chosen by a rate (frames per second) and would exceed `max_frames` or
    `max_memory`, fewer frames are taken, with a warning. If a number of frames is asked for, or
    every frame, and that exceeds them, the source is refused. A source that no machine could read
    within `max_seconds` is refused before it is decoded.
    """

    max_bytes: int | None = 2 << 30  # Of a source, such as a file, before it is decoded.
    max_pixels: int | None = 50_000_000  # Of one frame.
    max_frames: int | None = 768  # The chosen frames of a source.
    max_duration_s: float | int | None = 12 * 3600  # Of the whole video, in seconds.
    max_memory: int | None = 1 << 30  # Bytes of the chosen frames once they are decoded.
    max_seconds: float | int | None = 600  # How long the reading of one source may take.
    root: Path | None = None  # Only files inside this folder are read; None allows all.

    def check(
        self,
        label: str,
        nbytes: int = 0,
        size: tuple[int, int] = (0, 0),
        seconds: float = 0.0,
        work: float = 0.0,
    ) -> None:
        """Raises VideoInputError for what exceeds a limit, or a shape that no processor accepts.

        `label` names the source in the message, `nbytes` is the source's size in bytes, and `size`
        the (width, height) of a frame. `seconds` is the duration of the source, which
        `max_duration_s` limits. `work` is the seconds that the fastest machine needs to decode the
        source, which `max_seconds` limits. What is not known yet is left at 0.
        """
        if self.max_bytes and nbytes > self.max_bytes:
            what = f"is larger than {self.max_bytes} bytes: cut it or compress it"
            raise refusal(label, what, "too_large", self.max_bytes)
        if self.max_pixels and size[0] * size[1] > self.max_pixels:
            raise too_many_pixels(label, self.max_pixels)
        if min(size) and max(size) > MAX_ASPECT * min(size):
            what = f"is {size[0]}x{size[1]}, one side over {MAX_ASPECT} times the other: crop it"
            raise refusal(label, what, "unsupported", MAX_ASPECT)
        if self.max_duration_s and seconds > self.max_duration_s:
            what = f"is {seconds:.0f} s long and {self.max_duration_s:g} s is the limit: cut it"
            raise refusal(label, what, "too_long", self.max_duration_s)
        if self.max_seconds and work > self.max_seconds:
            what = f"has too many pixels in too many frames to be read in {self.max_seconds:g} s"
            raise refusal(
                label, f"{what}: take a part or scale it down", "too_slow", self.max_seconds
            )

    def start_timer(self, label: str) -> Callable[[], None]:
        """Returns a function that raises VideoInputError once `max_seconds` have passed."""
        deadline = time.monotonic() + (self.max_seconds or math.inf)

        def check() -> None:
            if time.monotonic() > deadline:
                raise refusal(label, *TOO_SLOW, self.max_seconds)

        return check


def seconds_left(deadline: float) -> float:
    """Returns the seconds to a deadline (of ``time.monotonic``). Raises TimeoutError after it."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def refusal(
    label: str, what: str, code: VideoInputCode, limit: int | float | None = None
) -> VideoInputError:
    """Returns the error that says ``what`` is wrong with the source named ``label``."""
    return VideoInputError(f"{label} {what}", code, limit)


def bad_option(message: str, limit: int | float | None = None) -> VideoInputError:
    """Returns the error for an argument that cannot be used; ``message`` is its whole text."""
    return VideoInputError(message, "bad_option", limit)


def too_many_pixels(label: str, limit: int) -> VideoInputError:
    what = f"has more than {limit} pixels in a frame: scale it down first"
    return refusal(label, what, "too_many_pixels", limit)

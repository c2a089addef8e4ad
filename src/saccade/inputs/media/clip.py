"""The request for frames, a `FrameSampling`, and its result, a `Clip`.

This module knows what image and video processors make of frames and times. It does not know where
the frames come from.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64, UInt8

from saccade.core.numpy_numbers import to_plain
from saccade.inputs.media.limits import bad_option

Frames = UInt8[np.ndarray, "frame height width 3"]
Image = UInt8[np.ndarray, "height width 3"]
Seconds = Float64[np.ndarray, "frame"]

MIN_SIDE = 5  # In pixels. Image processors mistake a side of 1, 3 or 4 pixels for channels.


@dataclass(frozen=True)
class FrameSampling:
    """Which moments to sample: by `fps`, `num_frames` or `every`, from `start` to `end` seconds.

    `every` takes all frames. Without `fps`, `num_frames` and `every` it takes 2 frames a second,
    and at least 4. No source frame is taken twice to reach a count. A folder of images gives all of
    them unless `num_frames`, `start` or `end` is set, and `fps` is the rate at which they were
    taken (default 1).
    """

    fps: float | int | None = None
    num_frames: int | None = None
    start: float | int | None = None
    end: float | int | None = None
    every: bool = False

    def __post_init__(self) -> None:
        for name in ("fps", "num_frames", "start", "end"):
            object.__setattr__(self, name, to_plain(getattr(self, name)))
        for name in ("fps", "start", "end"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 <= value <= 1e9):
                raise bad_option(f"{name} must be a number, 0 or more and finite")
        if self.fps is not None and not 1e-4 <= self.fps <= 1000:
            raise bad_option("fps must be between 0.0001 and 1000", 1000)
        count = self.num_frames
        if count is not None and (type(count) is not int or count < 1):
            raise bad_option("num_frames must be a whole number, 1 or more")
        if not isinstance(self.every, bool):
            raise bad_option("every must be True or False")
        if self.end is not None and self.end <= (self.start or 0):
            raise bad_option("end must come after start")
        if (self.fps is not None) + (self.num_frames is not None) + self.every > 1:
            raise bad_option("give only one of fps, num_frames and every")

    def for_sequence(self, rate: float) -> "FrameSampling":
        """Returns the sampling to use for images that were taken at ``rate`` a second: it takes all
        of them from ``start`` to ``end``, unless ``num_frames`` is set."""
        return self if self.num_frames or self.every else replace(self, fps=rate)


@dataclass(frozen=True, eq=False)
class Clip:
    """The chosen frames and when each appears, in seconds from the source's first frame."""

    frames: Frames
    timestamps: Seconds
    duration: float  # Of the whole source, in seconds.
    fps: float  # The source's average rate.
    source_frames: int  # How many frames the source has; of a video, its packets are counted.
    sampled_fps: float  # The rate at which `frames` follow each other.
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks types and shapes, because processors would silently misread other pixels."""
        frames, times = self.frames, self.timestamps
        is_bytes = isinstance(frames, np.ndarray) and frames.dtype == np.uint8
        if not is_bytes or frames.shape[3:] != (3,) or not frames.size:
            raise bad_option("a clip's frames are bytes in an array of [frames, height, width, 3]")
        if np.shape(times) != (len(frames),) or not np.isfinite(times).all():
            raise bad_option("a clip needs a time for each of its frames, in seconds")
        if not 0 < self.sampled_fps < math.inf:
            raise bad_option("a clip's sampled_fps must be a number above 0 and finite")

    @property
    def metadata(self) -> dict[str, Any]:
        """The fields of transformers' `VideoMetadata`, for use with `do_sample_frames=False`.

        They describe an imaginary source, of which the clip's frames are a sample. Processors
        compute two things from them: the sampling rate as len(indices) / total * fps (Qwen2.5-VL),
        which comes out exact, and each frame's time as index / fps (Qwen3-VL), which comes out
        within half a millisecond.

        If every time is a multiple of 1 / ``sampled_fps``, the source has the clip's rate and
        number of frames, and a frame's index is its time multiplied by that rate. Otherwise the
        source has 1000 frames a second or more, so that every time is near one of its frames. For
        example, a clip at 2 frames a second may have two frames, at 0 and at 0.513 seconds. They
        are frames 0 and 513 of a source of 1000 frames, at 1000 frames a second.

        Each call returns a new dict, because processors write to it.
        """
        frame_numbers = self.timestamps * self.sampled_fps
        half_millisecond = 5e-4 * self.sampled_fps  # in frames
        is_even = np.abs(np.rint(frame_numbers) - frame_numbers).max() <= half_millisecond
        # How many frames the imaginary source has for each frame of the clip.
        source_ratio = 1 if is_even else math.ceil(1000 / self.sampled_fps)
        count, height, width, _ = self.frames.shape
        return {
            "total_num_frames": count * source_ratio,
            "fps": self.sampled_fps * source_ratio,
            "frames_indices": np.rint(frame_numbers * source_ratio).astype(int).tolist(),
            "duration": self.duration,
            "height": height,
            "width": width,
        }


def enlarge(image: Image) -> np.ndarray:
    """Returns an image with its pixels repeated if it is so small that a side could be mistaken for
    channels; any other image as it is."""
    times = math.ceil(MIN_SIDE / min(image.shape[:2]))
    return image if times <= 1 else image.repeat(times, axis=0).repeat(times, axis=1)


def snap_rate(rate: float, nominal: float) -> float:
    """Returns the nominal rate where the measured one is within 1 % of it, else the measured one.

    MKV rounds times to milliseconds, which makes the measured rate inexact.
    """
    return float(nominal if nominal and abs(rate / nominal - 1) < 0.01 else rate)


def make_clip(frames: Frames, seconds: float) -> Clip:
    """Returns evenly timed frames [frames, height, width, 3] as a clip, as if read from a file."""
    times = np.arange(len(frames)) * seconds / len(frames)
    rate = len(frames) / seconds
    return Clip(frames, times, seconds, rate, len(frames), rate)

"""Makes clips from pixels that are in memory already: Pillow's images and arrays.

A clip is the frames that a model gets, with their timestamps.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image as PILImage

from saccade.inputs.media.clip import Clip, Frames, FrameSampling, Image, enlarge
from saccade.inputs.media.frame_sampling import sample
from saccade.inputs.media.images import DEFAULT_SEQUENCE_FPS, upright_rgb
from saccade.inputs.media.limits import Limits, bad_option

CHANNELS = (1, 3, 4)  # Grey, RGB, and RGB with transparency.
MAX_BYTE = 255


class FrameArray:
    """An array of frames at a steady rate. It is a ``FrameSource``, from which ``frame_sampling``
    takes frames."""

    def __init__(self, frames: Frames, fps: float | int | None) -> None:
        self.frames, self.label = frames, "the frames"
        # When times are compared, they count as rounded to this many seconds. The times below are
        # computed from the rate, so they are more exact than this.
        self.tick = 1e-6
        self.rate = float(fps or DEFAULT_SEQUENCE_FPS)
        self.times = np.arange(len(frames)) / self.rate
        self.duration = len(frames) / self.rate
        self.size = (frames.shape[2], frames.shape[1])
        self.warnings: list[str] = []

    def fetch(self, numbers: Sequence[int]) -> Iterator[tuple[int, Image]]:
        for number in numbers:
            yield number, self.frames[number]


def picture_clip(picture: PILImage.Image | np.ndarray, channels_first: bool = False) -> Clip:
    """Returns one picture as a clip of one frame. Raises VideoInputError for a malformed array."""
    if isinstance(picture, PILImage.Image):
        frame = upright_rgb(picture)
    else:
        frame = rgb_frames(picture, channels_first)[0]
    frame_source = FrameArray(enlarge(frame)[None], fps=None)
    return sample(frame_source, FrameSampling(every=True), Limits(), progress=None)


def frames_clip(frames: Frames, sampling: FrameSampling, limits: Limits | None = None) -> Clip:
    """Returns frames as the clip of a video.

    ``sampling.fps`` is the rate of the given frames, in frames a second, by default
    ``DEFAULT_SEQUENCE_FPS``. The clip has all frames from ``sampling.start`` to ``sampling.end``,
    unless ``sampling.num_frames`` is set. Raises VideoInputError where there are no frames.
    """
    if not len(frames):
        raise bad_option("there are no frames: give at least one")
    frame_source = FrameArray(frames, sampling.fps)
    sampling = sampling.for_sequence(frame_source.rate)
    return sample(frame_source, sampling, limits or Limits(), progress=None)


def is_picture(array: np.ndarray) -> bool:
    """Returns whether an array is one picture and not the frames of a video.

    An array of three axes is one picture, so grey frames need an axis of one channel.
    """
    return array.ndim < 4


def rgb_frames(array: np.ndarray, channels_first: bool = False) -> Frames:
    """Returns the pixels of a picture or a video as bytes of [frame, height, width, 3].

    The array is [height, width], or has one axis of 1, 3 or 4 channels, which comes last or before
    height and width. Where both are possible ``channels_first`` decides. A video has an axis of
    frames before these. Whole numbers are 0 to 255, and floats 0 to 1. Raises VideoInputError for
    another array.
    """
    pixels = _bytes(array)
    # A grey picture gets an axis of one channel, and a picture becomes a video of one frame.
    if pixels.ndim == 2:
        pixels = pixels[..., None]
        channels_first = False
    if pixels.ndim == 3:
        pixels = pixels[None]
    if pixels.ndim != 4 or not pixels.size:
        raise bad_option(
            "an array of pixels is [height, width, 3] for a picture and [frame, height, width, 3] "
            f"for a video, not {list(array.shape)}"
        )
    may_be_first = pixels.shape[1] in CHANNELS  # Whether the channels may be before the height.
    may_be_last = pixels.shape[3] in CHANNELS
    if not (may_be_first or may_be_last):
        raise bad_option(f"an array of {list(array.shape)} has no axis of 1, 3 or 4 channels")
    are_first = may_be_first and (channels_first or not may_be_last)
    if are_first:
        pixels = np.moveaxis(pixels, 1, 3)
    if pixels.shape[3] == 4:
        # Transparent pixels are shown on white, as those of an image file are.
        opacity = pixels[..., 3:].astype(np.float32) / MAX_BYTE
        on_white = pixels[..., :3] * opacity + MAX_BYTE * (1 - opacity)
        return np.rint(on_white).astype(np.uint8)
    # Grey is repeated for all three colours.
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:3], 3)))


def _bytes(array: np.ndarray) -> np.ndarray:
    """Returns an array's numbers as bytes. Raises VideoInputError where they are no pixels."""
    if array.dtype == np.uint8:
        return array
    kind: Any = array.dtype.kind
    is_float = kind == "f"
    allowed = "pixels in an array are whole numbers from 0 to 255 or floats from 0 to 1"
    if kind not in "iuf":
        raise bad_option(f"{allowed}, not {array.dtype}: convert the array")
    low = high = 0.0
    if array.size:
        low = float(array.min())
        high = float(array.max())
    if math.isnan(low) or low < 0 or high > (1 if is_float else MAX_BYTE):
        raise bad_option(
            f"{allowed}, not {array.dtype} from {low:g} to {high:g}: undo the processor's "
            "normalisation, or give what it read"
        )
    scaled = array.astype(np.float32) * MAX_BYTE if is_float else array
    return np.rint(scaled).astype(np.uint8)

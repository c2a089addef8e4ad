"""Reads images, animations, and lists or folders of images with Pillow.

Only listed formats are decoded, and only after the declared size was checked. What has several
frames becomes a ``FrameSource``. A ``FrameSource`` knows when each frame appears, and its ``fetch``
decodes frames by number. Which of them are fetched is decided by ``frame_sampling``. Videos are
read by other modules.
"""

import contextlib
import re
import sys
import threading
import warnings as python_warnings
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as PILImage
from PIL import ImageOps

from saccade.core.errors import VideoInputError
from saccade.inputs.media.clip import Image, enlarge
from saccade.inputs.media.limits import Limits, refusal, too_many_pixels
from saccade.inputs.media.media_file import (
    File,
    Source,
    is_not_hidden,
    open_media,
    printable_name,
    translate_errors,
)
from saccade.inputs.media.png import strip_long_texts

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF", "TIFF")
HEIC_FORMAT = "HEIF"  # The name that pillow-heif gives its format; it is an extra.
ANIMATED_FORMATS = ("GIF", "WEBP", "PNG", "AVIF")  # A TIFF's pages are no frames.
FOLDER_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".tif", ".tiff", ".heic")
DEFAULT_SEQUENCE_FPS = 1.0
# It is assumed that Pillow is no faster than this on any machine. An animation that would take too
# long even at this speed is refused before it is decoded.
MAX_PIXELS_PER_SECOND = 5e8
# Every frame of an animation is decoded to learn how long it is displayed, so they are limited.
MAX_ANIMATION_FRAMES = 40_000

# Python's filters of warnings belong to the whole process, so only one thread may change them.
_warnings_lock = threading.Lock()


def read_image(source: Source, limits: Limits | None = None) -> Image:
    """Reads one image, or the first frame of an animation.

    It is turned upright, and put on white where it is transparent. A very small image comes back
    larger, with its pixels repeated (``enlarge``).
    """
    limits = limits or Limits()
    with open_media(source, limits) as file:
        if file.kind != "image":
            what = "is not an image; give a PNG, JPEG, WebP, AVIF, TIFF, GIF or BMP"
            raise file.refusal(what, "unsupported")
        with _open_image(file, limits) as image, translate_errors(file):
            return enlarge(upright_rgb(image))


class Animation:
    """The ``FrameSource`` of an animated GIF, WebP, PNG or AVIF. A still image has one frame, which
    lasts a second."""

    def __init__(self, file: File, limits: Limits) -> None:
        self.file, self.limits, self.label = file, limits, file.label
        # The unit, in seconds, to which times are rounded: Pillow gives durations in milliseconds.
        self.tick = 1e-3
        self.warnings: list[str] = []
        seconds: list[float] = []
        with _open_image(file, limits) as image:
            self.size = image.size
            with translate_errors(file):
                count = image.n_frames if image.format in ANIMATED_FORMATS else 1
                pages = image.n_frames if image.format == "TIFF" else 1
            if pages > 1:
                self.warnings.append(f"has {pages} pages: only the first one is read")
            if count > MAX_ANIMATION_FRAMES:
                raise file.refusal("has too many frames; cut it into parts", "too_long")
            width, height = self.size
            limits.check(self.label, work=width * height * count / MAX_PIXELS_PER_SECOND)
            try:
                while len(seconds) < count:
                    file.check_time()
                    with translate_errors(file):
                        image.seek(len(seconds))
                        image.load()  # Only then does a WebP frame have its duration.
                    # Like browsers, display a frame of duration 0 for a tenth of a second.
                    milliseconds = image.info.get("duration") or 100
                    seconds.append(milliseconds / 1000 if count > 1 else 1.0)
            except VideoInputError as error:
                # The frames before a damaged one can be used. Running out of time is no damage.
                if error.code == "too_slow":
                    raise
        if not seconds:
            raise file.refusal("is damaged or cut short: copy it again", "truncated")
        if len(seconds) < count:
            self.warnings.append(f"cut short or damaged: read {len(seconds)} of {count} frames")
        self.times = np.cumsum([0.0, *seconds[:-1]])
        self.duration = sum(seconds)
        self.rate = len(seconds) / sum(seconds)

    def fetch(self, numbers: Sequence[int]) -> Iterator[tuple[int, Image]]:
        with _open_image(self.file, self.limits) as image:
            for number in numbers:
                with translate_errors(self.file):
                    image.seek(number)
                    array = upright_rgb(image)
                yield number, array


class ImageSequence:
    """A ``FrameSource`` whose frames are separate images, at a steady rate."""

    def __init__(
        self, label: str, pictures: Sequence[Path | bytes], fps: float | int | None, limits: Limits
    ) -> None:
        self.label, self.pictures, self.limits = label, pictures, limits
        # The unit, in seconds, to which times are rounded. The times below are computed and not
        # read from a file, so they are at least as exact as this.
        self.tick = 1e-6
        self.rate = float(fps or DEFAULT_SEQUENCE_FPS)
        self.warnings: list[str] = []
        with open_media(pictures[0], limits) as file, _open_image(file, limits) as image:
            self.size = image.size
        self.times = np.arange(len(pictures)) / self.rate
        self.duration = len(pictures) / self.rate

    def fetch(self, numbers: Sequence[int]) -> Iterator[tuple[int, Image]]:
        for number in numbers:
            yield number, read_image(self.pictures[number], self.limits)


def image_folder(path: Path, fps: float | int | None, limits: Limits) -> ImageSequence:
    """Returns the images of a folder as the frames of one clip, in natural order: frame2 comes
    before frame10."""
    label = printable_name(path.name)
    try:
        paths = sorted(
            (p for p in path.iterdir() if p.suffix.lower() in FOLDER_SUFFIXES and is_not_hidden(p)),
            key=lambda p: [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", p.name)],
        )
        limits.check(label, nbytes=sum(p.stat().st_size for p in paths))
    except OSError:
        what = "may not be read: change its permissions"
        raise refusal(label, what, "unreadable") from None
    if not paths:
        raise refusal(label, "holds no PNG, JPEG, WebP, AVIF, TIFF or HEIC image", "empty")
    return ImageSequence(label, paths, fps, limits)


def image_list(pictures: Sequence[bytes], fps: float | int | None, limits: Limits) -> ImageSequence:
    """Returns encoded images as the frames of one clip."""
    limits.check("the list of frames", nbytes=sum(map(len, pictures)))
    if not pictures:
        raise refusal("the list of frames", "is empty: give at least one image", "empty")
    return ImageSequence("the list of frames", pictures, fps, limits)


@cache
def _formats() -> tuple[str, ...]:
    """Returns the formats that Pillow may open. HEIC is among them where pillow-heif is
    installed."""
    if find_spec("pillow_heif") is None:
        return FORMATS
    import_module("pillow_heif").register_heif_opener()
    return (*FORMATS, HEIC_FORMAT)


@contextlib.contextmanager
def _open_image(file: File, limits: Limits) -> Iterator[Any]:
    """Opens an image without decoding it, and checks its declared size."""
    with contextlib.ExitStack() as stack:
        with translate_errors(file), _warnings_lock, python_warnings.catch_warnings():
            # Pillow only warns of an image with very many pixels. It is refused here.
            python_warnings.simplefilter("error", PILImage.DecompressionBombWarning)
            encoded = strip_long_texts(file.handle)  # Pillow would refuse a PNG for these texts.
            try:
                image: Any = stack.enter_context(PILImage.open(encoded, formats=_formats()))
            except (PILImage.DecompressionBombWarning, PILImage.DecompressionBombError):
                cap = min(limits.max_pixels or sys.maxsize, PILImage.MAX_IMAGE_PIXELS or 0)
                raise too_many_pixels(file.label, cap) from None
        limits.check(file.label, size=image.size)
        yield image


def upright_rgb(image: Any) -> Image:
    """Returns an image as upright 8-bit RGB, on white where it is transparent."""
    with contextlib.suppress(Exception):  # Broken EXIF is no reason to refuse an image.
        image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        grey = _grey_of_floats(image) if image.mode == "F" else _grey_of_integers(image)
        # A PNG with 16 bits of grey may name one number that stands for transparent.
        grey[np.asarray(image) == image.info.get("transparency")] = 255
        return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        white = PILImage.new("RGBA", image.size, "white")
        image = PILImage.alpha_composite(white, image.convert("RGBA"))
    return np.array(image.convert("RGB"))


def _grey_of_integers(image: Any) -> np.ndarray:
    """Returns grey of 16 bits, or of 32 bits that is clipped to 16 bits, as numbers up to 255."""
    grey: np.ndarray = np.clip(np.asarray(image), 0, 65535) >> 8
    return grey


def _grey_of_floats(image: Any) -> np.ndarray:
    """Returns the numbers of a grey image of floats, scaled to be from 0 to 255.

    Such an image does not say which number is white. It is taken to be the least of 1, 255 and
    65535 that no number exceeds, or else 65535. NaN and infinity count as 0.
    """
    numbers = np.nan_to_num(np.asarray(image), nan=0.0, posinf=0.0, neginf=0.0)
    brightest = numbers.max(initial=0)
    if brightest <= 1:
        white = 1
    elif brightest <= 255:
        white = 255
    else:
        white = 65535
    grey: np.ndarray = np.rint(np.clip(numbers / white, 0, 1) * 255)
    return grey

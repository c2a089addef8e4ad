"""Images, animations, and lists or folders of images, read by Pillow.

Only listed formats are decoded, and none before its declared size is allowed. Knows nothing of
videos, and not why a frame is wanted.
"""

import contextlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as PILImage
from PIL import ImageOps

from saccade.core.errors import VideoInputError
from saccade.inputs.media.clip import Image, enlarged
from saccade.inputs.media.limits import Limits, refusal, too_many_pixels
from saccade.inputs.media.opening import File, Source, blame, is_visible, opened, printable
from saccade.inputs.media.png import without_long_texts

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
FOLDER_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
PICTURES_FPS = 1.0
FASTEST = 5e8  # pixels a second that Pillow does not exceed
MAX_ANIMATION = 40_000  # frames: each is decoded to learn how long it is shown

_warnings_lock = threading.Lock()


def read_image(source: Source, limits: Limits | None = None) -> Image:
    """One image, upright, on white where it is transparent; of an animation, the first frame."""
    limits = limits or Limits()
    with opened(source, limits) as file:
        if file.kind != "image":
            raise file.refusal("is not an image; give a PNG, JPEG, WebP, GIF or BMP", "unsupported")
        with _image(file, limits) as image, blame(file):
            return enlarged(_rgb(image))


class Animation:
    """An animated GIF, WebP or PNG; or any one image, shown for a second."""

    def __init__(self, file: File, limits: Limits) -> None:
        self.file, self.limits, self.label, self.tick = file, limits, file.label, 1e-3
        self.notes: list[str] = []
        seconds: list[float] = []
        with _image(file, limits) as image:
            self.size = image.size
            with blame(file):
                count = image.n_frames if image.format in ("GIF", "WEBP", "PNG") else 1
            if count > MAX_ANIMATION:
                raise file.refusal("has too many frames; cut it into parts", "too_long")
            width, height = self.size
            limits.check(self.label, work=width * height * count / FASTEST)
            try:
                while len(seconds) < count:
                    file.check()
                    with blame(file):
                        image.seek(len(seconds))
                        image.load()  # a WebP frame tells its length only then
                    # Like browsers, show a frame of length 0 for a tenth of a second.
                    seconds.append((image.info.get("duration") or 100) / 1000 if count > 1 else 1.0)
            except VideoInputError as error:
                if error.code == "too_slow":
                    raise
        if not seconds:
            raise file.refusal("is damaged or cut short: copy it again", "truncated")
        if len(seconds) < count:
            self.notes.append(f"cut short or damaged: read {len(seconds)} of {count} frames")
        self.times = np.cumsum([0.0, *seconds[:-1]])
        self.duration, self.rate = sum(seconds), len(seconds) / sum(seconds)

    def fetch(self, wanted: Sequence[int]) -> Iterator[tuple[int, Image]]:
        with _image(self.file, self.limits) as image:
            for number in wanted:
                with blame(self.file):
                    image.seek(number)
                    array = _rgb(image)
                yield number, array


class Pictures:
    """Images one after another, at a steady rate."""

    def __init__(
        self, label: str, pictures: Sequence[Path | bytes], fps: float | int | None, limits: Limits
    ) -> None:
        self.label, self.pictures, self.limits, self.tick = label, pictures, limits, 1e-6
        self.rate = float(fps or PICTURES_FPS)
        self.notes: list[str] = []
        with opened(pictures[0], limits) as file, _image(file, limits) as image:
            self.size = image.size
        self.times = np.arange(len(pictures)) / self.rate
        self.duration = len(pictures) / self.rate

    def fetch(self, wanted: Sequence[int]) -> Iterator[tuple[int, Image]]:
        for number in wanted:
            yield number, read_image(self.pictures[number], self.limits)


def folder(path: Path, fps: float | int | None, limits: Limits) -> Pictures:
    """The images of a folder in natural order: frame2 before frame10."""
    label = printable(path.name)
    try:
        paths = sorted(
            (p for p in path.iterdir() if p.suffix.lower() in FOLDER_SUFFIXES and is_visible(p)),
            key=lambda p: [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", p.name)],
        )
        limits.check(label, nbytes=sum(p.stat().st_size for p in paths))
    except OSError:
        what = "may not be read: change its permissions"
        raise refusal(label, what, "unreadable") from None
    if not paths:
        raise refusal(label, "holds no PNG, JPEG or WebP image", "empty")
    return Pictures(label, paths, fps, limits)


def listed(pictures: Sequence[bytes], fps: float | int | None, limits: Limits) -> Pictures:
    """Encoded images as the frames of one clip."""
    limits.check("the list of frames", nbytes=sum(map(len, pictures)))
    if not pictures:
        raise refusal("the list of frames", "is empty: give at least one image", "empty")
    return Pictures("the list of frames", pictures, fps, limits)


@contextlib.contextmanager
def _image(file: File, limits: Limits) -> Iterator[Any]:
    """An image of which only the header has been read, and whose size is allowed."""
    with contextlib.ExitStack() as stack:
        with blame(file), _warnings_lock, warnings.catch_warnings():
            warnings.simplefilter("error", PILImage.DecompressionBombWarning)
            encoded = without_long_texts(file.handle)
            try:
                image: Any = stack.enter_context(PILImage.open(encoded, formats=FORMATS))
            except (PILImage.DecompressionBombWarning, PILImage.DecompressionBombError):
                cap = min(limits.max_pixels or sys.maxsize, PILImage.MAX_IMAGE_PIXELS or 0)
                raise too_many_pixels(file.label, cap) from None
        limits.check(file.label, size=image.size)
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

"""Warns about clips that differ from the only kind of picture a checkpoint was trained on.

A checkpoint folder may hold ``training_domain.json``. It describes the background of all training
clips, and has the warning that is shown for a clip with another background::

    {"warning": "...", "grey": 122, "tint": 32, "texture": [-28, 14], "pixel_error": 14,
     "share": 0.5}

Most checkpoints have no such file, and then nothing is checked. Reading it needs no model library.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from saccade.core.errors import ModelError
from saccade.core.json_text import parse_json
from saccade.inputs.checkpoints import source_of
from saccade.inputs.media import Clip

DOMAIN_FILE = "training_domain.json"
FRAMES_CHECKED = 4  # At most so many frames of a clip are looked at, evenly spaced.


@dataclass(frozen=True)
class TrainingDomain:
    """The pictures that a model was trained on: all of them show one background.

    The background is grey, turns redder to the right and greener to the bottom, and may have a
    texture. Brightness is in steps of 0 to 255.
    """

    warning: str  # One sentence for whoever shows the model something else.
    grey: float  # The brightness of the background in the middle of a picture.
    tint: float  # How far red and green rise from the middle to the border.
    texture: tuple[float, float]  # The least and the most brightness that a texture adds.
    pixel_error: float  # How far compression may change a pixel's brightness.
    share: float  # The least share of a picture that is background.

    def includes(self, frames: UInt8[np.ndarray, "frame height width 3"]) -> bool:
        """Returns whether each frame shows the background on at least ``share`` of its pixels.

        Only red and green are compared, and at most ``FRAMES_CHECKED`` frames are looked at.
        """
        step = max(1, ceil(len(frames) / FRAMES_CHECKED))
        sample = frames[::step].astype(np.float32)
        _, height, width, _ = sample.shape
        # The tint goes from -tint at the left or upper border to +tint at the opposite one.
        red_tint = self.tint * (2 * (np.arange(width, dtype=np.float32) + 0.5) / width - 1)
        green_tint = self.tint * (2 * (np.arange(height, dtype=np.float32) + 0.5) / height - 1)
        red = sample[..., 0] - self.grey - red_tint[None, None, :]
        green = sample[..., 1] - self.grey - green_tint[None, :, None]
        # Without grey and tint, a pixel of the background has only its texture left, which adds the
        # same to red as to green.
        low = self.texture[0] - self.pixel_error
        high = self.texture[1] + self.pixel_error
        is_background = (abs(red - green) <= self.pixel_error) & (low <= red) & (red <= high)
        return bool((is_background.mean((1, 2)) >= self.share).all())


def read_training_domain(name: str) -> TrainingDomain | None:
    """Returns what a checkpoint's folder says of its training; None where it says nothing.

    For a checkpoint that is named by its hub id it returns None, because only folders are looked
    into. Raises ModelError for a file that cannot be read or is invalid.
    """
    file = Path(source_of(name)) / DOMAIN_FILE
    if not file.is_file():
        return None
    try:
        values = parse_json(file.read_bytes())
        low, high = values["texture"]
        numbers = {key: float(values[key]) for key in ("grey", "tint", "pixel_error", "share")}
        if unknown := values.keys() - {field.name for field in fields(TrainingDomain)}:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        return TrainingDomain(str(values["warning"]), texture=(float(low), float(high)), **numbers)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        names = ", ".join(field.name for field in fields(TrainingDomain))
        message = (
            f"the {DOMAIN_FILE} of {name} is invalid: it must be a JSON object with exactly {names}"
        )
        raise ModelError(message) from error


def warn_outside_domain(clip: Clip, domain: TrainingDomain | None) -> Clip:
    """Returns the clip, with the domain's warning added if its frames are outside the domain."""
    if domain is None or domain.includes(clip.frames):
        return clip
    return replace(clip, warnings=(*clip.warnings, domain.warning))

"""Tells whether a clip shows the drawn world, on which alone the embedded pair was trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import UInt8

from saccade.inputs.checkpoints import embedded
from saccade.inputs.media import Clip

FOREIGN_CLIP_WARNING = (
    "the embedded pair has only ever seen drawn shapes: what it says about anything else means "
    "nothing; name a model of your own (a target), such as Qwen/Qwen2.5-VL-7B-Instruct"
)
GROUND_GREY = 122.0  # Of the background in ``drawing``.
GROUND_TINT = 32.0  # How far the background turns red to the right and green to the bottom.
TEXTURE_RANGE = (-28.0, 14.0)  # What textures add to the background.
MAX_PIXEL_ERROR = 14.0  # How far compression may move a pixel.
MIN_GROUND_SHARE = 0.5  # Objects cover less than half of a picture.
FRAMES_CHECKED = 4


def is_drawn_world(frames: UInt8[np.ndarray, "frame height width 3"]) -> bool:
    """Returns whether frames show the drawn world: more than half of each is its background.

    The background turns redder to the right and greener to the bottom, and is otherwise grey.
    """
    sample = frames[:: max(1, len(frames) // FRAMES_CHECKED)].astype(np.float32)
    _, height, width, _ = sample.shape
    red_tint = GROUND_TINT * (2 * (np.arange(width, dtype=np.float32) + 0.5) / width - 1)
    green_tint = GROUND_TINT * (2 * (np.arange(height, dtype=np.float32) + 0.5) / height - 1)
    red = sample[..., 0] - GROUND_GREY - red_tint[None, None, :]
    green = sample[..., 1] - GROUND_GREY - green_tint[None, :, None]
    low, high = TEXTURE_RANGE[0] - MAX_PIXEL_ERROR, TEXTURE_RANGE[1] + MAX_PIXEL_ERROR
    ground = (abs(red - green) <= MAX_PIXEL_ERROR) & (low <= red) & (red <= high)
    return bool((ground.mean((1, 2)) >= MIN_GROUND_SHARE).all())


def warn_if_foreign(clip: Clip, target: str) -> Clip:
    """Adds a warning to a clip of anything else, where the embedded pair is the target."""
    if not embedded(target) or is_drawn_world(clip.frames):
        return clip
    return replace(clip, warnings=(*clip.warnings, FOREIGN_CLIP_WARNING))

"""What the embedded pair knows: whether a clip is of its drawn world, and what to say if not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import UInt8

from saccade.inputs.checkpoints import is_embedded
from saccade.inputs.media import Clip

FOREIGN = (
    "the embedded pair has only ever seen drawn shapes: what it says about anything else means "
    "nothing; name a model of your own (a target), such as Qwen/Qwen2.5-VL-7B-Instruct"
)
GREY, TINT = 122.0, 32.0  # of the ground in ``drawing``, and how far it turns red and green
PATTERN = (-28.0, 14.0)  # what textures add to it
NEAR = 14.0  # how far compression moves a pixel
ENOUGH = 0.5  # objects cover less than half of a picture
LOOKED_AT = 4  # frames


def drawn(frames: UInt8[np.ndarray, "frame height width 3"]) -> bool:
    """Whether frames are of the drawn world: more than half of each shows the ground it draws,
    redder to the right, greener to the bottom, and else grey in both alike."""
    some = frames[:: max(1, len(frames) // LOOKED_AT)].astype(np.float32)
    _, height, width, _ = some.shape
    across = TINT * (2 * (np.arange(width, dtype=np.float32) + 0.5) / width - 1)
    down = TINT * (2 * (np.arange(height, dtype=np.float32) + 0.5) / height - 1)
    red = some[..., 0] - GREY - across[None, None, :]
    green = some[..., 1] - GREY - down[None, :, None]
    low, high = PATTERN[0] - NEAR, PATTERN[1] + NEAR
    ground = (abs(red - green) <= NEAR) & (low <= red) & (red <= high)
    return bool((ground.mean((1, 2)) >= ENOUGH).all())


def remarked(clip: Clip, target: str) -> Clip:
    """The clip, with ``FOREIGN`` among its warnings where the embedded pair is asked about what it
    cannot know."""
    if not is_embedded(target) or drawn(clip.frames):
        return clip
    return replace(clip, warnings=(*clip.warnings, FOREIGN))

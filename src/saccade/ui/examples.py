"""Clips of the synthetic world that no training stage drew, for people without a video at hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from saccade.inputs.media import Clip
from saccade.world import drawing, scenes

SECONDS = 8.0


@dataclass(frozen=True)
class Example:
    """A scene, how many frames of it are taken, and how large they are."""

    seed: int
    frames: int
    side: int

    def clip(self) -> Clip:
        pictures = drawing.render(scenes.scene(self.seed), self.frames, self.side)
        times = (np.arange(self.frames) * SECONDS / self.frames).astype(np.float64)
        rate = self.frames / SECONDS
        return Clip(pictures, times, SECONDS, rate, self.frames, rate)


EXAMPLES: dict[str, Example] = {
    "Three shapes (2,048 visual tokens)": Example(20_000_002, 64, 224),
    "Four on stripes (2,048)": Example(20_000_005, 64, 224),
    "Five shapes, short (256)": Example(20_000_001, 32, 112),
}

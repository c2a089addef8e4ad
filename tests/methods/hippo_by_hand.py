"""HIPPO by hand: its scores over lists of numbers, from uncached forwards of the draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from by_hand import prefilled
from helpers import (
    frames_input,
    no_seconds,
    onevision,
    qwen2,
    qwen25,
    video_input,
)

from saccade.core.prompt import Prefill, Prompt

KEEP, CROP, GAMMA = 0.1, 5, 5

CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "qwen2_vl": (qwen2, lambda: no_seconds(video_input(grid=(3, 8, 8)))),
    "qwen2_5_vl": (qwen25, lambda: video_input(1, grid=(4, 8, 14))),
    "llava_onevision": (onevision, lambda: frames_input(frames=6)),
}


@cache
def prefill_target(family: str) -> tuple[Any, Prefill]:
    """A target, and what its prefill revealed."""
    make, inputs = CASES[family]
    return make(), prefilled(make(), inputs())


Cell = tuple[int, ...]

Rows = list[list[float]]


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(x * x for x in b))


def temporal_by_hand(rows: Rows, cells: list[Cell]) -> list[float]:
    """Eq. 3 and 4."""
    at = {cell: row for cell, row in zip(cells, rows, strict=True)}
    scores = []
    for medium, t, h, w in cells:
        near = [(medium, t + step, h, w) for step in (-1, 1) if (medium, t + step, h, w) in at]
        like = [cosine(at[medium, t, h, w], at[other]) for other in near]
        scores.append(1 - sum(like) / len(like) if like else 1.0)
    return scores


def spatial_by_hand(
    rows: Rows, cells: list[Cell], side: int = CROP, unbiased: bool = False
) -> list[float]:
    """Eq. 5 and 6: crops tile the frame from the top left, the last ones hold what is left."""
    scores = []
    for row, (medium, t, h, w) in zip(rows, cells, strict=True):
        crop = (medium, t, h // side, w // side)
        like = [
            cosine(row, other)
            for other, (m, s, y, x) in zip(rows, cells, strict=True)
            if (m, s, y // side, x // side) == crop
        ]
        scores.append(variance(like, unbiased))
    return scores


def variance(values: Sequence[float], unbiased: bool = False) -> float:
    mean = sum(values) / len(values)
    return sum((x - mean) ** 2 for x in values) / max(1, len(values) - unbiased)


def normalised(scores: list[float], cells: list[Cell], *, whole: bool = False) -> list[float]:
    """The z-score within each frame, 0 where a frame does not vary; ``whole``: over the video."""
    z_scores = []
    for medium, t, *_ in cells:
        frame = [
            x for x, (m, s, *_) in zip(scores, cells, strict=True) if whole or (m, s) == (medium, t)
        ]
        spread = math.sqrt(variance(frame))
        # a row's cosine with itself is 1 only up to rounding
        flat = spread < 1e-9
        z_scores.append(0.0 if flat else (scores[len(z_scores)] - sum(frame) / len(frame)) / spread)
    return z_scores


@dataclass(frozen=True)
class Reading:
    """The paper, and ways to misread it."""

    attn: bool = True
    temp: bool = True
    spa: bool = True
    whole: bool = False  # the z-score over the whole video
    unbiased: bool = False  # the sample variance in Eq. 6
    side: int = CROP
    inverted: bool = True  # Eq. 4


def holistic_by_hand(
    prompt: Prompt, target_attention: Sequence[float], reading: Reading = Reading()
) -> list[float]:
    """Eq. 7."""
    rows = prompt.embeds[prompt.visual].double().tolist()
    cells = [tuple(cell) for cell in prompt.grid.tolist()]
    parts = []
    if reading.attn:
        parts.append(list(target_attention))
    if reading.temp:
        temp = temporal_by_hand(rows, cells)
        parts.append(temp if reading.inverted else [1 - x for x in temp])
    if reading.spa:
        parts.append(spatial_by_hand(rows, cells, reading.side, reading.unbiased))
    scaled = [normalised(part, cells, whole=reading.whole) for part in parts]
    return [sum(each) for each in zip(*scaled, strict=True)]

"""Computes what each visual token of a clip shows, and which words of a text depend on pixels.

Training uses the first to train a vision tower (linear probes predict the labels from its tokens)
and the second to see how many of the words that need the video are right. Clips are of the drawn
world (``saccade.world``), so both are known exactly.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from saccade.world.drawing import clip_and_sprite_slices, sprite, strokes
from saccade.world.scenes import COLORS, MOTIONS, SHAPES, SIZES, TEXTURES, Scene, state_at

# What is known of a visual token. Each is predicted by one linear probe in training.
PROBES = ("shape", "color", "size", "motion", "row", "col", "time")
# A token is background if no object covers this share of its pixels.
MIN_OBJECT_SHARE = 0.06


def token_labels(
    scene: Scene,
    frames: int,
    height: int,
    width: int | None = None,
    *,
    cell: int = 28,
    temporal: int = 2,
) -> dict[str, NDArray[np.int64]]:
    """Returns what each visual token shows, by the names in PROBES.

    The arrays are int64 [frames/temporal, height/cell, width/cell]. `shape`, `color`, `size` and
    `motion` are 0 for background, else 1 + the index in SHAPES, COLORS, SIZES or MOTIONS of the
    object with most pixels in the token. Every token has a `row` and a `col` (thirds of the frame,
    0..2), and a `time` (the quarter of the clip, 0..3). A token covers `temporal` frames of `cell`
    x `cell` pixels. Pixels and frames that do not fill a token are left out, but a single frame
    makes tokens of one frame.
    """
    width = height if width is None else width
    temporal = min(temporal, frames)
    steps = frames // temporal
    rows = height // cell
    cols = width // cell
    # Each pixel gets the number of its object, counted from 1, or 0 for background.
    ids = np.zeros((frames, height, width), dtype=np.uint8)
    for stroke in strokes(scene, frames, height, width):
        where, part = clip_and_sprite_slices(stroke, height, width)
        mask = sprite(scene.objects[stroke.index].shape, stroke.radius).mask[part]
        ids[where][:, mask] = stroke.index + 1
    ids = ids[: steps * temporal, : rows * cell, : cols * cell]
    blocks = ids.reshape(steps, temporal, rows, cell, cols, cell)
    # The object with most pixels of a token wins. In place of the background's pixels stands the
    # number that an object must exceed, so that a small object wins over the background.
    count = np.zeros((len(scene.objects) + 1, steps, rows, cols), dtype=np.int64)
    for index in range(1, len(scene.objects) + 1):
        count[index] = (blocks == index).sum(axis=(1, 3, 5))
    count[0] = MIN_OBJECT_SHARE * temporal * cell * cell
    winner = count.argmax(axis=0)

    things = scene.objects
    # The label of each number that may win; the first is that of background.
    tables = {
        "shape": [0, *(1 + SHAPES.index(o.shape) for o in things)],
        "size": [0, *(1 + SIZES.index(o.size) for o in things)],
        "motion": [0, *(1 + MOTIONS.index(o.motion) for o in things)],
    }
    out = {name: np.array(table, dtype=np.int64)[winner] for name, table in tables.items()}
    # Colors may change, so they have a table for each step. `middles` are the middles of steps, as
    # shares of the clip.
    colors = np.zeros((steps, len(things) + 1), dtype=np.int64)
    middles = [(s * temporal + temporal / 2) / frames for s in range(steps)]
    for index, thing in enumerate(things):
        for step, middle in enumerate(middles):
            state = state_at(scene, index, middle)
            now = thing.color if state is None else state.color
            colors[step, index + 1] = 1 + COLORS.index(now)
    out["color"] = colors[np.arange(steps)[:, None, None], winner]
    shape = (steps, rows, cols)
    row_thirds = _thirds(rows)
    col_thirds = _thirds(cols)
    out["row"] = np.broadcast_to(row_thirds[None, :, None], shape).astype(np.int64)
    out["col"] = np.broadcast_to(col_thirds[None, None, :], shape).astype(np.int64)
    quarter = np.array([min(3, int(4 * m)) for m in middles], dtype=np.int64)
    out["time"] = np.broadcast_to(quarter[:, None, None], shape).copy()
    return out


def _thirds(count: int) -> NDArray[np.int64]:
    """Returns for each of `count` cells side by side in which third (0..2) its middle lies.

    Of 4 cells, that is [0, 1, 1, 2].
    """
    middles = np.arange(count) * 2 + 1  # In half cells.
    return 3 * middles // (2 * count)


# The words in a pattern's groups count; if it has no group that matched, the whole match does.
# Patterns of phrases come first, so that their words are not matched as single words.
_TIME = (
    r"after a (quarter) of the time|(halfway) through|after (three quarters) of the time",
    r"(early) on|(midway)|(late)\b|in the (first half)|at (half time)|in the (second half)",
    r"(soon)|in the (middle of the clip)|(near the end)",
)
_MOTION = (
    r"(?:moves|slides|travels|drifts) (left|right|up|down)",
    r"in a (loop)|(stays still|does not move|rests|remains still)",
)
_EVENT = (
    rf"(turns|becomes|changes to) (?:{'|'.join(COLORS)})",
    r"(vanishes|disappears|is gone|leaves)[,.]",
    r"(appears|shows up|arrives|pops up) in|(missing|new)\b|(comes later|only later|will be)",
)
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("time", "|".join(_TIME)),
    ("motion", "|".join(_MOTION)),
    ("event", "|".join(_EVENT)),
    ("colour", rf"\b({'|'.join(COLORS)})\b"),
    ("shape", rf"\b({'|'.join(SHAPES)})\b"),
    ("size", r"\b(small|large|little|big)\b"),
    ("texture", rf"\b({'|'.join(TEXTURES)})\b"),
    ("count", r"\b(one|two|three|four|five|six|seven|eight|no(?= \w+s\b))\b"),
    ("where", r"\b(top|bottom|left|right|middle|centre|above)\b"),
    ("truth", r"\b(yes|no|none|nothing)\b"),
)
_COMPILED = tuple((kind, re.compile(p, re.IGNORECASE)) for kind, p in _PATTERNS)


def content_words(text: str) -> list[tuple[int, int, str]]:
    """Returns (start, end, kind) of the words that depend on the pixels, in order of `start`.

    The kinds are colour, shape, size, where, count, motion, time, event, texture and truth (yes or
    no). `start` and `end` are places in `text`. A span may have several words, such as 'stays
    still' or 'middle of the clip'; spans never overlap.
    """
    spans: list[tuple[int, int, str]] = []
    used = bytearray(len(text))
    for kind, pattern in _COMPILED:
        for match in pattern.finditer(text):
            group = match.lastindex or 0  # 0 is the whole match.
            start, end = match.span(group)
            if not any(used[start:end]):
                used[start:end] = b"\1" * (end - start)
                spans.append((start, end, kind))
    return sorted(spans)

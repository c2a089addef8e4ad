"""What the page shows, as HTML and SVG: text by how it came, frames, trees, rounds.

Here is what there is to draw and where it stands; the marks are those of ``pictures.html``, which
escapes every string. Everything is inline, so nothing is fetched, and how a token came is never
told by colour alone.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader
from PIL import Image, ImageDraw

from saccade.bench.show import MEANING
from saccade.core.result import RoundRecord
from saccade.core.tree import ROOT, Tree, add, children, depths, follow
from saccade.ui.duel import Column, Duel
from saccade.ui.kept import KeptClips

Word = Callable[[int], str]
"""A token's id -> how it is spelt."""

FRAMES, WIDE = 8, 176  # frames shown, and how wide
LOOKS = 5  # of lines over the rounds, in page.css
MARKS: Any = (
    Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    .get_template("pictures.html")
    .module
)


# -- text --------------------------------------------------------------------------------------


def mark(name: str, *what: Any) -> str:
    """A mark that needs nothing but what it shows: ``head`` (the page's title and who answers),
    ``how`` (both answers share the machine; whether one drafts in its own process), ``legend``."""
    return str(vars(MARKS)[name](*what))


def message(text: str, kind: str = "note") -> str:
    """A sentence in a box; nothing for none."""
    return str(MARKS.message(text, kind))


def column(side: Column, coloured: bool) -> str:
    """One answer: its measures so far above its text, each run of one kind in one span."""
    runs = groupby(side.pieces, key=lambda piece: piece.kind)
    spans = [(kind, "".join(piece.text for piece in run)) for kind, run in runs]
    return str(MARKS.column(side, spans if coloured else None))


def outcome(duel: Duel, sampled: bool) -> str:
    """Who was how much faster, and whether the answers are the same."""
    return str(MARKS.outcome(duel, sampled))


# -- frames ------------------------------------------------------------------------------------


def strip(frames: np.ndarray, times: Sequence[float]) -> str:
    """Some of the frames ``[frame, height, width, 3]`` in a row."""
    labels = [(i, f"{times[i]:.1f} s") for i in _spread(len(frames))]
    pictures = [
        (_png(Image.fromarray(frames[i])), label, f"frame at {label}") for i, label in labels
    ]
    return str(MARKS.strip(pictures))


def seen(frames: np.ndarray, times: Sequence[float], one: KeptClips) -> str:
    """The frames as one view has them: what it dropped is dimmed, what it kept is framed."""
    steps, pictures = one.share.shape[0], []
    for step in _spread(steps) if one.count else []:
        i = step * len(frames) // steps  # the first of the frames a token stands for
        share = one.share[step].numpy()
        kept, whole = int(np.nansum(share > 0)), int(np.sum(~np.isnan(share)))
        label = f"{times[i]:.1f} s: {kept}/{whole}"
        pictures.append((_png(overlaid(frames[i], share)), label, f"{one.view} at {label} kept"))
    apart = bool(((one.share > 0) & (one.share < 0.99)).any())  # heads keep tokens of their own
    return str(MARKS.seen(one, apart, pictures))


def overlaid(frame: np.ndarray, share: np.ndarray) -> Image.Image:
    """A frame with its grid of visual tokens over it: the less kept, the darker."""
    picture = Image.fromarray(frame).resize(_size(frame), Image.Resampling.BILINEAR)
    rows, columns = share.shape
    dim = Image.fromarray((np.nan_to_num(share).clip(0, 1) * 255).astype(np.uint8))
    light = dim.resize(picture.size, Image.Resampling.NEAREST)
    grey = Image.blend(picture.convert("L").convert("RGB"), Image.new("RGB", picture.size), 0.72)
    picture = Image.composite(picture, grey, light)
    pen = ImageDraw.Draw(picture)
    for row, column in np.argwhere(np.nan_to_num(share) > 0):
        box = [column / columns, row / rows, (column + 1) / columns, (row + 1) / rows]
        left, top, right, bottom = (
            round(edge * length) for edge, length in zip(box, picture.size * 2, strict=True)
        )
        pen.rectangle((left, top, right - 1, bottom - 1), outline=(255, 255, 255))
    return picture


def _size(frame: np.ndarray) -> tuple[int, int]:
    height, width = frame.shape[:2]
    return WIDE, max(1, round(WIDE * height / width))


def _png(picture: Image.Image) -> str:
    """A picture as a PNG file in base 64."""
    file = io.BytesIO()
    small = picture.copy()
    small.thumbnail((2 * WIDE, 2 * WIDE))
    small.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _spread(length: int) -> list[int]:
    return [int(i) for i in np.linspace(0, length - 1, min(FRAMES, length)).round()]


# -- one round ---------------------------------------------------------------------------------

ROW, GAP, LETTER, PAD = 30, 26, 7.4, 9


def tree(round: RoundRecord, word: Word, before: str = "") -> str:
    """A round's draft: accepted nodes filled and joined by a thick line, then the target's own
    token. ``before`` ends the text it extends; a node's title has what the draft gave it."""
    spelt = [shown(word(token)) for token in round.tokens]
    grown = Tree(round.tokens, round.parents)
    accepted = follow(grown, round.accepted)
    kinds = ["accepted" if i in accepted else "refused" for i in range(len(spelt))]
    if round.own is not None and round.kind is not None:
        spelt.append(shown(word(round.own)))
        grown = add(grown, accepted[-1] if accepted else ROOT, round.own)
        kinds.append(round.kind)
    odds = dict(enumerate(round.note)) if len(round.note) == len(round.tokens) else {}
    depth, height = [0, *depths(grown.parents)], _heights(grown)
    labels = [shown(before) or "start", *spelt]
    widths = [max(38.0, len(label) * LETTER + 2 * PAD) for label in labels]
    columns = [max(w for w, d in zip(widths, depth, strict=True) if d == level)
               for level in range(max(depth) + 1)]  # fmt: skip
    lefts = [sum(columns[:level]) + GAP * level + 2 for level in range(len(columns))]
    nodes = [
        {
            "label": label,
            "kind": kind,
            "odds": odds.get(node - 1),
            "parent": grown.parents[node - 1] + 1 if node else None,
            "x": _short(lefts[depth[node]]),
            "y": ROW * height[node] + ROW / 2 + 2,
            "width": widths[node],
        }
        for node, (label, kind) in enumerate(zip(labels, ["start", *kinds], strict=True))
    ]
    across, down = lefts[-1] + columns[-1] + 4, ROW * (max(height) + 1) + 6
    own = "" if round.kind is None else f", then a token {MEANING[round.kind]}"
    said = f"{len(round.tokens)} drafted, {len(round.accepted)} accepted{own}"
    said = "the prompt's own token: nothing was drafted for it" if round.opening else said
    return str(MARKS.tree(nodes, said, math.ceil(across), down))


def shown(text: str) -> str:
    """A token's text with its spaces and line ends to be seen."""
    return text.replace(" ", "·").replace("\n", "⏎")


def _heights(tree: Tree) -> list[int]:
    """The line of every node, the root's first: leaves one below another, parents beside the
    first of their children."""
    found = [0] * (len(tree) + 1)
    lines = count()

    def place(node: int) -> int:
        below = [place(child) for child in children(tree, node)]
        found[node + 1] = below[0] if below else next(lines)
        return found[node + 1]

    place(ROOT)
    return found


# -- over the rounds ---------------------------------------------------------------------------


class Size(NamedTuple):
    """Lengths of the picture of the rounds: panels one below another, all equally large."""

    across: int = 720
    panel: int = 96  # how tall the bars and lines of one may be
    left: int = 44
    right: int = 624
    top: int = 20  # above a panel, where its title stands
    side: int = 632  # where the names of bars and lines stand


SIZE = Size()


def over_rounds(
    rounds: Sequence[RoundRecord], views: Sequence[str] = (), chosen: int | None = None
) -> str:
    """What changed from round to round: drafted and accepted tokens; the depth and width of trees
    that branch; the weights of an ensemble's ``views``. ``chosen`` is the round to point at."""
    if not any(round.tokens for round in rounds):
        return message("Nothing was drafted, so there are no rounds to show.")
    each = (SIZE.right - SIZE.left) / len(rounds)  # a round's place across
    middles = [_short(SIZE.left + (i + 0.5) * each) for i in range(len(rounds))]
    deep = [depths(round.parents) for round in rounds]
    sizes = {
        "depth": [max(own, default=0) for own in deep],
        "width": [max(map(own.count, own), default=0) for own in deep],
    }
    panels = []
    if max(sizes["width"]) > 1:
        top = _even(max(map(max, sizes.values())))
        panels.append(("levels and widest level of the tree", top, _lines(sizes, middles, top)))
    if views and all(len(round.note) == len(views) for round in rounds if round.tokens):
        notes = [round.note or (float("nan"),) * len(views) for round in rounds]
        weights = dict(zip(views, zip(*notes, strict=True), strict=True))
        panels.append(("weight of each view", 1.0, _lines(weights, middles, 1.0)))
    most = _even(max(len(round.tokens) for round in rounds))
    thick, step = max(1.0, _short(0.8 * each)), math.ceil(len(rounds) / 10)
    return str(MARKS.over_rounds(rounds, most, panels, middles, thick, step, chosen, SIZE))


def _lines(
    lines: Mapping[str, Sequence[float]], middles: Sequence[float], top: float
) -> list[dict[str, Any]]:
    """Lines over the rounds, each named where it ends; names are kept from touching."""
    found: list[dict[str, Any]] = []
    for i, (name, line) in enumerate(lines.items()):
        heights = [SIZE.top + SIZE.panel * (1 - value / top) for value in line]
        places = [(x, y) for x, y in zip(middles, heights, strict=True) if not math.isnan(y)]
        if places:
            found.append({"name": name, "look": i % LOOKS, "places": places})
    below = 0.0
    for each in sorted(found, key=lambda each: each["places"][-1][1]):
        below = each["below"] = max(_short(each["places"][-1][1]) + 4, below + 14)
    return found


def _even(most: float) -> float:
    """The next even number, so that the middle is whole."""
    return 2.0 * max(1, math.ceil(most / 2))


def _short(length: float) -> float:
    """A length as it is written: to a tenth of a pixel."""
    return round(length, 1)

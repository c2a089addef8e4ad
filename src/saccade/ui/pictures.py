"""Draws what the page of ``saccade ui`` shows, as HTML and SVG: coloured text, frames, trees, and
charts of the rounds.

This module computes what is drawn and where; the markup is in ``pictures.html``, which escapes
every string. Everything is inline, so the page fetches nothing. Colour is never the only sign of a
token's kind (accepted, recovered or bonus).
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader
from PIL import Image, ImageDraw

from saccade.answering.coloured_text import KIND_MEANINGS
from saccade.core.result import RoundRecord
from saccade.core.tree import ROOT, Tree, add, children, depths, follow
from saccade.ui.duel import Column, Duel
from saccade.ui.kept_visual_tokens import KeptTokens

TokenText = Callable[[int], str]
"""Maps a token's id to its text."""

MAX_FRAMES = 8  # How many frames of a clip are drawn at most.
FRAME_WIDTH = 176  # In pixels.
LINE_STYLES = 5  # How many styles page.css has for lines over the rounds.
DROPPED_DARKENING = 0.72  # Dropped visual tokens are drawn in grey with this share of black.
NAME_DISTANCE = 14  # The least distance between the names of two lines, in pixels.
TEMPLATES: Any = (
    Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    .get_template("pictures.html")
    .module
)


# -- text --------------------------------------------------------------------------------------


def static_html(name: str, *values: Any) -> str:
    """Returns a part of the page that does not change during a run.

    ``name`` is the part, and decides what ``values`` are. For "head" they are the page's title, its
    purpose and the models' names, for "how" whether the draft has a process of its own, and for
    "legend" the meaning of each kind of token.
    """
    return str(vars(TEMPLATES)[name](*values))


def message(text: str, kind: str = "note") -> str:
    """Returns a sentence in a box, or nothing for an empty sentence."""
    return str(TEMPLATES.message(text, kind))


def exchange(heading: str, answer: str, strips: str = "") -> str:
    """Returns one question with its answer.

    ``heading`` has the question, and ``strips`` is the markup of the clips that came with it.
    """
    return str(TEMPLATES.exchange(heading, answer, strips))


def conversation(exchanges: Sequence[str], question: str, answer: str) -> str:
    """Returns the markup of a conversation, the latest exchange first.

    ``exchanges`` are the markup of the completed ones, the oldest first. ``question`` is the one
    that is being answered, or empty, and ``answer`` is its text so far.
    """
    growing = [exchange(question, answer)] if question else []
    return "".join([*growing, *reversed(exchanges)])


def column(side: Column, coloured: bool) -> str:
    """Returns one answer: its measures above its text.

    If ``coloured``, consecutive tokens of one kind (such as accepted ones) are one span of the
    text. Otherwise the text has no spans.
    """
    runs = groupby(side.pieces, key=lambda piece: piece.kind)
    spans = [(kind, "".join(piece.text for piece in run)) for kind, run in runs]
    return str(TEMPLATES.column(side, spans if coloured else None))


def outcome(duel: Duel, sampled: bool) -> str:
    """Returns how much faster the drafted answer was, and whether both have the same tokens."""
    return str(TEMPLATES.outcome(duel, sampled))


# -- frames ------------------------------------------------------------------------------------


def strip(frames: np.ndarray, times: Sequence[float]) -> str:
    """Returns some of the frames ``[frame, height, width, 3]`` in a row. ``times`` are the seconds
    of all frames."""
    labels = [(i, f"{times[i]:.1f} s") for i in _spread_evenly(len(frames))]
    pictures = [
        (_png(Image.fromarray(frames[i])), label, f"frame at {label}") for i, label in labels
    ]
    return str(TEMPLATES.strip(pictures))


def kept_frames(frames: np.ndarray, times: Sequence[float], view: KeptTokens) -> str:
    """Returns the frames with the visual tokens that one view keeps for the draft.

    The cells of dropped tokens are dimmed, and those of kept ones have a border.
    """
    steps = view.share.shape[0]  # A token may cover several frames, which are one step.
    shown_steps = _spread_evenly(steps) if view.kept_count else []
    pictures = []
    for step in shown_steps:
        i = step * len(frames) // steps  # The first frame of the step.
        share = view.share[step].numpy()
        kept_count = int(np.nansum(share > 0))
        total_count = int(np.sum(~np.isnan(share)))
        label = f"{times[i]:.1f} s: {kept_count}/{total_count}"
        alt = f"{view.view} at {label} kept"
        pictures.append((_png(overlay_kept_tokens(frames[i], share)), label, alt))
    # Where all heads keep a token, its share is a sum of fractions that may be a little below 1.
    heads_differ = bool(((view.share > 0) & (view.share < 0.99)).any())
    return str(TEMPLATES.kept_frames(view, heads_differ, pictures))


def overlay_kept_tokens(frame: np.ndarray, share: np.ndarray) -> Image.Image:
    """Returns a frame on which each visual token's cell is darker, the fewer heads keep the token.

    A view may keep other tokens for each attention head. Cells of tokens that any head keeps have a
    white border. ``frame`` is ``[height, width, 3]``. ``share``, ``[rows, columns]``, is the share
    of heads that keep each token, and NaN where a cell has no token. Such a cell is drawn like one
    whose token no head keeps.
    """
    picture = Image.fromarray(frame).resize(_picture_size(frame), Image.Resampling.BILINEAR)
    rows, columns = share.shape
    share_picture = Image.fromarray((np.nan_to_num(share).clip(0, 1) * 255).astype(np.uint8))
    mask = share_picture.resize(picture.size, Image.Resampling.NEAREST)
    grey = picture.convert("L").convert("RGB")
    black = Image.new("RGB", picture.size)
    dimmed = Image.blend(grey, black, DROPPED_DARKENING)
    picture = Image.composite(picture, dimmed, mask)
    pen = ImageDraw.Draw(picture)
    for row, column in np.argwhere(np.nan_to_num(share) > 0):
        left, right = (round(edge / columns * picture.width) for edge in (column, column + 1))
        top, bottom = (round(edge / rows * picture.height) for edge in (row, row + 1))
        pen.rectangle((left, top, right - 1, bottom - 1), outline=(255, 255, 255))
    return picture


def _picture_size(frame: np.ndarray) -> tuple[int, int]:
    height, width = frame.shape[:2]
    return FRAME_WIDTH, max(1, round(FRAME_WIDTH * height / width))


def _png(picture: Image.Image) -> str:
    """Returns a picture as a PNG file in base 64, at most twice as large as it is displayed."""
    file = io.BytesIO()
    small = picture.copy()
    small.thumbnail((2 * FRAME_WIDTH, 2 * FRAME_WIDTH))
    small.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _spread_evenly(length: int) -> list[int]:
    """Returns at most ``MAX_FRAMES`` indices, evenly spread, with the first and the last."""
    return [int(i) for i in np.linspace(0, length - 1, min(MAX_FRAMES, length)).round()]


# -- one round ---------------------------------------------------------------------------------

# Lengths of the picture of a tree, in pixels.
NODE_ROW = 30
COLUMN_GAP = 26
LETTER_WIDTH = 7.4
NODE_PADDING = 9
MIN_NODE_WIDTH = 38.0


def tree(
    round: RoundRecord,
    token_text: TokenText,
    before: str = "",
    *,
    notes_are_weights: bool = False,
) -> str:
    """Returns one round's draft as a picture, with the target's own token at its end.

    Accepted nodes are filled and joined by a thick line. ``before`` is the end of the text that the
    round extends. ``round.note`` may have the draft's probability of each node, which the node's
    title then shows. With ``notes_are_weights`` the note has the weights of several views instead,
    and no title shows them.
    """
    # The drafted tokens, and the target's own token as one more node.
    labels = [visible_whitespace(token_text(token)) for token in round.tokens]
    shown_tree = Tree(round.tokens, round.parents)
    accepted = follow(shown_tree, round.accepted)
    kinds = ["accepted" if i in accepted else "refused" for i in range(len(labels))]
    if round.own is not None and round.kind is not None:
        labels.append(visible_whitespace(token_text(round.own)))
        shown_tree = add(shown_tree, accepted[-1] if accepted else ROOT, round.own)
        kinds.append(round.kind)
    has_probabilities = not notes_are_weights and len(round.note) == len(round.tokens)
    probabilities = dict(enumerate(round.note)) if has_probabilities else {}
    # In the lists from here on the root is node 0, so a token's node is its index plus 1.
    node_depths = [0, *depths(shown_tree.parents)]
    node_lines = _node_lines(shown_tree)
    node_labels = [visible_whitespace(before) or "start", *labels]
    # The root is at the left, and each level is a column that is as wide as its widest node.
    widths = [
        max(MIN_NODE_WIDTH, len(label) * LETTER_WIDTH + 2 * NODE_PADDING) for label in node_labels
    ]
    level_widths = [
        max(width for width, depth in zip(widths, node_depths, strict=True) if depth == level)
        for level in range(max(node_depths) + 1)
    ]
    level_lefts = [
        sum(level_widths[:level]) + COLUMN_GAP * level + 2 for level in range(len(level_widths))
    ]
    nodes = [
        {
            "label": label,
            "kind": kind,
            "probability": probabilities.get(node - 1),
            "parent": shown_tree.parents[node - 1] + 1 if node else None,
            "x": _round_to_tenth(level_lefts[node_depths[node]]),
            "y": NODE_ROW * node_lines[node] + NODE_ROW / 2 + 2,
            "width": widths[node],
        }
        for node, (label, kind) in enumerate(zip(node_labels, ["start", *kinds], strict=True))
    ]
    width = math.ceil(level_lefts[-1] + level_widths[-1] + 4)
    height = NODE_ROW * (max(node_lines) + 1) + 6
    own_token = "" if round.kind is None else f", then a token {KIND_MEANINGS[round.kind]}"
    caption = f"{len(round.tokens)} drafted, {len(round.accepted)} accepted{own_token}"
    if round.opening:
        caption = "the prompt's own token: nothing was drafted for it"
    return str(TEMPLATES.tree(nodes, caption, width, height))


def visible_whitespace(text: str) -> str:
    """Returns a token's text with visible spaces and line ends."""
    return text.replace(" ", "·").replace("\n", "⏎")


def _node_lines(tree: Tree) -> list[int]:
    """Returns the line of the picture, counted from 0 at the top, in which each node lies.

    The root's comes first. Every leaf has a line of its own, and a parent lies in the line of its
    first child. A root with two leaves gives [0, 0, 1].
    """
    # ``ROOT`` is -1, so the line of node n is ``node_lines[n + 1]``.
    node_lines = [0] * (len(tree) + 1)
    next_lines = count()

    def place(node: int) -> int:
        below = [place(child) for child in children(tree, node)]
        node_lines[node + 1] = below[0] if below else next(next_lines)
        return node_lines[node + 1]

    place(ROOT)
    return node_lines


# -- over the rounds ---------------------------------------------------------------------------


class Size(NamedTuple):
    """The lengths in the chart of the rounds, in pixels.

    The chart has panels of one size, one below another.
    """

    across: int = 720  # The width of the whole chart.
    panel: int = 96  # The height of the bars and lines of one panel.
    left: int = 44  # Where the first round begins.
    right: int = 624  # Where the last round ends.
    top: int = 20  # The height above a panel, for its title.
    side: int = 632  # Where the names of bars and lines start.


SIZE = Size()


def rounds_chart(
    rounds: Sequence[RoundRecord], views: Sequence[str] = (), chosen: int | None = None
) -> str:
    """Returns what changed from round to round, as a picture of one to three panels.

    The first panel has the drafted and accepted tokens. If any tree branches, another has the
    trees' depth and width. The last has the weights of an ensemble's ``views``, if any are given
    and every round with a draft has a note of their weights. ``chosen`` is the index of the round
    that is pointed at.
    """
    if not any(round.tokens for round in rounds):
        return message("Nothing was drafted, so there are no rounds to show.")
    round_width = (SIZE.right - SIZE.left) / len(rounds)
    middles = [_round_to_tenth(SIZE.left + (i + 0.5) * round_width) for i in range(len(rounds))]
    node_depths_by_round = [depths(round.parents) for round in rounds]
    # A tree's width is the number of nodes at the depth that has most of them.
    tree_sizes = {
        "depth": [max(node_depths, default=0) for node_depths in node_depths_by_round],
        "width": [
            max(Counter(node_depths).values(), default=0) for node_depths in node_depths_by_round
        ],
    }
    panels = []  # Each is a title, the value at the panel's top, and the lines.
    if max(tree_sizes["width"]) > 1:
        max_size = _round_up_to_even(max(*tree_sizes["depth"], *tree_sizes["width"]))
        lines = _place_lines(tree_sizes, middles, max_size)
        panels.append(("levels and widest level of the tree", max_size, lines))
    if views and all(len(round.note) == len(views) for round in rounds if round.tokens):
        # Rounds without a draft have no weights: NaN leaves a gap in the line.
        notes = [round.note or (float("nan"),) * len(views) for round in rounds]
        weights = dict(zip(views, zip(*notes, strict=True), strict=True))
        panels.append(("weight of each view", 1.0, _place_lines(weights, middles, 1.0)))
    max_drafted = _round_up_to_even(max(len(round.tokens) for round in rounds))
    bar_width = max(1.0, _round_to_tenth(0.8 * round_width))
    label_step = math.ceil(len(rounds) / 10)  # At most ten rounds get their number.
    return str(
        TEMPLATES.rounds_chart(
            rounds, max_drafted, panels, middles, bar_width, label_step, chosen, SIZE
        )
    )


def _place_lines(
    lines: Mapping[str, Sequence[float]], middles: Sequence[float], max_value: float
) -> list[dict[str, Any]]:
    """Returns lines over the rounds, and where the name at each line's end is written.

    ``lines`` has a value for each round, and ``middles`` the x of each round. ``max_value`` is the
    value at the top of the panel. Values that are NaN are left out. Names are at least
    ``NAME_DISTANCE`` apart, so that they do not overlap.
    """
    placed: list[dict[str, Any]] = []
    for i, (name, line) in enumerate(lines.items()):
        ys = [SIZE.top + SIZE.panel * (1 - value / max_value) for value in line]
        places = [(x, y) for x, y in zip(middles, ys, strict=True) if not math.isnan(y)]
        if places:
            placed.append({"name": name, "look": i % LINE_STYLES, "places": places})
    name_y = 0.0
    for curve in sorted(placed, key=lambda curve: curve["places"][-1][1]):
        last_y = _round_to_tenth(curve["places"][-1][1])
        # A text lies above its y, so with 4 pixels more it is beside the line's last point.
        name_y = max(last_y + 4, name_y + NAME_DISTANCE)
        curve["name_y"] = name_y
    return placed


def _round_up_to_even(most: float) -> float:
    """Returns the smallest even number, at least 2, that is not below ``most``."""
    return 2.0 * max(1, math.ceil(most / 2))


def _round_to_tenth(length: float) -> float:
    """Rounds a length to a tenth of a pixel, as it is written into the picture."""
    return round(length, 1)

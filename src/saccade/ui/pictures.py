"""What the page shows, as HTML and SVG: text by how it came, frames, trees, rounds.

Everything is inline, so nothing is fetched; colours are names that ``page.css`` gives a value in
light and in dark. How a token came is never told by colour alone. Every string is escaped here.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import count, groupby
from operator import itemgetter

import numpy as np
from PIL import Image, ImageDraw

from saccade.bench.show import MEANING
from saccade.core.result import RoundRecord
from saccade.core.tree import ROOT, Tree, add, children, depths, follow
from saccade.ui.duel import Duel, Piece, Side
from saccade.ui.kept import Kept

Word = Callable[[int], str]
"""A token's id -> how it is spelt."""

FRAMES, WIDE = 8, 176  # frames shown, and how wide
DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 4")
Lines = Mapping[str, Sequence[float]]


# -- text --------------------------------------------------------------------------------------


def spans(pieces: Sequence[Piece]) -> str:
    """An answer's text, each run of one kind in one span."""
    return "".join(
        f'<span class="sac-{kind}">{escape("".join(piece.text for piece in run))}</span>'
        for kind, run in groupby(pieces, key=lambda piece: piece.kind)
    )


def legend() -> str:
    words = " ".join(f'<span class="sac-{kind}">{said}</span>' for kind, said in MEANING.items())
    return f'<p class="sac-legend">{words}</p>'


def column(side: Side, coloured: bool) -> str:
    """One answer: its measures so far above its text."""
    text = spans(side.pieces) if coloured else escape(side.text)
    waiting = side.result is None and side.phase not in ("stopped", "waiting")
    caret = '<span class="sac-caret"></span>' if waiting else ""
    rate = None if side.per_token is None else 1 / side.per_token
    figures = {
        "tokens/s": _number(rate, "{:.1f}"),
        "tokens": str(side.tokens),
        "time": f"{side.seconds:.2f} s",
        "tokens a forward": _number(side.tau, "{:.2f}"),
        "drafts accepted": _number(side.rate, "{:.0%}"),
    }
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures.items()
    )
    return (
        f'<section class="sac-side"><h3>{escape(side.method)} {"" if coloured else "(plain)"} '
        f'<small class="sac-phase">{escape(side.phase)}</small></h3>'
        f'<dl>{cells}</dl><div class="sac-text">{text}{caret}</div></section>'
    )


def outcome(duel: Duel, sampled: bool) -> str:
    """Who was how much faster, and whether the answers are the same."""
    if duel.halted:
        return '<p class="sac-outcome">Stopped.</p>'
    if not duel.over:
        return ""
    same = "yes" if duel.same else "NO"
    if sampled and not duel.same:
        same = "no: sampled, so of one law but drawn apart"
    decode, whole = _number(duel.speedup, "{:.2f}x"), _number(duel.speedup_whole, "{:.2f}x")
    parts = [
        f"Decoding at <b>{decode}</b> the speed",
        f"from the question to the last token <b>{whole}</b>",
        f'same tokens: <b class="sac-same">{same}</b>',
    ]
    found = f'<p class="sac-outcome">{" · ".join(parts)}</p>'
    result = duel.drafted.result
    notes = [] if result is None else [*result.warnings, result.fallback_reason or ""]
    return found + "".join(message(f"Fell back: {note}") for note in notes if note)


def message(text: str, kind: str = "note") -> str:
    """A sentence in a box; nothing for none."""
    return f'<p class="sac-{kind}" role="status">{escape(text)}</p>' if text else ""


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


# -- frames ------------------------------------------------------------------------------------


def strip(frames: np.ndarray, times: Sequence[float]) -> str:
    """Some of the frames ``[frame, height, width, 3]`` in a row."""
    pictures = "".join(
        _picture(Image.fromarray(frames[i]), f"{times[i]:.1f} s", f"frame at {times[i]:.1f} s")
        for i in _spread(len(frames))
    )
    return f'<div class="sac-strip">{pictures}</div>'


def seen(frames: np.ndarray, times: Sequence[float], one: Kept) -> str:
    """The frames as one view has them: what it dropped is dimmed, what it kept is framed."""
    about = f"<b>{escape(one.view)}</b>: {one.count} of {one.whole} visual tokens"
    about += f" ({one.count / one.whole:.0%})"
    if bool(((one.share > 0) & (one.share < 0.99)).any()):
        about += " a head; the brighter, the more heads kept it"
    if one.means:
        about += ", each the mean of several, shown where it stands"
    if not one.count:
        return f'<figure class="sac-seen"><figcaption>{about}</figcaption></figure>'
    steps, pictures = one.share.shape[0], []
    for step in _spread(steps):
        i = step * len(frames) // steps  # the first of the frames a token stands for
        share = one.share[step].numpy()
        kept, whole = int(np.nansum(share > 0)), int(np.sum(~np.isnan(share)))
        label = f"{times[i]:.1f} s: {kept}/{whole}"
        pictures.append(_picture(overlaid(frames[i], share), label, f"{one.view} at {label} kept"))
    return (
        f'<figure class="sac-seen"><figcaption>{about}</figcaption>'
        f'<div class="sac-strip">{"".join(pictures)}</div></figure>'
    )


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


def _picture(picture: Image.Image, label: str, alt: str) -> str:
    file = io.BytesIO()
    small = picture.copy()
    small.thumbnail((2 * WIDE, 2 * WIDE))
    small.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{escape(alt)}">'
        f"<figcaption>{escape(label)}</figcaption></figure>"
    )


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
    odds = round.note if len(round.note) == len(round.tokens) else ()
    depth, height = [0, *depths(grown.parents)], _heights(grown)
    labels = [shown(before) or "start", *spelt]
    widths = [max(38.0, len(label) * LETTER + 2 * PAD) for label in labels]
    columns = [max(w for w, d in zip(widths, depth, strict=True) if d == level)
               for level in range(max(depth) + 1)]  # fmt: skip
    lefts = [sum(columns[:level]) + GAP * level + 2 for level in range(len(columns))]
    x, y = [lefts[d] for d in depth], [ROW * h + ROW / 2 + 2 for h in height]
    lines, nodes = [], []
    for node, (label, kind) in enumerate(zip(labels, ["start", *kinds], strict=True)):
        if node:
            up = grown.parents[node - 1] + 1
            lines.append(_join(x[up] + widths[up], y[up], x[node], y[node], kind))
        chance = f"{odds[node - 1]:.0%}" if 0 < node <= len(odds) else ""
        nodes.append(_node(x[node], y[node], widths[node], label, kind, chance))
    across, down = lefts[-1] + columns[-1] + 4, ROW * (max(height) + 1) + 6
    own = "" if round.kind is None else f", then a token {MEANING[round.kind]}"
    said = f"{len(round.tokens)} drafted, {len(round.accepted)} accepted{own}"
    size = f'width="{across:.0f}" height="{down:.0f}" viewBox="0 0 {across:.0f} {down:.0f}"'
    return (
        f'<p class="sac-note">{said}</p><div class="sac-scroll">'
        f'<svg class="sac-tree" role="img" aria-label="{said}" {size}>'
        f"{''.join(lines)}{''.join(nodes)}</svg></div>"
    )


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


def _join(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    middle = (x + to_x) / 2
    curve = f"M{x:.1f} {y:.1f}C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
    return f'<path class="sac-line sac-line-{kind}" d="{curve}"/>'


def _node(x: float, y: float, width: float, label: str, kind: str, chance: str) -> str:
    title = f"<title>{escape(label)}: {kind}{f', odds {chance}' if chance else ''}</title>"
    return (
        f'<g class="sac-node sac-node-{kind}">{title}<rect x="{x:.1f}" y="{y - 11:.1f}" '
        f'width="{width:.1f}" height="22" rx="5"/><text x="{x + width / 2:.1f}" y="{y + 4:.1f}" '
        f'text-anchor="middle">{escape(label)}</text></g>'
    )


# -- over the rounds ---------------------------------------------------------------------------

ACROSS, PANEL, LEFT, RIGHT, TOP = 720, 96, 44, 96, 20
SIDE = ACROSS - RIGHT + 8  # where the names of bars and lines stand


def over_rounds(
    rounds: Sequence[RoundRecord], views: Sequence[str] = (), chosen: int | None = None
) -> str:
    """What changed from round to round: drafted and accepted tokens; the depth and width of trees
    that branch; the weights of an ensemble's ``views``. ``chosen`` is the round to point at."""
    if not any(round.tokens for round in rounds):
        return message("Nothing was drafted, so there are no rounds to show.")
    panels = [_bars(rounds)]
    deep = [depths(round.parents) for round in rounds]
    sizes = {
        "depth": [max(own, default=0) for own in deep],
        "width": [max(map(own.count, own), default=0) for own in deep],
    }
    if max(sizes["width"]) > 1:
        panels.append(_panel("levels and widest level of the tree", sizes, len(rounds)))
    if views and all(len(round.note) == len(views) for round in rounds if round.tokens):
        notes = [round.note or (float("nan"),) * len(views) for round in rounds]
        weights = dict(zip(views, zip(*notes, strict=True), strict=True))
        panels.append(_panel("weight of each view", weights, len(rounds), 1.0))
    down = len(panels) * (PANEL + TOP + 12) + 26
    drawn = "".join(
        f'<g transform="translate(0 {i * (PANEL + TOP + 12)})">{panel}</g>'
        for i, panel in enumerate(panels)
    )
    if chosen is not None:
        at = _at(chosen, len(rounds))
        drawn += f'<path class="sac-pointer" d="M{at:.1f} {down - 28}l-5 8h10z"/>'
    numbers = "".join(
        f'<text x="{_at(i, len(rounds)):.1f}" y="{down - 6}" text-anchor="middle">{i + 1}</text>'
        for i in range(0, len(rounds), math.ceil(len(rounds) / 10))
    )
    return (
        f'<div class="sac-wide"><svg class="sac-rounds" role="img" '
        f'aria-label="what changed from round to round" viewBox="0 0 {ACROSS} {down}">'
        f'{drawn}{numbers}<text x="{SIDE}" y="{down - 6}">round</text></svg></div>'
    )


def _at(round: int, rounds: int) -> float:
    """The middle of a round's place across."""
    return LEFT + (round + 0.5) * (ACROSS - LEFT - RIGHT) / rounds


def _bars(rounds: Sequence[RoundRecord]) -> str:
    most = _even(max(len(round.tokens) for round in rounds))
    thick = max(1.0, 0.8 * (ACROSS - LEFT - RIGHT) / len(rounds))
    bars = []
    for i, round in enumerate(rounds):
        left = _at(i, len(rounds)) - thick / 2
        for many, kind in ((len(round.tokens), "drafted"), (len(round.accepted), "accepted")):
            tall = PANEL * many / most
            bars.append(
                f'<rect class="sac-bar-{kind}" x="{left:.1f}" y="{TOP + PANEL - tall:.1f}" '
                f'width="{thick:.1f}" height="{tall:.1f}"><title>round {i + 1}: {many} {kind}'
                "</title></rect>"
            )
    key = "".join(
        f'<rect class="sac-bar-{kind}" x="{SIDE}" y="{TOP + 18 * i}" width="12" height="12"/>'
        f'<text x="{SIDE + 17}" y="{TOP + 18 * i + 10}">{kind}</text>'
        for i, kind in enumerate(("drafted", "accepted"))
    )
    return _axes("tokens drafted and accepted", most) + "".join(bars) + key


def _panel(title: str, lines: Lines, rounds: int, most: float | None = None) -> str:
    """Lines over the rounds, each named where it ends; names are kept from touching."""
    top = most or _even(max(max(line) for line in lines.values()))
    drawn, ends = [], []
    for i, (name, line) in enumerate(lines.items()):
        places = [
            (_at(j, rounds), TOP + PANEL * (1 - value / top))
            for j, value in enumerate(line)
            if value == value
        ]
        if not places:
            continue
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        style = f'class="sac-curve sac-curve-{i % 5}" stroke-dasharray="{DASHES[i % 5]}"'
        drawn.append(f'<path {style} d="M{path}"/>')
        ends.append((places[-1][1], name, style))
    below = 0.0
    for y, name, style in sorted(ends, key=itemgetter(0)):
        below = max(y + 4, below + 14)
        drawn.append(f'<path {style} d="M{SIDE} {below - 4:.1f}h16"/>')
        drawn.append(f'<text x="{SIDE + 20}" y="{below:.1f}">{escape(name)}</text>')
    return _axes(title, top) + "".join(drawn)


def _even(most: float) -> float:
    """The next even number, so that the middle is whole."""
    return 2.0 * max(1, math.ceil(most / 2))


def _axes(title: str, top: float) -> str:
    lines = "".join(
        f'<path class="sac-grid" d="M{LEFT} {TOP + PANEL * part}H{ACROSS - RIGHT}"/>'
        f'<text x="{LEFT - 6}" y="{TOP + PANEL * part + 4}" text-anchor="end">'
        f"{top * (1 - part):g}</text>"
        for part in (0, 0.5, 1)
    )
    return f'{lines}<text class="sac-title" x="{LEFT}" y="{TOP - 8}">{title}</text>'

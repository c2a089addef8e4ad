"""Draws the figures of a run, one set per suite: speeds, stages of an answer, acceptance.

Colours never stand alone: marks, hatches or dashes differ as well, so the figures are readable in
grey. This module knows records and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from saccade.bench import measures
from saccade.bench.comparison import BASELINE
from saccade.bench.draft_only import is_draft_only
from saccade.bench.records import STAGES, Answer

# Okabe and Ito's colours.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (6, 1)), "-")
MARKERS = "osD^vPX<>*hd"
FONT_SIZE = 8

AnswersByMethod = Mapping[str, Sequence[Answer]]
"""The answers of each method to one suite, without those that failed."""

MAX_POSITIONS = 12  # How many positions of a draft are drawn at most.
HATCHES = ("", "///", "xxx", "++", "...", "\\\\\\", "oo")  # One per stage.
# One per stage. Neighbouring stages differ in grey too, and not only in hatch.
GREYS = ("#f0f0f0", "#d0d0d0", "#b8b8b8", "#f8f8f8", "#ffffff", "#e4e4e4", "#909090")


def draw_figures(folder: Path, suite: str, answers: Sequence[Answer]) -> list[Path]:
    """Draws the figures that these answers allow, and returns the paths of the files."""
    methods = dict.fromkeys(a.method for a in answers if not is_draft_only(a.method))
    by_method: AnswersByMethod = {
        name: usable
        for name in methods
        if (usable := [a for a in answers if a.method == name and not a.error])
    }
    paths = []
    for name, draw in FIGURES.items():
        figure = draw(by_method)
        if figure is None:
            continue
        path = folder / f"{suite}-{name}.png"
        save_figure(figure, path)
        paths.append(path)
    return paths


def speed_figure(by_method: AnswersByMethod) -> Figure | None:
    """Draws each method's median speed over plain decoding, of decoding and of whole answers, with
    95 % intervals. Returns None if there is no other method.

    The answers of plain decoding must be among ``by_method``.
    """
    plain = by_method[BASELINE]
    rows = {name: answers for name, answers in by_method.items() if name != BASELINE}
    if not rows:
        return None
    figure = _new_figure(len(rows))
    axis = figure.subplots()
    for row, answers in enumerate(rows.values()):
        # Each method has two marks, a little above and below its line.
        for shift, is_whole, marker in ((-0.14, False, "o"), (0.14, True, "s")):
            interval = measures.interval(measures.speedups(answers, plain, whole=is_whole))
            if interval is None:
                continue
            middle, low, high = interval
            axis.errorbar(
                middle,
                row + shift,
                xerr=[[max(0.0, middle - low)], [max(0.0, high - middle)]],
                fmt=marker,
                color=COLOURS[0] if not is_whole else COLOURS[4],
                mfc="none" if is_whole else None,
                ms=5,
                capsize=2,
                lw=1,
                # The legend has each mark once, by its label in the first row.
                label=("whole answer" if is_whole else "decoding") if row == 0 else None,
            )
    axis.axvline(1, color="black", lw=0.8, ls=":")
    _label_rows(axis, list(rows), "times as fast as plain decoding (ar)")
    axis.set_xlim(left=0)
    figure.legend(fontsize=FONT_SIZE, ncols=2, loc="outside upper center")
    return figure


def stages_figure(by_method: AnswersByMethod) -> Figure | None:
    """Draws the mean seconds of an answer by stage, for each method whose answers have rounds.

    Peers have none, so their stages are unknown. Returns None if no method has rounds.
    """
    rows = {
        name: answers
        for name, answers in by_method.items()
        if any(answer.rounds for answer in answers)
    }
    if not rows:
        return None
    figure = _new_figure(len(rows))
    axis = figure.subplots()
    starts = [0.0] * len(rows)
    for (label, seconds_of), hatch, grey in zip(STAGES.items(), HATCHES, GREYS, strict=True):
        values = [mean(map(seconds_of, answers)) for answers in rows.values()]
        axis.barh(
            range(len(rows)),
            values,
            left=starts,
            color=grey,
            hatch=hatch,
            edgecolor="black",
            lw=0.5,
            label=label,
        )
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    _label_rows(axis, list(rows), "seconds an answer")
    figure.legend(fontsize=FONT_SIZE, ncols=7, loc="outside upper center")
    return figure


def positions_figure(by_method: AnswersByMethod) -> Figure | None:
    """Draws how often each position of a draft is accepted, where the draft went that deep.

    Positions after ``MAX_POSITIONS`` are left out, because a parallel draft's first round may be
    very long. Methods whose drafts were never deeper than one token are left out too. Returns None
    if no method is left.
    """
    rows = {
        name: shares_by_position
        for name, answers in by_method.items()
        if len(shares_by_position := measures.acceptance_by_position(answers)) > 1
    }
    if not rows:
        return None
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axis = figure.subplots()
    for i, (name, shares_by_position) in enumerate(rows.items()):
        shares = shares_by_position[:MAX_POSITIONS]
        axis.plot(
            range(1, len(shares) + 1),
            shares,
            label=name,
            marker=MARKERS[i % len(MARKERS)],
            # The dashes move on by one where the colours begin again, so line 7 has the colour of
            # line 1 and other dashes.
            ls=DASHES[(i + i // len(COLOURS)) % len(DASHES)],
            c=COLOURS[i % len(COLOURS)],
            mfc="none",
            lw=1.2,
            ms=5,
        )
    name_axes(axis, "place in the draft (tokens after the committed text)", "share accepted")
    axis.set_ylim(0, 1.05)
    figure.legend(fontsize=FONT_SIZE - 1, ncols=3, loc="outside upper center")
    return figure


FIGURES: dict[str, Callable[[AnswersByMethod], Figure | None]] = {
    "speed": speed_figure,
    "stages": stages_figure,
    "positions": positions_figure,
}


def _new_figure(rows: int) -> Figure:
    return Figure(figsize=(6.4, 1.1 + 0.32 * max(rows, 3)), layout="constrained")


def _label_rows(axis: Axes, names: Sequence[str], across: str) -> None:
    """Labels the rows of horizontal bars or marks, the first at the top, and the axis below."""
    axis.set_yticks(range(len(names)), names, fontsize=FONT_SIZE)
    axis.set_ylim(len(names) - 0.5, -0.5)
    name_axes(axis, across, "")


def name_axes(axis: Axes, across: str, up: str) -> None:
    """Sets both axes' names, in small type, over a faint grid."""
    axis.set_xlabel(across, fontsize=FONT_SIZE)
    axis.set_ylabel(up, fontsize=FONT_SIZE)
    axis.tick_params(labelsize=FONT_SIZE - 1)
    axis.grid(alpha=0.3)


def save_figure(figure: Figure, path: Path) -> None:
    """Saves a figure without a date or random ids, so that its file changes only with its numbers.

    In an SVG, the names of clip paths may still change. They are hashes of positions, which the
    layout's solver returns with a relative error of about 1e-13.
    """
    date = {"Date": None} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "saccade"}):
        figure.savefig(path, dpi=130, metadata=date)

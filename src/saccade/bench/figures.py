"""Pictures of a run, one set a suite: speed with intervals, where the time goes, acceptance.

Readable in grey: marks, hatches and dashes tell apart what colours do. Knows records, no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from saccade.bench import measures
from saccade.bench.compare import BASELINE
from saccade.bench.draft_only import is_draft_only
from saccade.bench.records import STAGES, Answer

# Okabe and Ito's colours; marks and dashes tell the lines apart without them
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (6, 1)), "-")
MANY = "osD^vPX<>*hd"
SMALL = 8

By = Mapping[str, Sequence[Answer]]
"""The answers of each method to one suite, without those that failed."""

PLACES = 12  # of a draft that are drawn
HATCHES = ("", "///", "xxx", "++", "...", "\\\\\\", "oo")  # of the stages
GREYS = ("#f0f0f0", "#d0d0d0", "#b8b8b8", "#f8f8f8", "#ffffff", "#e4e4e4", "#909090")


def write(folder: Path, suite: str, answers: Sequence[Answer]) -> list[Path]:
    """Draws what these answers allow; the paths of the files."""
    methods = dict.fromkeys(a.method for a in answers if not is_draft_only(a.method))
    by: By = {
        name: own
        for name in methods
        if (own := [a for a in answers if a.method == name and not a.error])
    }
    made = []
    for name, draw in FIGURES.items():
        figure = draw(by)
        if figure is None:
            continue
        path = folder / f"{suite}-{name}.png"
        save(figure, path)
        made.append(path)
    return made


def speed(by: By) -> Figure | None:
    """Speed over plain decoding with 95 % intervals: decoding (filled) and the whole answer."""
    plain = by[BASELINE]
    rows = {name: own for name, own in by.items() if name != BASELINE}
    if not rows:
        return None
    figure = _figure(len(rows))
    axis = figure.subplots()
    for place, own in enumerate(rows.values()):
        for shift, whole, mark in ((-0.14, False, "o"), (0.14, True, "s")):
            found = measures.interval(measures.speedups(own, plain, whole=whole))
            if found is None:
                continue
            middle, low, high = found
            axis.errorbar(
                middle,
                place + shift,
                xerr=[[max(0.0, middle - low)], [max(0.0, high - middle)]],
                fmt=mark,
                color=COLOURS[0] if not whole else COLOURS[4],
                mfc="none" if whole else None,
                ms=5,
                capsize=2,
                lw=1,
                label=("whole answer" if whole else "decoding") if not place else None,
            )
    axis.axvline(1, color="black", lw=0.8, ls=":")
    _rows(axis, list(rows), "times as fast as plain decoding (ar)")
    axis.set_xlim(left=0)
    figure.legend(fontsize=SMALL, ncols=2, loc="outside upper center")
    return figure


def stages(by: By) -> Figure | None:
    """Seconds an answer by stage, means."""
    rows = {name: own for name, own in by.items() if any(answer.rounds for answer in own)}
    if not rows:
        return None
    figure = _figure(len(rows))
    axis = figure.subplots()
    left = [0.0] * len(rows)
    for (label, seconds), hatch, grey in zip(STAGES.items(), HATCHES, GREYS, strict=True):
        values = [mean(map(seconds, own)) for own in rows.values()]
        axis.barh(
            range(len(rows)),
            values,
            left=left,
            color=grey,
            hatch=hatch,
            edgecolor="black",
            lw=0.5,
            label=label,
        )
        left = [start + value for start, value in zip(left, values, strict=True)]
    _rows(axis, list(rows), "seconds an answer")
    figure.legend(fontsize=SMALL, ncols=7, loc="outside upper center")
    return figure


def positions(by: By) -> Figure | None:
    """How often each place of a draft is accepted where the draft went that deep, as far as places
    are shown: a parallel draft's first round may be very long."""
    rows = {name: found for name, own in by.items() if len(found := measures.by_position(own)) > 1}
    if not rows:
        return None
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axis = figure.subplots()
    for i, (name, found) in enumerate(rows.items()):
        shares = found[:PLACES]
        axis.plot(
            range(1, len(shares) + 1),
            shares,
            label=name,
            marker=MANY[i % len(MANY)],
            ls=DASHES[(i + i // len(COLOURS)) % len(DASHES)],
            c=COLOURS[i % len(COLOURS)],
            mfc="none",
            lw=1.2,
            ms=5,
        )
    name_axes(axis, "place in the draft (tokens after the committed text)", "share accepted")
    axis.set_ylim(0, 1.05)
    figure.legend(fontsize=SMALL - 1, ncols=3, loc="outside upper center")
    return figure


FIGURES: dict[str, Callable[[By], Figure | None]] = {
    "speed": speed,
    "stages": stages,
    "positions": positions,
}


def _figure(rows: int) -> Figure:
    return Figure(figsize=(6.4, 1.1 + 0.32 * max(rows, 3)), layout="constrained")


def _rows(axis: Axes, names: Sequence[str], across: str) -> None:
    axis.set_yticks(range(len(names)), names, fontsize=SMALL)
    axis.set_ylim(len(names) - 0.5, -0.5)
    name_axes(axis, across, "")


def name_axes(axis: Axes, across: str, up: str) -> None:
    """Both axes' names, small, over a faint grid."""
    axis.set_xlabel(across, fontsize=SMALL)
    axis.set_ylabel(up, fontsize=SMALL)
    axis.tick_params(labelsize=SMALL - 1)
    axis.grid(alpha=0.3)


def save(figure: Figure, path: Path) -> None:
    """Without a date or random ids, so that a file in the repository changes with its numbers.

    Names of clip paths may change still: they are hashes of a layout that is solved to 1e-13.
    """
    date = {"Date": None} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "saccade"}):
        figure.savefig(path, dpi=130, metadata=date)

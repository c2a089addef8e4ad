"""Draws the figures of studies from their numbers alone: lines in panels, bars, maps over frames.

A study measures a paper's figure (``lab/studies``) and gives its numbers as JSON data, from which
one of these functions draws it. Each function says which keys of the data it reads. A value is a
number, or [value, low, high] where it has a 95 % interval. The figures can be read in grey, because
marks, dashes and hatches differ wherever colours do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from saccade.bench.figures import COLOURS, DASHES, FONT_SIZE, MARKERS, name_axes

MARKS = "osD^v "  # Matplotlib's markers; the sixth line has none.
Data = dict[str, Any]
"""The numbers of a figure, by keys that depend on the function that draws it."""


def lines(data: Data) -> Figure:
    """Draws panels below each other, with a line for each name.

    Keys of the data:
        panels: {label of the y axis: {name of a line: its values}}.
        x: the label of the x axis.
        at: the places of the values on the x axis, on a log scale; rounds 1, 2, ... without it.
        linear: makes the scale of ``at`` linear.
        ticks: the places of the x axis that have numbers; without it all of ``at`` on a log scale.
        guides: names of lines that are drawn thin, to compare with.
        apart: gives each panel a legend of its own, for panels of different names.
        tall: makes the panels taller.
        from zero: begins the y axis just below 0, as is always done without ``at``.
    """
    panels = data["panels"]
    size = (5.4, 1.3 + 1.3 * len(panels)) if len(panels) > 1 else (5.4, 3.4)
    if data.get("tall"):
        size = (5.4, 1.0 + 2.4 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False).flat
    for axis, (label, line_by_name) in zip(axes, panels.items(), strict=True):
        for i, (name, y) in enumerate(line_by_name.items()):
            x = data.get("at") or range(1, len(y) + 1)
            middle, reach = _middles_and_reach(y)
            markers = MARKS if len(line_by_name) <= len(MARKS) else MARKERS
            style = {
                "marker": markers[i % len(markers)],
                # The dashes move on by one when the colours begin again.
                "ls": DASHES[(i + i // len(COLOURS)) % len(DASHES)],
                "c": COLOURS[i % len(COLOURS)],
                "mfc": "none",
                "lw": 1.2,
                # Markers are hollow and get smaller, so all of them show where they coincide.
                "ms": max(3, 7 - i),
                "label": name,
            }
            if name in data.get("guides", ()):
                style |= {"marker": "", "ls": ":", "c": "black", "lw": 1}
            if reach is None:
                axis.plot(list(x)[: len(middle)], middle, **style)
            else:
                axis.errorbar(x, middle, yerr=reach, capsize=2, elinewidth=0.8, **style)
        name_axes(axis, data["x"], label)
        axis.label_outer()
        axis.margins(y=0.1)
        if "at" not in data:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        elif data.get("linear"):
            if "ticks" in data:
                axis.set_xticks(data["ticks"])
            elif all(isinstance(place, int) for place in data["at"]):
                axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            axis.set_xscale("log")
            ticks: Sequence[float] = data.get("ticks") or data["at"]
            axis.set_xticks(ticks, map(str, ticks))
            axis.minorticks_off()
        if "at" not in data or data.get("from zero"):
            axis.set_ylim(bottom=-0.05 * axis.get_ylim()[1])
    if data.get("apart"):
        for axis in figure.axes:
            axis.legend(fontsize=FONT_SIZE, loc="center left", bbox_to_anchor=(1, 0.5))
        return figure
    # One legend is enough: that of the panel with most lines, in the order of its data.
    fullest_axis = max(figure.axes, key=lambda axis: len(axis.get_legend_handles_labels()[0]))
    handles, labels = fullest_axis.get_legend_handles_labels()
    handle_by_name = dict(zip(labels, handles, strict=True))
    names = [name for name in max(panels.values(), key=len) if name in handle_by_name]
    _add_legend(figure, [handle_by_name[name] for name in names], names)
    return figure


def bars(data: Data) -> Figure:
    """Draws rows of horizontal bars, one bar for each series, with intervals where there are any.

    Keys of the data:
        rows: {row: {series: value}}.
        panels: {title: rows}, in place of ``rows`` for several panels, each with rows as above.
        x: the label of the x axis.
        start: where the x axis begins: 0 without it. If it is None, the values decide.
        stacked: lays a row's bars end to end.
        marks: {name: value}, drawn as dashed lines across.
    """
    panels = data.get("panels") or {"": data["rows"]}
    all_rows = [own for rows in panels.values() for own in rows.values()]
    series = list(dict.fromkeys(name for own in all_rows for name in own))
    # The height of a row, as a number of thin bars of 0.17 inches each.
    bars_per_row = 2 if data.get("stacked") else max(2, len(series))
    height = 0.8 + 0.4 * len(panels) + 0.17 * len(all_rows) * bars_per_row
    figure = Figure(figsize=(6.0, height), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False).flat
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        _draw_bars(axis, rows, series, data.get("stacked", False))
        name_axes(axis, data["x"], "")
        axis.label_outer()
        axis.set_axisbelow(True)
        axis.set_title(title, fontsize=FONT_SIZE)
        axis.set_yticks(range(len(rows)), list(rows), fontsize=FONT_SIZE)
        axis.set_ylim(len(rows) - 0.45, -0.55)
        for name, at in data.get("marks", {}).items():
            axis.axvline(at, color="black", ls="--", lw=1, label=name)
    if (start := data.get("start", 0)) is not None:
        axis.set_xlim(left=start)  # All panels share this axis.
    handle_by_name: dict[str, Any] = {}
    for axis in figure.axes:
        handles, names = axis.get_legend_handles_labels()
        handle_by_name.update(zip(names, handles, strict=True))
    if len(handle_by_name) > 1:
        _add_legend(figure, list(handle_by_name.values()), list(handle_by_name))
    return figure


def _add_legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Puts a legend above the axes, in as many columns as fit.

    A column needs a mark and its letters, which are about 0.06 inches wide.
    """
    fit = int(figure.get_figwidth() / (0.06 * max(map(len, names)) + 0.5))
    place: Any = {"ncols": min(4, max(1, fit)), "loc": "outside upper center"}
    figure.legend(handles, names, fontsize=FONT_SIZE, **place)


def _draw_bars(axis: Axes, rows: Data, series: Sequence[str], stacked: bool) -> None:
    """Draws the bars of one panel."""
    greys = np.linspace(0.95, 0.45, len(series))
    thick = 0.7 if stacked else 0.8 / len(series)
    for place, own in enumerate(rows.values()):
        left = 0.0
        for i, (name, value) in enumerate(own.items()):
            series_number = series.index(name)
            (middle,), reach = _middles_and_reach([value])
            # Bars that are not stacked lie around the row's middle.
            offset = 0.0 if stacked else (i - (len(own) - 1) / 2) * thick
            axis.barh(
                place + offset,
                middle,
                thick,
                left=left,
                color=str(greys[series_number]),
                hatch=("", "///", "...", "xxx", "\\\\\\", "oo")[series_number % 6],
                edgecolor="black",
                lw=0.6,
                xerr=reach,
                error_kw={"capsize": 2, "elinewidth": 0.8},
                label=name,
            )
            left += middle if stacked else 0


def maps(data: Data) -> Figure:
    """Draws a row of frames for each name, each a picture of values: dark cells are large.

    Keys of the data:
        maps: {name: [frame][row][column]}.
        labels: one for each frame of a row.
        z: the label of the grey scale, whose numbers are log10 of values. All frames share it.
        floor: the value at which the scale begins. Smaller values are drawn as this one. The scale
            ends at 1.
    """
    rows = data["maps"]
    wide = max(len(frames) for frames in rows.values())
    # The least size leaves room for the labels of a single map.
    size = max(4.4, 1.05 * wide + 1.2), max(3.2, 1.2 * len(rows) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), wide, squeeze=False)
    floor = data["floor"]
    last_image = None
    for row, (name, frames) in zip(axes, rows.items(), strict=True):
        for axis, frame in zip(row, frames, strict=True):
            values = np.maximum(np.asarray(frame, dtype=float), floor)
            last_image = axis.imshow(np.log10(values), cmap="Greys", vmin=np.log10(floor), vmax=0)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, fontsize=FONT_SIZE)
    for axis, label in zip(axes[-1], data["labels"], strict=True):
        axis.set_xlabel(label, fontsize=FONT_SIZE)
    assert last_image is not None
    bar = figure.colorbar(last_image, ax=axes, shrink=0.9)
    bar.set_label(data["z"], fontsize=FONT_SIZE)
    bar.ax.tick_params(labelsize=FONT_SIZE - 1)
    return figure


def shaded_weights(data: Data) -> Figure:
    """Draws TABED's Fig. 3: the weight at each token, and which weights would have been accepted.

    TABED mixes the laws of a draft under several views by weights. At each token, those weights are
    shaded with which the mixture's token would have been accepted.

    Keys of the data:
        panels: {title: {"accepted": [token][candidate] bool, "weights": {name: [token]}}}, where
            the candidates are weights that run from 0 to 1 evenly.
        x, y: the labels of the axes.
    """
    panels = data["panels"]
    figure = Figure(figsize=(6.4, 0.6 + 1.7 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False).flat
    for axis, (title, own) in zip(axes, panels.items(), strict=True):
        accepted = np.asarray(own["accepted"], dtype=float).T
        half = 0.5 / (len(accepted) - 1)
        axis.imshow(
            np.where(accepted > 0, 0.78, 1.0),
            cmap="gray",
            vmin=0,
            vmax=1,
            aspect="auto",
            origin="lower",
            extent=(0.5, accepted.shape[1] + 0.5, -half, 1 + half),
            interpolation="nearest",
        )
        for i, (name, weights) in enumerate(own["weights"].items()):
            at = np.arange(1, len(weights) + 1)
            axis.step(at, weights, where="mid", c=COLOURS[i], ls=DASHES[i], lw=1.4, label=name)
        name_axes(axis, data["x"], data["y"])
        axis.set_title(title, fontsize=FONT_SIZE)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axis is not figure.axes[-1]:
            axis.set_xlabel("")  # The ticks stay, because answers differ in length.
    names = figure.axes[0].get_legend_handles_labels()
    figure.legend(*names, fontsize=FONT_SIZE, ncols=4, loc="outside upper center")
    return figure


def _middles_and_reach(values: Sequence[Any]) -> tuple[list[float], Any]:
    """Returns the middles of values, and how far their intervals reach below and above them.

    The reach has two rows, one below and one above, or is None if no value has an interval.
    """
    if not any(isinstance(value, list | tuple) for value in values):
        return list(values), None
    # A row for each value: the middle, the lower end and the upper end.
    table = np.array(
        [value if isinstance(value, list | tuple) else (value,) * 3 for value in values]
    )
    middles, lows, highs = table.T
    reach = np.maximum(0, [middles - lows, highs - middles])
    return middles.tolist(), reach

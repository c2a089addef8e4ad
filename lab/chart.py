"""Draws the charts of docs/numbers.md, one for each processor, from stored runs.

A chart shows how many times as fast as our plain decoding each method is. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from saccade.bench import measures, records
from saccade.bench.comparison import BASELINE
from saccade.bench.figures import COLOURS, save_figure
from saccade.bench.measures import Interval
from saccade.bench.records import Answer

# A chart's file -> the folder of the run that it shows; each run is of another processor.
RUNS = {"speed.svg": "bench-256", "speed-intel.svg": "bench-intel", "speed-zen3.svg": "bench-zen3"}
# A suite of the run -> the title of its panel.
PANELS = {"shapes-caption": "descriptions", "shapes-qa": "answers of a few words"}
# A method of the run -> its label in the chart.
METHODS = {
    "auto": "auto (default)",
    "sd/shape=fit": "sd, fitted chain",
    "specvlm/shape=fit": "specvlm, fitted",
    "hf-assisted-seeing": "transformers,\nassisted",
    "hf": "transformers",
}
LETTER_SIZE = 10  # In points.

Bars = Mapping[str, Mapping[str, tuple[Interval, Interval]]]
"""A suite's name -> a method's name -> two speedups over ``ar``: of decoding, of whole answers.

A speedup is (median over clips, lower end, upper end of the 95 % interval).
"""


def read_bars(run: Path) -> Bars:
    """Returns a chart's numbers from the stored run in the folder ``run``.

    Of ``METHODS``, those are left out that the run does not have in any suite. Raises OptionError
    where there is no such run.
    """
    _, answers = records.read_run(run)
    methods = [name for name in METHODS if any(answer.method == name for answer in answers)]
    return {
        suite: {name: _speedup_intervals(answers, suite, name) for name in methods}
        for suite in PANELS
    }


def _speedup_intervals(
    answers: Sequence[Answer], suite: str, method: str
) -> tuple[Interval, Interval]:
    """Returns how many times as fast as ``ar`` a method is: in decoding, and in whole answers."""
    own, plain = (
        [a for a in answers if a.suite == suite and a.method == name] for name in (method, BASELINE)
    )
    decoding, whole = (
        measures.interval(measures.speedups(own, plain, whole=whole)) for whole in (False, True)
    )
    assert decoding is not None and whole is not None, f"no {method} in {suite}"
    return decoding, whole


def draw_bars(bars: Bars) -> Figure:
    """Draws a panel for each suite, with two bars for each method.

    The upper bar is of decoding and the lower one of whole answers. Each bar has its number and its
    95 % interval.
    """
    count = len(next(iter(bars.values())))
    figure = Figure(figsize=(6, 1.6 + 0.8 * count), layout="constrained")
    axes = figure.subplots(len(bars), 1, sharex=True)
    for axis, (suite, methods) in zip(axes, bars.items(), strict=True):
        for place, both in enumerate(methods.values()):
            # Places count downwards, so a negative shift puts the bar of decoding above the other.
            for shift, (middle, low, high), colour, label in zip(
                (-0.2, 0.2), both, COLOURS, ("decoding", "whole answer"), strict=False
            ):
                axis.barh(
                    place + shift,
                    middle,
                    height=0.38,
                    color=colour,
                    hatch="" if shift < 0 else "///",
                    edgecolor="white",
                    xerr=[[middle - low], [high - middle]],
                    error_kw={"lw": 1, "capsize": 2, "ecolor": "#444444"},
                    label=label if place == 0 else None,  # The legend has each label once.
                )
                white_box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                axis.text(
                    high + 0.07,
                    place + shift,
                    f"{middle:.2f}",
                    va="center",
                    fontsize=LETTER_SIZE - 1,
                    bbox=white_box,
                )
        axis.axvline(1, color="black", lw=1, ls=":")
        axis.set_yticks(
            range(len(methods)), [METHODS[name] for name in methods], fontsize=LETTER_SIZE
        )
        axis.set_ylim(len(methods) - 0.5, -0.5)  # The first method is on top.
        axis.set_title(PANELS[suite], fontsize=LETTER_SIZE + 1, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("times as fast as our own plain decoding", fontsize=LETTER_SIZE)
    axes[0].legend(fontsize=LETTER_SIZE, loc="lower right", frameon=False)
    return figure


def write_chart(run: Path, path: Path) -> None:
    """Saves the chart as an SVG whose words stay text, so that readers and tests can find them."""
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        save_figure(draw_bars(read_bars(run)), path)

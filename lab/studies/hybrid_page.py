"""Writes the page about the hybrid pair from stored measurements (``lab/studies/hybrid.py``).

A hybrid has layers of Gated DeltaNet, whose memory is a state of fixed size, beside layers of
attention. The page compares a hybrid target and its hybrid draft with the embedded pair, which is
the small target and draft of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from lab.studies.hybrid import METHODS, VIEWS
from saccade.bench.measures import interval

Row = Mapping[str, Any]
# The names that rows of ``hybrids.json`` have for the two pairs, in the order of the columns.
PAIRS = ("hybrid", "embedded")
HEAD = "| | hybrid pair | embedded pair |\n|-|-|-|"
# Views that keep half of the visual tokens are left out of the table.
VIEWS_IN_TABLE = tuple(view for view in VIEWS if not view.endswith("0.5"))
ROWS_IN_TABLE = ("2", "4", "8", "16")  # Tokens of a forward; keys of JSON are text.


def page(facts: Mapping[str, Any]) -> str:
    """Returns the page in Markdown from what ``python -m lab hybrid`` stored.

    Parts that were not measured yet are left out of the table.
    """
    answers = [row for row in facts.get("speed", []) if row["method"] != "hf"]
    same = sum(row["same"] for row in answers)
    identical = f"Of {len(answers)} answers {same} are those of `generate()`, token for token. "
    if not answers:
        identical = ""
    lines = [
        "# A hybrid target and draft",
        "",
        "For whoever drafts for a Qwen3.5-like model. Four of the target's six layers and one of "
        "the draft's two are Gated DeltaNet. The target's were added to the embedded pair's layers "
        "and matter little to what it says; the draft's replaced attention. Both were trained for "
        f"{_training_minutes(facts)} CPU minutes (`lab/training/hybrid.py`). {facts['machine']}.",
        "",
        f"Made by `{facts['command']}`. {identical}Clips have 256 visual tokens and are unseen. "
        "Tau is tokens per target forward, by view of a chain of 5; intervals are over clips. The "
        "hybrid's second tau is of a draft whose attention alone is pruned, so the difference is "
        "the cost of the pruned prompt's other state.",
        "",
        HEAD,
    ]
    lines += _table(facts)
    return "\n".join(lines) + "\n"


def _training_minutes(facts: Mapping[str, Any]) -> str:
    return f"{sum(facts['training'].values()) / 60:.0f}"


def _table(facts: Mapping[str, Any]) -> Iterator[str]:
    accuracy: Sequence[Row] = facts.get("accuracy", [])
    acceptance = [row for row in facts.get("acceptance", []) if row["size"] == 256]
    speed: Sequence[Row] = facts.get("speed", [])
    for role in ("target", "draft"):
        yield from _row(
            f"content words right, {role}",
            accuracy,
            lambda rows, role=role: next(
                f"{row['content']['own']:.3f}"
                for row in rows
                if row["model"] == role and row["size"] == 256
            ),
        )
    for view in VIEWS_IN_TABLE:
        yield from _row(
            f"tau, draft sees `{view}`",
            acceptance,
            lambda rows, view=view: _tau_by_view(rows, view),
        )
    for method in (*METHODS[1:], "hf"):
        yield from _row(
            f"`{method}`: tau; decoding, whole over `ar`; over `hf`",
            [row for row in speed if row["method"] == method],
            _figures_of_method,
        )
    forwards: Sequence[Row] = facts.get("forwards", [])
    yield from _row(
        "T(n)/T(1) of the target, n = " + ", ".join(ROWS_IN_TABLE),
        [row for row in forwards if row["model"] == "target"],
        lambda rows: _ratios_text(rows[0]["ratio"]),
    )
    parts = {row["layers"]: _ratios_text(row["ratio"]) for row in facts.get("layers", [])}
    if parts:
        recurrent = parts["four of Gated DeltaNet alone"]
        attention = parts["four of attention alone"]
        yield f"| the same of four layers, Gated DeltaNet; attention | {recurrent} | {attention} |"


def _row(label: str, rows: Sequence[Row], figure: Callable[[Sequence[Row]], str]) -> Iterator[str]:
    """Yields one line of the table if ``rows`` has rows of both pairs, and nothing otherwise.

    ``figure`` is called with the rows of one pair, and returns the text of that pair's cell.
    """
    by_pair = [[row for row in rows if row["pair"] == pair] for pair in PAIRS]
    if all(by_pair):
        yield f"| {label} | " + " | ".join(figure(own) for own in by_pair) + " |"


def _tau_by_view(rows: Sequence[Row], view: str) -> str:
    """Returns one pair's mean tau under a view as text, with its interval over clips.

    For the hybrid pair a second tau follows, unless the view is the whole prompt. It is that of a
    draft whose attention alone is pruned, while its Gated DeltaNet layers have read the whole
    prompt.
    """
    pruned = _interval([row["views"][view]["tau"] for row in rows])
    if rows[0]["pair"] == "embedded" or view == "full":
        return pruned
    return f"{pruned}; {_interval([row['with_whole_states'][view]['tau'] for row in rows])}"


def _interval(values: Sequence[float]) -> str:
    """Returns the mean of values with its 95 % bootstrap interval, as text."""
    measured = interval(values, np.mean)
    assert measured is not None
    return "{:.2f} [{:.2f}, {:.2f}]".format(*measured)


def _figures_of_method(rows: Sequence[Row]) -> str:
    """Returns a method's mean tau and its median speedups over ``ar`` and over ``hf``, as text.

    A speedup is of decoding, and then of whole answers. The tau of ``hf`` is unknown and left out.
    """
    taus = [row["tau"] for row in rows if row["tau"] is not None]
    over = [
        ", ".join(
            f"{median(row[f'{part}_over_{baseline}'] for row in rows):.2f}"
            for part in ("decode", "whole")
        )
        for baseline in ("ar", "hf")
    ]
    return "; ".join([f"{fmean(taus):.2f}" if taus else "", *over])


def _ratios_text(ratios: Mapping[Any, float]) -> str:
    """Returns T(n)/T(1) for n = 2, 4, 8 and 16 as text, where T(n) is the time of n tokens.

    ``ratios`` has them by n, which is a number or its text.
    """
    by_name = {str(rows): ratio for rows, ratio in ratios.items()}
    return ", ".join(f"{by_name[rows]:.2f}" for rows in ROWS_IN_TABLE)

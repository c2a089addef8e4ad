"""What ``evidence speed``, ``bench profile`` and ``bench cost`` show in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from saccade.bench.hardware.profile import Profile


def _table(first: str, *heads: str) -> Table:
    found = Table(box=None, pad_edge=False, header_style="bold")
    found.add_column(first, overflow="fold")
    for head in heads:
        found.add_column(head, justify="right")
    return found


def profiles(found: Sequence[Profile]) -> Table:
    """A line a method: what a round does, its milliseconds and where they go, the ideal."""
    heads = ("tau", "gamma", "rows", "ms", "draft", "verify", "rest", "level", "c", "T(n)", "bare")
    table = _table("method", *heads, "ideal", "got", "share")
    for each in found:
        parts = (each.drafting, each.verifying, each.rest)
        table.add_row(
            each.method,
            *(f"{value:.2f}" for value in (each.tau, each.gamma, each.rows)),
            _ms(each.round),
            *(f"{part / each.round:.0%}" for part in parts),
            "" if each.level is None else _ms(each.level),
            *map(_ms, (each.bare_level, each.bare_verify, each.bare_round)),
            f"{each.ideal[0]:.2f}",
            f"{each.measured[0]:.2f}",
            Text(f"{each.share[0]:.0%}", style="bold"),
        )
    return table


def goals(ratios: Sequence[Mapping[str, Any]]) -> Table:
    """A line a ratio of ``evidence speed``: the value, its interval, the goal, and whether it is
    met."""
    table = _table("part", "ratio", "x", "95 %", "goal", "met")
    table.columns[1].justify = "left"
    for each in ratios:
        value, goal, met = each["value"], each["goal"], each["met"]
        within = "" if each["interval"] is None else "{:.3f} to {:.3f}".format(*each["interval"])
        said = {None: Text(""), True: Text("yes", "green"), False: Text("no", "bold red")}[met]
        best = each["detail"].get("best")
        table.add_row(
            each["part"],
            each["name"] + ("" if best is None else f": {best}"),
            "failed" if value is None else f"{value:.3f}",
            within,
            "" if goal is None else f"{goal:g}",
            said,
        )
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"

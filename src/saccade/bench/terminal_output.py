"""Output for a terminal: tables, and frames as text. This module knows no model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from saccade.bench.comparison import Summary
from saccade.bench.measures import format_number


def make_table(word_columns: Sequence[str], number_columns: Sequence[str]) -> Table:
    """Returns a table without lines: columns of words, then right-aligned columns of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in word_columns:
        table.add_column(head, overflow="fold")
    for head in number_columns:
        table.add_column(head, justify="right")
    return table


def summary_table(rows: Mapping[str, Summary]) -> Table:
    """Returns a comparison as a table, one row a method.

    "same ids" says whether the answer equals that of plain decoding. "accepted" is the share of
    drafted tokens that were accepted, and "before s" the seconds before decoding. "decode x" and
    "whole x" are the speedups over plain decoding: of decoding alone, and of the whole answer.
    """
    number_columns = ("same ids", "tokens", "tau", "accepted", "before s", "decode s", "tok/s")
    table = make_table(["method"], [*number_columns, "decode x", "whole x"])
    table.columns[0].no_wrap = True
    table.columns[-2].style = "bold"
    for name, row in rows.items():
        if row.error is not None:
            table.add_row(name, Text("failed", style="red"))
            continue
        same_ids = (
            Text("yes", style="green") if row.identical_to_ar else Text("NO", style="bold red")
        )
        table.add_row(
            name,
            same_ids,
            str(row.tokens),
            format_number(row.tau, 2),
            "" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}",
            format_number(row.prefill_seconds, 3),
            format_number(row.decode_seconds, 3),
            format_number(row.tokens_per_second, 0),
            format_number(row.speedup_decode, 2),
            format_number(row.speedup_end_to_end, 2),
        )
    return table


def print_notes(console: Console, rows: Mapping[str, Summary]) -> None:
    """Prints the failures and fallbacks, for which a table has no column."""
    for name, row in rows.items():
        if row.error is not None:
            console.print(f"{name} failed: {row.error}", style="red", markup=False)
        if row.fallback_reason is not None:
            console.print(f"{name} fell back: {row.fallback_reason}", style="yellow", markup=False)


def frames_as_text(pictures: np.ndarray, count: int = 4, width: int = 22) -> Text:
    """Draws some frames of ``pictures`` [frame, height, width, 3] side by side.

    It draws ``count`` frames from the first to the last, or all if there are fewer, each ``width``
    characters wide. A character shows two pixels, one above the other.
    """
    chosen = pictures[np.linspace(0, len(pictures) - 1, min(count, len(pictures))).astype(int)]
    height, source_width = chosen.shape[1:3]
    # So many rows of pixels keep the proportions. The number is even, as a character shows two.
    rows = max(2, round(width * height / source_width) // 2 * 2)
    y = ((np.arange(rows) + 0.5) * height / rows).astype(int)
    x = ((np.arange(width) + 0.5) * source_width / width).astype(int)
    resized = chosen[:, y][:, :, x]
    text = Text()
    for row in range(0, rows, 2):
        for frame in resized:
            for upper, lower in zip(frame[row], frame[row + 1], strict=True):
                text.append("\N{UPPER HALF BLOCK}", style=f"{_rgb(upper)} on {_rgb(lower)}")
            text.append("  ")
        text.append("\n")
    return text


def remove_web_fonts(svg: str) -> str:
    """Removes the web fonts that rich refers to; the viewer then uses its own monospaced font."""
    return re.sub(r"@font-face\s*{[^}]*}", "", svg)


def _rgb(pixel: np.ndarray) -> str:
    red, green, blue = (int(value) for value in pixel)
    return f"rgb({red},{green},{blue})"

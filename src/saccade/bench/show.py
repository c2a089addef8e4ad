"""What a person sees in a terminal: text as it is drafted, tables, frames. Knows no model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from saccade.bench.compare import Summary
from saccade.bench.measures import number
from saccade.core.result import UNFINISHED, Kind, RoundRecord

STYLE: dict[Kind, str] = {"accepted": "green", "recovered": "bold yellow", "bonus": "bold cyan"}
MEANING: dict[Kind, str] = {
    "accepted": "accepted draft tokens",
    "recovered": "corrected by the target",
    "bonus": "added by the target",
}


class Typist:
    """Turns tokens into text as they come, each piece in the colour of how its token came.

    A character spelt by several tokens is held back until it is whole.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = ""

    def type(self, round: RoundRecord) -> Text:
        """The text a round adds."""
        added = Text()
        for text, kind in self.pieces(round):
            added.append(text, style=STYLE[kind])
        return added

    def pieces(self, round: RoundRecord) -> Iterator[tuple[str, Kind]]:
        """The same in pieces, each with how its token came."""
        for token, kind in zip(round.emitted, round.kinds, strict=True):
            self._ids.append(token)
            whole = self._decode(self._ids)
            if not whole.endswith(UNFINISHED):
                yield whole[len(self._shown) :], kind
                self._shown = whole

    def rest(self) -> str:
        """What was still held back at the end."""
        return self._decode(self._ids)[len(self._shown) :]


def legend() -> Text:
    return Text(", ").join(Text(words, style=STYLE[kind]) for kind, words in MEANING.items())


def columns(words: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table without lines: columns of words, then columns of numbers."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for head in words:
        found.add_column(head, overflow="fold")
    for head in numbers:
        found.add_column(head, justify="right")
    return found


def table(rows: Mapping[str, Summary]) -> Table:
    """A comparison, one line a method."""
    heads = ("same ids", "tokens", "tau", "accepted", "before s", "decode s", "tok/s")
    found = columns(["method"], [*heads, "decode x", "whole x"])
    found.columns[0].no_wrap = True
    found.columns[-2].style = "bold"
    for name, row in rows.items():
        if row.error is not None:
            found.add_row(name, Text("failed", style="red"))
            continue
        same = Text("yes", style="green") if row.identical_to_ar else Text("NO", style="bold red")
        found.add_row(
            name,
            same,
            str(row.tokens),
            number(row.tau, 2),
            "" if row.acceptance_rate is None else f"{row.acceptance_rate:.0%}",
            number(row.prefill_seconds, 3),
            number(row.decode_seconds, 3),
            number(row.tokens_per_second, 0),
            number(row.speedup_decode, 2),
            number(row.speedup_end_to_end, 2),
        )
    return found


def notes(console: Console, rows: Mapping[str, Summary]) -> None:
    """What a table has no room for: failures and fallbacks."""
    for name, row in rows.items():
        if row.error is not None:
            console.print(f"{name} failed: {row.error}", style="red", markup=False)
        if row.fallback_reason is not None:
            console.print(f"{name} fell back: {row.fallback_reason}", style="yellow", markup=False)


def frames(pictures: np.ndarray, count: int = 4, width: int = 22) -> Text:
    """A few of the frames ``[frame, height, width, 3]`` side by side, two pixels a character."""
    chosen = pictures[np.linspace(0, len(pictures) - 1, min(count, len(pictures))).astype(int)]
    height, across = chosen.shape[1:3]
    rows = max(2, round(width * height / across) // 2 * 2)
    y = ((np.arange(rows) + 0.5) * height / rows).astype(int)
    x = ((np.arange(width) + 0.5) * across / width).astype(int)
    small = chosen[:, y][:, :, x]
    text = Text()
    for row in range(0, rows, 2):
        for frame in small:
            for upper, lower in zip(frame[row], frame[row + 1], strict=True):
                text.append("\N{UPPER HALF BLOCK}", style=f"{_rgb(upper)} on {_rgb(lower)}")
            text.append("  ")
        text.append("\n")
    return text


def offline_svg(svg: str) -> str:
    """The picture without the web fonts rich refers to; the viewer's own monospaced one serves."""
    return re.sub(r"@font-face\s*{[^}]*}", "", svg)


def _rgb(pixel: np.ndarray) -> str:
    red, green, blue = (int(value) for value in pixel)
    return f"rgb({red},{green},{blue})"

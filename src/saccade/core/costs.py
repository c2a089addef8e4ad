"""What a forward costs: numbers that shapes decide by, however they were measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Costs:
    """Seconds per forward: the target's by number of rows, the draft's for one level."""

    rows: tuple[int, ...]
    target: tuple[float, ...]
    draft: float
    multiple: int = 1  # of rows: every forward is padded to one
    apart: tuple[float, float] = (0.0, 0.0)
    """What another request in a forward adds beside its rows to the target's, and what it adds with
    its one row to the draft's."""

    def verify(self, rows: int) -> float:
        """T(rows), linear between the measured points and beyond them."""
        rows = -(-rows // self.multiple) * self.multiple
        for (a, low), (b, high) in self._lines:
            if rows <= b:
                return low + (high - low) * (rows - a) / (b - a)
        return high + (high - low) * (rows - b) / (b - a)

    @cached_property
    def _lines(self) -> list[tuple[tuple[int, float], tuple[int, float]]]:
        return list(pairwise(zip(self.rows, self.target, strict=True)))

    def together(self, requests: int, rows: int) -> float:
        """The target's time for so many rows of so many requests."""
        return self.verify(rows) + (requests - 1) * self.apart[0]

    def shared(self, requests: int) -> Costs:
        """One request's part of forwards that so many share, each with so many rows."""
        if requests == 1:
            return self
        each = [self.together(requests, requests * rows) / requests for rows in self.rows]
        level = (self.draft + (requests - 1) * self.apart[1]) / requests
        return replace(self, target=tuple(each), draft=level, multiple=1)

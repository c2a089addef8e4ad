"""The seconds that forwards take: numbers that shapes decide by, however they were measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

EXPECTED_COST_PER_ROW = {"cpu": 0.055, "cuda": 0.005}
"""What one more row adds to a verifying forward, as a share of T(1).

The CPU's was measured on tiny models (notebook/LOG.md). The GPU's is assumed.
"""
# Beyond this many rows a forward is taken to cost as much for each further row.
EXPECTED_ROWS = (1, 26)


@dataclass(frozen=True)
class Costs:
    """Seconds per forward: the target's by its number of rows, and the draft's."""

    rows: tuple[int, ...]
    target: tuple[float, ...]
    draft: float
    draft_levels: int = 1  # of a draft's tree, that one forward of the draft scores
    row_multiple: int = 1  # The rows of every forward are padded to a multiple of this.
    extra_request_seconds: tuple[float, float] = (0.0, 0.0)
    """What another request adds to a target's forward beside its rows, and what it adds to a
    draft's forward with its one row."""
    acceptance: float | None = None
    """How often drafted tokens of earlier answers were accepted; None where no earlier answer's
    rounds have corrected these costs."""

    def draft_forwards(self, levels: int) -> int:
        """Returns how many forwards of the draft so many levels of a tree take."""
        return -(-levels // self.draft_levels)

    def verify(self, rows: int) -> float:
        """Returns T(rows), the seconds of a target's forward, linear between the measured points
        and beyond them."""
        rows = -(-rows // self.row_multiple) * self.row_multiple
        for (a, low), (b, high) in self._lines:
            if rows <= b:
                return low + (high - low) * (rows - a) / (b - a)
        return high + (high - low) * (rows - b) / (b - a)

    @cached_property
    def _lines(self) -> list[tuple[tuple[int, float], tuple[int, float]]]:
        return list(pairwise(zip(self.rows, self.target, strict=True)))

    def verify_together(self, requests: int, rows: int) -> float:
        """Returns the seconds of a target's forward of so many rows of so many requests."""
        return self.verify(rows) + (requests - 1) * self.extra_request_seconds[0]

    def per_request(self, requests: int) -> Costs:
        """Returns one request's part of the costs of forwards that ``requests`` share equally."""
        if requests == 1:
            return self
        each = [self.verify_together(requests, requests * rows) / requests for rows in self.rows]
        level = (self.draft + (requests - 1) * self.extra_request_seconds[1]) / requests
        return replace(self, target=tuple(each), draft=level, row_multiple=1)

"""The seconds that forwards of a target and a draft take, by which shapes decide.

This file has the numbers alone, whether they were measured or estimated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

EXPECTED_COST_PER_ROW = {"cpu": 0.055, "cuda": 0.005}
"""What one more row adds to a verifying forward, as a share of T(1), the cost of a single row.

The CPU's was measured on tiny models (notebook/LOG.md). The GPU's is assumed.
"""
EXPECTED_ROWS = (1, 26)
"""The two numbers of rows for which costs are estimated. The costs of all other numbers of rows lie
on the line through these two points."""


@dataclass(frozen=True)
class Costs:
    """Seconds per forward of the target and of the draft.

    A target's forward of ``rows[i]`` rows takes ``target[i]`` seconds. It has a row for each token
    that it scores. There must be at least two such points, in ascending order of rows. A forward of
    the draft takes ``draft`` seconds.
    """

    rows: tuple[int, ...]
    target: tuple[float, ...]
    draft: float
    draft_levels: int = 1  # How many levels of its tree one forward of the draft scores.
    row_multiple: int = 1  # The rows of every forward are padded to a multiple of this.
    extra_request_seconds: tuple[float, float] = (0.0, 0.0)
    """The seconds that one more request adds to a forward: first of the target, then of the draft.

    The first number leaves out the time of the request's own rows, because ``verify`` counts them.
    In a forward of the draft the request has one row, and the second number includes its time."""
    acceptance: float | None = None
    """The acceptance rate of earlier answers. It is None in costs that were only measured or
    estimated, before the rounds of any answer corrected them."""

    def draft_forwards(self, levels: int) -> int:
        """Returns how many forwards of the draft so many levels of a tree take."""
        return -(-levels // self.draft_levels)  # This rounds up.

    def verify(self, rows: int) -> float:
        """Returns T(rows), the seconds of a target's forward, linear between the measured points
        and beyond them, for the rows with their padding (``row_multiple``)."""
        rows = -(-rows // self.row_multiple) * self.row_multiple  # The rows with their padding.
        for (fewer, low), (more, high) in self._intervals:
            if rows <= more:
                return low + (high - low) * (rows - fewer) / (more - fewer)
        # The line of the last interval goes on beyond it.
        return high + (high - low) * (rows - more) / (more - fewer)

    @cached_property
    def _intervals(self) -> list[tuple[tuple[int, float], tuple[int, float]]]:
        """The measured points as neighbouring pairs of (rows, seconds)."""
        return list(pairwise(zip(self.rows, self.target, strict=True)))

    def verify_together(self, requests: int, rows: int) -> float:
        """Returns the seconds of a target's forward that ``requests`` requests share. ``rows`` is
        the number of rows of all of them together."""
        return self.verify(rows) + (requests - 1) * self.extra_request_seconds[0]

    def per_request(self, requests: int) -> Costs:
        """Returns one request's part of the costs of forwards that ``requests`` share equally."""
        if requests == 1:
            return self
        # These costs include the padding, so ``row_multiple`` becomes 1.
        target = [self.verify_together(requests, requests * rows) / requests for rows in self.rows]
        draft = (self.draft + (requests - 1) * self.extra_request_seconds[1]) / requests
        return replace(self, target=tuple(target), draft=draft, row_multiple=1)

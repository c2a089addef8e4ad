"""Decides how many requests decode together in the next round, so that a newly arrived request does
not wait long for its first token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import linear_regression

NEW_ROUND_WEIGHT = 0.3  # The weight of one more round in the mean seconds of rounds of its size.
# Only the sizes seen last are remembered, because prompts get longer and machines busier.
MAX_REMEMBERED_SIZES = 8
SPLIT_COST = 0.1  # Splitting a round may make each request's share of it about a tenth dearer.


@dataclass(frozen=True)
class RoundTimes:
    """The mean seconds of recent rounds, by how many requests took part."""

    seconds: Mapping[int, float] = field(default_factory=dict)

    def fold(self, requests: int, seconds: float) -> RoundTimes:
        """Returns the times with one more round; the size that was seen longest ago is dropped."""
        old = self.seconds.get(requests, seconds)
        others = [each for each in self.seconds.items() if each[0] != requests]
        recent = dict(others[1 - MAX_REMEMBERED_SIZES :])
        return RoundTimes({**recent, requests: old + NEW_ROUND_WEIGHT * (seconds - old)})

    def fit_line(self) -> tuple[float, float]:
        """Returns the seconds of a round without requests and those that each request adds.

        It is the least-squares line. Where all rounds had one size it is the line through zero,
        which the next round of another size corrects.
        """
        sizes, seconds = list(self.seconds), list(self.seconds.values())
        if len(sizes) == 1:
            return 0.0, seconds[0] / sizes[0]
        each, fixed = linear_regression(sizes, seconds)
        return max(0.0, fixed), each

    def requests_per_round(self, live: int, patience: float) -> int:
        """Returns how many of ``live`` requests take part in the next round.

        They are about as many as a round has time for in ``patience`` seconds, or more where such
        small rounds would cost too much (``SPLIT_COST``). The number divides the requests into
        rounds of nearly equal size. More requests than any remembered round had are tried
        together, because small rounds tell little about large ones.
        """
        if live > max(self.seconds, default=0):
            return live
        fixed, each = self.fit_line()
        if each <= 0:
            return live
        cheap = fixed / (SPLIT_COST * each + (1 + SPLIT_COST) * fixed / live)
        rounds = round(live / max(1, cheap, (patience - fixed) / each))
        return ceil(live / max(1, rounds))

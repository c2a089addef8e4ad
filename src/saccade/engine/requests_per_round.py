"""Decides how many requests decode together in the next round, so that a newly arrived request does
not wait long for its first token."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from saccade.core.round_estimates import SecondsBySize

SPLIT_COST = 0.1  # Splitting a round may make each request's share of it about a tenth dearer.


@dataclass(frozen=True)
class RoundTimes(SecondsBySize):
    """The seconds of recent rounds, and what follows from them for the next one."""

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
        # The smallest size whose share of a round, fixed / size + each, is at most 1 + SPLIT_COST
        # times that of a round of all.
        smallest_cheap = fixed / (SPLIT_COST * each + (1 + SPLIT_COST) * fixed / live)
        rounds = round(live / max(1, smallest_cheap, (patience - fixed) / each))
        return ceil(live / max(1, rounds))

"""How many requests take part in a round: a newcomer waits for the one under way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import linear_regression

NEW = 0.3  # of what is believed of rounds, by one more
SIZES = 8  # seen last, that are believed in: prompts get longer, machines busier
DEARER = 0.1  # is a request's part of a round, about, where rounds are made shorter


@dataclass(frozen=True)
class Pace:
    """What is believed of rounds: seconds by how many requests took part."""

    seconds: Mapping[int, float] = field(default_factory=dict)

    def fold(self, requests: int, seconds: float) -> Pace:
        """With one more round; the size that was seen longest ago is forgotten."""
        old = self.seconds.get(requests, seconds)
        others = [each for each in self.seconds.items() if each[0] != requests]
        return Pace({**dict(others[1 - SIZES :]), requests: old + NEW * (seconds - old)})

    def line(self) -> tuple[float, float]:
        """Seconds of any round, and what each request adds to them: the best line, or where all
        rounds had one size the line from nothing, which is soon put right."""
        sizes, seconds = list(self.seconds), list(self.seconds.values())
        if len(sizes) == 1:
            return 0.0, seconds[0] / sizes[0]
        each, fixed = linear_regression(sizes, seconds)
        return max(0.0, fixed), each

    def at_once(self, live: int, patience: float) -> int:
        """Of ``live`` requests about as many as a round has time for in ``patience`` seconds, or
        more where those few would be dear: the nearest number of turns. More than were in any round
        that is remembered are tried together: few together tell little of many."""
        if live > max(self.seconds, default=0):
            return live
        fixed, each = self.line()
        if each <= 0:
            return live
        cheap = fixed / (DEARER * each + (1 + DEARER) * fixed / live)
        turns = round(live / max(1, cheap, (patience - fixed) / each))
        return ceil(live / max(1, turns))

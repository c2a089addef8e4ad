"""What drafters propose: those that let their drafts grow over one model share its forwards."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from saccade.core.protocols import Drafter, Growth, State
from saccade.core.sampling import Scores
from saccade.core.tree import Tree
from saccade.drafting.drafters import drive
from saccade.model.session import Session, score_together

Proposal = tuple[dict[int, Tree], dict[int, float]]
"""A drafter's trees, and of each request its part of the seconds they took."""


def proposals(drafters: Sequence[tuple[Drafter, Mapping[int, State]]]) -> list[Proposal]:
    """What each drafter proposes for its requests. Those that let their drafts grow with others'
    over the same model share a forward a step; where that fails each proposes alone, so that a
    drafter's failure stays its own.
    """
    found: dict[int, Proposal] = {}
    if len(drafters) > 1:
        alike: dict[int, dict[int, Growth]] = defaultdict(dict)
        for place, (drafter, states) in enumerate(drafters):
            growth = drafter.growing(states)
            if growth is not None:
                alike[id(growth.session.backbone)][place] = growth
        for growths in alike.values():
            if len(growths) > 1:
                found |= _together(growths)
    for place, (drafter, states) in enumerate(drafters):
        if place not in found:
            began = time.perf_counter()
            trees = drafter.propose(states)
            each = (time.perf_counter() - began) / max(1, len(states))
            found[place] = trees, dict.fromkeys(states, each)
    return [found[place] for place in range(len(drafters))]


def _together(growths: Mapping[int, Growth]) -> dict[int, Proposal]:
    shared = _Shared(growths)
    growing = {
        number: growths[place].drafts[request] for number, (place, request) in shared.whose.items()
    }
    seen: dict[int, Scores] = {}
    try:
        grown = drive(shared, growing, seen)
    except Exception:  # whose it was shows when each proposes alone
        return {}
    found: dict[int, Proposal] = {}
    for place, growth in growths.items():
        mine = {request: n for n, (whose, request) in shared.whose.items() if whose == place}
        growth.seen.update({request: seen[n] for request, n in mine.items() if n in seen})
        trees = growth.take({request: grown[n] for request, n in mine.items()})
        found[place] = trees, {request: shared.seconds[n] for request, n in mine.items()}
    return found


class _Shared:
    """Sessions over one model as one, their requests numbered anew; who took what time."""

    def __init__(self, growths: Mapping[int, Growth]) -> None:
        self._sessions: dict[int, Session] = {place: g.session for place, g in growths.items()}
        whose = [(place, request) for place, g in growths.items() for request in g.drafts]
        self.whose = dict(enumerate(whose))
        self.seconds = dict.fromkeys(self.whose, 0.0)
        self._last = time.perf_counter()

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        asked: dict[int, dict[int, Tree]] = defaultdict(dict)
        for number, tree in trees.items():
            place, request = self.whose[number]
            asked[place][request] = tree
        scored = score_together([(self._sessions[place], asked[place]) for place in asked])
        by_place = dict(zip(asked, scored, strict=True))
        before, self._last = self._last, time.perf_counter()
        for number in trees:
            self.seconds[number] += (self._last - before) / len(trees)
        return {number: by_place[self.whose[number][0]][self.whose[number][1]] for number in trees}

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        raise NotImplementedError("each drafter commits its own")

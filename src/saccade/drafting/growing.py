"""What drafters propose: those that let their drafts grow over one model share its forwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from saccade.core.protocols import Drafter, Growth, State
from saccade.core.sampling import Scores
from saccade.core.timing import now
from saccade.core.tree import Tree
from saccade.drafting.drafters import drive
from saccade.model.session import score_together

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
            began = now()
            trees = drafter.propose(states)
            each = (now() - began) / max(1, len(states))
            found[place] = trees, dict.fromkeys(states, each)
    return [found[place] for place in range(len(drafters))]


def _together(growths: Mapping[int, Growth]) -> dict[int, Proposal]:
    growing = {(at, number): each for at, g in growths.items() for number, each in g.drafts.items()}
    seen: dict[tuple[int, int], Scores] = {}
    seconds, last = dict.fromkeys(growing, 0.0), now()

    def score(trees: dict[tuple[int, int], Tree]) -> dict[tuple[int, int], Scores]:
        nonlocal last
        asked: dict[int, dict[int, Tree]] = defaultdict(dict)
        for (place, request), tree in trees.items():
            asked[place][request] = tree
        scored = score_together([(growths[place].session, own) for place, own in asked.items()])
        before, last = last, now()
        for key in trees:
            seconds[key] += (last - before) / len(trees)
        told = zip(asked, scored, strict=True)
        return {(place, request): one for place, own in told for request, one in own.items()}

    try:
        grown = drive(score, growing, seen)
    except Exception:  # whose it was shows when each proposes alone
        return {}
    found: dict[int, Proposal] = {}
    for at, growth in growths.items():
        growth.seen.update({r: seen[at, r] for r in growth.drafts if (at, r) in seen})
        trees = growth.take({request: grown[at, request] for request in growth.drafts})
        found[at] = trees, {request: seconds[at, request] for request in growth.drafts}
    return found

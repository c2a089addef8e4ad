"""Gets the next round's drafts from several drafters, as in a server with a drafter per request.

Drafts that grow by forwards of the same draft model share these forwards.
"""

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
"""A drafter's trees by request, and by request its part of the seconds that they took."""


def proposals(drafters: Sequence[tuple[Drafter, Mapping[int, State]]]) -> list[Proposal]:
    """Returns what each drafter proposes for its requests, in the order of ``drafters``.

    Each drafter comes with the states of its requests, by request number. Drafts over the same
    model share one forward per step. Where that fails, each drafter proposes alone, so that a
    failure harms no other drafter.
    """
    by_drafter: dict[int, Proposal] = {}  # by the drafter's place in ``drafters``
    if len(drafters) > 1:
        by_model: dict[int, dict[int, Growth]] = defaultdict(dict)
        for place, (drafter, states) in enumerate(drafters):
            growth = drafter.start_growth(states)
            if growth is not None:  # None stands for a drafter that shares no forwards.
                by_model[id(growth.session.backbone)][place] = growth
        for growths in by_model.values():
            if len(growths) > 1:
                by_drafter |= _grow_together(growths)
    for place, (drafter, states) in enumerate(drafters):
        if place not in by_drafter:
            start = now()
            trees = drafter.propose(states)
            seconds_each = (now() - start) / max(1, len(states))
            by_drafter[place] = trees, dict.fromkeys(states, seconds_each)
    return [by_drafter[place] for place in range(len(drafters))]


def _grow_together(growths: Mapping[int, Growth]) -> dict[int, Proposal]:
    """Grows the drafts of several drafters in step, in one forward a step.

    The keys of ``growths`` and of the result are the drafters' places in the list that
    ``proposals`` was given. If one of the drafters fails, the result is empty.
    """
    drafts = {
        (place, request): draft
        for place, growth in growths.items()
        for request, draft in growth.drafts.items()
    }
    last_scores: dict[tuple[int, int], Scores] = {}  # ``drive`` puts each draft's latest here.
    seconds = dict.fromkeys(drafts, 0.0)
    counted_until = now()

    def score(trees: dict[tuple[int, int], Tree]) -> dict[tuple[int, int], Scores]:
        """Scores all trees in one forward. The seconds since the last forward ended, which include
        the growing of the trees, are divided equally among the trees."""
        nonlocal counted_until
        by_place: dict[int, dict[int, Tree]] = defaultdict(dict)
        for (place, request), tree in trees.items():
            by_place[place][request] = tree
        sessions_and_trees = [
            (growths[place].session, trees_by_request)
            for place, trees_by_request in by_place.items()
        ]
        scored = score_together(sessions_and_trees)
        before = counted_until
        counted_until = now()
        for key in trees:
            seconds[key] += (counted_until - before) / len(trees)
        pairs = zip(by_place, scored, strict=True)
        return {
            (place, request): scores
            for place, scores_by_request in pairs
            for request, scores in scores_by_request.items()
        }

    # In each step ``drive`` calls ``score`` once, with the trees of all drafts that are still
    # growing. When all drafts have ended, it returns their trees.
    try:
        all_trees = drive(score, drafts, last_scores)
    except Exception:
        # Each drafter proposes alone after this. That takes back no drawn token: the noise of a
        # draw follows from the seed and the draw's place, so the same draws are made again. A
        # drafter that caused the failure then fails by itself.
        return {}
    proposed: dict[int, Proposal] = {}
    for place, growth in growths.items():
        keys = {request: (place, request) for request in growth.drafts}
        # The drafter reads the last scores of its requests from ``growth.last_scores``.
        growth.last_scores.update(
            {request: last_scores[key] for request, key in keys.items() if key in last_scores}
        )
        # ``finish`` takes the grown trees and returns those to propose. Most drafters propose them
        # as they are, and a drafter with a fallback checks them first.
        trees = growth.finish({request: all_trees[key] for request, key in keys.items()})
        proposed[place] = trees, {request: seconds[key] for request, key in keys.items()}
    return proposed

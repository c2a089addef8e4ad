"""When target and draft work. Serial: one waits for the other. Parallel: both at once (PEARL).

In the parallel schedule the target judges tokens *in flight* while the draft goes on from their
end. So the target's laws reach one token past them, and that token is judged with them: with none
in flight this is PEARL's pre-verification (HIPPO's conservative round), with a full batch its
post-verification (the optimistic round). After a refusal nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from saccade.core.protocols import Cut, Drafter, Scoring, State
from saccade.core.result import FinishReason, Load, Round, Verdict
from saccade.core.sampling import BrokenLaw, Scores
from saccade.core.timing import now
from saccade.core.tree import ROOT, Tree, below
from saccade.core.verify import verify
from saccade.drafting.growing import proposals
from saccade.model import memory
from saccade.model.cuda_graphs import capture_new_sizes

Judgement = tuple[dict[int, Verdict], dict[int, FinishReason | None]]
"""What stands of each request's tree, and why the request ends if it does."""

NOTHING = Verdict((), (), None, None)
NO_MEMORY = "the target has no memory to judge what is drafted"


@dataclass
class Group:
    """Requests that share a drafter, which counts them from 0; the session has them from ``first``
    on. ``states`` are the folds of those that have not ended.

    ``unjudged`` are drafted nodes that the target has not reached. They are proposed again before
    anything new is drafted, for a drawn token stands (see ``Tree``).
    """

    drafter: Drafter
    states: dict[int, State]
    cut: Cut
    first: int = 0
    unjudged: dict[int, Tree] = field(default_factory=dict)

    @classmethod
    def begun(cls, drafter: Drafter, requests: Sequence[int], cut: Cut, first: int = 0) -> Group:
        """Requests whose folds are at their beginnings."""
        return cls(drafter, {request: drafter.start() for request in requests}, cut, first)


def opening(target: Scoring, request: int, cut: Cut, first: int = 0) -> Round:
    """A request's first token, by the law its prompt ended with: nobody waits for a draft to see
    it, and a draft has no part in it."""
    tree = {request: Tree()}
    laws = {request: target.score({first + request: Tree()})[first + request]}
    verdicts, endings = judged(tree, laws, cut)
    verdict, finish = verdicts[request], endings[request]
    target.commit({first + request: verdict.tokens})
    return Round(request, Tree(), verdict, finish, laws[request], None, 0.0, 0.0, opening=True)


def serial(target: Scoring, draft: Drafter, requests: Sequence[int], cut: Cut) -> Iterator[Round]:
    """Propose, score, verify, commit, until every request has ended; one target forward a round."""
    group = Group.begun(draft, requests, cut)
    while group.states:
        for _, round in advance(target, [group]):
            yield round


def advance(target: Scoring, groups: Sequence[Group]) -> Iterator[tuple[Group, Round]]:
    """One round of all requests of all groups, in one forward of the target."""
    began = now()
    drafted = proposals([(group.drafter, _drafting(group)) for group in groups])
    drafting = now() - began

    began = now()
    proposed = [
        (group, trees | group.unjudged, parts | dict.fromkeys(group.unjudged, 0.0))
        for group, (trees, parts) in zip(groups, drafted, strict=True)
    ]
    scored = target.score(
        {g.first + r: tree for g, trees, _ in proposed for r, tree in trees.items()}
    )
    outcomes = []
    emitted: dict[int, Sequence[int]] = {}
    for group, trees, parts in proposed:
        laws = {request: scored[group.first + request] for request in trees}
        judgement = judged(trees, laws, group.cut)
        outcomes.append((group, trees, parts, laws, judgement))
        emitted |= {group.first + r: verdict.tokens for r, verdict in judgement[0].items()}
    target.commit(emitted)
    verifying = now() - began
    capture_new_sizes()

    rows = len(scored) + sum(len(tree) for _, trees, _ in proposed for tree in trees.values())
    for group, trees, parts, laws, judgement in outcomes:
        began = now()
        group.drafter.commit({r: verdict.tokens for r, verdict in judgement[0].items()})
        group.unjudged = unjudged(trees, judgement)
        committing = now() - began
        spent = drafting + committing, verifying
        loads: dict[int, Load | None] = dict.fromkeys(trees)
        if len(scored) > 1:
            loads |= {r: Load(len(scored), rows, parts[r] + committing / len(trees)) for r in parts}
        for round in _rounds(group, trees, laws, judgement, spent, loads):
            yield group, round


def parallel(target: Scoring, draft: Drafter, requests: Sequence[int], cut: Cut) -> Iterator[Round]:
    """Judge what is in flight while the draft extends it; one target forward a round."""
    group = Group.begun(draft, requests, cut)
    in_flight = draft.propose(group.states)
    while in_flight:
        began = now()
        laws = target.score(in_flight)
        scored = now()
        trees = draft.extend(in_flight)
        waited = now()

        verdicts, endings = judged(trees, laws, cut)
        live = [request for request in in_flight if endings[request] is None]
        emitted = {request: verdict.tokens for request, verdict in verdicts.items()}
        target.commit(emitted)
        verified = now()
        draft.commit(emitted)
        in_flight = {r: Tree() for r in live}
        if onward := [r for r in live if verdicts[r].own is None]:
            in_flight |= draft.propose({request: group.states[request] for request in onward})
        in_flight |= unjudged(trees, (verdicts, endings))
        waiting = waited - scored + now() - verified
        capture_new_sizes()
        spent = waiting, scored - began + verified - waited
        yield from _rounds(group, trees, laws, (verdicts, endings), spent)


@dataclass(frozen=True)
class MemoryGuard:
    """The target's session; where it has no memory for what was drafted, it judges the text alone.

    A walk down such a tree ends after one token. ``give_up`` is told of the trees and the error.
    """

    session: Scoring
    give_up: Callable[[Mapping[int, Tree], Exception], None]

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        try:
            return self.session.score(trees)
        except (RuntimeError, MemoryError) as error:
            if not memory.ran_out(error) or not any(map(len, trees.values())):
                raise
            self.give_up(trees, error)
        return self.session.score(dict.fromkeys(trees, Tree()))

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self.session.commit(tokens)


def judged(trees: Mapping[int, Tree], laws: Mapping[int, Scores], cut: Cut) -> Judgement:
    """What stands of each tree, cut where the answer stops; a broken law ends its request alone."""
    verdicts: dict[int, Verdict] = {}
    endings: dict[int, FinishReason | None] = {}
    for request, tree in trees.items():
        try:
            verdict = verify(tree, laws[request].every_law(), laws[request].noise)
        except BrokenLaw:
            verdicts[request], endings[request] = NOTHING, "error"
            continue
        count, endings[request] = cut(request, verdict.tokens)
        verdicts[request] = shortened(verdict, count)
    return verdicts, endings


def unjudged(trees: Mapping[int, Tree], judgement: Judgement) -> dict[int, Tree]:
    """Of each request that goes on, the nodes below those that were accepted, where the target's
    laws ended before the tree did."""
    verdicts, endings = judgement
    rest = {
        request: below(trees[request], (ROOT, *verdict.path)[-1])
        for request, verdict in verdicts.items()
        if endings[request] is None and verdict.own is None
    }
    return {request: tree for request, tree in rest.items() if len(tree)}


def _drafting(group: Group) -> dict[int, State]:
    """The states of the requests that wait for a new draft."""
    return {r: state for r, state in group.states.items() if r not in group.unjudged}


def shortened(verdict: Verdict, count: int) -> Verdict:
    """The verdict with its first ``count`` tokens only."""
    if count >= len(verdict.tokens):
        return verdict
    return Verdict(verdict.path[:count], verdict.accepted[:count], None, None)


def _rounds(
    group: Group,
    trees: Mapping[int, Tree],
    laws: Mapping[int, Scores],
    judgement: Judgement,
    spent: tuple[float, float],
    loads: Mapping[int, Load | None] | None = None,
) -> Iterator[Round]:
    """Each request's round, folded into its state; ``spent`` in seconds of drafting, verifying.
    The state of one that ended is gone: nobody asks what its last round taught."""
    draft, (verdicts, endings) = group.drafter, judgement
    for request, verdict in verdicts.items():
        round = Round(
            request=request,
            tree=trees[request],
            verdict=verdict,
            finish=endings[request],
            p=laws[request],
            q=draft.scores(request),
            draft_seconds=spent[0],
            verify_seconds=spent[1],
            note=draft.noted(request) or trees[request].odds,
            load=(loads or {}).get(request),
        )
        state = group.states.pop(request)
        if round.finish is None:
            group.states[request] = draft.fold(state, round)
        yield round

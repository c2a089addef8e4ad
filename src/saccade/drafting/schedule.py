"""When target and draft work. Serial: one waits for the other. Parallel: both at once (PEARL).

Tokens *in flight* are drafted and not verified yet. In the parallel schedule the target scores them
while the draft goes on after them. The target's scores reach one token past those in flight, so the
first token that the draft adds is verified in the same round. If it and all tokens in flight are
accepted, the draft's next tokens are in flight in the next round. After a rejection nothing is in
flight.

A round with no token in flight is PEARL's pre-verification (HIPPO's conservative round). One with a
whole draft in flight is PEARL's post-verification (the optimistic round).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from saccade.core.capabilities import Capability
from saccade.core.protocols import Cut, Drafter, Schedule, Scoring, State
from saccade.core.result import FinishReason, Load, Round, Verdict
from saccade.core.sampling import BrokenLaw, Scores
from saccade.core.timing import now
from saccade.core.tree import ROOT, Tree, subtree
from saccade.core.verify import verify
from saccade.drafting.proposals import proposals
from saccade.model import memory
from saccade.model.cuda_graphs import capture_new_sizes

Judgement = tuple[dict[int, Verdict], dict[int, FinishReason | None]]
"""The verdict on each request's tree, and why the request ends, if it does."""

EMPTY_VERDICT = Verdict((), (), own=None, kind=None)
NO_MEMORY_REASON = "the target has no memory to judge what is drafted"


@dataclass
class Group:
    """Requests that share a drafter.

    The drafter numbers them from 0, and the target's session from ``first_request``. ``states`` has
    what the drafter has learnt in each request that has not ended. ``cut`` is called as (request,
    new tokens). It returns how many of these the answer takes before it stops, and why the request
    ends, or None if it goes on. ``unjudged`` are drafted nodes that the target has not judged yet.
    They are proposed again before anything new is drafted, because a drawn token stands (see
    ``Tree``).
    """

    drafter: Drafter
    states: dict[int, State]
    cut: Cut
    first_request: int = 0
    unjudged: dict[int, Tree] = field(default_factory=dict)

    @classmethod
    def start(cls, drafter: Drafter, requests: Sequence[int], cut: Cut, first: int = 0) -> Group:
        """Makes a group of requests that have had no round yet. ``first`` is its
        ``first_request``."""
        return cls(drafter, {request: drafter.learner.start() for request in requests}, cut, first)


def opening_round(target: Scoring, request: int, cut: Cut, first: int = 0) -> Round:
    """Emits a request's first token, by the target's law after the prompt. No draft takes part.

    The target's session numbers the request ``first + request``.
    """
    tree = {request: Tree()}
    scores = {request: target.score({first + request: Tree()})[first + request]}
    verdicts, endings = judge(tree, scores, cut)
    verdict = verdicts[request]
    finish = endings[request]
    target.commit({first + request: verdict.tokens})
    return Round(
        request,
        Tree(),
        verdict,
        finish,
        p=scores[request],
        q=None,
        draft_seconds=0.0,
        verify_seconds=0.0,
        opening=True,
    )


def take_turns(
    target: Scoring, draft: Drafter, requests: Sequence[int], cut: Cut
) -> Iterator[Round]:
    """Proposes, scores, verifies and commits until every request has ended, with one forward of the
    target per round."""
    group = Group.start(draft, requests, cut)
    while group.states:
        for _, round in advance(target, [group]):
            yield round


def advance(target: Scoring, groups: Sequence[Group]) -> Iterator[tuple[Group, Round]]:
    """Runs one round of all requests of all groups, in one forward of the target. Yields each
    request's round with its group."""
    # The drafters propose.
    start = now()
    drafted = proposals([(group.drafter, _states_to_draft(group)) for group in groups])
    propose_seconds = now() - start

    # The target scores what was drafted, and each tree is verified.
    start = now()
    # Unjudged trees were drafted in an earlier round, so they take no time in this one.
    proposed = [
        (group, trees | group.unjudged, draft_seconds | dict.fromkeys(group.unjudged, 0.0))
        for group, (trees, draft_seconds) in zip(groups, drafted, strict=True)
    ]
    scored = target.score(
        {
            group.first_request + request: tree
            for group, trees, _ in proposed
            for request, tree in trees.items()
        }
    )
    outcomes = []
    emitted: dict[int, Sequence[int]] = {}
    for group, trees, draft_seconds in proposed:
        scores = {request: scored[group.first_request + request] for request in trees}
        judgement = judge(trees, scores, group.cut)
        outcomes.append((group, trees, draft_seconds, scores, judgement))
        verdicts, _ = judgement
        emitted |= {group.first_request + r: verdict.tokens for r, verdict in verdicts.items()}
    target.commit(emitted)
    verify_seconds = now() - start
    # Forwards of a size that was new in this round are captured as CUDA graphs, for later rounds.
    # ``capture_new_sizes`` returns whether there were any.
    first_of_size = capture_new_sizes()

    # The drafters commit what was emitted, and each request's round is yielded. In the target's
    # forward a request had one row for the last token of its text, and one for each node.
    rows = len(scored) + sum(len(tree) for _, trees, _ in proposed for tree in trees.values())
    for group, trees, draft_seconds, scores, judgement in outcomes:
        start = now()
        verdicts, _ = judgement
        group.drafter.commit({r: verdict.tokens for r, verdict in verdicts.items()})
        group.unjudged = unjudged_trees(trees, judgement)
        commit_seconds = now() - start
        spent = propose_seconds + commit_seconds, verify_seconds
        loads: dict[int, Load | None] = dict.fromkeys(trees)
        if len(scored) > 1:  # Several requests shared the target's forward.
            commit_seconds_each = commit_seconds / len(trees)
            loads |= {
                request: Load(
                    requests=len(scored), rows=rows, draft_seconds=seconds + commit_seconds_each
                )
                for request, seconds in draft_seconds.items()
            }
        for round in _rounds(group, trees, scores, judgement, spent, first_of_size, loads):
            yield group, round


def work_side_by_side(
    target: Scoring, draft: Drafter, requests: Sequence[int], cut: Cut
) -> Iterator[Round]:
    """Judges the tokens in flight while the draft continues after them, with one forward of the
    target per round.

    The draft runs in a process of its own, so it drafts while ``score`` runs here. ``extend`` adds
    to each tree in flight the one token that the draft drafted next, and waits for it if need be. A
    draft that still reads its prompt adds none. ``propose`` fetches the tokens that were drafted
    after that one token.
    """
    group = Group.start(draft, requests, cut)
    in_flight = draft.propose(group.states)
    while in_flight:
        start = now()
        scores = target.score(in_flight)
        score_end = now()
        trees = draft.parallel_work.extend(in_flight)
        extend_end = now()

        verdicts, endings = judge(trees, scores, cut)
        live = [request for request in in_flight if endings[request] is None]
        emitted = {request: verdict.tokens for request, verdict in verdicts.items()}
        target.commit(emitted)
        commit_end = now()
        draft.commit(emitted)
        in_flight = {r: Tree() for r in live}
        # If the draft has added a token while the target scored, that token is the last of the
        # tree, and the target has no scores after it. If all tokens of such a tree are accepted,
        # the verdict therefore has no token of the target's own, and the draft goes on after the
        # accepted tokens. Otherwise the next round starts with nothing in flight.
        if all_accepted := [r for r in live if verdicts[r].own is None]:
            in_flight |= draft.propose({request: group.states[request] for request in all_accepted})
        # Where the target had no memory to score a tree (``MemoryGuard``), some of its tokens are
        # not judged yet. They are in flight in the next round, in the place of a new proposal.
        in_flight |= unjudged_trees(trees, (verdicts, endings))
        # The draft's seconds are those of ``extend``, and those from the end of the target's commit
        # until now. The target's are those of its scores, and those of the verdicts and its commit.
        draft_seconds = extend_end - score_end + now() - commit_end
        verify_seconds = score_end - start + commit_end - extend_end
        first_of_size = capture_new_sizes()  # Whether a forward of this round had a new size.
        spent = draft_seconds, verify_seconds
        yield from _rounds(group, trees, scores, (verdicts, endings), spent, first_of_size)


serial = Schedule("serial", take_turns, offers=frozenset({Capability.SHARED_FORWARDS}))
parallel = Schedule(
    "parallel",
    work_side_by_side,
    needs=frozenset({Capability.OWN_PROCESS, Capability.GROWS_TOKEN_BY_TOKEN}),
    offers=frozenset({Capability.BESIDE_TARGET}),
)


@dataclass(frozen=True)
class MemoryGuard:
    """A target's session that scores without drafts where its memory does not suffice for them.

    Each request then gets one token, by the target's law after its text. Before that ``give_up`` is
    called with the trees and the error.
    """

    session: Scoring
    give_up: Callable[[Mapping[int, Tree], Exception], None]

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        try:
            return self.session.score(trees)
        except (RuntimeError, MemoryError) as error:
            if not memory.is_out_of_memory(error) or not any(map(len, trees.values())):
                raise
            self.give_up(trees, error)
        return self.session.score(dict.fromkeys(trees, Tree()))

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self.session.commit(tokens)


def judge(trees: Mapping[int, Tree], scores: Mapping[int, Scores], cut: Cut) -> Judgement:
    """Verifies each tree and cuts the verdict where the answer stops. A law with NaN ends only its
    own request."""
    verdicts: dict[int, Verdict] = {}
    endings: dict[int, FinishReason | None] = {}
    for request, tree in trees.items():
        try:
            verdict = verify(tree, scores[request].every_law(), scores[request].noise)
        except BrokenLaw:
            verdicts[request], endings[request] = EMPTY_VERDICT, "error"
            continue
        count, endings[request] = cut(request, verdict.tokens)
        verdicts[request] = shorten(verdict, count)
    return verdicts, endings


def unjudged_trees(trees: Mapping[int, Tree], judgement: Judgement) -> dict[int, Tree]:
    """Returns the part of each tree below its accepted nodes that the target has not judged.

    Requests that end, and those that have no such nodes, are left out.
    """
    verdicts, endings = judgement
    unjudged: dict[int, Tree] = {}
    for request, verdict in verdicts.items():
        # The target adds a token of its own only after it has judged all children of the last
        # accepted node, so nothing below is left to judge.
        if endings[request] is not None or verdict.own is not None:
            continue
        last_accepted = (ROOT, *verdict.path)[-1]
        below = subtree(trees[request], last_accepted)
        if len(below):
            unjudged[request] = below
    return unjudged


def _states_to_draft(group: Group) -> dict[int, State]:
    """Returns the states of the requests that need a new draft."""
    return {r: state for r, state in group.states.items() if r not in group.unjudged}


def shorten(verdict: Verdict, count: int) -> Verdict:
    """Returns the verdict with its first ``count`` tokens only."""
    if count >= len(verdict.tokens):
        return verdict
    return Verdict(verdict.path[:count], verdict.accepted[:count], own=None, kind=None)


def _rounds(
    group: Group,
    trees: Mapping[int, Tree],
    scores: Mapping[int, Scores],
    judgement: Judgement,
    spent: tuple[float, float],
    first_of_size: bool,
    loads: Mapping[int, Load | None] | None = None,
) -> Iterator[Round]:
    """Yields each request's round, after the drafter's learner has folded it into the request's
    state. A request that ends leaves the group, and later answers learn from its last state.

    ``spent`` are the seconds of drafting and of verifying. ``first_of_size`` says that a forward
    was the first of its size, so that its seconds tell nothing of later rounds. ``loads`` has each
    request's part in forwards that it shared with other requests, and None for a request that was
    alone. Without ``loads`` every request was alone.
    """
    draft, (verdicts, endings) = group.drafter, judgement
    report = draft.report()
    for request, verdict in verdicts.items():
        # The numbers that the draft decided by: those that the drafter reports, such as an
        # ensemble's weights of its views, or else the draft's probabilities of the tree's tokens.
        note = report.notes.get(request) or trees[request].confidences
        round = Round(
            request=request,
            tree=trees[request],
            verdict=verdict,
            finish=endings[request],
            p=scores[request],
            q=report.scores.get(request),
            draft_seconds=spent[0],
            verify_seconds=spent[1],
            note=note,
            load=(loads or {}).get(request),
            first_of_size=first_of_size,
        )
        state = draft.learner.fold(group.states.pop(request), round)
        if round.finish is None:
            group.states[request] = state
        else:
            draft.learner.finish(state)
        yield round

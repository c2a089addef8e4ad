"""When target and draft work. Serial: one waits for the other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from saccade.sampling import BrokenLaw
from saccade.types import Cut, Draft, FinishReason, Round, Scoring, Tree, Verdict
from saccade.verify import verify

NOTHING = Verdict((), (), None, None)


def serial(target: Scoring, draft: Draft, requests: Sequence[int], cut: Cut) -> Iterator[Round]:
    """Propose, score, verify, commit, until every request has ended; one target forward a round."""
    states = {request: draft.start() for request in requests}
    live = list(requests)
    while live:
        began = time.perf_counter()
        trees = draft.propose(dict.fromkeys(live, Tree()), states)
        drafted = time.perf_counter()

        laws = target.score(trees)
        verdicts: dict[int, Verdict] = {}
        endings: dict[int, FinishReason | None] = {}
        for request in live:
            try:
                verdict = verify(trees[request], laws[request].law, laws[request].noise)
            except BrokenLaw:  # ends this request and no other
                verdicts[request], endings[request] = NOTHING, "error"
                continue
            count, endings[request] = cut(request, verdict.tokens)
            verdicts[request] = shortened(verdict, count)
        live = [request for request in live if endings[request] is None]
        target.commit({request: verdict.tokens for request, verdict in verdicts.items()})
        verified = time.perf_counter()
        draft.commit({request: verdicts[request].tokens for request in live})
        committed = time.perf_counter()

        for request, verdict in verdicts.items():
            round = Round(
                request=request,
                tree=trees[request],
                verdict=verdict,
                finish=endings[request],
                p=laws[request],
                q=draft.scores(request),
                draft_seconds=drafted - began + committed - verified,
                verify_seconds=verified - drafted,
            )
            states[request] = draft.fold(states[request], round)
            yield round


def shortened(verdict: Verdict, count: int) -> Verdict:
    """The verdict with its first ``count`` tokens only."""
    if count >= len(verdict.tokens):
        return verdict
    return Verdict(verdict.path[:count], verdict.accepted[:count], None, None)

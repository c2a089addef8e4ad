"""What one forward costs, timed anew: nothing is remembered from a busier hour."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.backbone import Backbone
from saccade.bench import measures
from saccade.bench.measures import Interval
from saccade.clock import Clock
from saccade.sampling import Sampling
from saccade.session import Request, Session
from saccade.tree import chain
from saccade.types import Tree

WARM_UP, REPEATS = 2, 21


def milliseconds(model: Backbone, context: int, ways: Sequence[tuple[int, int]]) -> list[Interval]:
    """Median milliseconds of a forward of (requests, tokens of each), the ways taking turns."""
    sessions = [
        _filled(model, context, requests, max(rows for _, rows in ways)) for requests, _ in ways
    ]
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(WARM_UP + REPEATS):
        for session, (_, rows), own in zip(sessions, ways, found, strict=True):
            for request in session.requests.values():
                request.pending, request.tree, request.rows = [0], Tree(), []
                request.cache.length = context
            clock = Clock(model.device)
            session.score(dict.fromkeys(session.requests, chain([0] * (rows - 1))))
            own.append(1e3 * clock.since())
    middles = [measures.interval(own[WARM_UP:]) for own in found]
    return [middle for middle in middles if middle is not None]


def _filled(model: Backbone, context: int, requests: int, room: int) -> Session:
    """Requests that each read ``context`` random keys."""
    session = Session(model, [Sampling()] * requests)
    for number in range(requests):
        cache = model.cache(context + room)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()
        cache.advance(context)
        session.requests[number] = Request(cache, [], context)
    return session

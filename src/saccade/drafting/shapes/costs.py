"""What a forward costs on this machine, measured once per machine, pair and length, and kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from saccade.core.costs import Costs
from saccade.core.home import Measured
from saccade.core.sampling import Sampling
from saccade.core.timing import Clock, Phase, untold
from saccade.core.tree import Tree, chain
from saccade.model.backbone import Backbone
from saccade.model.session import RequestState, Session

log = logging.getLogger(__name__)

POINTS = (1, 8, 26, 4, 16, 2, 12, 6, 20, 3, 10)  # rows of a forward, what tells most first
SECONDS = 0.6  # of timing all of them, and as much a point elsewhere: somebody waits
FEWEST, REPEATS, LEAST = 2, 10, 3  # of repeats; of points
MORE = 1.5  # how much dearer a forward of many rows is than of one, about
MANY = 8  # requests in a forward, to tell what one more costs
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)  # of a prompt a draft may be shown
SLOWER, DEARER = 1.2, 0.1  # a draft's step against its cheapest; its prefill against the target's
PROBE, BUSIER = 64, 1.25  # keys; how much slower a probe tells of a busy hour
_MEASURED = Measured("costs.json")
_TRUSTED: set[str] = set()  # costs this process measured, or found to hold


def measure(
    target: Backbone,
    draft: Backbone,
    *,
    context: int = 2048,
    draft_context: int = 256,
    phase: Phase = untold,
) -> Costs:
    """Times bare forwards over ``context`` cached tokens, and tells so; remembered per machine and
    pair, unless what is remembered is of a busier hour."""
    key = _key(target, draft, context, draft_context)
    known = _MEASURED.load(key)
    if known is not None and (key in _TRUSTED or _holds(known, target, draft)):
        _TRUSTED.add(key)
        rows, seconds, apart = tuple(known["rows"]), tuple(known["target"]), known["apart"]
        return Costs(rows, seconds, known["draft"], apart=(apart[0], apart[1]))
    phase("costs")
    (one,) = _times(target, [(context, 1)])
    count = max(LEAST, int(SECONDS / (FEWEST * MORE * one)))  # a slow model would take minutes
    told = tuple(sorted(POINTS[:count]))
    times = _times(target, [(context, rows) for rows in told])
    # noise must not make more rows look cheaper than fewer
    for i in range(len(times) - 2, -1, -1):
        times[i] = min(times[i], times[i + 1])
    (level,) = _times(draft, [(draft_context, 1)])
    costs = Costs(told, tuple(times), level, apart=_apart(target, draft))
    _TRUSTED.add(key)
    _MEASURED.save(key, asdict(costs) | {"probe": _probe(target, draft)})
    log.info("measured forwards: %s", costs)
    return costs


def _apart(target: Backbone, draft: Backbone) -> tuple[float, float]:
    """``Costs.apart``, over few keys."""
    (together,) = _times(target, [(PROBE, MANY)])
    (requests,) = _times(target, [(PROBE, 1)], MANY)
    (one,), (many,) = _times(draft, [(PROBE, 1)]), _times(draft, [(PROBE, 1)], MANY)
    others = MANY - 1
    return max(0.0, requests - together) / others, max(0.0, many - one) / others


def _probe(target: Backbone, draft: Backbone) -> list[float]:
    """What tells a busy hour from a quiet one for little: seconds of a row over few keys."""
    return [_times(model, [(PROBE, 1)])[0] for model in (target, draft)]


def _holds(known: Mapping[str, Any], target: Backbone, draft: Backbone) -> bool:
    """Whether this machine is no quicker now than when these costs were measured."""
    now, then = _probe(target, draft), known.get("probe") or [math.inf, math.inf]
    return all(BUSIER * mine >= old for mine, old in zip(now, then, strict=True))


def affordable(target: Backbone, draft: Backbone, context: int, phase: Phase = untold) -> float:
    """The largest share of a prompt of ``context`` tokens that a draft reads without much ado: with
    steps at most a fifth slower than its quickest, and a prefill of at most a tenth of the
    target's. Its own keys, if it is the target, need no prefill."""
    bearable = 1.0 if draft is target else DEARER * _size(target) / _size(draft)
    key = _key(target, draft, context, 0)
    times = (_MEASURED.load(key) or {}).get("steps")
    if times is None:
        phase("costs")
        asked = [(max(1, int(share * context)), 1) for share in SHARES]
        times = _times(draft, asked)
        _MEASURED.save(key, {"steps": times})
        log.info("a draft's step over %s of %d tokens: %s s", SHARES, context, times)
    quick = [share for share, own in zip(SHARES, times, strict=True) if own <= SLOWER * min(times)]
    return max((share for share in quick if share <= bearable), default=SHARES[-1])


def _size(model: Backbone) -> int:
    """Weights a prompt token is multiplied with."""
    return sum(weight.numel() for weight in model.text.layers.parameters())


def _times(model: Backbone, asked: Sequence[tuple[int, int]], requests: int = 1) -> list[float]:
    """Seconds of forwards of (context, rows) each: the quickest of several, taken in turns, so that
    a busy moment neither counts nor falls on one of them alone. Slow forwards are taken fewer
    times: they vary less."""
    longest, most = max(asked)[0], max(rows for _, rows in asked)
    session = filled(model, longest, requests, most + 1)
    clock = Clock(model.device)
    took: list[list[float]] = []
    allowed = SECONDS * len(asked) / len(POINTS)
    while len(took) < FEWEST or (len(took) < REPEATS and clock.since() < allowed):
        took.append([step(session, *each) for each in asked])
    return [min(times) for times in zip(*took, strict=True)]


def filled(
    model: Backbone, context: int, requests: int, room: int, *, cuda_graphs: bool | None = None
) -> Session:
    """Requests that each read ``context`` random keys, with room for ``room`` more."""
    session = Session(model, [Sampling()] * requests, cuda_graphs=cuda_graphs)
    for number in range(requests):
        cache = model.cache(context + room)
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(1)  # drawn ones take longer than a forward, and cost it as much
        cache.advance(context)
        session.requests[number] = RequestState(cache, [], context)
    return session


def step(session: Session, context: int, rows: int) -> float:
    """Seconds of a forward of ``rows`` new tokens of each request of a filled session."""
    for request in session.requests.values():
        request.pending, request.tree, request.rows = [0], Tree(), []
        request.cache.length = context
    trees = dict.fromkeys(session.requests, chain([0] * (rows - 1)))
    clock = Clock(session.backbone.device)
    session.score(trees)
    return clock.since()


def bucket(tokens: int) -> int:
    """The power of two nearest ``tokens`` by ratio: costs are measured per such context length."""
    return 1 << max(6, round(math.log2(max(tokens, 1))))


def _key(target: Backbone, draft: Backbone, context: int, draft_context: int) -> str:
    facts: list[object] = [context, draft_context]
    for model in (target, draft):
        facts += [str(model.config.to_dict()), str(model.dtype), str(model.device)]
        facts.append(model.fused is not None)
    return _MEASURED.key(*facts)

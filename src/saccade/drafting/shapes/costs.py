"""What a forward costs on this machine, measured once per machine, pair and length, and kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from saccade.core.costs import Costs
from saccade.core.home import Measured
from saccade.core.once import once
from saccade.core.sampling import Sampling
from saccade.core.timing import Clock, Phase, untold
from saccade.core.tree import Tree, chain
from saccade.model.backbone import Backbone
from saccade.model.cuda_graphs import capture_new_sizes
from saccade.model.kernels import compiled
from saccade.model.session import RequestState, Session

log = logging.getLogger(__name__)

POINTS = (1, 8, 26, 4, 16, 2, 12, 6, 20, 3, 10)  # rows of a forward, what tells most first
SECONDS = 0.6  # of timing all of them, and as much a point elsewhere: somebody waits
FEWEST, REPEATS, LEAST = 2, 10, 3  # of repeats; of points
MORE = 1.5  # how much dearer a forward of many rows is than of one, about
MANY = 8  # requests in a forward, to tell what one more costs
OFTEN = 8  # answers, after which all points are worth their time
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)  # of a prompt a draft may be shown
SLOWER, DEARER = 1.1, 0.1  # a draft's step against its cheapest; its prefill against the target's
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
    pair, unless what is remembered is of a busier hour. A slow model is timed at few numbers of
    rows, and at the others by the first process after ``OFTEN`` answers: within one nothing
    changes, so that what is drawn by a seed does not."""
    known = _known(target, draft, context, phase)
    _used(target, draft, context, known)
    rows, seconds, apart = tuple(known["rows"]), tuple(known["target"]), known["apart"]
    return Costs(rows, seconds, _step(known, context, draft_context), apart=(apart[0], apart[1]))


def _known(target: Backbone, draft: Backbone, context: int, phase: Phase) -> dict[str, Any]:
    """What is remembered of these two over so many keys, measured where it is not, or no more."""
    key = _key(target, draft, context)
    known = _MEASURED.load(key)
    if known is not None and (key in _TRUSTED or _stands(known, target, draft)):
        _TRUSTED.add(key)
        return dict(known)
    phase("costs")
    used = 0 if known is None else known.get("used", 0)
    found = {**_timed(target, draft, context, often=used >= OFTEN), "used": used}
    _TRUSTED.add(key)
    _MEASURED.save(key, found)
    log.info("measured forwards: %s", found)
    return found


def _used(target: Backbone, draft: Backbone, context: int, known: Mapping[str, Any]) -> None:
    """Counts an answer, as far as it matters how many there were."""
    if (used := known.get("used", 0)) < OFTEN:
        _MEASURED.save(_key(target, draft, context), {**known, "used": used + 1})


def _timed(target: Backbone, draft: Backbone, context: int, *, often: bool) -> dict[str, Any]:
    """Seconds of forwards: the target's by rows, a row of the draft's over few keys and over all,
    and what another request adds to either, over few keys."""
    few = POINTS[:LEAST]
    asked = [(PROBE, 1), (PROBE, MANY), *((context, rows) for rows in few)]
    alone, together, *times = _times(target, asked)
    steps = [alone, times[0]]
    count = int(SECONDS / (FEWEST * MORE * times[0]))  # a slow model would take minutes
    rows = sorted(POINTS if often else POINTS[: max(LEAST, count)])
    told = dict(zip(few, times, strict=True))
    if len(rows) > LEAST:
        told = dict(zip(rows, _times(target, [(context, each) for each in rows]), strict=True))
    # noise must not make more rows look cheaper than fewer
    seconds = [min(told[each] for each in rows[place:]) for place in range(len(rows))]
    (requests,) = _times(target, [(PROBE, 1)], MANY)
    own, many = steps, requests
    if draft is not target:
        own = _times(draft, [(PROBE, 1), (context, 1)])
        (many,) = _times(draft, [(PROBE, 1)], MANY)
    others = MANY - 1
    return {
        "rows": rows,
        "target": seconds,
        "steps": own,
        "apart": [max(0.0, requests - together) / others, max(0.0, many - own[0]) / others],
        "probe": [alone, own[0]],
    }


def _step(known: Mapping[str, Any], context: int, keys: int) -> float:
    """Seconds of a step of the draft over so many keys: it reads all of them once, so they lie on a
    line between those over few and over all."""
    few, every = known["steps"]
    return float(few + max(0.0, every - few) * max(0, keys - PROBE) / max(1, context - PROBE))


def _stands(known: Mapping[str, Any], target: Backbone, draft: Backbone) -> bool:
    """Whether what is known is all that is wanted, and this machine no quicker now than then. A row
    over few keys tells a busy hour from a quiet one for little."""
    if "steps" not in known or (known["used"] >= OFTEN and len(known["rows"]) < len(POINTS)):
        return False
    now = [_times(model, [(PROBE, 1)])[0] for model in (target, draft)]
    return all(BUSIER * mine >= old for mine, old in zip(now, known["probe"], strict=True))


def affordable(target: Backbone, draft: Backbone, context: int, phase: Phase = untold) -> float:
    """The largest share of a prompt of ``context`` tokens that a draft reads without much ado: with
    steps at most a tenth slower than its quickest, and a prefill of at most a tenth of the
    target's. Its own keys, if it is the target, need no prefill."""
    bearable = 1.0 if draft is target else DEARER * _size(target) / _size(draft)
    known = _known(target, draft, context, phase)
    times = [_step(known, context, int(share * context)) for share in SHARES]
    quick = [share for share, own in zip(SHARES, times, strict=True) if own <= SLOWER * min(times)]
    return max((share for share in quick if share <= bearable), default=SHARES[-1])


@once
def _size(model: Backbone) -> int:
    """Weights a prompt token is multiplied with."""
    return sum(weight.numel() for weight in model.text.layers.parameters())


def _times(model: Backbone, asked: Sequence[tuple[int, int]], requests: int = 1) -> list[float]:
    """Seconds of forwards of (context, rows) each: the quickest of several, taken in turns, so that
    a busy moment neither counts nor falls on one of them alone. Slow forwards are taken fewer
    times: they vary less."""
    most = max(rows for _, rows in asked)
    # Each context has a session of its own, in which nothing but its rows changes.
    sessions = {
        context: filled(model, context, requests, most + 1)
        for context in dict.fromkeys(context for context, _ in asked)
    }
    for context, rows in asked:
        if sessions[context].cuda_graphs is not None:
            step(sessions[context], context, rows)  # What is captured is not the step's price.
            capture_new_sizes()
    clock = Clock(model.device)
    took: list[list[float]] = []
    allowed = SECONDS * len(asked) / len(POINTS)
    while len(took) < FEWEST or (len(took) < REPEATS and clock.since() < allowed):
        took.append([step(sessions[context], context, rows) for context, rows in asked])
    return [min(times) for times in zip(*took, strict=True)]


def filled(
    model: Backbone, context: int, requests: int, room: int, *, cuda_graphs: bool | None = None
) -> Session:
    """Requests that each read ``context`` random keys, with room for ``room`` more."""
    session = Session(model, [Sampling()] * requests, cuda_graphs=cuda_graphs)
    for number in range(requests):
        cache = session.cache(context + room)
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


def _key(target: Backbone, draft: Backbone, context: int) -> str:
    return _MEASURED.key(context, compiled.version(), *_facts(target), *_facts(draft))


@once
def _facts(model: Backbone) -> tuple[object, ...]:
    kind = str(model.config.to_dict()), str(model.dtype), str(model.device)
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None
    return (*kind, model.fused is not None, gpu)

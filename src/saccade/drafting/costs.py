"""What a forward costs on this machine, and the shape of draft that pays best at that cost.

Expected tokens per second of a shape = E[tokens emitted] / (draft levels x c + T(n)), with T(n) the
target's time for n rows, c the draft's for one level and E from the rate at which drafts are
accepted (Leviathan et al. 2023, Sec. 3; the ideal speedup is this over 1 / T(1)).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saccade.core.protocols import Growing, State
from saccade.core.result import Round
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, chain
from saccade.drafting.policies import Paths, grow_chain, grow_static
from saccade.model.backbone import Backbone
from saccade.model.batch_invariant import ROWS as EXACT_ROWS
from saccade.model.session import Request, Session
from saccade.model.timing import Clock

log = logging.getLogger(__name__)

ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 26)
REPEATS, WARM = 9, 2
LONGEST = 12
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)  # of a prompt a draft may be shown
SLOWER, DEARER = 1.2, 0.1  # a draft's step against its cheapest; its prefill against the target's
GLANCE, BUSIER = 64, 1.25  # keys; how much slower a glance tells of a busy hour
PRIOR_RATE, PRIOR_WEIGHT, MEMORY = 0.85, 8.0, 0.98
_TRUSTED: set[str] = set()  # costs this process measured, or found to hold


@dataclass(frozen=True)
class Costs:
    """Seconds per forward: the target's by number of rows, the draft's for one level."""

    rows: tuple[int, ...]
    target: tuple[float, ...]
    draft: float

    def verify(self, rows: int) -> float:
        """T(rows), linear between the measured points and beyond them."""
        points = list(zip(self.rows, self.target, strict=True))
        for (a, low), (b, high) in zip(points, points[1:], strict=False):
            if rows <= b:
                return low + (high - low) * (rows - a) / (b - a)
        (a, low), (b, high) = points[-2:]
        return high + (high - low) * (rows - b) / (b - a)

    def speedup(self, emitted: float, levels: float, rows: int) -> float:
        """emitted T(1) / (levels T_q + T(rows)): what bare forwards allow."""
        return emitted * self.verify(1) / (levels * self.draft + self.verify(rows))


@dataclass(frozen=True)
class Padded(Costs):
    """Costs where every forward is padded, as ``exact`` asks for."""

    def verify(self, rows: int) -> float:
        return super().verify(-(-rows // EXACT_ROWS) * EXACT_ROWS)


def padded(costs: Costs) -> Padded:
    return Padded(costs.rows, costs.target, costs.draft)


def expected_chain(rate: float, length: int) -> float:
    """E[tokens] of a chain whose tokens are each accepted at ``rate``: 1 + a + a^2 + ..."""
    return sum(rate**i for i in range(length + 1))


def expected_tree(rate: float, paths: Paths) -> float:
    """E[tokens] of a static tree; rank r is right with probability rate, then half of what is left.

    The halving is a model, stated here and nowhere measured; chains do not depend on it.
    """
    share = [rate]
    for _ in range(max((max(path) for path in paths), default=0)):
        share.append((1 - sum(share)) / 2)
    total = 1.0
    for path in paths:
        chance = 1.0
        for rank in path:
            chance *= share[rank]
        total += chance
    return total


@dataclass(frozen=True)
class Fit:
    """Shape ``fit``: before every round, the chain length or tree with the best expected rate.

    Costs are measured once per machine and pair; the acceptance rate is folded from the rounds,
    starting at a stated prior. State: (accepted, tried), old rounds fading.
    """

    trees: tuple[Paths, ...] = ()
    costs: Costs | None = None  # written by Recipe.fit

    def start(self) -> State:
        return PRIOR_RATE * PRIOR_WEIGHT, PRIOR_WEIGHT

    def choose(self, state: State) -> int | Paths:
        """A chain length or the paths of a tree."""
        assert self.costs is not None, "Fit needs measured costs: see Recipe.fit"
        costs, rate = self.costs, state[0] / state[1]
        best: int | Paths = 1
        highest = 0.0
        for length in range(1, LONGEST + 1):
            speed = expected_chain(rate, length) / (length * costs.draft + costs.verify(length + 1))
            if speed > highest:
                best, highest = length, speed
        for paths in self.trees:
            levels = max(len(path) for path in paths)
            speed = expected_tree(rate, paths) / (
                levels * costs.draft + costs.verify(len(paths) + 1)
            )
            if speed > highest:
                best, highest = paths, speed
        return best

    def grow(self, stem: Tree, state: State) -> Growing:
        choice = self.choose(state)
        return grow_chain(stem, choice) if isinstance(choice, int) else grow_static(stem, choice)

    def fold(self, state: State, round: Round) -> State:
        accepted = len(round.verdict.accepted)
        refused = round.verdict.kind == "recovered"
        hits, tries = state
        return hits * MEMORY + accepted, tries * MEMORY + accepted + refused


def measure(
    target: Backbone, draft: Backbone, *, context: int = 2048, draft_context: int = 256
) -> Costs:
    """Times bare forwards over ``context`` cached tokens; remembered per machine and pair, unless
    what is remembered is of a busier hour."""
    key = _key(target, draft, context, draft_context)
    known = _load().get(key)
    if known is not None and (key in _TRUSTED or _holds(known, target, draft)):
        _TRUSTED.add(key)
        return Costs(tuple(known["rows"]), tuple(known["target"]), known["draft"])
    times = _times(target, [(context, rows) for rows in ROWS])
    # noise must not make more rows look cheaper than fewer
    for i in range(len(times) - 2, -1, -1):
        times[i] = min(times[i], times[i + 1])
    costs = Costs(ROWS, tuple(times), *_times(draft, [(draft_context, 1)]))
    _TRUSTED.add(key)
    glance = _glance(target, draft)
    _save(key, {"rows": ROWS, "target": costs.target, "draft": costs.draft, "glance": glance})
    log.info("measured forwards of %s rows: %s s; draft %.6f s", ROWS, costs.target, costs.draft)
    return costs


def _glance(target: Backbone, draft: Backbone) -> list[float]:
    """What tells a busy hour from a quiet one for little: seconds of a row over few keys."""
    return [_times(model, [(GLANCE, 1)])[0] for model in (target, draft)]


def _holds(known: Mapping[str, Any], target: Backbone, draft: Backbone) -> bool:
    """Whether this machine is no quicker now than when these costs were measured."""
    now, then = _glance(target, draft), known.get("glance") or [math.inf, math.inf]
    return all(BUSIER * mine >= old for mine, old in zip(now, then, strict=True))


def affordable(target: Backbone, draft: Backbone, context: int) -> float:
    """The largest share of a prompt of ``context`` tokens that a draft reads without much ado: with
    steps at most a fifth slower than its quickest, and a prefill of at most a tenth of the
    target's. Its own keys, if it is the target, need no prefill."""
    bearable = 1.0 if draft is target else DEARER * _size(target) / _size(draft)
    key = _key(target, draft, context, 0)
    times = _load().get(key, {}).get("steps")
    if times is None:
        asked = [(max(1, int(share * context)), 1) for share in SHARES]
        times = _times(draft, asked)
        _save(key, {"steps": times})
        log.info("a draft's step over %s of %d tokens: %s s", SHARES, context, times)
    quick = [share for share, own in zip(SHARES, times, strict=True) if own <= SLOWER * min(times)]
    return max((share for share in quick if share <= bearable), default=SHARES[-1])


def _size(model: Backbone) -> int:
    """Weights a prompt token is multiplied with."""
    return sum(weight.numel() for weight in model.text.layers.parameters())


def _times(model: Backbone, asked: Sequence[tuple[int, int]]) -> list[float]:
    """Seconds of forwards of (context, rows) each: the quickest of several, taken in turns, so that
    a busy moment neither counts nor falls on one of them alone."""
    longest, most = max(asked)[0], max(rows for _, rows in asked)
    session = filled(model, longest, 1, most + 1)
    took = [[step(session, *each) for each in asked] for _ in range(REPEATS + WARM)]
    return [min(times) for times in zip(*took[WARM:], strict=True)]


def filled(
    model: Backbone, context: int, requests: int, room: int, *, static: bool | None = None
) -> Session:
    """Requests that each read ``context`` random keys, with room for ``room`` more."""
    session = Session(model, [Sampling()] * requests, static=static)
    for number in range(requests):
        cache = model.cache(context + room)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()
        cache.advance(context)
        session.requests[number] = Request(cache, [], context)
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
    facts = [
        platform.node(),
        platform.processor() or platform.machine(),
        os.cpu_count(),
        torch.get_num_threads(),
        torch.__version__,
        context,
        draft_context,
    ]
    for model in (target, draft):
        facts += [str(model.config.to_dict()), str(model.dtype), str(model.device)]
        facts.append(model.lean is not None)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _path() -> Path:
    home = os.environ.get("SACCADE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path.home() / ".cache"
    return base / "saccade" / "costs.json"


def _load() -> dict[str, dict]:
    try:
        return json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}


def _save(key: str, value: dict) -> None:
    """Remembering is a convenience: a read-only home only means measuring again."""
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        scratch = _path().with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({**_load(), key: value}))
        scratch.replace(_path())
    except OSError as error:
        log.info("costs not remembered: %s", error)

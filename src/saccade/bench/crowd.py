"""Several requests at once: what sharing the target's forwards gives all of them together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from saccade.backbone import Backbone
from saccade.engine import Asked, settled
from saccade.errors import OptionError
from saccade.media import Clip
from saccade.models import Loaded, ask
from saccade.models.asking import shown
from saccade.pool import pool
from saccade.suites.shapes import suites
from saccade.systems import resolve


@dataclass(frozen=True)
class Crowd:
    """So many rows, over all requests: medians over the repeats."""

    method: str
    rows: int
    seconds: float  # until the last answer
    tokens: int
    first_token: float  # of a request, from when it joined
    same: bool  # whether every answer is the one given alone

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def questions(target: Loaded, suite: str, count: int, limit: int) -> list[Asked]:
    """The first requests of a suite, as a server would take them."""
    found = suites()
    if suite not in found:
        raise OptionError(f"there is no suite {suite!r}: take one of {', '.join(found)}")
    asked = []
    for item, _ in zip(found[suite].items(), range(count), strict=False):
        clip = item.media[0].read()
        assert isinstance(clip, Clip)
        inputs = ask(target, item.question, **shown(clip))
        asked.append(settled(target.backbone, inputs, max_new_tokens=limit))
    return asked


def race(
    target: Backbone,
    draft: Backbone | None,
    asked: Sequence[Asked],
    methods: Sequence[str],
    rows: Sequence[int],
    repeat: int,
) -> list[Crowd]:
    """Every method with every number of rows, interleaved; after a run that counts for nothing."""
    found: dict[tuple[str, int], list[Crowd]] = {}
    alone: dict[int, tuple[int, ...]] = {}
    for run in range(repeat + 1):
        for method in methods:
            for most in rows:
                ids, crowd = _run(target, draft, asked, method, most)
                alone = alone or ids
                if run:
                    same = crowd.same and ids == alone
                    found.setdefault((method, most), []).append(
                        Crowd(method, most, crowd.seconds, crowd.tokens, crowd.first_token, same)
                    )
    return [_median(runs) for runs in found.values()]


def _run(
    target: Backbone, draft: Backbone | None, asked: Sequence[Asked], method: str, rows: int
) -> tuple[dict[int, tuple[int, ...]], Crowd]:
    crowd, waiting = pool(target, resolve(method), draft), list(range(len(asked)))
    numbers: dict[int, int] = {}
    joined: dict[int, float] = {}
    firsts: dict[int, float] = {}
    ids: dict[int, tuple[int, ...]] = {}
    began = time.perf_counter()
    while waiting or len(crowd):
        while waiting and len(crowd) < rows:
            which = waiting.pop(0)
            number = crowd.join(asked[which])
            numbers[number], joined[number] = which, time.perf_counter()
        for news in crowd.step():
            if news.error is not None:
                raise news.error
            if news.round is not None:
                firsts.setdefault(news.number, time.perf_counter() - joined[news.number])
            if news.result is not None:
                ids[numbers[news.number]] = news.result.ids
    seconds = time.perf_counter() - began
    tokens = sum(map(len, ids.values()))
    return ids, Crowd(method, rows, seconds, tokens, median(firsts.values()), True)


def _median(runs: Sequence[Crowd]) -> Crowd:
    return Crowd(
        runs[0].method,
        runs[0].rows,
        median(run.seconds for run in runs),
        runs[0].tokens,
        median(run.first_token for run in runs),
        all(run.same for run in runs),
    )

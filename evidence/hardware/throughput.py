"""Several requests at once: what sharing the target's forwards gives all of them together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from saccade.bench.runner import shown
from saccade.bench.suites.types import Item
from saccade.engine.request import Request
from saccade.engine.scheduler import Scheduler
from saccade.inputs import Loaded, ask
from saccade.methods import resolve
from saccade.model.backbone import Backbone


@dataclass(frozen=True)
class Throughput:
    """So many rows, over all requests: medians over the repeats."""

    method: str
    rows: int
    seconds: float  # until the last answer
    tokens: int
    first_token: float  # of a request, from when it joined
    same: bool = True  # whether every answer is the one given alone

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def questions(target: Loaded, items: Iterable[Item], limit: int) -> list[Request]:
    """A suite's items as requests, as a server would take them; of several turns the first."""
    asked = (ask(target, item.question, **shown(item)) for item in items)
    return [Request.of(target.backbone, inputs, max_new_tokens=limit) for inputs in asked]


def race(
    target: Backbone,
    draft: Backbone | None,
    asked: Sequence[Request],
    methods: Sequence[str],
    rows: Sequence[int],
    repeat: int,
) -> list[Throughput]:
    """Every method with every number of rows, interleaved; after a run that counts for nothing."""
    found: dict[tuple[str, int], list[Throughput]] = {}
    alone: dict[int, tuple[int, ...]] = {}
    for run in range(repeat + 1):
        for method in methods:
            for most in rows:
                ids, one = _run(target, draft, asked, method, most)
                alone = alone or ids
                if run:
                    found.setdefault((method, most), []).append(replace(one, same=ids == alone))
    return [_median(runs) for runs in found.values()]


def _run(
    target: Backbone, draft: Backbone | None, asked: Sequence[Request], method: str, rows: int
) -> tuple[dict[int, tuple[int, ...]], Throughput]:
    scheduler, waiting = Scheduler(target, resolve(method), draft), list(range(len(asked)))
    numbers: dict[int, int] = {}
    joined: dict[int, float] = {}
    firsts: dict[int, float] = {}
    ids: dict[int, tuple[int, ...]] = {}
    began = time.perf_counter()
    while waiting or len(scheduler):
        while waiting and len(scheduler) < rows:
            which = waiting.pop(0)
            number = scheduler.join(asked[which])
            numbers[number], joined[number] = which, time.perf_counter()
        for news in scheduler.step():
            if news.error is not None:
                raise news.error
            if news.round is not None:
                firsts.setdefault(news.number, time.perf_counter() - joined[news.number])
            if news.result is not None:
                ids[numbers[news.number]] = news.result.ids
    seconds = time.perf_counter() - began
    tokens = sum(map(len, ids.values()))
    return ids, Throughput(method, rows, seconds, tokens, median(firsts.values()))


def _median(runs: Sequence[Throughput]) -> Throughput:
    return replace(
        runs[0],
        seconds=median(run.seconds for run in runs),
        first_token=median(run.first_token for run in runs),
        same=all(run.same for run in runs),
    )

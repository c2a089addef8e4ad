"""Several requests at once: what sharing the target's forwards gives all of them together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from matplotlib.figure import Figure

from saccade.bench.figures import COLOURS
from saccade.bench.runner import media_arguments
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
    between: tuple[float, float]  # seconds a token after the first: median, 95 % of requests
    same: bool = True  # whether every answer is the one given alone

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def questions(target: Loaded, items: Iterable[Item], limit: int) -> list[Request]:
    """A suite's items as requests, as a server would take them; of several turns the first."""
    asked = (ask(target, item.question, **media_arguments(item)) for item in items)
    return [Request.of(target.backbone, inputs, max_new_tokens=limit) for inputs in asked]


def race(
    target: Backbone,
    draft: Backbone | None,
    asked: Sequence[Request],
    methods: Sequence[str],
    rows: Sequence[int],
    repeat: int,
) -> list[Throughput]:
    """Every method with every number of rows, one method after another with each; after a run that
    counts for nothing. A method has one scheduler throughout, as a server has."""
    desks = {method: Scheduler(target, resolve(method), draft) for method in methods}
    found: dict[tuple[str, int], list[Throughput]] = {
        (method, most): [] for method in methods for most in rows
    }
    alone: dict[int, tuple[int, ...]] = {}
    for run in range(repeat + 1):
        for most in rows:
            for method in methods:
                ids, one = _run(desks[method], asked, method, most)
                alone = alone or ids
                if run:
                    found[method, most].append(replace(one, same=ids == alone))
    return [_median(runs) for runs in found.values()]


def _run(
    scheduler: Scheduler, asked: Sequence[Request], method: str, rows: int
) -> tuple[dict[int, tuple[int, ...]], Throughput]:
    waiting = list(range(len(asked)))
    numbers: dict[int, int] = {}
    joined: dict[int, float] = {}
    firsts: dict[int, float] = {}
    later: list[float] = []  # seconds a token after the first
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
                own = ids[numbers[news.number]] = news.result.ids
                since = time.perf_counter() - joined[news.number] - firsts[news.number]
                later.append(since / max(1, len(own) - 1))
    seconds = time.perf_counter() - began
    tokens, first = sum(map(len, ids.values())), median(firsts.values())
    between = median(later), float(np.quantile(later, 0.95))
    return ids, Throughput(method, rows, seconds, tokens, first, between)


def _median(runs: Sequence[Throughput]) -> Throughput:
    return replace(
        runs[0],
        seconds=median(run.seconds for run in runs),
        first_token=median(run.first_token for run in runs),
        between=(median(run.between[0] for run in runs), median(run.between[1] for run in runs)),
        same=all(run.same for run in runs),
    )


PANELS: Mapping[str, Callable[[Throughput], float]] = {
    "tokens a second, all together": lambda each: each.tokens_per_second,
    "seconds to the first token": lambda each: each.first_token,
    "milliseconds a token, median request": lambda each: 1e3 * each.between[0],
    "milliseconds a token, slowest of twenty": lambda each: 1e3 * each.between[1],
}


def draw(found: Sequence[Throughput]) -> Figure:
    """A panel a figure over requests at once, a line a method."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    rows = sorted({each.rows for each in found})
    methods = list(dict.fromkeys(each.method for each in found))
    for axis, (title, value) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for method, colour in zip(methods, COLOURS, strict=False):
            own = [each for each in found if each.method == method]
            at = [each.rows for each in own]
            axis.plot(at, [value(each) for each in own], marker="o", color=colour, label=method)
        axis.set_xscale("log", base=2)
        axis.set_xticks(rows, [str(each) for each in rows])
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    figure.supxlabel("requests at once", fontsize=10)
    return figure

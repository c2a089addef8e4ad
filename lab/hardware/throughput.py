"""Measures throughput and latency of several requests that share the target's forwards."""

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
    """The throughput of one method. Seconds are medians over repeats."""

    method: str
    rows: int  # The largest number of requests that are decoded at once.
    seconds: float  # Until the last answer is complete.
    tokens: int  # Of all answers.
    first_token: float  # Median seconds from a request's start to its first token.
    between: tuple[float, float]  # Seconds a token after the first: median, 95th percentile.
    same: bool = True  # Whether every answer equals that of the first run of all.

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def make_requests(target: Loaded, items: Iterable[Item], limit: int) -> list[Request]:
    """Returns a suite's items as requests, using the first turn of those with several."""
    prompts = (ask(target, item.question, **media_arguments(item)) for item in items)
    return [Request.of(target.backbone, inputs, max_new_tokens=limit) for inputs in prompts]


def measure_throughput(
    target: Backbone,
    draft: Backbone | None,
    requests: Sequence[Request],
    methods: Sequence[str],
    rows: Sequence[int],
    repeat: int,
) -> list[Throughput]:
    """Serves the requests by every method with every number of rows, in turns.

    The first turn warms up and does not count. A method keeps one scheduler throughout, as a server
    does. All answers are compared with those of the first run of all, which is by the first method
    with the first number of rows. With one row these are answers of requests that ran alone.
    """
    schedulers = {method: Scheduler(target, resolve(method), draft) for method in methods}
    runs_by_case: dict[tuple[str, int], list[Throughput]] = {
        (method, most): [] for method in methods for most in rows
    }
    reference: dict[int, tuple[int, ...]] = {}
    for run in range(repeat + 1):
        for most in rows:
            for method in methods:
                ids, one = _run(schedulers[method], requests, method, most)
                reference = reference or ids
                if run:
                    runs_by_case[method, most].append(replace(one, same=ids == reference))
    return [_median(case_runs) for case_runs in runs_by_case.values()]


def _run(
    scheduler: Scheduler, requests: Sequence[Request], method: str, rows: int
) -> tuple[dict[int, tuple[int, ...]], Throughput]:
    """Serves the requests once, and returns each answer by its request's place, and the figures.

    At most ``rows`` requests are decoded at once. The scheduler gives each request a number, which
    is not its place in ``requests``.
    """
    waiting = list(range(len(requests)))  # Places.
    place_of: dict[int, int] = {}  # By number.
    join_time: dict[int, float] = {}  # By number.
    first_token_seconds: dict[int, float] = {}  # By number, since the request joined.
    seconds_per_token: list[float] = []  # After the first token, one for each request.
    ids: dict[int, tuple[int, ...]] = {}  # By place.
    start_time = time.perf_counter()
    while waiting or len(scheduler):
        while waiting and len(scheduler) < rows:
            place = waiting.pop(0)
            number = scheduler.join(requests[place])
            place_of[number] = place
            join_time[number] = time.perf_counter()
        for news in scheduler.step():
            if news.error is not None:
                raise news.error
            if news.round is not None:
                waited = time.perf_counter() - join_time[news.number]
                first_token_seconds.setdefault(news.number, waited)
            if news.result is not None:
                answer = ids[place_of[news.number]] = news.result.ids
                since_joining = time.perf_counter() - join_time[news.number]
                since_first_token = since_joining - first_token_seconds[news.number]
                seconds_per_token.append(since_first_token / max(1, len(answer) - 1))
    seconds = time.perf_counter() - start_time
    tokens = sum(map(len, ids.values()))
    first = median(first_token_seconds.values())
    between = median(seconds_per_token), float(np.quantile(seconds_per_token, 0.95))
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


def draw_throughput(results: Sequence[Throughput]) -> Figure:
    """Draws a panel for each of ``PANELS`` over the requests at once, with a line a method."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    rows = sorted({each.rows for each in results})
    methods = list(dict.fromkeys(each.method for each in results))
    for axis, (title, value) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for method, colour in zip(methods, COLOURS, strict=False):
            points = [each for each in results if each.method == method]
            at = [each.rows for each in points]
            axis.plot(at, [value(each) for each in points], marker="o", color=colour, label=method)
        axis.set_xscale("log", base=2)
        axis.set_xticks(rows, [str(each) for each in rows])
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    figure.supxlabel("requests at once", fontsize=10)
    return figure

"""Measures throughput and latency of several requests that share the target's forwards.

``python -m lab pool`` prints the numbers. Here rows are requests that are decoded at once.
"""

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
    """The throughput and latency of one method with one number of rows.

    All seconds are medians over the repeats.
    """

    method: str
    rows: int  # The largest number of requests that are decoded at once.
    seconds: float  # Of the whole run, until the last answer is complete.
    tokens: int  # Of all answers together.
    # Seconds from when a request joins the scheduler to its first token: the median over requests.
    first_token: float
    # A request's mean seconds a token after its first: the median and the 95th percentile over
    # requests. An answer of one token counts with nearly 0.
    between: tuple[float, float]
    # Whether every answer has the ids that the same request got in the very first run.
    same: bool = True

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def make_requests(target: Loaded, items: Iterable[Item], limit: int) -> list[Request]:
    """Returns a suite's items as requests for answers of at most ``limit`` tokens.

    Of an item with several turns, only the first is asked.
    """
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
    """Serves all requests by every method with every number of rows, in ``repeat`` turns.

    A turn has one run of each method with each number of rows. One more turn comes first, which
    warms up and does not count. A method keeps one scheduler throughout, as a server
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
    """Serves the requests once, and returns the ids of their answers and the figures of this run.

    The ids are by a request's place in ``requests``. At most ``rows`` requests are decoded at once;
    a request joins when an earlier one has its whole answer. The scheduler gives each request a
    number of its own, which is not its place.
    """
    waiting = list(range(len(requests)))  # Places of the requests that did not join yet.
    place_of: dict[int, int] = {}  # By number.
    join_time: dict[int, float] = {}  # By number.
    first_token_seconds: dict[int, float] = {}  # By number, counted from when the request joined.
    # The mean seconds a token after the first, of each request that has its whole answer.
    seconds_per_token: list[float] = []
    ids: dict[int, tuple[int, ...]] = {}  # Of the answers, by place.
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
    """Returns the medians of runs of one method with one number of rows."""
    return replace(
        runs[0],
        seconds=median(run.seconds for run in runs),
        first_token=median(run.first_token for run in runs),
        between=(median(run.between[0] for run in runs), median(run.between[1] for run in runs)),
        same=all(run.same for run in runs),
    )


# The title of a panel -> the value that it shows of one method with one number of rows.
PANELS: Mapping[str, Callable[[Throughput], float]] = {
    "tokens a second, all together": lambda each: each.tokens_per_second,
    "seconds to the first token": lambda each: each.first_token,
    "milliseconds a token, median request": lambda each: 1e3 * each.between[0],
    "milliseconds a token, slowest of twenty": lambda each: 1e3 * each.between[1],
}


def draw_throughput(results: Sequence[Throughput]) -> Figure:
    """Draws a panel for each of ``PANELS``, with rows on the x axis and a line for each method."""
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

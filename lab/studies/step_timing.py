"""Times single forwards anew, without the costs that an earlier measurement stored."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.bench import measures
from saccade.bench.measures import Interval
from saccade.drafting.shapes import cost_measurement
from saccade.model.backbone import Backbone

WARM_UP = 2  # Forwards of each size that do not count, before those that do.
REPEATS = 21  # Forwards of each size that count.


def step_milliseconds(
    model: Backbone, context: int, sizes: Sequence[tuple[int, int]]
) -> list[Interval]:
    """Returns the median milliseconds of a forward, for each (requests, tokens of each request).

    The sizes take turns. Each median has its interval over the repeats. ``context`` is the number
    of cached tokens of each request.
    """
    room = max(rows for _, rows in sizes)
    sessions = [
        cost_measurement.filled_session(model, context, requests, room) for requests, _ in sizes
    ]
    times: list[list[float]] = [[] for _ in sizes]
    for _ in range(WARM_UP + REPEATS):
        for session, (_, rows), own in zip(sessions, sizes, times, strict=True):
            own.append(1e3 * cost_measurement.time_step(session, context, rows))
    intervals = [measures.interval(own[WARM_UP:]) for own in times]
    return [middle for middle in intervals if middle is not None]

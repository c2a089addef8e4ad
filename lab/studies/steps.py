"""What one forward costs, timed anew: nothing is remembered from a busier hour."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.bench import measures
from saccade.bench.measures import Interval
from saccade.drafting.shapes import cost_measurement
from saccade.model.backbone import Backbone

WARM_UP, REPEATS = 2, 21


def milliseconds(model: Backbone, context: int, ways: Sequence[tuple[int, int]]) -> list[Interval]:
    """Median milliseconds of a forward of (requests, tokens of each), the ways taking turns."""
    room = max(rows for _, rows in ways)
    sessions = [
        cost_measurement.filled_session(model, context, requests, room) for requests, _ in ways
    ]
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(WARM_UP + REPEATS):
        for session, (_, rows), own in zip(sessions, ways, found, strict=True):
            own.append(1e3 * cost_measurement.time_step(session, context, rows))
    middles = [measures.interval(own[WARM_UP:]) for own in found]
    return [middle for middle in middles if middle is not None]

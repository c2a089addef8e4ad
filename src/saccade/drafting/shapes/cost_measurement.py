"""Measures what forwards of a target and a draft cost on this machine.

Shapes decide by these costs how far to draft, and ``affordable_share`` decides by them how much of
a prompt a draft reads. The numbers are kept on disk: they are measured once per machine, pair of
models and context length.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from saccade.core.costs import EXPECTED_COST_PER_ROW, EXPECTED_ROWS, Costs
from saccade.core.home import MeasurementFile
from saccade.core.once import once
from saccade.core.sampling import Sampling
from saccade.core.timing import Clock, Phase, ignore_phase
from saccade.core.tree import chain
from saccade.model import families
from saccade.model.backbone import Backbone
from saccade.model.capture_choice import is_capturing_worthwhile
from saccade.model.cuda_graphs import capture_new_sizes
from saccade.model.kernels import compiled
from saccade.model.session import Session, session_of

log = logging.getLogger(__name__)

# Forwards of these numbers of rows are timed, the most telling numbers first. A row is a token that
# a forward scores.
ROW_COUNTS = (1, 8, 26, 4, 16, 2, 12, 6, 20, 3, 10)
FIRST_ROW_COUNTS = 3  # This many of them are timed however slow the model is.
# The time for timing forwards of all row counts. If only some are timed, they get their share of
# it, because an answer waits meanwhile.
TIMING_SECONDS = 0.6
MIN_REPEATS = 2  # Every forward is timed at least this many times.
MAX_REPEATS = 10  # Every forward is timed at most this many times.
# A forward of many rows takes about this many times as long as a forward of one row.
MANY_ROWS_FACTOR = 1.5
MANY_REQUESTS = 8  # Requests in the forward that shows what one more request costs.
ANSWERS_BEFORE_ALL_ROW_COUNTS = 8  # After this many answers all row counts are worth their time.
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)  # Shares of a prompt that a draft may read.
MAX_STEP_SLOWDOWN = 1.1  # A draft's step may take this many times as long as its quickest one.
MAX_PREFILL_SHARE = 0.1  # The draft's prefill may take this share of the target's.
PROBE_KEYS = 64  # The context of the probe, a short forward that shows how busy the machine is.
# Measuring is skipped where it would take longer than both this share of the answer's expected
# time and ``UNNOTICED_SECONDS``. Costs are estimated then, and rounds may correct them.
MAX_MEASURING_SHARE = 0.03
UNNOTICED_SECONDS = 0.3
MEASURING_FORWARDS = 20  # A first measurement takes about as long as so many forwards of one row.
# How fast a forward of one row is assumed to read weights and keys, where costs are estimated.
EXPECTED_BYTES_PER_SECOND = {"cpu": 1e10, "cuda": 2e12}
# Stored costs are measured again if the machine was busy when they were measured. That is the case
# if the probe took more than this many times as long then as it takes now.
BUSY_SLOWDOWN = 1.25
_MEASUREMENTS = MeasurementFile("costs.json")
# Keys of costs that this process has estimated because an answer could not wait. They are estimated
# from then on, until a call without ``answer_tokens`` measures or loads them.
_ESTIMATED: set[str] = set()
_IN_USE: dict[str, dict[str, Any]] = {}  # Measurements that this process has used, by their keys.
# A sample of a model's weights has the first SAMPLED_NUMBERS numbers of each of its last
# SAMPLED_PARAMETERS parameters.
SAMPLED_NUMBERS = 4
SAMPLED_PARAMETERS = 12


def measure_costs(
    target: Backbone,
    draft: Backbone,
    *,
    context: int = 2048,
    draft_context: int = 256,
    phase: Phase = ignore_phase,
    answer_tokens: int | None = None,
) -> Costs:
    """Returns how long forwards of the target over ``context`` cached tokens take here, and those
    of the draft over ``draft_context``.

    They are measured once per machine, pair and context, and stored. They are measured again if the
    machine was busier then than it is now. ``phase`` is called with "costs" before anything is
    measured. A slow model is timed at few numbers of rows at first, and at all of them by the first
    process after ``ANSWERS_BEFORE_ALL_ROW_COUNTS`` answers. Costs that were measured or loaded
    never change within a process, so a seed always gives the same answer. Estimated costs change at
    most once, when a call without ``answer_tokens`` measures or loads them.

    ``answer_tokens`` is the length of the answer that waits for these costs. Nothing is measured
    if that would take longer than both ``UNNOTICED_SECONDS`` and ``MAX_MEASURING_SHARE`` of the
    answer's time. Stored costs are then used unchecked. If none are stored, costs are estimated by
    the bytes that forwards read. With None the answer waits however long measuring takes.
    """
    measured = _load_or_measure(target, draft, context, phase, answer_tokens)
    if not measured.get("estimated"):
        _count_answer(target, draft, context, measured)
    step = _draft_step_seconds(measured, context, draft_context)
    target_extra, draft_extra = measured["extra_request_seconds"]
    extra = (target_extra, draft_extra)
    rows = tuple(measured["rows"])
    seconds = tuple(measured["target"])
    return Costs(rows, seconds, step, draft.levels_per_forward, extra_request_seconds=extra)


def _load_or_measure(
    target: Backbone, draft: Backbone, context: int, phase: Phase, answer_tokens: int | None = None
) -> dict[str, Any]:
    """Returns the measurements of this pair and context.

    Stored ones are returned while they are valid. Otherwise forwards are measured, or their costs
    estimated if an answer of ``answer_tokens`` is too short to wait (:func:`measure_costs`).
    """
    key = _key(target, draft, context)
    if key in _IN_USE:
        return _IN_USE[key]
    stored = _MEASUREMENTS.load(key)
    if answer_tokens is not None:
        estimated = _estimate(target, draft, context)
        one_row_seconds = estimated["target"][0]
        max_seconds = max(UNNOTICED_SECONDS, MAX_MEASURING_SHARE * answer_tokens * one_row_seconds)
        if MEASURING_FORWARDS * one_row_seconds > max_seconds:
            # Measuring would take too long. Stored costs are used unchecked if there are any. But a
            # process that has estimated these costs before goes on with the estimate.
            if key not in _ESTIMATED and stored is not None and _is_complete(stored):
                _IN_USE[key] = stored
                return stored
            _ESTIMATED.add(key)
        # Once this process has estimated these costs, it goes on with the estimate even if a longer
        # answer could wait for a measurement.
        if key in _ESTIMATED:
            return estimated
    if stored is not None and _is_still_valid(stored, target, draft):
        _IN_USE[key] = stored
        return stored
    phase("costs")
    answers = 0 if stored is None else stored.get("used", 0)
    all_row_counts = answers >= ANSWERS_BEFORE_ALL_ROW_COUNTS
    measurements = _measure(target, draft, context, all_row_counts=all_row_counts)
    measured = {**measurements, "used": answers}
    _IN_USE[key] = measured
    _MEASUREMENTS.save(key, measured)
    log.info("measured forwards: %s", measured)
    return measured


def _estimate(target: Backbone, draft: Backbone, context: int) -> dict[str, Any]:
    """Returns seconds by name as :func:`_measure` does, estimated by the bytes that forwards
    read."""

    def seconds(model: Backbone, keys: int) -> float:
        step_bytes = model.weight_bytes_per_step + keys * model.token_bytes
        return step_bytes / EXPECTED_BYTES_PER_SECOND[kind(model)]

    def kind(model: Backbone) -> str:
        return "cuda" if model.device.type == "cuda" else "cpu"

    one_row_seconds = seconds(target, context)
    cost_per_row = EXPECTED_COST_PER_ROW[kind(target)]
    return {
        "rows": list(EXPECTED_ROWS),
        "target": [one_row_seconds * (1 + cost_per_row * (rows - 1)) for rows in EXPECTED_ROWS],
        "steps": [seconds(draft, PROBE_KEYS), seconds(draft, context)],
        "extra_request_seconds": [0.0, 0.0],
        "estimated": True,
    }


class CorrectedCosts:
    """Loads and saves the costs of a pair as the rounds of earlier answers have corrected them.

    These costs include the acceptance rate, which depends on the draft's weights. So their key in
    the file contains a sample of the weights: a draft with the same config and other weights has
    costs of its own.
    """

    def __init__(self, target: Backbone, draft: Backbone, context: int, draft_context: int) -> None:
        facts = "corrected", draft is target, draft_context, context, compiled.version()
        self._key = _MEASUREMENTS.key(
            *facts, *_facts(target), *_facts(draft), *map(_sample_weights, (target, draft))
        )
        self._draft_levels = draft.levels_per_forward

    def load(self) -> Costs | None:
        stored = _MEASUREMENTS.load(self._key)
        if stored is None:
            return None
        rows = tuple(stored["rows"])
        seconds = tuple(stored["target"])
        extra = tuple(stored["extra_request_seconds"])
        optional_fields = {"extra_request_seconds": extra, "acceptance": stored["acceptance"]}
        return Costs(rows, seconds, stored["draft"], self._draft_levels, **optional_fields)

    def save(self, costs: Costs) -> None:
        # The values are kept until they are written later. They need not be copied, as
        # ``dataclasses.asdict`` would do, because numbers and tuples never change.
        values = {field.name: getattr(costs, field.name) for field in fields(costs)}
        _MEASUREMENTS.save_later(self._key, values)


def _count_answer(
    target: Backbone, draft: Backbone, context: int, measured: Mapping[str, Any]
) -> None:
    """Counts one more answer that used these costs.

    It counts up to ``ANSWERS_BEFORE_ALL_ROW_COUNTS``, since more answers than that change nothing.
    """
    key = _key(target, draft, context)
    stored = _MEASUREMENTS.load(key) or measured  # Another process may have measured since.
    answers = stored.get("used", 0)
    if answers < ANSWERS_BEFORE_ALL_ROW_COUNTS:
        _MEASUREMENTS.save(key, {**stored, "used": answers + 1})


def _measure(
    target: Backbone, draft: Backbone, context: int, *, all_row_counts: bool
) -> dict[str, Any]:
    """Times the forwards of a pair, and returns their seconds by name.

    * "target" has the target's forwards, one for each number of rows in "rows".
    * "steps" has the draft's steps over ``PROBE_KEYS`` and over ``context`` keys.
    * "extra_request_seconds" is what one more request adds to a forward, first of the target, then
      of the draft. The target's leaves out the time of the request's own rows, and the draft's
      includes the time of its one row.
    * "probe" has short forwards of the target and of the draft, by which a later process notices
      that the machine was busy.

    With ``all_row_counts`` the target is timed at all of ``ROW_COUNTS``, however slow it is.
    """
    # A forward of one row, and of a few other numbers of rows, shows how slow the target is.
    first = ROW_COUNTS[:FIRST_ROW_COUNTS]  # They begin with one row.
    # Two short forwards are timed beside these: the probe, and one request with MANY_REQUESTS rows.
    # The latter is compared below with a forward of MANY_REQUESTS requests with one row each.
    short_forwards = [(PROBE_KEYS, 1), (PROBE_KEYS, MANY_REQUESTS)]
    probe_seconds, many_rows_seconds, *times = _time_forwards(
        target, [*short_forwards, *((context, n) for n in first)]
    )
    one_row_seconds = times[0]
    # A slow target is timed at only as many row counts as there is time for, but always at the
    # first ones. All of them would take minutes.
    affordable_count = int(TIMING_SECONDS / (MIN_REPEATS * MANY_ROWS_FACTOR * one_row_seconds))
    count = len(ROW_COUNTS) if all_row_counts else max(FIRST_ROW_COUNTS, affordable_count)
    rows = sorted(ROW_COUNTS[:count])
    by_rows = dict(zip(first, times, strict=True))
    if len(rows) > FIRST_ROW_COUNTS:
        times = _time_forwards(target, [(context, each) for each in rows])
        by_rows = dict(zip(rows, times, strict=True))
    # Noise must not make more rows look cheaper than fewer, so each number of rows takes the least
    # seconds that it or any larger number took: 5, 7, 6 become 5, 6, 6.
    seconds = [min(by_rows[each] for each in rows[place:]) for place in range(len(rows))]
    # What another request costs, and the draft's steps.
    (requests_seconds,) = _time_forwards(target, [(PROBE_KEYS, 1)], MANY_REQUESTS)
    if draft is target:
        draft_steps = [probe_seconds, one_row_seconds]
        draft_requests_seconds = requests_seconds
    else:
        draft_steps = _time_forwards(draft, [(PROBE_KEYS, 1), (context, 1)])
        (draft_requests_seconds,) = _time_forwards(draft, [(PROBE_KEYS, 1)], MANY_REQUESTS)
    # For the target, many requests with one row each are compared with one request of as many rows,
    # so the time of rows cancels. For the draft they are compared with one request of one row.
    others = MANY_REQUESTS - 1
    target_extra = max(0.0, requests_seconds - many_rows_seconds) / others
    draft_extra = max(0.0, draft_requests_seconds - draft_steps[0]) / others
    return {
        "rows": rows,
        "target": seconds,
        "steps": draft_steps,
        "extra_request_seconds": [target_extra, draft_extra],
        "probe": [probe_seconds, draft_steps[0]],
    }


def _draft_step_seconds(measured: Mapping[str, Any], context: int, keys: int) -> float:
    """Returns the seconds of a draft's step over ``keys`` keys.

    A step reads every key once, so its time lies on the line through the two measured ones.
    """
    few_keys_seconds, all_keys_seconds = measured["steps"]
    span = max(1, context - PROBE_KEYS)
    return float(
        few_keys_seconds
        + max(0.0, all_keys_seconds - few_keys_seconds) * max(0, keys - PROBE_KEYS) / span
    )


def _is_complete(stored: Mapping[str, Any]) -> bool:
    """Returns whether stored costs have all that this version measures."""
    return {"steps", "extra_request_seconds"} <= stored.keys()


def _is_still_valid(stored: Mapping[str, Any], target: Backbone, draft: Backbone) -> bool:
    """Returns whether stored costs need not be measured again.

    They must be complete, and have all row counts if enough answers have used them. The machine
    must not have been busier then than now, which one short forward of each model shows.
    """
    if not _is_complete(stored):
        return False
    if stored["used"] >= ANSWERS_BEFORE_ALL_ROW_COUNTS and len(stored["rows"]) < len(ROW_COUNTS):
        return False
    new_probes = [_time_forwards(model, [(PROBE_KEYS, 1)])[0] for model in (target, draft)]
    pairs = zip(new_probes, stored["probe"], strict=True)
    return all(BUSY_SLOWDOWN * new >= old for new, old in pairs)


def affordable_share(
    target: Backbone,
    draft: Backbone,
    context: int,
    phase: Phase = ignore_phase,
    answer_tokens: int | None = None,
    *,
    reads_target_keys: bool,
) -> float:
    """Returns the largest share of a prompt of ``context`` tokens that a draft reads cheaply.

    It is one of ``SHARES``, and the smallest of them if none is cheap. A share is cheap if a step
    over it takes at most ``MAX_STEP_SLOWDOWN`` times as long as the quickest step over any share,
    and the draft's prefill at most ``MAX_PREFILL_SHARE`` of the target's. A draft with
    ``reads_target_keys`` needs no prefill: it is the target itself, perhaps with rounded weights.
    The other arguments are those of :func:`measure_costs`.
    """
    largest = 1.0
    if not reads_target_keys:
        # The time of a prefill is taken to be proportional to the model's weights and the tokens.
        # For example, a draft with a tenth of the target's weights may read the whole prompt.
        largest = MAX_PREFILL_SHARE * _count_weights(target) / _count_weights(draft)
    measured = _load_or_measure(target, draft, context, phase, answer_tokens)
    times = [_draft_step_seconds(measured, context, int(share * context)) for share in SHARES]
    limit = MAX_STEP_SLOWDOWN * min(times)
    quick = [share for share, seconds in zip(SHARES, times, strict=True) if seconds <= limit]
    return max((share for share in quick if share <= largest), default=SHARES[-1])


@once
def _count_weights(model: Backbone) -> int:
    """Returns how many weights a token of a prompt is multiplied with, on which the time of a
    prefill depends."""
    return families.weights_per_token(model.text.layers, model.config)


def _time_forwards(
    model: Backbone, forwards: Sequence[tuple[int, int]], requests: int = 1
) -> list[float]:
    """Returns the seconds of each of these forwards, which are given as (context, rows).

    Each forward has so many ``requests``, with ``rows`` new tokens each. It is repeated several
    times, and the quickest repeat counts. The forwards are repeated in turns, so that a busy moment
    does not fall on one of them alone. Slow forwards are repeated fewer times, because they vary
    less.
    """
    most = max(rows for _, rows in forwards)
    # Each context has a session of its own, in which only the number of new rows changes.
    sessions = {
        context: filled_session(model, context, requests, most + 1)
        for context in dict.fromkeys(context for context, _ in forwards)
    }
    for context, rows in forwards:
        if sessions[context].cuda_graphs is not None:
            # Captures this size now, so that what is timed below is a replay.
            time_step(sessions[context], context, rows)
            capture_new_sizes()
    clock = Clock(model.device)
    repeats: list[list[float]] = []
    allowed = TIMING_SECONDS * len(forwards) / len(ROW_COUNTS)
    while len(repeats) < MIN_REPEATS or (len(repeats) < MAX_REPEATS and clock.elapsed() < allowed):
        repeats.append([time_step(sessions[context], context, rows) for context, rows in forwards])
    return [min(times) for times in zip(*repeats, strict=True)]


def filled_session(
    model: Backbone, context: int, requests: int, room: int, *, cuda_graphs: bool | None = None
) -> Session:
    """Returns a session of requests that each have ``context`` keys, and room for ``room`` more."""
    session = session_of(model, [Sampling()] * requests, cuda_graphs=cuda_graphs)
    for number in range(requests):
        session.fill_for_timing(number, context, room)
    return session


def time_step(session: Session, context: int, rows: int) -> float:
    """Returns the seconds of a forward of ``rows`` new tokens of each request of a filled
    session."""
    session.rewind_for_timing(context)
    # One of the rows is the request's pending token, and the others are the nodes of a tree.
    trees = dict.fromkeys(session.requests, chain([0] * (rows - 1)))
    clock = Clock(session.backbone.device)
    session.score(trees)
    return clock.elapsed()


def context_bucket(tokens: int) -> int:
    """Returns the context length that the costs of a prompt of ``tokens`` tokens are measured at:
    the power of two nearest to it by ratio, at least 64."""
    exponent = round(math.log2(max(tokens, 1)))
    return 1 << max(6, exponent)


def _key(target: Backbone, draft: Backbone, context: int) -> str:
    """Returns the key of a pair's measurements in the file."""
    return _MEASUREMENTS.key(context, compiled.version(), *_facts(target), *_facts(draft))


@once
def _sample_weights(model: Backbone) -> str:
    """Returns a few numbers of the last weights, which differ from those of another model with the
    same config."""
    parameters = [*model.text.layers.parameters()][-SAMPLED_PARAMETERS:]
    numbers = [
        each.detach().flatten()[:SAMPLED_NUMBERS].float().tolist()
        for each in parameters
        if each.device.type != "meta"
    ]
    return str(numbers)


def _facts(model: Backbone) -> tuple[object, ...]:
    """Returns everything about a model that its costs depend on."""
    described = str(model.config.to_dict()), str(model.dtype), str(model.device)
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None
    return (*described, is_capturing_worthwhile(model), gpu, str(model.rounding))

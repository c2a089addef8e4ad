"""Computes ratios of speed from timed runs, each with its interval over clips.

``lab/speed.py`` runs the methods, and says which of these ratios have a goal. In a turn every
method answers a clip once. A clip's speedup is the median over its turns, and each turn compares
runs of that turn alone. A ratio is the median over clips, with a bootstrap interval where there are
three clips or more. One ratio is computed otherwise: `ratio_to_best_fixed`, which compares `auto`
with the other methods by the seconds that decoding all clips takes.

*Best* is the one drafting method with the highest median over the clips. Where several methods are
equally fast, noise decides which of them looks best, so the ratio of the best is too high by about
the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from saccade.bench import measures
from saccade.bench.comparison import BASELINE
from saccade.bench.peers import TimedRun

AUTO, PEER = "auto", "hf"
MIN_CLIPS_FOR_INTERVAL = 3

Seconds = Callable[[TimedRun], float]
"""Returns the seconds of one run that a ratio compares."""


@dataclass(frozen=True)
class InterleavedRuns:
    """The runs of one part: for each clip, every method's timed runs in the order of turns."""

    clips: tuple[str, ...]  # Ids of the suite's items, which end in their seeds.
    runs: tuple[Mapping[str, Sequence[TimedRun]], ...]  # For each clip: method -> a run a turn.
    errors: Mapping[str, str] = field(default_factory=dict)  # Why a peer failed, by its name.

    def methods(self) -> tuple[str, ...]:
        """Returns the methods that ran on every clip, at least in one turn."""
        return tuple(name for name in self.runs[0] if all(own[name] for own in self.runs))

    def drafting_methods(self) -> tuple[str, ...]:
        """Returns the methods that ran on every clip, without `ar` and `hf`. `auto` is one."""
        return tuple(name for name in self.methods() if name not in (BASELINE, PEER))


@dataclass(frozen=True)
class MeasuredRatio:
    """A measured ratio, with the numbers it was computed from in ``detail``.

    ``value`` is None where a method failed.
    """

    value: float | None
    interval: tuple[float, float] | None = None  # Its two ends. None for fewer than three clips.
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Goal:
    """A ratio, how it is computed from the runs, and the least value that meets the goal.

    ``minimum`` is None for a ratio that is only reported.
    """

    name: str
    measure: Callable[[InterleavedRuns], MeasuredRatio]
    minimum: float | None = None


@dataclass(frozen=True)
class GoalOutcome:
    """A goal with the ratio that was measured for it, as the JSON of a run has it."""

    part: str  # The suite of clips and the methods that it was measured on.
    name: str
    value: float | None  # None where a method failed.
    goal: float | None  # The least value that meets it; None if the ratio is only reported.
    met: bool | None  # None without a value or without a goal.
    interval: tuple[float, float] | None
    detail: Mapping[str, Any]


def decoding_seconds_per_token(run: TimedRun) -> float:
    """Returns the seconds of decoding per token, from the second token on."""
    return run.decode_seconds / run.decoded_tokens


def whole_seconds_per_token(run: TimedRun) -> float:
    """Returns the seconds of the whole answer per token, everything included.

    Methods that write the same text have the same number of tokens, so this compares whole answers.
    """
    return run.total_seconds / max(1, len(run.ids))


def seconds_at_length(tokens: int) -> Seconds:
    """Returns a function from a run to the seconds that an answer of ``tokens`` would have taken.

    It assumes that every further token takes as long as the run's tokens did on average. What comes
    before decoding stays as it was.
    """
    return lambda run: (
        run.total_seconds - run.decode_seconds + (tokens - 1) * decoding_seconds_per_token(run)
    )


def speedups_by_clip(
    timed: InterleavedRuns, method: str, over: str, seconds: Seconds = decoding_seconds_per_token
) -> list[float]:
    """Returns how many times as fast as ``over`` a method is on each clip: the median of turns."""
    return [
        median(
            seconds(other_run) / seconds(own_run)
            for own_run, other_run in zip(by_method[method], by_method[over], strict=True)
        )
        for by_method in timed.runs
    ]


def best_method(
    timed: InterleavedRuns, over: str = BASELINE, seconds: Seconds = decoding_seconds_per_token
) -> str:
    """Returns the drafting method with the highest median speedup over clips."""
    return max(
        timed.drafting_methods(),
        key=lambda name: median(speedups_by_clip(timed, name, over, seconds)),
    )


def amdahl_limit(share: float, speedup: float) -> float:
    """Returns the whole's speedup when ``share`` of its time gets ``speedup`` times as fast.

    This is Amdahl's law.
    """
    return 1 / ((1 - share) + share / speedup)


def _median_ratio(values: Sequence[float], **detail: Any) -> MeasuredRatio:
    """Returns the median of one value a clip, with an interval where there are enough clips.

    ``detail`` has further numbers for the result's ``detail``, beside the values themselves.
    """
    interval = measures.interval(values) if len(values) >= MIN_CLIPS_FOR_INTERVAL else None
    detail |= {"clips": [round(value, 4) for value in values]}
    ends = interval and interval[1:]  # An interval begins with its middle, which is not stored.
    return MeasuredRatio(median(values), ends, detail)


def method_ratio(
    method: str, over: str, seconds: Seconds = decoding_seconds_per_token
) -> Callable[[InterleavedRuns], MeasuredRatio]:
    """Returns a measure of how many times as fast as ``over`` one method is."""

    def measure(timed: InterleavedRuns) -> MeasuredRatio:
        if {method, over} - {*timed.methods()}:
            return MeasuredRatio(value=None, detail={"errors": dict(timed.errors)})
        return _median_ratio(speedups_by_clip(timed, method, over, seconds))

    return measure


def best_method_ratio(
    over: str, seconds: Seconds = decoding_seconds_per_token
) -> Callable[[InterleavedRuns], MeasuredRatio]:
    """Returns a measure of how many times as fast as ``over`` the best drafting method is.

    The detail has the median speedup of every drafting method.
    """

    def measure(timed: InterleavedRuns) -> MeasuredRatio:
        if over not in timed.methods():
            return MeasuredRatio(value=None, detail={"errors": dict(timed.errors)})
        best = best_method(timed, over, seconds)
        speedup_by_method = {
            name: median(speedups_by_clip(timed, name, over, seconds))
            for name in timed.drafting_methods()
        }
        return _median_ratio(
            speedups_by_clip(timed, best, over, seconds), best=best, methods=speedup_by_method
        )

    return measure


def share_of_amdahl_limit(timed: InterleavedRuns) -> MeasuredRatio:
    """Returns the best method's speedup of whole answers, as a share of Amdahl's limit.

    The limit assumes that plain decoding's time before the first token stays, and that the rest
    shrinks by the speedup of decoding.
    """
    best = best_method(timed)
    # The share of plain decoding's seconds that is not before the first token, clip by clip.
    decoding_shares = [
        median(run.decode_seconds / run.total_seconds for run in by_method[BASELINE])
        for by_method in timed.runs
    ]
    decoding_speedups = speedups_by_clip(timed, best, BASELINE)
    limits = [
        amdahl_limit(share, speedup)
        for share, speedup in zip(decoding_shares, decoding_speedups, strict=True)
    ]
    whole_speedups = speedups_by_clip(timed, best, BASELINE, whole_seconds_per_token)
    detail = {
        "best": best,
        "decode share of ar": median(decoding_shares),
        "limit": median(limits),
        "end to end": median(whole_speedups),
    }
    return _median_ratio(
        [speedup / limit for speedup, limit in zip(whole_speedups, limits, strict=True)], **detail
    )


def ratio_to_best_fixed(timed: InterleavedRuns) -> MeasuredRatio:
    """Returns the fastest fixed method's seconds of decoding all clips, over `auto`'s.

    A clip's seconds are the median over its turns. Every method but `auto` is fixed, plain decoding
    included. The fastest is the one with the least seconds of all clips together. It stays the same
    one in the bootstrap, which draws clips.
    """
    # For each method an array with the seconds of decoding each clip.
    seconds_by_method = {
        name: np.array([median(each.decode_seconds for each in own[name]) for own in timed.runs])
        for name in timed.methods()
    }
    auto_seconds = seconds_by_method.pop(AUTO)
    best = min(seconds_by_method, key=lambda name: float(seconds_by_method[name].sum()))

    # ``clips`` are indices of clips, [clip], or of clips drawn with replacement, [draw, clip].
    def ratio(clips: np.ndarray) -> np.ndarray:
        return seconds_by_method[best][clips].sum(-1) / auto_seconds[clips].sum(-1)

    interval = (
        measures.bootstrap(len(auto_seconds), ratio)
        if len(auto_seconds) >= MIN_CLIPS_FOR_INTERVAL
        else None
    )
    totals = {
        name: float(own.sum()) for name, own in {AUTO: auto_seconds, **seconds_by_method}.items()
    }
    value = float(seconds_by_method[best].sum() / auto_seconds.sum())
    return MeasuredRatio(value, interval and interval[1:], {"best": best, "seconds": totals})

"""Ratios of speed as pure arithmetic over runs, each with its interval over clips.

A figure of a clip is the median over its repeats, each set against the run of the other method in
the same turn; a ratio is the median over clips, with its bootstrap interval where there are three
or more. Only `auto`'s rank is of total seconds. *Best* is the one method with the highest median
over the clips: of several that tie, the luckiest, so it flatters by about the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from saccade.bench import measures
from saccade.bench.compare import BASELINE
from saccade.bench.peers import TimedRun

AUTO, PEER = "auto", "hf"
ENOUGH = 3  # clips for an interval

Seconds = Callable[[TimedRun], float]


@dataclass(frozen=True)
class Raced:
    """One part's runs: for each clip, every method's timed runs in order."""

    clips: tuple[str, ...]  # ids of the suite's items, which end in their seeds
    runs: tuple[Mapping[str, Sequence[TimedRun]], ...]
    errors: Mapping[str, str] = field(default_factory=dict)  # of peers

    def methods(self) -> tuple[str, ...]:
        """Those that ran on every clip."""
        return tuple(name for name in self.runs[0] if all(own[name] for own in self.runs))

    def ours(self) -> tuple[str, ...]:
        """Those that could be the best: ours that draft."""
        return tuple(name for name in self.methods() if name not in (BASELINE, PEER))


@dataclass(frozen=True)
class Figure:
    """A measured ratio; ``detail`` says what it is made of."""

    value: float | None
    interval: tuple[float, float] | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Goal:
    """A ratio, how it is made of the runs, and what it should be at least; None for no goal."""

    name: str
    figure: Callable[[Raced], Figure]
    least: float | None = None


@dataclass(frozen=True)
class Ratio:
    """A goal and what became of it."""

    part: str
    name: str
    value: float | None
    goal: float | None
    met: bool | None
    interval: tuple[float, float] | None
    detail: Mapping[str, Any]


def decoding(run: TimedRun) -> float:
    """Seconds of decoding a token, from the second token on."""
    return run.decode / run.counted


def whole(run: TimedRun) -> float:
    """Seconds of an answer a token, all included: two ways to write one text have as many."""
    return run.total / max(1, len(run.ids))


def lengthened(tokens: int) -> Seconds:
    """Seconds of the answer, had it gone on at its pace to so many tokens."""
    return lambda run: run.total - run.decode + (tokens - 1) * decoding(run)


def faster(raced: Raced, method: str, over: str, seconds: Seconds = decoding) -> list[float]:
    """How much faster ``method`` is, clip by clip: medians of turns."""
    return [
        median(
            seconds(base) / seconds(each) for each, base in zip(own[method], own[over], strict=True)
        )
        for own in raced.runs
    ]


def best(raced: Raced, over: str = BASELINE, seconds: Seconds = decoding) -> str:
    """The drafting method with the highest median over clips."""
    return max(raced.ours(), key=lambda name: median(faster(raced, name, over, seconds)))


def amdahl(share: float, speedup: float) -> float:
    """The whole's speedup when ``share`` of its time becomes ``speedup`` times faster."""
    return 1 / ((1 - share) + share / speedup)


def _median(values: Sequence[float], **detail: Any) -> Figure:
    """The median over clips, with an interval where there are clips enough."""
    found = measures.interval(values) if len(values) >= ENOUGH else None
    detail |= {"clips": [round(value, 4) for value in values]}
    return Figure(median(values), found and found[1:], detail)


def versus(method: str, over: str, seconds: Seconds = decoding) -> Callable[[Raced], Figure]:
    """One method over another."""

    def figure(raced: Raced) -> Figure:
        if {method, over} - {*raced.methods()}:
            return Figure(None, detail={"errors": dict(raced.errors)})
        return _median(faster(raced, method, over, seconds))

    return figure


def best_versus(over: str, seconds: Seconds = decoding) -> Callable[[Raced], Figure]:
    """The best drafting method over another; the others are in the detail."""

    def figure(raced: Raced) -> Figure:
        if over not in raced.methods():
            return Figure(None, detail={"errors": dict(raced.errors)})
        chosen = best(raced, over, seconds)
        every = {name: median(faster(raced, name, over, seconds)) for name in raced.ours()}
        return _median(faster(raced, chosen, over, seconds), best=chosen, methods=every)

    return figure


def of_amdahl(raced: Raced) -> Figure:
    """The best decoder's speedup end to end, as a share of what its decoding allows: plain
    decoding's time before the first token stays, the rest shrinks by the speedup of decoding."""
    chosen = best(raced)
    shares = [median(each.decode / each.total for each in own[BASELINE]) for own in raced.runs]
    speed = faster(raced, chosen, BASELINE)
    limits = [amdahl(share, own) for share, own in zip(shares, speed, strict=True)]
    reached = faster(raced, chosen, BASELINE, whole)
    detail = {
        "best": chosen,
        "decode share of ar": median(shares),
        "limit": median(limits),
        "end to end": median(reached),
    }
    return _median([own / top for own, top in zip(reached, limits, strict=True)], **detail)


def of_best_fixed(raced: Raced) -> Figure:
    """The fastest fixed method's seconds of decoding all clips, over `auto`'s. Plain decoding is
    a fixed method too."""
    spent = {
        name: np.array([median(each.decode for each in own[name]) for own in raced.runs])
        for name in raced.methods()
    }
    mine = spent.pop(AUTO)
    chosen = min(spent, key=lambda name: float(spent[name].sum()))

    def ratio(clips: np.ndarray) -> np.ndarray:
        return spent[chosen][clips].sum(-1) / mine[clips].sum(-1)

    found = measures.bootstrap(len(mine), ratio) if len(mine) >= ENOUGH else None
    totals = {name: float(own.sum()) for name, own in {AUTO: mine, **spent}.items()}
    value = float(spent[chosen].sum() / mine.sum())
    return Figure(value, found and found[1:], {"best": chosen, "seconds": totals})

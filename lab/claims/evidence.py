"""What a claim is judged by: the runs and figures stored under ``docs/results``.

An ordering is judged by the differences on the same item or clip, with 95 % bootstrap intervals: it
holds where every interval lies on the claimed side, fails where none does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from saccade.bench import measures, records
from saccade.bench.compare import BASELINE
from saccade.bench.measures import Interval
from saccade.bench.records import Answer
from saccade.core.errors import OptionError

Verdict = Literal["holds", "partly", "does not hold", "not measured"]


@dataclass(frozen=True)
class Finding:
    """What was found: a verdict computed from numbers, and the numbers in words."""

    verdict: Verdict
    number: str


@dataclass(frozen=True)
class Claim:
    """One claim of a paper, how it is judged here, and why it came out so.

    ``why`` was written for the verdict ``expected``: the page refuses to be made with another.
    """

    place: str  # "Fig. 6"
    text: str  # what the paper says
    printed: str  # its number, and in what unit
    source: str  # the run or figure that decides: "bench-2k", "figure specvlm-criteria"
    judge: Callable[[Evidence], Finding]
    expected: Verdict
    why: str


@dataclass(frozen=True)
class Evidence:
    """The stored results. Raises OptionError for what is not there."""

    folder: Path
    alone: str = "real.json"  # where a language model drafts for itself
    drafted: str = "real-drafts.json"  # and where another does

    def answers(self, run: str, suite: str, method: str) -> list[Answer]:
        """A method's answers to a suite, those that failed left out."""
        found = _by_method(self.folder / run).get((suite, method))
        if not found:
            raise OptionError(f"{self.folder / run} has no answers of {method} to {suite}")
        return found

    def suites(self, run: str) -> list[str]:
        return list(dict.fromkeys(suite for suite, _ in _by_method(self.folder / run)))

    def figure(self, name: str) -> dict[str, Any]:
        """The numbers of a study."""
        path = self.folder / "figures" / f"{name}.json"
        if not path.is_file():
            raise OptionError(f"{path} is missing: python -m lab figure {name} makes it")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def speed(self, run: str, suite: str, method: str, *, whole: bool = False) -> Interval:
        """Median speedup over plain decoding."""
        own, plain = self.answers(run, suite, method), self.answers(run, suite, BASELINE)
        return _known(measures.interval(measures.speedups(own, plain, whole=whole)))

    def speeds(self, run: str, suite: str, methods: Sequence[str], *, whole: bool = False) -> str:
        """Each method's median speedup with its interval, in words."""
        found = {name: self.speed(run, suite, name, whole=whole) for name in methods}
        return ", ".join(f"{name} {said(own)}x" for name, own in found.items())

    def tau(self, run: str, suite: str, method: str) -> Interval:
        return _known(measures.tau_interval(self.answers(run, suite, method)))

    def gain(
        self, run: str, suite: str, method: str, other: str, figure: Callable[[Answer], float]
    ) -> Interval:
        """The mean of ``figure`` of one method less that of another, on the same questions."""
        theirs = {(a.item, a.turn): figure(a) for a in self.answers(run, suite, other)}
        own = {(a.item, a.turn): figure(a) for a in self.answers(run, suite, method)}
        return between([own[key] - theirs[key] for key in own if key in theirs])


def tau_of(answer: Answer) -> float:
    return measures.tau([answer]) or 0.0


def accepted(tau: float) -> float:
    """Of tokens a target forward, the drafted ones: all but the target's own, one a forward."""
    return tau - 1


def speed_of(answer: Answer) -> float:
    """Tokens a second of decoding."""
    return 1 / measures.seconds_per_token(answer)


def whole_speed_of(answer: Answer) -> float:
    """Tokens a second from the inputs on, prefills and early drafting included."""
    return len(answer.ids) / answer.total


def between(values: Sequence[float]) -> Interval:
    """The mean and its interval."""
    return _known(measures.interval(values, np.mean))


def less(found: Sequence[float], other: Sequence[float]) -> Interval:
    """The mean difference of two lists over the same clips."""
    return between([a - b for a, b in zip(found, other, strict=True)])


def graded(whole: bool, part: bool = False) -> Verdict:
    """Whether a claim holds, or at least in part."""
    return "holds" if whole else "partly" if part else "does not hold"


def among(right: Sequence[bool]) -> Verdict:
    """Whether a claim about several holds for all, for some, or for none."""
    return graded(all(right), any(right))


def ordered(differences: Sequence[Interval]) -> Verdict:
    """Whether everything claimed to be above is, beyond its interval."""
    return among([low > 0 for _, low, _ in differences])


def said(found: Sequence[float], digits: int = 2) -> str:
    """A value and its interval, as [value, low, high]."""
    middle, low, high = (f"{value:.{digits}f}" for value in found)
    return f"{middle} [{low}, {high}]"


def _known(found: Interval | None) -> Interval:
    if found is None:
        raise OptionError("there is nothing to compare")
    return found


@cache
def _by_method(folder: Path) -> dict[tuple[str, str], list[Answer]]:
    found: dict[tuple[str, str], list[Answer]] = {}
    for answer in records.read_finished_run(folder)[1]:
        if not answer.error:
            found.setdefault((answer.suite, answer.method), []).append(answer)
    return found

"""Defines a paper's claim, and the stored runs and figures by which it is judged.

The results lie under ``docs/results``. An ordering is judged by the differences on the same item or
clip, with 95 % bootstrap intervals. It holds where every interval lies on the claimed side, and
does not hold where none does.
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
    """A verdict that was computed from numbers, and these numbers in words."""

    verdict: Verdict
    number: str


@dataclass(frozen=True)
class Claim:
    """One claim of a paper, the function that judges it here, and the reason for the verdict.

    ``why`` was written for the verdict ``expected``, and no page is made where the verdict is
    another one.
    """

    place: str  # Where the paper has it, such as "Fig. 6".
    text: str  # What the paper claims.
    printed: str  # The paper's number with its unit.
    source: str  # The run or figure that decides: "bench-2k", "figure specvlm-criteria".
    judge: Callable[[StoredResults], Finding]
    expected: Verdict
    why: str


@dataclass(frozen=True)
class StoredResults:
    """The stored runs and figures. Its methods raise OptionError for what is not stored."""

    folder: Path
    self_draft_file: str = "real.json"  # Of a language model that drafts for itself.
    draft_model_file: str = "real-drafts.json"  # Of a language model with a draft model.

    def answers(self, run: str, suite: str, method: str) -> list[Answer]:
        """Returns a method's answers to a suite, without the failed ones."""
        matching = _answers_by_suite_and_method(self.folder / run).get((suite, method))
        if not matching:
            raise OptionError(f"{self.folder / run} has no answers of {method} to {suite}")
        return matching

    def suites(self, run: str) -> list[str]:
        return list(
            dict.fromkeys(suite for suite, _ in _answers_by_suite_and_method(self.folder / run))
        )

    def figure(self, name: str) -> dict[str, Any]:
        """Returns the stored numbers of a study."""
        path = self.folder / "figures" / f"{name}.json"
        if not path.is_file():
            raise OptionError(f"{path} is missing: python -m lab figure {name} makes it")
        numbers: dict[str, Any] = json.loads(path.read_text())
        return numbers

    def speed(self, run: str, suite: str, method: str, *, whole: bool = False) -> Interval:
        """Returns the median speedup over plain decoding, with its interval."""
        own, plain = self.answers(run, suite, method), self.answers(run, suite, BASELINE)
        return _require_interval(measures.interval(measures.speedups(own, plain, whole=whole)))

    def speeds(self, run: str, suite: str, methods: Sequence[str], *, whole: bool = False) -> str:
        """Returns each method's median speedup with its interval, in words."""
        speed_by_method = {name: self.speed(run, suite, name, whole=whole) for name in methods}
        return ", ".join(f"{name} {interval_text(own)}x" for name, own in speed_by_method.items())

    def tau(self, run: str, suite: str, method: str) -> Interval:
        return _require_interval(measures.tau_interval(self.answers(run, suite, method)))

    def gain(
        self, run: str, suite: str, method: str, other: str, figure: Callable[[Answer], float]
    ) -> Interval:
        """Returns the mean of ``figure`` of one method less another's, on the same questions."""
        theirs = {(a.item, a.turn): figure(a) for a in self.answers(run, suite, other)}
        own = {(a.item, a.turn): figure(a) for a in self.answers(run, suite, method)}
        return mean_interval([own[key] - theirs[key] for key in own if key in theirs])


def tau_of(answer: Answer) -> float:
    return measures.tau([answer]) or 0.0


def accepted_tokens(tau: float) -> float:
    """Returns the drafted tokens among those of a target forward: all but the target's own one."""
    return tau - 1


def decoding_speed(answer: Answer) -> float:
    """Returns tokens per second of decoding."""
    return 1 / measures.seconds_per_token(answer)


def whole_answer_speed(answer: Answer) -> float:
    """Returns tokens per second of the whole answer, prefills and early drafting included."""
    return len(answer.ids) / answer.total


def mean_interval(values: Sequence[float]) -> Interval:
    """Returns the mean of values with its interval."""
    return _require_interval(measures.interval(values, np.mean))


def mean_difference(values: Sequence[float], other: Sequence[float]) -> Interval:
    """Returns the mean difference of two lists over the same clips, with its interval."""
    return mean_interval([a - b for a, b in zip(values, other, strict=True)])


def grade(holds: bool, partly: bool = False) -> Verdict:
    """Returns the verdict on a claim that holds, or holds at least in part."""
    if holds:
        return "holds"
    return "partly" if partly else "does not hold"


def grade_each(holds: Sequence[bool]) -> Verdict:
    """Returns the verdict on a claim about several things, from whether it holds for each."""
    return grade(all(holds), any(holds))


def grade_ordering(differences: Sequence[Interval]) -> Verdict:
    """Returns the verdict on a claim that all these differences are above 0, by their intervals."""
    return grade_each([low > 0 for _, low, _ in differences])


def interval_text(interval: Sequence[float], digits: int = 2) -> str:
    """Returns [value, low, high] as text."""
    middle, low, high = (f"{value:.{digits}f}" for value in interval)
    return f"{middle} [{low}, {high}]"


def _require_interval(interval: Interval | None) -> Interval:
    if interval is None:
        raise OptionError("there is nothing to compare")
    return interval


@cache
def _answers_by_suite_and_method(folder: Path) -> dict[tuple[str, str], list[Answer]]:
    by_method: dict[tuple[str, str], list[Answer]] = {}
    for answer in records.read_finished_run(folder)[1]:
        if not answer.error:
            by_method.setdefault((answer.suite, answer.method), []).append(answer)
    return by_method

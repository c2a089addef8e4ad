"""Judges a claim by the one rule of the claims page.

A verdict compares values of the same item, in one unit, over every suite of the run that decides.
Each comparison is a mean with its 95 % bootstrap interval over items. Two kinds have another
interval: stored means whose items are not stored (``of_intervals``), and arithmetic, which has no
spread (``computed``). A claim states a range for a comparison: mostly one of the named ranges
below, or the numbers that a paper prints (``printed``). ``judge`` then gives the verdict, in the
same way for every claim. A module for each paper, such as ``lab.claims.sage``, makes the
comparisons.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from saccade.bench import measures
from saccade.bench.measures import Interval
from saccade.core.errors import OptionError

Verdict = Literal[
    "holds",
    "partly",
    "not shown",
    "does not hold",
    "not testable here",
    "to be run again",
]
Item = TypeVar("Item", bound=Hashable)
SMALL = 0.05  # What counts as small everywhere: TABED's remarks call 5 % constant.
CHANCE = 1 / 40  # The share of 95 % intervals that lie above a true value by chance.
MIN_ITEMS = 6  # With fewer items not even a unanimous sign is significant at 5 %.
MAX_LISTED = 4  # Comparisons that are listed one by one.


class SuitesMissing(OptionError):
    """A claim was compared over fewer suites, or others, than the run has."""


class UnitsDiffer(OptionError):
    """Values in different units were compared, or a range does not belong to the unit."""


@dataclass(frozen=True)
class Unit:
    """What is counted, and how: as the difference or the ratio of two values, or as one value."""

    name: str
    compared_by: Literal["difference", "ratio", "value"]
    is_time: bool = False  # Whether it is made of seconds, which depend on the machine.
    digits: int = 2  # After the point, in text.


@dataclass(frozen=True)
class Claimed:
    """The range, without its ends, that a claim says a comparison lies in.

    An interval has to lie within it whole.
    """

    low: float
    high: float
    compared_by: Literal["difference", "ratio", "value"]


MORE = Claimed(0, math.inf, "difference")
HIGHER_RATIO = Claimed(1, math.inf, "ratio")
SAME = Claimed(1 - SMALL, 1 + SMALL, "ratio")
NOT_LESS = Claimed(1 - SMALL, math.inf, "ratio")  # By no more than what counts as small.
SMALL_SHARE = Claimed(-math.inf, SMALL, "value")
LARGE_SHARE = Claimed(SMALL, math.inf, "value")
MOST = Claimed(0.5, math.inf, "value")


def printed(
    low: float, high: float = math.inf, compared_by: Literal["ratio", "value"] = "ratio"
) -> Claimed:
    """Returns the range of numbers that a paper prints; without ``high`` all above ``low``."""
    return Claimed(low, high, compared_by)


def exact(compared_by: Literal["difference", "value"] = "value") -> Claimed:
    """Returns the range of arithmetic that agrees up to rounding."""
    return Claimed(-1e-9, 1e-9, compared_by)


@dataclass(frozen=True)
class Premise:
    """What has to be so before a claim can be tested, and whether it is so in this run."""

    text: str
    is_met: bool


@dataclass(frozen=True)
class Suites:
    """The run or figure that decides, with every suite it has.

    ``outdated`` is empty if the run can decide, and else says why it cannot any more.
    """

    source: str  # The name of the run, figure or file.
    names: tuple[str, ...]
    visual_tokens: str  # Of a prompt, in words: "256" or "256 to 2,048".
    items: int  # Of the suite with the fewest.
    outdated: str = ""


@dataclass(frozen=True)
class Comparison:
    """One mean over the items of one suite, with its interval."""

    label: str  # What is compared, as the page calls it.
    suite: str
    unit: Unit
    interval: Interval  # (mean, low, high).
    items: int

    def is_within(self, claimed: Claimed) -> bool:
        return self.items >= MIN_ITEMS and (
            claimed.low < self.interval[1] and self.interval[2] < claimed.high
        )

    def is_outside(self, claimed: Claimed) -> bool:
        return self.items >= MIN_ITEMS and (
            self.interval[2] < claimed.low or claimed.high < self.interval[1]
        )


@dataclass(frozen=True)
class Finding:
    """A verdict, and in words the numbers that it was computed from.

    Only ``judge``, ``not_testable`` and ``_without_numbers`` make one.
    """

    verdict: Verdict
    number: str  # The comparisons as text, or why there are none.
    source: str = ""  # The run or figure that decided.
    unit: str = ""  # The unit's name.
    visual_tokens: str = ""  # As those of ``Suites``.
    suites: int = 0  # How many there are.
    items: int = 0  # Of the suite with the fewest.
    comparisons: tuple[Comparison, ...] = ()


def paired(
    label: str,
    suite: str,
    unit: Unit,
    own: Mapping[Item, float],
    other: Mapping[Item, float],
) -> Comparison:
    """Returns the mean difference, or mean ratio, of two values of the same items.

    The unit says which of the two. An item whose ratio would be to zero is left out, and is not in
    the comparison's count of items.
    Raises OptionError where the two do not have the same items.
    """
    if own.keys() != other.keys():
        raise OptionError(f"{label} in {suite}: the two sides have different items")
    if unit.compared_by == "ratio":
        values = [own[item] / other[item] for item in own if other[item]]
    else:
        values = [own[item] - other[item] for item in own]
    return Comparison(label, suite, unit, _mean_interval(label, values), len(values))


def alone(label: str, suite: str, unit: Unit, values: Sequence[float]) -> Comparison:
    """Returns the mean of one value of each item, to be compared with a number."""
    return Comparison(label, suite, unit, _mean_interval(label, values), len(values))


def of_intervals(
    label: str,
    suite: str,
    unit: Unit,
    own: Sequence[float],
    other: Sequence[float] | float,
    items: int,
) -> Comparison:
    """Compares two stored means with intervals, where the values of items are not stored.

    The interval of the comparison is as wide as the two can make it: from the lower end of one with
    the upper end of the other, to the reverse. [3, 4] less [1, 2] becomes [1, 3]. ``own`` and
    ``other`` are (mean, low, high), and ``other`` may be a float in the place of all three. Some
    figures store medians in the place of means; they are compared in the same way.
    """
    own_mean, own_low, own_high = own
    other_mean, other_low, other_high = (other,) * 3 if isinstance(other, float) else other
    if unit.compared_by == "ratio":
        interval = (own_mean / other_mean, own_low / other_high, own_high / other_low)
    else:
        interval = (own_mean - other_mean, own_low - other_high, own_high - other_low)
    return Comparison(label, suite, unit, interval, items)


def computed(label: str, unit: Unit, value: float) -> Comparison:
    """Returns a computed number, which has no spread and needs no items to be judged."""
    return Comparison(label, "arithmetic", unit, (value, value, value), MIN_ITEMS)


def worst_case(unit: Unit, claimed: Claimed, cases: Mapping[str, float]) -> Comparison:
    """Returns the case of arithmetic that is farthest outside the claimed range.

    If all lie inside, it is the one nearest to an end. ``cases`` has the value of each case by its
    name. A theorem claims every case, so its worst one decides.
    """

    def distance(name: str) -> float:
        return max(claimed.low - cases[name], cases[name] - claimed.high)

    worst = max(cases, key=distance)
    return computed(f"worst of {len(cases)} cases, {worst}:", unit, cases[worst])


ARITHMETIC = Suites("arithmetic", ("arithmetic",), visual_tokens="", items=0)
NO_RUN = Suites("no run", names=(), visual_tokens="", items=0)


def judge(
    suites: Suites,
    unit: Unit,
    claimed: Claimed,
    comparisons: Sequence[Comparison],
    premise: Premise | None = None,
    not_run: str = "",
) -> Finding:
    """Returns the verdict on a claim, by the same rule for all of them.

    Of these verdicts the first that applies is given:

    - *to be run again*: the run is outdated.
    - *not testable here*: the premise is not met.
    - *holds*: every interval lies within the claimed range.
    - *partly*: some do, and more than the one in forty that would by chance.
    - *does not hold*: every interval lies outside it.
    - *not shown*: anything else.

    A comparison of fewer than ``MIN_ITEMS`` items is neither within nor outside. ``not_run`` names
    rivals of the claim that the run did not have. Then what would hold holds partly.

    Raises SuitesMissing where a comparison leaves out a suite of the run, and UnitsDiffer where
    comparisons are in different units or the range does not belong to the unit.
    """
    if suites.outdated:
        return _without_numbers("to be run again", suites.outdated, unit, suites)
    _require_one_unit(unit, claimed, comparisons)
    _require_every_suite(suites, comparisons)
    within = [each.is_within(claimed) for each in comparisons]
    verdict: Verdict
    number = _number_text(claimed, comparisons)
    if premise is not None and not premise.is_met:
        verdict = "not testable here"
        number = f"missing: {premise.text}. {number}"
    elif all(within):
        verdict = "partly" if not_run else "holds"
    elif sum(within) > CHANCE * len(within):
        verdict = "partly"
    elif all(each.is_outside(claimed) for each in comparisons):
        verdict = "does not hold"
    else:
        verdict = "not shown"
    if not_run:
        number = f"{number}; {not_run} was not run"
    return Finding(
        verdict,
        number,
        suites.source,
        unit.name,
        suites.visual_tokens,
        len(suites.names),
        suites.items,
        tuple(comparisons),
    )


def not_testable(premise: str, unit: Unit) -> Finding:
    """Returns the finding "not testable here" for a missing premise and no number to show."""
    return _without_numbers("not testable here", premise, unit, NO_RUN)


def _without_numbers(verdict: Verdict, why: str, unit: Unit, suites: Suites) -> Finding:
    """Returns a finding without comparisons, with the unit and suites that they would have had."""
    return Finding(
        verdict,
        why,
        suites.source,
        unit.name,
        suites.visual_tokens,
        len(suites.names),
        suites.items,
    )


def interval_text(interval: Sequence[float], digits: int = 2) -> str:
    """Returns [value, low, high] as text."""
    middle, low, high = (f"{round(value, digits) + 0.0:.{digits}f}" for value in interval)
    return f"{middle} [{low}, {high}]"


def _require_one_unit(unit: Unit, claimed: Claimed, comparisons: Sequence[Comparison]) -> None:
    if claimed.compared_by != unit.compared_by:
        raise UnitsDiffer(f"a range of a {claimed.compared_by} does not judge {unit.name}")
    for each in comparisons:
        if each.unit != unit:
            raise UnitsDiffer(f"{each.label} counts {each.unit.name}, and the claim {unit.name}")


def _require_every_suite(suites: Suites, comparisons: Sequence[Comparison]) -> None:
    if not comparisons:
        raise SuitesMissing(f"nothing of {suites.source} is compared")
    by_label: dict[str, list[str]] = defaultdict(list)
    for each in comparisons:
        by_label[each.label].append(each.suite)
    for label, names in by_label.items():
        if sorted(names) != sorted(suites.names):
            raise SuitesMissing(
                f"{label} is compared over {', '.join(names)}, and {suites.source} has "
                f"{', '.join(suites.names)}"
            )


def _mean_interval(label: str, values: Sequence[float]) -> Interval:
    interval = measures.interval(values, np.mean)
    if interval is None:
        raise OptionError(f"{label}: there is nothing to compare")
    return interval


def _number_text(claimed: Claimed, comparisons: Sequence[Comparison]) -> str:
    """Returns the comparisons in words: a few of them one by one, or the two extremes of many."""
    if len(comparisons) <= MAX_LISTED:
        return "; ".join(_named_interval(each, comparisons) for each in comparisons)
    within = sum(each.is_within(claimed) for each in comparisons)
    lowest, highest = (pick(comparisons, key=lambda each: each.interval[0]) for pick in (min, max))
    return (
        f"{within} of {len(comparisons)} within; lowest {_named_interval(lowest, comparisons)}; "
        f"highest {_named_interval(highest, comparisons)}"
    )


def _named_interval(each: Comparison, among: Sequence[Comparison]) -> str:
    """Returns a comparison as text: its interval, after the names that tell it from the others.

    The label is named if ``among``, the comparisons that are shown together, have several labels,
    and the suite if they have several suites. Arithmetic always has its label. If the interval has
    no width, only the mean is shown.
    """
    names = []
    if each.suite == ARITHMETIC.source or len({other.label for other in among}) > 1:
        names.append(each.label)
    if len({other.suite for other in among}) > 1:
        names.append(each.suite)
    middle, low, high = each.interval
    digits = each.unit.digits
    if low == high:
        number = f"{round(middle, digits) + 0.0:.{digits}f}"  # Adding 0.0 turns -0.0 into 0.0.
    else:
        number = interval_text(each.interval, digits)
    return f"{', '.join(names)} {number}".strip()

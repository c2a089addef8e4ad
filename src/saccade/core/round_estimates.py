"""What rounds have taught so far: how often drafts are accepted, and what forwards and rounds cost.

These are the estimators of every part that decides how far to draft, or how many requests share a
round: the shapes ``auto`` and ``fit``, the draft inside vLLM, and the scheduler. Each is a frozen
fold over rounds in which older rounds count less. The parts keep their own decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import linear_regression
from typing import NamedTuple, TypeVar

SECONDS_DECAY = 0.97  # Per round, of the weight of seconds on a cost line.
MIN_MEASURED_ROUNDS = 3.0  # The decayed number of rounds after which a cost line is used.
OUTLIER_FACTOR = 4.0  # A round that takes longer than this many times the expectation is capped.
# What more rows are believed to cost beyond a round's rows falls by this share each round, so that
# sizes that were dear in a busy moment are tried again.
EXTRA_COST_DECAY = 0.02
TIMES_MEMORY = 0.95  # What is left of the seconds of forwards after one more.
FORWARD_OUTLIER_FACTOR = 2.0  # A forward counts for this many times the expectation at most.
# Outliers are capped by measured times only after this many forwards, whose number decays. Before
# that a draft is capped by its believed time, and the target's forwards are not capped.
MIN_FORWARDS_FOR_OUTLIERS = 3.0
# The believed time of a forward weighs as much as this many measured forwards.
FORWARD_PRIOR_WEIGHT = 0.5
# It is added to the sum of the squared deviations of the rows, and so draws the slope towards 0.
SLOPE_PRIOR_WEIGHT = 0.7
NEW_ROUND_WEIGHT = 0.3  # The weight of one more round in the mean seconds of rounds of its size.
# Before any verdict the draft's confidence is believed to predict verdicts better than their mean
# rate does, by this many nats.
CONFIDENCE_PRIOR_NATS = 4.0
LEAST_LIKELIHOOD = 0.02  # A verdict that was thought unlikelier surprises no more than this one.
MAX_NATS = 50.0  # A larger difference of nats changes nothing.
# Only the sizes seen last are remembered, because prompts get longer and machines busier.
MAX_REMEMBERED_SIZES = 8


# -- acceptance --------------------------------------------------------------------------------


class FadingMean(NamedTuple):
    """A mean over rounds, of which older ones count less: a share of judged tokens that were
    accepted, or the seconds of a forward."""

    total: float
    weight: float  # how many tokens, or forwards, the total is of

    @property
    def mean(self) -> float:
        return self.total / self.weight

    def fold(self, total: float, weight: float, memory: float) -> FadingMean:
        """Returns the mean with one more round; ``memory`` is what is left of those before."""
        return FadingMean(self.total * memory + total, self.weight * memory + weight)


class Surprise(NamedTuple):
    """By how many nats verdicts surprised two predictions of them; older verdicts count less.

    The one that was surprised less is the better prediction of the next verdict.
    """

    by_confidence: float = 0.0
    by_rate: float = 0.0

    @property
    def trust(self) -> float:
        """How far the draft's confidence is to be believed, from 0 to 1.

        It is the probability, given the verdicts, that the draft's confidence predicts them and
        not the rate alone. Before any verdict it is high, because drafts that know nothing of
        their own chances are rare.
        """
        odds = self.by_confidence - self.by_rate - CONFIDENCE_PRIOR_NATS
        return 1 / (1 + exp(min(odds, MAX_NATS)))

    def after(self, chance: float, rate: float, accepted: bool, memory: float) -> Surprise:
        """Returns the surprise after one more verdict, which had this ``chance`` to be accepted by
        the draft's confidence and this ``rate`` by all verdicts."""
        return Surprise(
            memory * self.by_confidence + _surprise(chance, accepted),
            memory * self.by_rate + _surprise(rate, accepted),
        )


def _surprise(chance: float, accepted: bool) -> float:
    likelihood = chance if accepted else 1 - chance
    return -log(max(likelihood, LEAST_LIKELIHOOD))


class Acceptance(NamedTuple):
    """How often drafted tokens are accepted, and how well the draft's confidence predicts it."""

    accepted: FadingMean
    """Accepted tokens over judged tokens."""
    calibration: FadingMean
    """Accepted tokens over the sum of the draft's confidence in the judged ones."""
    surprise: Surprise = Surprise()

    @property
    def rate(self) -> float:
        """How often a drafted token is accepted, whatever its confidence."""
        return self.accepted.mean

    def chance(self, confidence: float) -> float:
        """Returns how often a token of this confidence is accepted.

        That is the draft's confidence, corrected, as far as verdicts have shown it to be of use;
        and the rate of acceptance for the rest.
        """
        trust = self.surprise.trust
        return trust * self._chance_by_confidence(confidence) + (1 - trust) * self.rate

    def _chance_by_confidence(self, confidence: float) -> float:
        return min(1.0, confidence * self.calibration.mean)

    def fold(
        self, verdicts: Sequence[tuple[float, bool]], judged: float, memory: float
    ) -> Acceptance:
        """Returns the estimate after verdicts on tokens, each with the draft's confidence in it and
        whether it was accepted. ``judged`` is the number of tokens of which the rate counts these
        as the verdicts."""
        hits = sum(accepted for _, accepted in verdicts)
        promised = sum(confidence for confidence, _ in verdicts)
        surprise = self.surprise
        for confidence, accepted in verdicts:
            chance = self._chance_by_confidence(confidence)
            surprise = surprise.after(chance, self.rate, accepted, memory)
        return Acceptance(
            self.accepted.fold(hits, judged, memory),
            self.calibration.fold(hits, promised, memory),
            surprise,
        )


def continuation_chances(match_length: int, count: int) -> list[float]:
    """Returns how likely the tokens after a repeated run each go on repeating, by the length of the
    run before them alone: a run of n tokens goes on with n / (n + 2), the law of succession."""
    lengths = range(match_length, match_length + count)
    return [length / (length + 2) for length in lengths]


def expected_chain(rate: float, length: int) -> float:
    """Returns E[tokens] of a chain whose tokens are each accepted at rate a: 1 + a + a^2 + ..."""
    return sum(rate**i for i in range(length + 1))


class Pause(NamedTuple):
    """How many rounds decode plainly before drafting is tried again, and how many have done so.

    Before the first plain round drafting has not been given up, and the pause has not begun.
    """

    length: int
    rounds: int = 0

    @property
    def is_running(self) -> bool:
        return 0 < self.rounds < self.length

    @property
    def is_over(self) -> bool:
        return self.rounds >= self.length

    def after_plain_round(self) -> Pause:
        return self._replace(rounds=self.rounds + 1)


# -- costs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostLine:
    """Seconds as a straight line over a count: least squares over rounds with decaying weights."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def fold(self, x: float, y: float) -> CostLine:
        """Returns the line after one more round, in which ``x`` took ``y`` seconds."""
        expected = self.at(x)
        # A line that an early outlier has tilted may reach 0, where it says nothing of outliers.
        if self.weight >= MIN_MEASURED_ROUNDS and expected > 0:
            y = min(y, OUTLIER_FACTOR * expected)
        return CostLine(
            SECONDS_DECAY * self.weight + 1,
            SECONDS_DECAY * self.x + x,
            SECONDS_DECAY * self.y + y,
            SECONDS_DECAY * self.xx + x * x,
            SECONDS_DECAY * self.xy + x * y,
        )

    @property
    def slope(self) -> float:
        """Seconds per unit of the count; 0 while there is no measurement."""
        spread = self.weight * self.xx - self.x**2
        if spread <= 1e-9 * self.weight * self.xx:
            return 0.0
        return max(0.0, (self.weight * self.xy - self.x * self.y) / spread)

    def at(self, x: float) -> float:
        """Returns the seconds of ``x`` by the line through the mean, never below 0."""
        if not self.weight:
            return 0.0
        return max(0.0, self.y / self.weight + self.slope * (x - self.x / self.weight))


def correct_ratios(
    ratios: Sequence[float], bare: Sequence[float], rows: int, measured: float
) -> tuple[float, ...]:
    """Returns the corrected ratios after a forward of ``rows`` rows took ``measured`` seconds.

    ``bare[n]`` are the seconds of a forward of n rows as they were measured before the first
    answer, and ``ratios[n]`` is the factor by which such a forward is believed to take longer.

    A dearer forward is believed at once, a cheaper one by half. Fewer rows take no longer than this
    forward, and more rows no less. What more rows are believed to take falls a little with every
    round that does not try them, so that they are tried again some day.
    """
    seconds = [ratio * cost for ratio, cost in zip(ratios, bare, strict=True)]
    here = max(measured, (seconds[rows] + measured) / 2)
    fewer_rows_seconds = [min(each, here) for each in seconds[1:rows]]
    more_rows_seconds = [
        max(here, each - EXTRA_COST_DECAY * (each - here)) for each in seconds[rows + 1 :]
    ]
    pairs = zip((*fewer_rows_seconds, here, *more_rows_seconds), bare[1:], strict=True)
    return (1.0, *(each / cost for each, cost in pairs))


class ForwardTimes(NamedTuple):
    """What rounds have shown of the seconds of forwards, beside costs that were believed before.

    A forward of one row has a mean of its own, because it is what drafting has to beat. Forwards of
    more rows have a line, by least squares over what they took beyond the believed costs. Its slope
    is 0 until rounds with several numbers of rows have shown another.
    """

    plain: FadingMean = FadingMean(0.0, 0.0)  # seconds of a forward of one row
    level: FadingMean = FadingMean(0.0, 0.0)  # seconds of a forward of the draft
    # Sums over forwards of several rows; older ones count less.
    weight: float = 0.0
    rows: float = 0.0
    square_rows: float = 0.0
    seconds: float = 0.0
    rows_seconds: float = 0.0
    believed: float = 0.0  # seconds by the costs that were believed before
    rows_believed: float = 0.0
    since_plain: int = 0  # forwards of several rows since the last one of one row

    def after_plain(self, seconds: float, believed: float) -> ForwardTimes:
        """Returns the times after a forward of one row, which was believed to take so long."""
        usual = self.scale(believed) * believed
        if self.plain.weight + self.weight >= MIN_FORWARDS_FOR_OUTLIERS:
            seconds = min(seconds, FORWARD_OUTLIER_FACTOR * usual)
        return self._replace(plain=self.plain.fold(seconds, 1.0, TIMES_MEMORY), since_plain=0)

    def after_drafting(
        self,
        levels: int,
        level_seconds: float,
        rows: int,
        seconds: float,
        believed: float,
        believed_level: float,
    ) -> ForwardTimes:
        """Returns the times after a draft of ``levels`` forwards and a forward that judged it.

        ``level_seconds`` are those of the draft, and ``seconds`` those of the forward of ``rows``
        rows. ``believed`` is what that forward was believed to take before, and
        ``believed_level`` one of the draft's. A draft that a busy machine slowed down counts for
        no more than ``FORWARD_OUTLIER_FACTOR`` times what was expected, the first ones too.
        """
        level = self.level
        expected = level.mean if level.weight >= MIN_FORWARDS_FOR_OUTLIERS else believed_level
        level_seconds = min(level_seconds, FORWARD_OUTLIER_FACTOR * levels * expected)
        if self.weight >= MIN_FORWARDS_FOR_OUTLIERS:
            seconds = min(seconds, FORWARD_OUTLIER_FACTOR * self.average * believed)
        extra_rows, memory = rows - 1, TIMES_MEMORY
        return self._replace(
            level=level.fold(level_seconds, levels, memory),
            weight=memory * self.weight + 1,
            rows=memory * self.rows + extra_rows,
            square_rows=memory * self.square_rows + extra_rows * extra_rows,
            seconds=memory * self.seconds + seconds,
            rows_seconds=memory * self.rows_seconds + extra_rows * seconds,
            believed=memory * self.believed + believed,
            rows_believed=memory * self.rows_believed + extra_rows * believed,
            since_plain=self.since_plain + 1,
        )

    @property
    def average(self) -> float:
        """Seconds of forwards of several rows over those that were believed."""
        return self.seconds / self.believed

    def scale(self, believed: float) -> float:
        """Returns the factor from believed to measured seconds.

        It is that of forwards of one row, which were believed to take ``believed`` seconds. Until
        one has run it is that of forwards of more rows, and before those it is 1.
        """
        if self.plain.weight:
            return self.plain.mean / believed
        return self.average if self.weight else 1.0

    def line(self, scale: float) -> tuple[float, float]:
        """Returns (a, b): a forward of n > 1 rows takes ``a + b (n - 1)`` seconds beyond ``scale``
        times the believed ones."""
        if not self.weight:
            return 0.0, 0.0
        extra_seconds = self.seconds - scale * self.believed
        rows_extra_seconds = self.rows_seconds - scale * self.rows_believed
        spread = self.square_rows - self.rows**2 / self.weight
        slope = (rows_extra_seconds - self.rows * extra_seconds / self.weight) / (
            spread + SLOPE_PRIOR_WEIGHT
        )
        here = extra_seconds / (self.weight + FORWARD_PRIOR_WEIGHT)
        return here - slope * self.rows / self.weight, slope


Times = TypeVar("Times", bound="SecondsBySize")


@dataclass(frozen=True)
class SecondsBySize:
    """The mean seconds of recent rounds, by how many requests took part."""

    seconds: Mapping[int, float] = field(default_factory=dict)

    def fold(self: Times, requests: int, seconds: float) -> Times:
        """Returns the times with one more round; the size that was seen longest ago is dropped."""
        old = self.seconds.get(requests, seconds)
        others = [each for each in self.seconds.items() if each[0] != requests]
        recent = dict(others[1 - MAX_REMEMBERED_SIZES :])
        return replace(self, seconds={**recent, requests: old + NEW_ROUND_WEIGHT * (seconds - old)})

    def fit_line(self) -> tuple[float, float]:
        """Returns the seconds of a round without requests and those that each request adds.

        It is the least-squares line. Where all rounds had one size it is the line through zero,
        which the next round of another size corrects.
        """
        sizes, seconds = list(self.seconds), list(self.seconds.values())
        if len(sizes) == 1:
            return 0.0, seconds[0] / sizes[0]
        each, fixed = linear_regression(sizes, seconds)
        return max(0.0, fixed), each

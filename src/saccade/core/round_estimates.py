"""What rounds have taught so far: how often drafts are accepted, and what forwards and rounds cost.

These estimators serve every part that decides how far to draft, or how many requests share a
round: the shapes ``auto`` and ``fit``, the draft inside vLLM, and the scheduler. Each is immutable:
a method such as ``fold`` returns the estimate with one more round, in which older rounds count
less. The decisions themselves are made in those parts.

An outcome is about one token here: whether a drafted token was accepted. The chance of a token is
the probability that it will be, if all tokens before it are. The believed seconds of a forward are
those that were expected before it ran. At first they are the seconds of a bare forward, which is
timed before the first answer. Later they are corrected by what forwards have taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import linear_regression
from typing import NamedTuple, TypeVar

SECONDS_DECAY = 0.97  # Each round multiplies the weight of earlier rounds on a cost line by this.
# A cost line is used, to plan drafts and to notice outliers, once the decayed number of its rounds
# is at least this.
MIN_MEASURED_ROUNDS = 3.0
OUTLIER_FACTOR = 4.0  # A round counts as at most this many times its expected seconds.
# Forwards of more rows than the latest one are believed to take longer than that one. Each round
# takes this share off the difference. So row counts that were slow in a busy moment are tried
# again.
EXTRA_COST_DECAY = 0.02
TIMES_MEMORY = 0.95  # Each forward multiplies the weight of earlier forwards by this.
FORWARD_OUTLIER_FACTOR = 2.0  # A forward counts as at most this many times its expected seconds.
# The expected seconds in this cap come from measured forwards, once the decayed number of these is
# at least this. Until then, a forward of the draft is expected to take its initial seconds (see
# ``ForwardTimes``), and forwards of the target are not capped.
MIN_FORWARDS_FOR_CAP = 3.0
# The measured seconds of forwards are averaged with a prior, which weighs as much as this many
# measured forwards. The prior is a forward's initial seconds times the slowdown of forwards of one
# row (``ForwardTimes.plain_slowdown``).
FORWARD_PRIOR_WEIGHT = 0.5
# A least-squares slope of seconds over rows is a quotient, whose divisor is the sum of the squared
# deviations of the rows. This is added to the divisor, so it draws the slope towards 0.
SLOPE_PRIOR_WEIGHT = 0.7
NEW_ROUND_WEIGHT = 0.3  # The weight of one more round in the mean seconds of rounds of its size.
# Before any outcome the draft's confidence is believed to predict outcomes better than their mean
# rate does, by this many nats.
CONFIDENCE_PRIOR_NATS = 4.0
LEAST_LIKELIHOOD = 0.02  # An outcome's likelihood counts as at least this: 3.9 nats of surprise.
# A difference of nats is capped here, so that ``exp`` does not overflow. ``trust`` is about 0 then.
MAX_NATS = 50.0
# Only the sizes seen last are remembered, because prompts get longer and machines busier.
MAX_REMEMBERED_SIZES = 8


# -- acceptance --------------------------------------------------------------------------------


class FadingMean(NamedTuple):
    """A mean in which older rounds count less: of judged tokens that were accepted, or of the
    seconds of a forward."""

    total: float
    weight: float  # what the total is divided by: tokens, the sum of their confidence, or forwards

    @property
    def mean(self) -> float:
        return self.total / self.weight

    def fold(self, total: float, weight: float, memory: float) -> FadingMean:
        """Returns the mean with one more round, whose own sum is ``total`` over ``weight`` items.

        ``memory`` is the share of their weight that earlier rounds keep.
        """
        return FadingMean(self.total * memory + total, self.weight * memory + weight)


class Surprise(NamedTuple):
    """How badly two predictions of outcomes did: the nats of surprise (-log likelihood) of each.

    One predicts by the draft's confidence in a token, the other by the mean rate of acceptance. The
    one with less surprise is the better prediction of the next outcome. Older outcomes count less.
    """

    by_confidence: float = 0.0
    by_rate: float = 0.0

    @property
    def trust(self) -> float:
        """How far the draft's confidence is to be believed, from 0 to 1.

        It is the probability, given the outcomes, that the draft's confidence predicts them better
        than their mean rate. Before any outcome it is high, because drafts whose confidence says
        nothing about acceptance are rare.
        """
        # The logarithm of the odds that the mean rate predicts better.
        log_odds_of_rate = self.by_confidence - self.by_rate - CONFIDENCE_PRIOR_NATS
        return 1 / (1 + exp(min(log_odds_of_rate, MAX_NATS)))

    def after(self, chance: float, rate: float, accepted: bool, memory: float) -> Surprise:
        """Returns the surprise after one more outcome.

        ``chance`` and ``rate`` are the two predicted probabilities that the token is accepted: by
        the draft's confidence, and by the rate of all outcomes.
        """
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
    """Accepted tokens over the sum of the draft's confidence in the judged ones: 1 if the draft is
    right as often as it says, less if it is too sure."""
    surprise: Surprise = Surprise()

    @property
    def rate(self) -> float:
        """How often a drafted token is accepted, whatever its confidence."""
        return self.accepted.mean

    def chance(self, confidence: float) -> float:
        """Returns how often a token of this confidence is accepted.

        It is the mean of the corrected confidence and of the rate of acceptance. The weight of the
        confidence is ``Surprise.trust``.
        """
        trust = self.surprise.trust
        return trust * self._chance_by_confidence(confidence) + (1 - trust) * self.rate

    def _chance_by_confidence(self, confidence: float) -> float:
        return min(1.0, confidence * self.calibration.mean)

    def fold(
        self, outcomes: Sequence[tuple[float, bool]], judged: float, memory: float
    ) -> Acceptance:
        """Returns the estimate after some outcomes.

        An outcome has the draft's confidence in a token, and whether the token was accepted. In the
        rate of acceptance the outcomes count as ``judged`` tokens. A caller may give a larger
        number than that of the outcomes, so that a rejection weighs more: the shape ``auto`` does
        so where the draft was unsure of the rejected token.
        """
        hits = sum(accepted for _, accepted in outcomes)
        promised = sum(confidence for confidence, _ in outcomes)
        surprise = self.surprise
        for confidence, accepted in outcomes:
            chance = self._chance_by_confidence(confidence)
            surprise = surprise.after(chance, self.rate, accepted, memory)
        return Acceptance(
            self.accepted.fold(hits, judged, memory),
            self.calibration.fold(hits, promised, memory),
            surprise,
        )


def continuation_chances(match_length: int, count: int) -> list[float]:
    """Returns the chance of each of ``count`` drafted tokens that are copied from the text.

    If the text's last ``match_length`` tokens have occurred before, what followed them there may be
    copied as a draft. By the rule of succession, a token that comes after n repeated ones has the
    chance n / (n + 2). For a match of 3 tokens the chances are 3/5, 4/6, 5/7 and so on.
    """
    lengths = range(match_length, match_length + count)
    return [length / (length + 2) for length in lengths]


def expected_chain(rate: float, length: int) -> float:
    """Returns the expected tokens of a round with a drafted chain: 1 + a + a^2 + ... + a^length,
    where each token is accepted at the rate a."""
    return sum(rate**i for i in range(length + 1))


class Pause(NamedTuple):
    """A pause in drafting: some rounds that decode plainly before drafting is tried again.

    It begins with the first plain round. Before that it is neither running nor over.
    """

    length: int  # How many rounds decode plainly.
    rounds: int = 0  # How many of them have passed.

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

    # Sums over rounds, in which older rounds count less: of 1, of counts x, of seconds y, of
    # squares of x, and of products of x and y.
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def fold(self, x: float, y: float) -> CostLine:
        """Returns the line after one more round, in which a count of ``x`` took ``y`` seconds."""
        expected = self.at(x)
        # An early outlier may tilt the line until it is 0 at ``x``. Such a line cannot show whether
        # ``y`` is an outlier.
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
        """Seconds per unit of the count, never below 0; 0 while all rounds had the same count."""
        # With one count only, the spread is zero up to rounding.
        spread = self.weight * self.xx - self.x**2
        if spread <= 1e-9 * self.weight * self.xx:
            return 0.0
        return max(0.0, (self.weight * self.xy - self.x * self.y) / spread)

    def at(self, x: float) -> float:
        """Returns the line's seconds for a count of ``x``, never below 0; 0 before any round."""
        if not self.weight:
            return 0.0
        return max(0.0, self.y / self.weight + self.slope * (x - self.x / self.weight))


def correct_ratios(
    ratios: Sequence[float], bare: Sequence[float], rows: int, measured: float
) -> tuple[float, ...]:
    """Returns the corrected ratios after a forward of ``rows`` rows took ``measured`` seconds.

    ``bare[n]`` are the seconds of a forward of n rows as they were measured before the first
    answer. Such a forward is believed to take ``ratios[n]`` times as long.

    If the forward took longer than was believed, forwards of so many rows are now believed to take
    the measured seconds. If it was quicker, they are believed to take the mean of the measured
    seconds and those believed before. Forwards of fewer rows are believed to take no longer than
    that, and those of more rows no less. Where forwards of more rows were believed to take longer,
    their seconds fall a little each time, so that they are tried again some day.

    For example, 1, 2 and 3 rows were believed to take 10, 12 and 14 ms, and a forward of 2 rows
    took 20 ms. From now on they are believed to take 10, 20 and 20 ms.
    """
    seconds = [ratio * cost for ratio, cost in zip(ratios, bare, strict=True)]
    # The mean is the larger of the two only where the forward was faster than was believed.
    now_believed = max(measured, (seconds[rows] + measured) / 2)
    fewer_rows_seconds = [min(each, now_believed) for each in seconds[1:rows]]
    more_rows_seconds = [
        max(now_believed, each - EXTRA_COST_DECAY * (each - now_believed))
        for each in seconds[rows + 1 :]
    ]
    corrected = (*fewer_rows_seconds, now_believed, *more_rows_seconds)
    # No forward has 0 rows, so the first ratio is never used.
    return (1.0, *(each / cost for each, cost in zip(corrected, bare[1:], strict=True)))


class ForwardTimes(NamedTuple):
    """The seconds that an answer's forwards have taken, and their initial seconds to compare with.

    The initial seconds of a forward are those that it was expected to take when the answer began.
    The answer's rounds do not correct them.

    Forwards of one row have a mean of their own, because drafting has to beat them. They take
    ``scale`` times their initial seconds (:meth:`plain_slowdown`). Forwards of more rows take
    ``scale`` times their own initial seconds and some seconds more or less, which a least-squares
    line over the rows gives (:meth:`line`). The line's slope is 0 until forwards of different
    numbers of rows have been measured.
    """

    # Seconds of a forward of one row.
    plain: FadingMean = FadingMean(total=0.0, weight=0.0)
    # Seconds of a forward of the draft.
    draft_forward: FadingMean = FadingMean(total=0.0, weight=0.0)
    # Sums over the target's forwards of several rows, in which older forwards count less. With r
    # for the rows of a forward beyond the first, these are the sums of:
    weight: float = 0.0  # 1
    rows: float = 0.0  # r
    square_rows: float = 0.0  # r * r
    seconds: float = 0.0  # its measured seconds
    rows_seconds: float = 0.0  # r * its measured seconds
    initial: float = 0.0  # its initial seconds
    rows_initial: float = 0.0  # r * its initial seconds
    since_plain: int = 0  # forwards of several rows since the last one of one row

    def after_plain(self, seconds: float, initial: float) -> ForwardTimes:
        """Returns the times after a forward of one row, whose initial seconds are ``initial``."""
        expected = self.plain_slowdown(initial) * initial
        if self.plain.weight + self.weight >= MIN_FORWARDS_FOR_CAP:
            seconds = min(seconds, FORWARD_OUTLIER_FACTOR * expected)
        return self._replace(plain=self.plain.fold(seconds, 1.0, TIMES_MEMORY), since_plain=0)

    def after_drafting(
        self,
        draft_forwards: int,
        draft_seconds: float,
        rows: int,
        seconds: float,
        initial: float,
        initial_draft_forward: float,
    ) -> ForwardTimes:
        """Returns the times after a draft of ``draft_forwards`` forwards and the target's forward
        over it.

        ``draft_seconds`` are the seconds of the whole draft, and ``seconds`` those of the target's
        forward of ``rows`` rows. ``initial`` are the initial seconds of this forward, and
        ``initial_draft_forward`` those of one forward of the draft. Even the first drafts count as
        at most ``FORWARD_OUTLIER_FACTOR`` times the expected seconds, because a busy machine may
        have slowed them down.
        """
        expected_draft_forward = initial_draft_forward
        if self.draft_forward.weight >= MIN_FORWARDS_FOR_CAP:
            expected_draft_forward = self.draft_forward.mean
        expected = draft_forwards * expected_draft_forward
        draft_seconds = min(draft_seconds, FORWARD_OUTLIER_FACTOR * expected)
        if self.weight >= MIN_FORWARDS_FOR_CAP:
            seconds = min(seconds, FORWARD_OUTLIER_FACTOR * self.slowdown * initial)
        extra_rows = rows - 1
        memory = TIMES_MEMORY
        return self._replace(
            draft_forward=self.draft_forward.fold(draft_seconds, draft_forwards, memory),
            weight=memory * self.weight + 1,
            rows=memory * self.rows + extra_rows,
            square_rows=memory * self.square_rows + extra_rows * extra_rows,
            seconds=memory * self.seconds + seconds,
            rows_seconds=memory * self.rows_seconds + extra_rows * seconds,
            initial=memory * self.initial + initial,
            rows_initial=memory * self.rows_initial + extra_rows * initial,
            since_plain=self.since_plain + 1,
        )

    @property
    def slowdown(self) -> float:
        """The ratio of measured to initial seconds of forwards of several rows."""
        return self.seconds / self.initial

    def plain_slowdown(self, initial: float) -> float:
        """Returns measured over initial seconds of a forward of one row.

        ``initial`` are the initial seconds of such a forward. Until one has run, this is the
        ratio of forwards of more rows, and before any forward it is 1.
        """
        if self.plain.weight:
            return self.plain.mean / initial
        return self.slowdown if self.weight else 1.0

    def line(self, scale: float) -> tuple[float, float]:
        """Returns (a, b): a forward of n > 1 rows takes ``a + b (n - 1)`` seconds more than
        ``scale`` times its initial seconds.

        ``scale`` is the :meth:`plain_slowdown`. If forwards of more rows are slowed down as much as
        those of one row, the line is 0.
        """
        if not self.weight:
            return 0.0, 0.0
        # A least-squares line is fitted to the seconds of each forward beyond ``scale`` times the
        # initial ones.
        extra_seconds = self.seconds - scale * self.initial
        rows_extra_seconds = self.rows_seconds - scale * self.rows_initial
        spread = self.square_rows - self.rows**2 / self.weight
        slope = (rows_extra_seconds - self.rows * extra_seconds / self.weight) / (
            spread + SLOPE_PRIOR_WEIGHT
        )
        # At the mean number of rows, the line has the mean of these seconds and of a prior of 0.
        at_mean_rows = extra_seconds / (self.weight + FORWARD_PRIOR_WEIGHT)
        return at_mean_rows - slope * self.rows / self.weight, slope


Times = TypeVar("Times", bound="SecondsBySize")


@dataclass(frozen=True)
class SecondsBySize:
    """The mean seconds of recent rounds by their size, which is how many requests took part."""

    seconds: Mapping[int, float] = field(default_factory=dict)

    def fold(self: Times, requests: int, seconds: float) -> Times:
        """Returns the times with one more round; the size that was seen longest ago is dropped."""
        old = self.seconds.get(requests, seconds)
        # Sizes are in the order in which they were last seen. One place is left for this one.
        others = [each for each in self.seconds.items() if each[0] != requests]
        recent = dict(others[-(MAX_REMEMBERED_SIZES - 1) :])
        return replace(self, seconds={**recent, requests: old + NEW_ROUND_WEIGHT * (seconds - old)})

    def fit_line(self) -> tuple[float, float]:
        """Returns the seconds of a round without requests and those that each request adds.

        They are the constant and the slope of the least-squares line through the mean seconds of
        all sizes. The constant is at least 0; the slope may be negative. If all rounds had one
        size, a round without requests is taken to cost nothing. There must have been a round.
        """
        sizes = list(self.seconds)
        seconds = list(self.seconds.values())
        if len(sizes) == 1:
            return 0.0, seconds[0] / sizes[0]
        per_request, fixed = linear_regression(sizes, seconds)
        return max(0.0, fixed), per_request

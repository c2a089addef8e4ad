"""Decides how long drafts are: as long as one more token pays, and empty where none does.

A round over ``n`` requests that each draft ``k`` tokens yields n (1 + a + ... + a^k) tokens, where
a is the acceptance rate. It costs a target forward of n (1 + k) rows and k levels of the draft. The
``k`` with the highest rate R is chosen, and within it a token is drafted while

    P(all tokens up to it are accepted)  >  R x (its share of a level + a row)

P comes from the draft's confidence, scaled by how well that has predicted acceptance so far.
Seconds are measured as rounds go by, because nobody knows beforehand how many requests share a
forward. Tokens are chosen and not drawn, so measured times change no answer and no law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

SECONDS_DECAY = 0.97  # Per round, of the weight of measured seconds.
ACCEPTANCE_DECAY = 0.99  # Per verified token, of the weight of its acceptance.
MIN_MEASURED_ROUNDS = 3.0  # The decayed number of rounds after which measured seconds are used.
OUTLIER_FACTOR = 4.0  # A round that takes longer than this many times the expectation is capped.
RETRY_AFTER_ROUNDS = 8  # The first wait, in rounds without drafts, before drafting is tried again.
MAX_RETRY_ROUNDS = 512  # The longest such wait.
MIN_SPEEDUP = 1.03  # Over plain decoding; below it nothing is drafted.


@dataclass(frozen=True)
class CostLine:
    """Seconds as a straight line over a count: least squares over rounds with decaying weights."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def fold(self, x: float, y: float) -> CostLine:
        if self.weight >= MIN_MEASURED_ROUNDS:
            y = min(y, OUTLIER_FACTOR * self.at(x))
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


@dataclass(frozen=True)
class Acceptance:
    """How often drafted tokens were accepted, and how often the draft's confidence predicted it."""

    accepted: float = 0.8
    judged: float = 1.0
    expected: float = 0.9

    @property
    def rate(self) -> float:
        return self.accepted / self.judged

    def probability(self, confidence: float) -> float:
        """Returns the probability that a token of this confidence is accepted."""
        return min(1.0, confidence * self.accepted / self.expected)

    def fold(
        self, drafted: Sequence[int], confidences: Sequence[float], emitted: Sequence[int]
    ) -> Acceptance:
        """Adds the verification of a draft; tokens after the first rejected one are not counted."""
        acceptance = self
        for token, confidence, emitted_token in zip(drafted, confidences, emitted, strict=False):
            acceptance = Acceptance(
                ACCEPTANCE_DECAY * acceptance.accepted + (token == emitted_token),
                ACCEPTANCE_DECAY * acceptance.judged + 1,
                ACCEPTANCE_DECAY * acceptance.expected + confidence,
            )
            if token != emitted_token:
                break
        return acceptance


@dataclass(frozen=True)
class DraftPlan:
    """How long drafts may get in a round, and below which probability a token is not drafted."""

    length: int
    min_probability: float = 0.0  # That all tokens up to it are accepted.
    acceptance: Acceptance = Acceptance()


@dataclass(frozen=True)
class RoundCosts:
    """The costs of rounds of about this many requests.

    ``target`` has seconds between drafts over rows of the forward, ``draft`` seconds of drafting
    over levels. ``plain_rounds`` counts the rounds since drafting was last tried.
    """

    max_length: int
    target: CostLine = field(default=CostLine())
    draft: CostLine = field(default=CostLine())
    tries: int = 0
    plain_rounds: int = 0
    retry_after: int = RETRY_AFTER_ROUNDS

    def plan(self, requests: int, acceptance: Acceptance) -> DraftPlan:
        """Returns the plan of a round with this many requests."""
        if self.target.weight < MIN_MEASURED_ROUNDS or self.draft.weight < MIN_MEASURED_ROUNDS:
            # The lengths differ until both costs are measured: long, half as long, and none.
            lengths = (self.max_length, max(1, self.max_length // 2), 0)
            return DraftPlan(lengths[self.tries % 3], 0.0, acceptance)
        rates = [
            self._rate(requests, acceptance.rate, length) for length in range(self.max_length + 1)
        ]
        best = max(range(len(rates)), key=rates.__getitem__)
        if best == 0 or rates[best] < MIN_SPEEDUP * rates[0]:
            is_retry = self.plain_rounds >= self.retry_after
            return DraftPlan(self.max_length if is_retry else 0, 0.0, acceptance)
        min_probability = rates[best] * (self.draft.slope / requests + self.target.slope)
        return DraftPlan(self.max_length, min_probability, acceptance)

    def _rate(self, requests: int, acceptance_rate: float, length: int) -> float:
        tokens = requests * sum(acceptance_rate**n for n in range(length + 1))
        drafting = self.draft.at(length) if length else 0.0
        return tokens / max(1e-9, self.target.at(requests * (1 + length)) + drafting)

    def after_drafting(self, levels: int, seconds: float) -> RoundCosts:
        """Returns the costs after a draft of ``levels`` forwards, or of none."""
        if not levels:
            return replace(self, tries=self.tries + 1, plain_rounds=self.plain_rounds + 1)
        retry_after = self.retry_after
        if self.plain_rounds >= self.retry_after:
            retry_after = min(MAX_RETRY_ROUNDS, 2 * self.retry_after)
        return replace(
            self,
            draft=self.draft.fold(levels, seconds),
            tries=self.tries + 1,
            plain_rounds=0,
            retry_after=retry_after,
        )

    def after_target_forward(self, rows: int, seconds: float) -> RoundCosts:
        """Returns the costs after a target forward over ``rows``, with everything beside it."""
        return replace(self, target=self.target.fold(rows, seconds))


def size_bucket(requests: int) -> int:
    """Returns the power of two at or above, as rounds of similar size cost about the same."""
    return 1 << (requests - 1).bit_length()

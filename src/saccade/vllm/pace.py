"""How long drafts should be here and now: as far as one more token pays, none where none does.

A round over ``n`` requests that each draft ``k`` tokens earns n (1 + a + ... + a^k) tokens, where a
is how often a drafted token is accepted, and costs a forward of n (1 + k) rows and k levels of the
draft. The ``k`` of the highest rate R is looked for; within it, a token is drafted while

    P(everything up to it is accepted)  >  R x (its share of a level + a row)

with P from the draft's confidence, scaled by how it has kept its word. Seconds are measured as
rounds go by: nobody knows before how many requests will share a forward. Tokens are chosen, not
drawn, so that what the clock says changes no answer and no law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

FADE = 0.97  # a round, of seconds
SLOW = 0.99  # a judged token, of acceptance
KNOWN = 3.0  # faded rounds after which measured seconds are believed
OUTLIER = 4.0  # times what was expected: a pause of the machine
RETRY, SELDOM = 8, 512  # rounds without drafts before drafting is tried again, and at most
GAIN = 1.03  # by which drafting has to beat plain decoding


@dataclass(frozen=True)
class CostLine:
    """Seconds as a straight line over a count: least squares over rounds that fade."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def fold(self, x: float, y: float) -> CostLine:
        if self.weight >= KNOWN:
            y = min(y, OUTLIER * self.at(x))
        return CostLine(
            FADE * self.weight + 1,
            FADE * self.x + x,
            FADE * self.y + y,
            FADE * self.xx + x * x,
            FADE * self.xy + x * y,
        )

    @property
    def slope(self) -> float:
        """Seconds of one more; 0 while nothing tells."""
        spread = self.weight * self.xx - self.x**2
        if spread <= 1e-9 * self.weight * self.xx:
            return 0.0
        return max(0.0, (self.weight * self.xy - self.x * self.y) / spread)

    def at(self, x: float) -> float:
        """Seconds of ``x``: through the middle of what was seen, never below 0."""
        if not self.weight:
            return 0.0
        return max(0.0, self.y / self.weight + self.slope * (x - self.x / self.weight))


@dataclass(frozen=True)
class Trust:
    """How often drafted tokens were accepted, and how often that was promised."""

    accepted: float = 0.8
    judged: float = 1.0
    promised: float = 0.9

    @property
    def usual(self) -> float:
        return self.accepted / self.judged

    def chance(self, confidence: float) -> float:
        """How often a token of this confidence is accepted."""
        return min(1.0, confidence * self.accepted / self.promised)

    def fold(self, drafted: Sequence[int], odds: Sequence[float], emitted: Sequence[int]) -> Trust:
        """With the verdict on a draft: its tokens are judged up to the first that was refused."""
        found = self
        for token, odd, real in zip(drafted, odds, emitted, strict=False):
            found = Trust(
                SLOW * found.accepted + (token == real),
                SLOW * found.judged + 1,
                SLOW * found.promised + odd,
            )
            if token != real:
                break
        return found


@dataclass(frozen=True)
class DraftPlan:
    """Of one round: how long drafts may get, and what a token must promise to be drafted."""

    length: int
    bar: float = 0.0  # of the probability that everything up to it is accepted
    trust: Trust = Trust()


@dataclass(frozen=True)
class RoundCosts:
    """What rounds of about this many requests have cost."""

    most: int
    target: CostLine = field(default=CostLine())  # seconds between drafts, over rows of the forward
    draft: CostLine = field(default=CostLine())  # seconds of drafting, over levels
    tried: int = 0
    plain: int = 0  # rounds since drafting was last tried
    patience: int = RETRY

    def plan(self, requests: int, trust: Trust) -> DraftPlan:
        """For a round of this many requests."""
        if self.target.weight < KNOWN or self.draft.weight < KNOWN:
            # long, half as long, and not at all, until it is known what each costs
            lengths = (self.most, max(1, self.most // 2), 0)
            return DraftPlan(lengths[self.tried % 3], 0.0, trust)
        rates = [self._rate(requests, trust.usual, length) for length in range(self.most + 1)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if best == 0 or rates[best] < GAIN * rates[0]:
            return DraftPlan(self.most if self.plain >= self.patience else 0, 0.0, trust)
        bar = rates[best] * (self.draft.slope / requests + self.target.slope)
        return DraftPlan(self.most, bar, trust)

    def _rate(self, requests: int, usual: float, length: int) -> float:
        tokens = requests * sum(usual**n for n in range(length + 1))
        drafting = self.draft.at(length) if length else 0.0
        return tokens / max(1e-9, self.target.at(requests * (1 + length)) + drafting)

    def drafted(self, levels: int, seconds: float) -> RoundCosts:
        """After a draft of ``levels`` forwards, or of none."""
        if not levels:
            return replace(self, tried=self.tried + 1, plain=self.plain + 1)
        waited = self.plain >= self.patience
        return replace(
            self,
            draft=self.draft.fold(levels, seconds),
            tried=self.tried + 1,
            plain=0,
            patience=min(SELDOM, 2 * self.patience) if waited else self.patience,
        )

    def stepped(self, rows: int, seconds: float) -> RoundCosts:
        """After a forward of the target over ``rows``, and all that goes with it."""
        return replace(self, target=self.target.fold(rows, seconds))


def bucket(requests: int) -> int:
    """The power of two at or above: rounds of about as many requests cost about the same."""
    return 1 << (requests - 1).bit_length()

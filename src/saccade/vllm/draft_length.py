"""Decides how long drafts inside vLLM get: tokens are drafted as long as one more pays.

A round over ``n`` requests that each draft ``k`` tokens yields n (1 + a + ... + a^k) tokens, where
a is the acceptance rate. It costs a target forward of n (1 + k) rows, and k forwards of the draft,
each for all n requests. R is the tokens a second of the best ``k``. One more drafted token of a
request takes d/n + t seconds, where d are the seconds of a forward of the draft, shared by the n
requests, and t those of one more row in the target's forward. It is drafted while it yields more
tokens than these seconds would yield at the rate R:

    P(it and all tokens before it are accepted)  >  R x (d/n + t)

P comes from the draft's confidence, scaled by how well that has predicted acceptance.
Seconds are measured as rounds go by, because nobody knows beforehand how many requests share a
forward. A drafted token is the draft's arg-max and never a sample, so a draft's length may depend
on measured times. That changes neither a greedy answer nor the distribution of a sampled one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from saccade.core.round_estimates import (
    MIN_MEASURED_ROUNDS,
    Acceptance,
    CostLine,
    FadingMean,
    Pause,
    expected_chain,
)

ACCEPTANCE_DECAY = 0.99  # Each judged token leaves earlier ones this share of their weight.
RETRY_AFTER_ROUNDS = 8  # The first wait, in rounds without drafts, before drafting is tried again.
MAX_RETRY_ROUNDS = 512  # The longest such wait.
MIN_SPEEDUP = 1.03  # Nothing is drafted if the expected speedup over plain decoding is smaller.

# The estimate before any token is judged. It is as if one token had been judged, in which the
# draft's confidence was 0.9, and as if 0.8 tokens had been accepted. So the acceptance rate begins
# at 0.8, and confidences are first multiplied by 0.8/0.9.
PRIOR = Acceptance(
    accepted=FadingMean(total=0.8, weight=1.0),
    calibration=FadingMean(total=0.8, weight=0.9),
)


def update_acceptance(
    acceptance: Acceptance,
    drafted: Sequence[int],
    confidences: Sequence[float],
    emitted: Sequence[int],
) -> Acceptance:
    """Returns the acceptance after one more verified draft.

    ``emitted`` are the tokens that the round emitted. A drafted token was accepted if it is the one
    emitted in its place. Tokens after the first rejected one are not counted.
    """
    for token, confidence, emitted_token in zip(drafted, confidences, emitted, strict=False):
        accepted = token == emitted_token
        acceptance = acceptance.fold([(confidence, accepted)], judged=1, memory=ACCEPTANCE_DECAY)
        if not accepted:
            break
    return acceptance


@dataclass(frozen=True)
class DraftPlan:
    """How long drafts may get in a round, and the probability at which they stop."""

    length: int  # The most tokens of a draft.
    # A token is drafted only if P(it and all tokens before it are accepted) is above this.
    min_probability: float = 0.0
    acceptance: Acceptance = PRIOR  # It turns the draft's confidence into that probability.


@dataclass(frozen=True)
class RoundCosts:
    """What rounds of about the same number of requests cost.

    ``target`` fits the seconds from the end of one draft to the start of the next, against the rows
    of the target's forward. ``draft`` fits the seconds of drafting, against the forwards of the
    draft. ``rounds`` counts all rounds, with or without drafts.
    """

    max_length: int  # The longest draft.
    target: CostLine = field(default=CostLine())
    draft: CostLine = field(default=CostLine())
    rounds: int = 0
    pause: Pause = Pause(RETRY_AFTER_ROUNDS)  # the wait until drafting is tried again

    def plan(self, requests: int, acceptance: Acceptance) -> DraftPlan:
        """Returns the plan of a round with this many requests."""
        if self.target.weight < MIN_MEASURED_ROUNDS or self.draft.weight < MIN_MEASURED_ROUNDS:
            # A line cannot be fitted through a single length. So until both costs are measured,
            # rounds alternate between the longest draft, half of it, and none.
            lengths = (self.max_length, max(1, self.max_length // 2), 0)
            return DraftPlan(lengths[self.rounds % 3], acceptance=acceptance)
        rates = [
            self._rate(requests, acceptance.rate, length) for length in range(self.max_length + 1)
        ]
        best = max(range(len(rates)), key=rates.__getitem__)
        if best == 0 or rates[best] < MIN_SPEEDUP * rates[0]:
            # Drafting does not pay. After a pause one full draft tries whether it does now.
            length = self.max_length if self.pause.is_over else 0
            return DraftPlan(length, acceptance=acceptance)
        min_probability = rates[best] * (self.draft.slope / requests + self.target.slope)
        return DraftPlan(self.max_length, min_probability, acceptance)

    def _rate(self, requests: int, acceptance_rate: float, length: int) -> float:
        """Returns the tokens a second of rounds whose drafts have this length."""
        tokens = requests * expected_chain(acceptance_rate, length)
        drafting = self.draft.at(length) if length else 0.0
        return tokens / max(1e-9, self.target.at(requests * (1 + length)) + drafting)

    def after_plain_round(self) -> RoundCosts:
        """Returns the costs after a round that was planned without a draft."""
        return replace(self, rounds=self.rounds + 1, pause=self.pause.after_plain_round())

    def after_drafting(self, forwards: int, seconds: float) -> RoundCosts:
        """Returns the costs after a round whose draft took so many forwards and seconds.

        A round may be planned with a draft and have none, for example where prompt lookup finds no
        match. Such a round has no forwards and says nothing about the costs.
        """
        if not forwards:
            return replace(self, rounds=self.rounds + 1)
        # A draft that was expected to pay resets the pause. One after a whole pause was a retry, so
        # the next pause is twice as long.
        length = RETRY_AFTER_ROUNDS
        if self.pause.is_over:
            length = min(MAX_RETRY_ROUNDS, 2 * self.pause.length)
        return replace(
            self,
            draft=self.draft.fold(forwards, seconds),
            rounds=self.rounds + 1,
            pause=Pause(length),
        )

    def after_target_forward(self, rows: int, seconds: float) -> RoundCosts:
        """Returns the costs after a target forward of ``rows`` rows.

        ``seconds`` are those from the end of one draft to the start of the next.
        """
        return replace(self, target=self.target.fold(rows, seconds))


def size_bucket(requests: int) -> int:
    """Returns the smallest power of two that is at least ``requests``.

    Rounds of about as many requests cost about the same, so their costs are kept together.
    """
    return 1 << (requests - 1).bit_length()

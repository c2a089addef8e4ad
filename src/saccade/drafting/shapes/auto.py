"""Shape ``auto``: drafts as long as one more token pays, and decodes plainly where none does.

A round earns tokens and costs seconds. By the renewal-reward rule one more drafted token pays iff

    P(everything up to it is accepted)  >  R x what it costs,      R = tokens a second

The cost of a token is one draft forward and one more row to verify. A runner-up, an alternative to
a token that is judged beside it, costs a row alone. P comes from the draft's own confidence,
corrected by how often the draft has been right in this answer. R is the rate that this answer
reaches, so the rule raises its own bar until it settles at the best rate it can get. The confidence
in a chosen token is the probability that the draft gives it. For a token that is yet to be drawn it
is the expected value of this probability, the sum of q(x)^2, because a drawn token stands (see
``Tree``). Where drafting earns less than plain decoding it stops, and it is tried again after ever
longer pauses.

Where the ending of the text has occurred before (prompt lookup), the tokens that followed it there
are a draft that takes no draft forward, but only rows to verify. They are copied where the round is
expected to earn more with them than without. How likely they are to be right follows from the
length of the match, corrected by how often copies have been right in this answer.

Costs measured before the first answer, those of *bare* forwards, may be wrong: the machine may have
been busy, and only a few numbers of rows are measured. So the seconds of rounds correct three of
them: a target forward of one row, a draft forward, and a target forward of more rows. The corrected
costs are the *believed* ones. Where drafting does not pay by costs that no round has confirmed, it
is tried as if its extra cost were half as high. While drafting pays, an occasional round without a
draft measures plain decoding again.

The state is computed round by round and holds only numbers, so the same rounds give the same state.
When sampling, the time that a round took does not enter it, so that the drawn tokens do not depend
on how busy the machine is meanwhile. The seconds of a sampled round are computed from the believed
costs, which sampled rounds do not correct. Tokens that were drawn after a rejected one must not
enter the state either. So of a draft only the levels that were judged count. The round counts as
the time to draft and verify these levels, which leaves out the levels after a rejected token, and
at least as the time of a round with the chain length that is expected to decode fastest. With a
copied draft the round counts as the time to verify the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import ceil, isnan, log, prod
from operator import mul
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.capabilities import Capabilities, Capability
from saccade.core.costs import Costs
from saccade.core.protocols import CostMemory, Growing, Repetition, Shape, State
from saccade.core.result import Round
from saccade.core.round_estimates import (
    FORWARD_PRIOR_WEIGHT,
    Acceptance,
    FadingMean,
    ForwardTimes,
    Pause,
    continuation_chances,
)
from saccade.core.sampling import NO_TOKEN, BrokenLaw, Law, Scores
from saccade.core.tree import ROOT, Tree, add, chain
from saccade.drafting.shapes.policies import CostedShape, confidence

MAX_DRAFT_DEPTH = 24  # levels of one draft
MAX_DRAFT_NODES = 48  # nodes of one draft, runners-up included

# What is believed of a draft before any of its tokens was judged. The weights count as so many
# judged tokens. They are small, so that a useless draft is dropped soon. They were chosen on clips
# that no benchmark draws.
PRIOR_ACCEPTANCE = 0.8
PRIOR_WEIGHT = 1.25
# How much earlier answers weigh at the start of an answer: their acceptance rate counts as so many
# judged tokens, and their seconds per draft forward as so many forwards. It keeps two rejections or
# one slow draft from ending drafting. It was chosen by replaying many kinds of costs and drafts.
REMEMBERED_WEIGHT = 6.0
# What is believed of the calibration, which is accepted tokens over the sum of the draft's
# confidence in the judged ones. Its weight counts as so much of that sum.
PRIOR_CALIBRATION = 0.9
PRIOR_CALIBRATION_WEIGHT = 1.0

BAR_MARGIN = 0.95  # A level may earn a little less than its bar: it opens the way to deeper ones.
# Drafting is tried again only if it would pay at this acceptance rate, or at the mean of this and
# the remembered rate if there is one.
RETRY_ACCEPTANCE = 0.9
# The factor by which the sums of tokens and seconds decay in each round with a draft. In
# ``verify_slowdown`` it is the weight of the earlier rounds.
RATE_MEMORY = 0.9
ACCEPTANCE_MEMORY = 0.98  # the factor by which sums of judged tokens decay in a round with a draft
# A rejected token counts as one judged token. It counts as more where the draft itself was unsure
# of it, because the draft then knows little of the text: for each nat by which -log(confidence)
# exceeds SURPRISE_NATS, ``trust`` is added. The trust, from 0 to 1, is learnt in this answer: the
# probability that the draft's confidence predicts outcomes better than their mean rate does. With
# a confidence of e^-5 and a trust of 0.5 the token counts as 1 + 0.5 (5 - 2) = 2.5 tokens.
# Confidences below LEAST_CONFIDENCE are treated as LEAST_CONFIDENCE.
SURPRISE_NATS = 2.0
LEAST_CONFIDENCE = 1e-4
RETRY_AFTER_ROUNDS = 2  # rounds of plain decoding before drafting is tried again
MAX_RETRY_AFTER_ROUNDS = 128
MAX_PAUSE_GROWTH = 16  # A pause is at most this many times as long as the one before.
# How much a retry may lose. A loss is how many tokens more plain decoding would have emitted in the
# same time. A round of a pause emits one token. The pause after a loss is made so long that the
# loss is at most this share of the pause's tokens: after a loss of 0.3 tokens it has at least 0.3 /
# 0.015 = 20 rounds. MAX_RETRY_AFTER_ROUNDS and MAX_PAUSE_GROWTH limit the pause even so.
MAX_LOST_SHARE = 0.015

# When a pause is over, drafting is tried again if it would pay at this share of what it is believed
# to cost beyond plain decoding. The share is lower until a round with a draft, in this answer or an
# earlier one, has confirmed the costs, because before that they may be far too high.
UNCONFIRMED_COST_SHARE = 0.5
CONFIRMED_COST_SHARE = 0.8
MAX_TRIAL_DEPTH = 3  # levels of a draft that is tried although it is not believed to pay
# After this many rounds with drafts, one round decodes plainly, to measure what that takes. The
# first number holds until this answer has measured it, unless an earlier answer that drafted has
# corrected the costs.
FIRST_PLAIN_AFTER_ROUNDS = 3
PLAIN_AFTER_ROUNDS = 48
# How much the remembered acceptance rate weighs when an answer ends and its own rate is averaged
# into it: it counts as this many judged tokens.
REMEMBERED_TOKENS = 10
# After an answer without drafts the remembered acceptance rate moves towards PRIOR_ACCEPTANCE, by
# this share times the share of time that drafting could save. So a draft that could save much is
# tried again soon. The remembered cost of a draft forward falls by FORGOTTEN_COST_SHARE.
FORGOTTEN_SHARE = 0.5
FORGOTTEN_COST_SHARE = 0.01
# Row counts of the costs that the next answer starts from.
REMEMBERED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 26, 48)


class Estimates(NamedTuple):
    """What the rounds of an answer have taught so far: the state of :class:`Auto`.

    Sums over rounds fade, so that older rounds count less.
    """

    acceptance: Acceptance = Acceptance(
        FadingMean(PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT),
        FadingMean(PRIOR_CALIBRATION * PRIOR_CALIBRATION_WEIGHT, PRIOR_CALIBRATION_WEIGHT),
    )
    runner_up_calibration: FadingMean = FadingMean(
        PRIOR_CALIBRATION * PRIOR_CALIBRATION_WEIGHT, PRIOR_CALIBRATION_WEIGHT
    )
    """Accepted runners-up over the sum of their shares. A runner-up's share is its probability over
    the probability of all tokens but the draft's first choice (:func:`_share_of_rest`). Only
    runners-up beside a rejected first choice count."""
    copy_calibration: FadingMean = FadingMean(
        PRIOR_CALIBRATION * PRIOR_CALIBRATION_WEIGHT, PRIOR_CALIBRATION_WEIGHT
    )
    """Copied tokens that were right over the sum of their chances by the length of the match."""
    tokens: float = 0.0  # emitted in rounds that drafted
    seconds: float = 0.0  # spent in rounds that drafted
    verify_slowdown: float = 1.0
    """The factor from the seconds of bare target forwards to the measured ones. It is used only
    while requests share forwards."""
    times: ForwardTimes = ForwardTimes()  # of forwards that no other request shared
    pause: Pause = Pause(RETRY_AFTER_ROUNDS)
    requests: int = 1  # that shared the forwards of the last round

    def runner_up_chance(self, share: float) -> float:
        """Returns how likely a runner-up is right, given that the draft's first choice is wrong.

        ``share`` is the runner-up's share of the probability of all tokens but the first choice.
        """
        return min(1.0, share * self.runner_up_calibration.mean)

    def copy_chances(self, repetition: Repetition) -> list[float]:
        """How likely each token of a repetition is right if those before it are."""
        chances = continuation_chances(repetition.match_length, len(repetition.tokens))
        return [min(1.0, self.copy_calibration.mean * chance) for chance in chances]


class RunnerUp(NamedTuple):
    """An alternative to a drafted token, to be judged beside it."""

    worth: float  # expected tokens that it earns
    parent: int  # the node that it follows, as the drafted token does
    token: int
    confidence: float  # the draft's probability of it


@dataclass(frozen=True)
class Auto(CostedShape):
    """Decides before each token whether one more pays.

    ``costs`` are those of bare forwards on this machine, or those that earlier answers have
    corrected. They are None until :meth:`prepare` has set them. Then ``forward_costs`` returns
    them. ``runners_up`` is how many alternatives to each token are considered (0: every draft is a
    chain). ``copies`` says whether a draft may be copied from the text. ``memory`` stores what an
    answer has taught, for the next one.
    """

    costs: Costs | None = None
    runners_up: int = 1
    copies: bool = True
    memory: CostMemory | None = field(default=None, compare=False, repr=False)

    @property
    def offers(self) -> Capabilities:
        copies = {Capability.COPIES} if self.copies else set()
        return frozenset({Capability.WORKS_WITHOUT_DRAFT_MODEL, *copies})

    @property
    def branches(self) -> bool:
        return self.runners_up > 0

    def as_chains(self) -> Auto:
        return replace(self, runners_up=0)

    def prepare(
        self,
        measure: Callable[[], Costs],
        memory: CostMemory | None = None,
        target_family: str = "",
    ) -> Shape:
        if self.costs is not None:
            return self
        remembered = None if memory is None else memory.load()
        return replace(self, costs=remembered or measure(), memory=memory)

    def start(self) -> State:
        remembered = None if self.costs is None else self.costs.acceptance
        if remembered is None:
            return Estimates()
        accepted = FadingMean(remembered * REMEMBERED_WEIGHT, REMEMBERED_WEIGHT)
        # The calibration is accepted tokens over the sum of the draft's confidence in all judged
        # tokens. No confidence exceeds 1, so that sum is at most the number of judged tokens, and
        # the calibration is at least the acceptance rate.
        mean = max(PRIOR_CALIBRATION, remembered)
        calibration = FadingMean(mean * PRIOR_CALIBRATION_WEIGHT, PRIOR_CALIBRATION_WEIGHT)
        return Estimates(Acceptance(accepted, calibration))

    def grow(self, state: State) -> Growing:
        estimates: Estimates = state
        tree = Tree()
        plan = self._plan(estimates)
        if plan is None:
            return tree
        bar = BAR_MARGIN * plan.rate
        last = ROOT
        reach = 1.0  # the probability that everything drafted so far is accepted
        runners_up: list[RunnerUp] = []
        while len(tree) < plan.max_depth:
            # Prices in tokens: what the answer would earn in the time that a row or a level takes.
            row = bar * plan.costs.row_price(len(tree))
            level = bar * plan.costs.level_price(len(tree))
            # The confidence in the next token is known only after a draft forward. Until then the
            # mean acceptance rate stands for it.
            if len(tree) and reach * estimates.acceptance.rate <= level + row:
                break
            scores: Scores = yield tree
            law, token_confidence, alternatives = _law_and_alternatives(
                scores, last, self.runners_up
            )
            chance = estimates.acceptance.chance(token_confidence)
            # The first token is always drafted and judged. Otherwise a draft with little confidence
            # would never be judged, and nothing would be learnt of it.
            if len(tree) and reach * chance <= row:
                break
            # An alternative can be accepted only where the draft's first choice is rejected.
            for alternative, alternative_confidence in alternatives:
                share = _share_of_rest(token_confidence, alternative_confidence)
                worth = reach * (1 - chance) * estimates.runner_up_chance(share)
                runners_up.append(RunnerUp(worth, last, alternative, alternative_confidence))
            token, q = scores.draw(last, law)
            tree = add(tree, last, token, q, token_confidence)
            last = len(tree) - 1
            if not scores.may_go_on(tree, last):
                # The answer probably ends with this round, so runners-up would save very little.
                return tree
            reach *= chance
        runners_up = sorted(runners_up, reverse=True)[: MAX_DRAFT_NODES - len(tree)]
        count = _count_paying_runners_up(runners_up, len(tree), plan)
        for runner_up in runners_up[:count]:
            tree = add(
                tree, runner_up.parent, runner_up.token, q=None, confidence=runner_up.confidence
            )
        return tree

    def copy(self, state: State, repetition: Repetition) -> Tree | None:
        estimates: Estimates = state
        if self._next_round_measures_plain(estimates):
            return None
        costs = self.believed_costs(estimates)
        # What a round without the copy is expected to emit and to take: plain decoding in a pause,
        # else a draft of the model.
        other_tokens, other_seconds = 1.0, costs.plain
        if not estimates.pause.is_running:
            other_tokens, other_seconds = best_round(costs, estimates.acceptance.rate)
        rate = _rate_to_beat(estimates, costs, (other_tokens, other_seconds))
        tokens = repetition.tokens[:MAX_DRAFT_NODES]
        # For each copied token, the chance that it and all before it are right.
        reach_chances = accumulate(estimates.copy_chances(repetition), mul)
        # For each number of copied tokens, from 0 on, the expected tokens of a round, the target's
        # own token included.
        expected_tokens = accumulate(reach_chances, initial=1.0)
        # For each number of copied tokens, what the round earns beyond the tokens that its seconds
        # are worth at this rate. At 50 tokens a second, 2.5 tokens in 40 ms are a gain of 0.5.
        gains = [
            earned - rate * costs.verify(1 + count)
            for count, earned in zip(range(len(tokens) + 1), expected_tokens, strict=False)
        ]
        other_gain = other_tokens - rate * other_seconds
        best_count = max(range(len(gains)), key=gains.__getitem__)
        if best_count == 0 or gains[best_count] <= other_gain:
            return None
        return replace(chain(tokens[:best_count]), match_length=repetition.match_length)

    def _plan(self, estimates: Estimates) -> Plan | None:
        """Returns how the next draft is grown; None where the next round decodes plainly."""
        if self._next_round_measures_plain(estimates):
            return None
        if estimates.pause.is_running:
            # During the pause no draft of the model is judged, so whether drafting pays is not
            # asked again.
            return None
        costs = self.believed_costs(estimates)
        expected_round = best_round(costs, estimates.acceptance.rate)
        # More than one token is expected only where some draft is faster than plain decoding.
        if expected_round[0] > 1:
            return Plan(costs, _rate_to_beat(estimates, costs, expected_round), costs.max_depth)
        # A pause begins with its first plain round. Before that it is neither running nor over.
        if not estimates.pause.is_over:
            return None
        is_confirmed = self.has_measured_draft or estimates.times.draft_forward.weight > 0
        hopeful = costs.cheaper(CONFIRMED_COST_SHARE if is_confirmed else UNCONFIRMED_COST_SHARE)
        expected_round = best_round(hopeful, self._retry_acceptance)
        if expected_round[0] <= 1:
            return None
        max_depth = min(MAX_TRIAL_DEPTH, hopeful.max_depth)
        return Plan(hopeful, _rate_to_beat(estimates, hopeful, expected_round), max_depth)

    @property
    def _retry_acceptance(self) -> float:
        """The acceptance rate at which drafting must pay to be tried again: RETRY_ACCEPTANCE, or
        its mean with the rate of earlier answers if there were any."""
        remembered = self.forward_costs.acceptance
        return RETRY_ACCEPTANCE if remembered is None else (RETRY_ACCEPTANCE + remembered) / 2

    def _next_round_measures_plain(self, estimates: Estimates) -> bool:
        """Returns whether the next round decodes plainly only to measure what that takes."""
        times = estimates.times
        # Costs that earlier answers have corrected count as measured, even if none of these answers
        # had a plain round.
        is_measured = self.has_measured_draft or times.plain.weight > 0
        interval = PLAIN_AFTER_ROUNDS if is_measured else FIRST_PLAIN_AFTER_ROUNDS
        return times.since_plain >= interval

    def fold(self, state: State, round: Round) -> State:
        before: Estimates = state
        # Sampled tokens must not depend on the other requests that share a forward.
        load = None if round.p.rules.sample else round.load
        state = before._replace(
            requests=1 if load is None else load.requests,
            verify_slowdown=self._verify_slowdown_after(before, round),
            times=self._times_after(before, round),
        )
        # A round without a draft has no verdict. It counts as one round of the pause, unless it was
        # made only to measure plain decoding.
        if not round.tree.tokens:
            was_measurement = self._next_round_measures_plain(before)
            pause = before.pause if was_measurement else before.pause.after_plain_round()
            return state._replace(pause=pause)
        is_copy = round.tree.match_length > 0
        estimates = _learn_from_copy(state, round) if is_copy else _learn_from_draft(state, round)
        seconds = self._round_seconds(state, round)
        estimates = estimates._replace(
            tokens=RATE_MEMORY * estimates.tokens + len(round.emitted),
            seconds=RATE_MEMORY * estimates.seconds + seconds,
        )
        if is_copy:  # A copy does not show whether drafting by the model pays.
            return estimates
        return estimates._replace(pause=self._pause_after(estimates, round, seconds))

    def _pause_after(self, estimates: Estimates, round: Round, seconds: float) -> Pause:
        """Returns how long drafting pauses if it does not pay to draft in the next round.

        The pause is short where this round was faster than plain decoding. Otherwise it is at least
        twice as long as the one before, and longer the more tokens the round lost. The one before
        is what this returned after the last draft of the model, even if that pause was not made
        because drafting went on. MAX_PAUSE_GROWTH and MAX_RETRY_AFTER_ROUNDS limit the length.
        """
        # Plain decoding would have emitted this many tokens more in the same time.
        lost_tokens = seconds / self.believed_costs(estimates).plain - len(round.emitted)
        if lost_tokens < 0:
            return Pause(RETRY_AFTER_ROUNDS)
        last_length = estimates.pause.length
        needed_length = max(2 * last_length, ceil(lost_tokens / MAX_LOST_SHARE))
        longer = min(needed_length, MAX_PAUSE_GROWTH * last_length)
        return Pause(min(MAX_RETRY_AFTER_ROUNDS, longer))

    def finish(self, state: State) -> None:
        costs = None if self.memory is None else self.learnt_costs(state)
        if self.memory is not None and costs is not None:
            self.memory.save(costs)

    def is_expected_to_pay(self) -> bool:
        """Whether drafting is expected to pay by what is known before an answer's first round."""
        estimates: Estimates = self.start()
        return best_round(self.believed_costs(estimates), estimates.acceptance.rate)[0] > 1

    @property
    def has_measured_draft(self) -> bool:
        # Only costs that earlier answers have corrected have an acceptance rate.
        return self.forward_costs.acceptance is not None

    def learnt_costs(self, state: State) -> Costs | None:
        """Returns the costs as an answer's rounds have corrected them, from which the next answer
        starts; None where there is nothing to remember."""
        estimates: Estimates = state
        remembered, times = self.forward_costs.acceptance, estimates.times
        if not times.draft_forward.weight:
            if remembered is None or not times.plain.weight:
                return None
            # This answer drafted nothing, so it shows nothing new of the draft. The remembered rate
            # moves towards the prior and the remembered cost falls, so that some later answer tries
            # the draft again.
            forgotten = FORGOTTEN_SHARE * self._possible_gain(estimates)
            return replace(
                self.forward_costs,
                acceptance=remembered + forgotten * (PRIOR_ACCEPTANCE - remembered),
                draft=(1 - FORGOTTEN_COST_SHARE) * self.forward_costs.draft,
            )
        # An answer with few judged tokens changes the rate little, so that one unlucky answer does
        # not end drafting.
        earlier_rate = PRIOR_ACCEPTANCE if remembered is None else remembered
        judged = estimates.acceptance.accepted.weight
        share = judged / (judged + REMEMBERED_TOKENS)
        acceptance = earlier_rate + share * (estimates.acceptance.rate - earlier_rate)
        costs = self.believed_costs(estimates._replace(requests=1))
        # A forward of more rows is not believed to be faster, so this is a running maximum.
        seconds = tuple(accumulate(map(costs.verify, REMEMBERED_ROWS), max))
        return replace(
            self.forward_costs,
            rows=REMEMBERED_ROWS,
            target=seconds,
            draft=costs.draft_forward,
            acceptance=acceptance,
        )

    def _possible_gain(self, estimates: Estimates) -> float:
        """Returns the share of plain decoding's time that drafting would save if tokens were
        accepted at PRIOR_ACCEPTANCE."""
        costs = self.believed_costs(estimates._replace(requests=1))
        tokens, seconds = best_round(costs, PRIOR_ACCEPTANCE)
        return 1 - seconds / (tokens * costs.plain)

    def believed_costs(self, estimates: Estimates) -> BelievedCosts:
        """Returns the costs of forwards as the rounds so far have corrected them.

        Where requests share forwards, the costs are one request's share.
        """
        bare = _tabulate(self.forward_costs, estimates.requests)
        if estimates.requests > 1:
            scale = estimates.verify_slowdown
            return BelievedCosts(
                draft_forward=scale * bare.costs.draft,
                plain=scale * bare.verify[1],
                scale=scale,
                shift=0.0,
                slope=0.0,
                bare=bare,
            )
        times = estimates.times
        scale = times.plain_slowdown(bare.verify[1])
        # A draft forward is believed to take the mean of the measured ones and of a prior, which
        # counts as ``weight`` forwards. A prior that earlier answers have measured weighs more, so
        # that one slow draft does not outweigh it.
        prior = scale * bare.costs.draft
        weight = REMEMBERED_WEIGHT if self.has_measured_draft else FORWARD_PRIOR_WEIGHT
        measured = times.draft_forward
        draft_forward = (measured.total + weight * prior) / (measured.weight + weight)
        # The seconds that forwards of n > 1 rows were measured to take beyond ``scale`` times their
        # bare ones, as a straight line over n: shift + slope (n - 1).
        shift, slope = times.line(scale)
        return BelievedCosts(
            draft_forward=draft_forward,
            plain=scale * bare.verify[1],
            scale=scale,
            shift=shift,
            slope=slope,
            bare=bare,
        )

    def _round_seconds(self, estimates: Estimates, round: Round) -> float:
        """Returns how many seconds a round counts as in the estimates.

        They are the measured ones, with two exceptions. One is sampling. The other is a round with
        a forward that was the first of its size, because later forwards of that size are replayed
        as a CUDA graph, which is quicker. In both cases the seconds are computed from the believed
        costs. For a copy they are the time to verify it. For another draft they are the time to
        draft and verify the levels that were judged, and at least the time of a round with the
        chain length that is expected to decode fastest.
        """
        if not round.p.rules.sample and not round.first_of_size:
            return sum(_seconds_of_request(round))
        costs = self.believed_costs(estimates)
        if round.tree.match_length:
            return costs.verify(1 + len(round.tree))
        # The judged levels are those of accepted tokens, and one more after a rejection.
        levels = len(round.verdict.accepted) + (round.verdict.kind == "recovered")
        _, fastest_round_seconds = best_round(costs, estimates.acceptance.rate)
        return max(costs.drafting(levels) + costs.verify(1 + levels), fastest_round_seconds)

    def _verify_slowdown_after(self, estimates: Estimates, round: Round) -> float:
        """Returns ``verify_slowdown`` with the seconds of this round in it.

        It is unchanged when sampling, and where the seconds tell nothing of later rounds.
        """
        if round.p.rules.sample or not round.has_typical_duration:
            return estimates.verify_slowdown
        requests = 1
        rows = 1 + len(round.tree)
        if round.load is not None:
            requests, rows = round.load.requests, round.load.rows
        slowdown = round.verify_seconds / self.forward_costs.verify_together(requests, rows)
        return RATE_MEMORY * estimates.verify_slowdown + (1 - RATE_MEMORY) * slowdown

    def _times_after(self, estimates: Estimates, round: Round) -> ForwardTimes:
        """Returns ``times`` with the seconds of this round.

        They are unchanged in three cases: when sampling, after a round whose seconds tell nothing
        of later rounds, and after a round whose forward was shared.

        The third case has an exception. ``since_plain`` counts the rounds with drafts since the
        last round without one. Once it is high enough, the next round decodes plainly, to measure
        what that takes. Such a round sets the count to 0 even if its forward was shared. Otherwise
        every further round would decode plainly, for as long as forwards are shared.
        """
        times = estimates.times
        rows = 1 + len(round.tree)
        if round.p.rules.sample or not round.has_typical_duration:
            return times
        if round.load is not None:
            return times if rows > 1 else times._replace(since_plain=0)
        # ``ForwardTimes`` compares the measured seconds with those that were expected when the
        # answer began, before its rounds corrected them.
        initial_seconds = self.forward_costs.verify(rows)
        if rows == 1:
            return times.after_plain(round.verify_seconds, initial_seconds)
        levels = self._count_levels(estimates, round)
        return times.after_drafting(
            self.forward_costs.draft_forwards(levels),
            round.draft_seconds,
            rows,
            round.verify_seconds,
            initial_seconds,
            self.forward_costs.draft,
        )

    def _count_levels(self, estimates: Estimates, round: Round) -> int:
        """Returns how many levels of a round's tree the draft has scored.

        That is the depth of the tree, and one more where ``grow`` let the draft score the next
        token and then left it out, because it was not worth a row to verify. Whether it did is not
        recorded, so the decisions of ``grow`` are repeated here.
        """
        tree = round.tree
        if tree.match_length:
            return 0
        # The first choices are a chain at the tree's beginning, where each node's parent is the
        # node before it. The runners-up come after the chain and have parents further up.
        depth = sum(parent == node - 1 for node, parent in enumerate(tree.parents))
        plan = self._plan(estimates)
        if plan is None or depth >= plan.max_depth:
            return depth
        if depth and not round.p.may_go_on(tree, depth - 1):
            return depth
        reach = prod(estimates.acceptance.chance(each) for each in tree.confidences[:depth])
        # The prices in tokens, as in ``grow``.
        bar = BAR_MARGIN * plan.rate
        level = bar * plan.costs.level_price(depth)
        row = bar * plan.costs.row_price(depth)
        ended_before_scoring = reach * estimates.acceptance.rate <= level + row
        return depth if ended_before_scoring else depth + 1


class BareCosts(NamedTuple):
    """Seconds of forwards, tabulated by the number of rows or nodes.

    They are those of bare forwards, or those that earlier answers have corrected (``Auto.costs``).
    The rounds of this answer have not corrected them.
    """

    costs: Costs  # what the tables are made of
    verify: tuple[float, ...]  # ``verify[n]``: seconds of a target forward of n rows
    row_prices: tuple[float, ...]  # ``row_prices[n]``: of one more row in a draft of n nodes


class BelievedCosts(NamedTuple):
    """Seconds of forwards as rounds have corrected the bare ones."""

    draft_forward: float  # of one draft forward
    plain: float  # of a target forward of one row
    # A target forward of n > 1 rows takes scale x bare seconds + shift + slope (n - 1), and never
    # less than ``plain``.
    scale: float
    shift: float
    slope: float
    bare: BareCosts
    share: float = 1.0  # the factor on the extra seconds of more rows, below 1 for a hopeful trial

    def cheaper(self, share: float) -> BelievedCosts:
        """Returns the costs if drafting and more rows took this share of what is believed."""
        return self._replace(draft_forward=share * self.draft_forward, share=share)

    @property
    def max_depth(self) -> int:
        """How many levels a draft may have. A head that drafts a whole block in one forward drafts
        no levels beyond that block."""
        levels = self.bare.costs.draft_levels
        return MAX_DRAFT_DEPTH if levels == 1 else min(levels, MAX_DRAFT_DEPTH)

    def drafting(self, levels: int) -> float:
        """Returns the seconds of the draft's forwards for so many levels."""
        return self.bare.costs.draft_forwards(levels) * self.draft_forward

    def level_price(self, depth: int) -> float:
        """Returns the seconds of one more level after ``depth`` levels.

        They are 0 where the draft's last forward has scored that level already.
        """
        return 0.0 if depth % self.bare.costs.draft_levels else self.draft_forward

    def verify(self, rows: int) -> float:
        """Returns the seconds of a target forward of so many rows, never less than those of one
        row."""
        if rows == 1:
            return self.plain
        seconds = self.scale * self.bare.verify[rows] + self.shift + self.slope * (rows - 1)
        return self.plain + self.share * max(0.0, seconds - self.plain)

    def row_price(self, nodes: int) -> float:
        """Returns the seconds of one more row to verify, in a draft that has so many nodes."""
        price = self.scale * self.bare.row_prices[nodes] + self.slope
        return self.share * max(0.0, price)


class Plan(NamedTuple):
    """How a draft is grown."""

    costs: BelievedCosts
    rate: float  # tokens a second that one more token has to beat
    max_depth: int


@lru_cache(maxsize=64)  # A round asks several times with the same costs and rate.
def best_round(costs: BelievedCosts, acceptance_rate: float) -> tuple[float, float]:
    """Returns the expected (tokens, seconds) of a round with the chain length that decodes fastest
    if each token is accepted at this rate; those of plain decoding where no chain is faster."""
    best = (1.0, costs.plain)  # (tokens, seconds)
    chance = tokens = 1.0
    for length in range(1, costs.max_depth + 1):
        chance *= acceptance_rate
        tokens += chance
        seconds = costs.drafting(length) + costs.verify(length + 1)
        # This compares tokens / seconds with those of the best round.
        if tokens * best[1] > best[0] * seconds:
            best = tokens, seconds
    return best


def _rate_to_beat(
    estimates: Estimates, costs: BelievedCosts, expected: tuple[float, float]
) -> float:
    """Returns the tokens a second that one more drafted token has to beat.

    It is the rate of the answer so far, with the ``expected`` (tokens, seconds) of the next round
    added to it, and at least the rate of plain decoding.
    """
    tokens, seconds = expected
    reached = (estimates.tokens + tokens) / (estimates.seconds + seconds)
    return max(1 / costs.plain, reached)


def _count_paying_runners_up(runners_up: Sequence[RunnerUp], nodes: int, plan: Plan) -> int:
    """Returns how many of the runners-up to draft, so that they earn the most beyond the price of
    their rows.

    They are sorted by what they earn, the best first. The draft has ``nodes`` nodes without them.
    """
    gains = accumulate((runner_up.worth for runner_up in runners_up), initial=0.0)
    before = plan.costs.verify(1 + nodes)
    nets = [
        gain - plan.rate * (plan.costs.verify(1 + nodes + count) - before)
        for count, gain in enumerate(gains)
    ]
    return nets.index(max(nets))


@lru_cache(maxsize=256)
def _tabulate(costs: Costs, requests: int) -> BareCosts:
    """Returns one request's part of the costs that so many requests share, as tables."""
    costs = costs.per_request(requests)
    rows = range(1, MAX_DRAFT_NODES + MAX_DRAFT_DEPTH + 3)  # at least all that are read below
    verify = (0.0, *(costs.verify(count) for count in rows))

    def next_row_price(rows_before: int) -> float:
        # The time of a forward grows in steps: the first row of a step is dear and those after it
        # are cheap. So the price of a row is the mean price of that row and some rows after it, of
        # as many as give the lowest mean. If 9 to 16 rows take 8 ms more than 8, the ninth row
        # costs 1 ms.
        return min(
            (verify[rows_before + extra_rows] - verify[rows_before]) / extra_rows
            for extra_rows in range(1, MAX_DRAFT_DEPTH + 1)
        )

    # A draft of n nodes has n + 1 rows.
    row_prices = tuple(next_row_price(nodes + 1) for nodes in range(MAX_DRAFT_NODES))
    return BareCosts(costs, verify, row_prices)


def _seconds_of_request(round: Round) -> tuple[float, float]:
    """Returns a request's part of a round's seconds: of drafting, and of verifying.

    If the target's forward was shared, the request's part of it is its share of the rows. The
    seconds of drafting in ``round.load`` are the request's part already.
    """
    if round.load is None:
        return round.draft_seconds, round.verify_seconds
    share = (1 + len(round.tree)) / round.load.rows
    return round.load.draft_seconds, share * round.verify_seconds


def _learn_from_draft(estimates: Estimates, round: Round) -> Estimates:
    """Returns the estimates after the verdict on a draft.

    It learns from each first choice of the draft that was judged, and from the runners-up beside
    the one that was rejected.
    """
    verdicts: list[tuple[float, bool]] = []
    judged = 0.0
    hits, promised = 0, 0.0  # of the runners-up beside a rejected first choice
    path = (ROOT, *round.verdict.path)
    confidences = round.tree.confidences
    # Each node of the accepted path comes with the node that was accepted below it. The last one
    # comes with None, because nothing below it was accepted.
    for parent, accepted in zip(path, (*path[1:], None), strict=True):
        if accepted is None and round.verdict.own is None:
            break  # The answer was cut here, so the next token was not rejected.
        children = [node for node, above in enumerate(round.tree.parents) if above == parent]
        if not children:
            break
        first = children[0]
        others = children[1:]
        verdicts.append((confidences[first], accepted == first))
        judged += 1
        if accepted == first:
            continue
        # The first choice was rejected. It counts for more where the draft was unsure of it.
        excess_surprise = max(0.0, -log(max(confidences[first], LEAST_CONFIDENCE)) - SURPRISE_NATS)
        judged += estimates.acceptance.surprise.trust * excess_surprise
        # One more outcome, of the runners-up: whether one of them was accepted, and how likely that
        # was by the draft's confidence, given that its first choice was wrong.
        hits = int(accepted is not None)
        promised = sum(_share_of_rest(confidences[first], confidences[node]) for node in others)
        break
    calibration = estimates.runner_up_calibration.fold(hits, promised, ACCEPTANCE_MEMORY)
    return estimates._replace(
        acceptance=estimates.acceptance.fold(verdicts, judged, ACCEPTANCE_MEMORY),
        runner_up_calibration=calibration,
    )


def _learn_from_copy(estimates: Estimates, round: Round) -> Estimates:
    """Returns the estimates after the verdict on a draft that was copied from the text."""
    accepted = len(round.verdict.path)
    judged = accepted + (round.verdict.kind == "recovered")
    promised = sum(continuation_chances(round.tree.match_length, judged))
    calibration = estimates.copy_calibration.fold(accepted, promised, ACCEPTANCE_MEMORY)
    return estimates._replace(copy_calibration=calibration)


def _share_of_rest(first: float, runner_up: float) -> float:
    """Returns a runner-up's share of the probability of all tokens but the draft's first choice.

    With 0.6 for the first choice and 0.3 for the runner-up, the share is 0.3 / 0.4 = 0.75.
    """
    return runner_up / max(1 - first, runner_up)


def _to_lists(
    ids: Int[Tensor, " some"], chances: Float[Tensor, " some"]
) -> tuple[list[int], list[float]]:
    """Returns ids and probabilities as numbers. They are copied together, so that a GPU is waited
    for only once."""
    if ids.device.type == "cpu":
        return ids.tolist(), chances.tolist()
    both: list[list[float]] = torch.stack((ids.double(), chances.double())).tolist()
    return [*map(int, both[0])], both[1]  # A double holds any id.


def _law_and_alternatives(
    scores: Scores, node: int, runners_up: int
) -> tuple[Law, float, Sequence[tuple[int, float]]]:
    """Returns the draft's law after ``node``, its confidence in the token there, and the likeliest
    alternatives with its confidence in each.

    When greedy, the law is the id of the token. When sampling, it is a vector of probabilities and
    the token is yet to be drawn: the confidence is the mean over the draws, and there are no
    alternatives. Raises BrokenLaw on NaN.
    """
    # The forward may have found its two likeliest tokens already.
    computed = scores.computed_top(node) if runners_up <= 1 else None
    if computed is not None:
        if computed.token == NO_TOKEN:
            raise BrokenLaw("the draft's logits hold NaN")
        has_alternative = runners_up == 1 and computed.runner_up_probability > 0
        runner_up = computed.runner_up, computed.runner_up_probability
        return computed.token, computed.probability, [runner_up] if has_alternative else ()
    # Where the rules only take the arg-max, it is the first token that ``topk`` finds below.
    law = None if scores.rules.is_plain else scores.law(node)
    if isinstance(law, Tensor):
        return law, confidence(scores, node, law), ()
    probabilities = scores.logits(node).float().softmax(-1)
    top = probabilities.topk(min(runners_up + 1, probabilities.shape[0]))
    likely = dict(zip(*_to_lists(top.indices, top.values), strict=True))
    # Rules such as a repetition penalty may choose a token that is not among the likeliest ones.
    token = next(iter(likely)) if law is None else law
    token_confidence = likely.pop(token) if token in likely else float(probabilities[token])
    if isnan(token_confidence):
        raise BrokenLaw("the draft's logits hold NaN")
    allowed = [(alternative, chance) for alternative, chance in likely.items() if chance > 0]
    return token, token_confidence, allowed[:runners_up]

"""Shape ``auto``: drafts as long as one more token pays, and decodes plainly where none does.

A round earns tokens and costs seconds. By the renewal-reward rule one more drafted token pays iff

    P(everything up to it is accepted)  >  R x what it costs,      R = tokens a second

The cost of a token is one draft forward and one more row to verify; a runner-up costs a row alone.
P comes from the draft's own confidence, corrected by how often the draft has been right in this
answer. R is the rate that this answer reaches, so the rule raises its own bar until it settles at
the best rate it can get. The confidence in a chosen token is the probability that the draft gives
it. The confidence in a token that is yet to be drawn is the mean over its draws, the sum of
q(x)^2, because a drawn token stands (see ``Tree``). Where drafting earns less than plain decoding
it stops, and it is tried again after ever longer pauses.

The state is a fold over rounds and holds floats alone, so a recorded trace replays it. When
sampling, no measured time enters the state, so that what is drawn does not depend on how fast the
machine was; and nothing enters it that was drawn beyond a refusal, since a round is counted at what
was judged of it or planned for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import isnan, log
from typing import NamedTuple

from torch import Tensor

from saccade.core.capabilities import Capabilities, Capability
from saccade.core.costs import Costs
from saccade.core.pace import Acceptance, Pause, Rate
from saccade.core.protocols import Growing, State
from saccade.core.result import Round
from saccade.core.sampling import BrokenLaw, Law, Scores
from saccade.core.tree import ROOT, Tree, add
from saccade.drafting.shapes.policies import CostedShape, confidence

MAX_DRAFT_DEPTH = 24  # levels of one draft
MAX_DRAFT_NODES = 48  # nodes of one draft, runners-up included

# What is believed before anything was judged. The weights are in tokens: little, so that a useless
# draft is dropped soon. They were chosen on clips that no benchmark draws.
PRIOR_ACCEPTANCE = 0.8
PRIOR_WEIGHT = 1.25
PRIOR_HONESTY = 0.9  # how much of what the draft's confidence promised comes true
PRIOR_HONESTY_WEIGHT = 1.0

BAR_MARGIN = 0.95  # A level may earn a little less than its bar: it opens the way to deeper ones.
RETRY_ACCEPTANCE = 0.9  # Drafting is tried again only if it would pay at this acceptance.
RATE_MEMORY = 0.9  # what is left of tokens and seconds after one more round
ACCEPTANCE_MEMORY = 0.98  # what is left of judged tokens after one more round
# A draft that gives its own favourite less than this knows nothing of the text. Its refusal counts
# as several tokens, up to those of this probability.
LEAST_CONFIDENCE = 1e-4
RETRY_AFTER_ROUNDS = 2  # rounds of plain decoding before drafting is tried again
MAX_RETRY_AFTER_ROUNDS = 128


class Estimates(NamedTuple):
    """What the rounds so far have taught. Sums fade from round to round."""

    acceptance: Acceptance = Acceptance(
        Rate(PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT),
        Rate(PRIOR_HONESTY * PRIOR_HONESTY_WEIGHT, PRIOR_HONESTY_WEIGHT),
    )
    runner_honesty: Rate = Rate(PRIOR_HONESTY * PRIOR_HONESTY_WEIGHT, PRIOR_HONESTY_WEIGHT)
    """Runners-up that were right over the sum of the draft's confidence in them."""
    tokens: float = 0.0  # emitted in rounds that drafted
    seconds: float = 0.0  # spent in rounds that drafted
    stretch: float = 1.0  # seconds of verifying over those of a bare forward
    pause: Pause = Pause(RETRY_AFTER_ROUNDS)
    requests: int = 1  # that shared the forwards of the last round

    def runner_chance(self, share: float) -> float:
        """How often a runner-up is right where the first token was wrong, if the draft gives it
        this share of what it does not give the first."""
        return min(1.0, share * self.runner_honesty.share)


class Runner(NamedTuple):
    """An alternative to a drafted token, to be judged beside it."""

    worth: float  # expected tokens that it earns
    parent: int
    token: int
    odds: float


@dataclass(frozen=True)
class Auto(CostedShape):
    """The controller. ``costs`` are those of bare forwards on this machine; ``runners`` is how many
    alternatives to each token are weighed (0: every draft is a chain)."""

    costs: Costs | None = None
    runners: int = 1

    @property
    def offers(self) -> Capabilities:
        return frozenset({Capability.NO_DRAFT_MODEL})

    @property
    def branches(self) -> bool:
        return self.runners > 0

    def as_chains(self) -> Auto:
        return replace(self, runners=0)

    def start(self) -> State:
        return Estimates()

    def grow(self, state: State) -> Growing:
        estimates: Estimates = state
        tree = Tree()
        if estimates.pause.is_running:
            return tree  # Nothing was learnt since drafting was given up.
        expected = self._best_round(estimates, estimates.acceptance.rate)
        is_retry = estimates.pause.is_over and self._best_round(estimates, RETRY_ACCEPTANCE)[0] > 1
        if not is_retry and expected[0] <= 1:
            return tree
        rate, level = self._rate_to_beat(estimates, expected), self._level_seconds(estimates)
        bar, row_prices = BAR_MARGIN * rate, self._bare(estimates).row_prices
        last, reach = ROOT, 1.0
        runners: list[Runner] = []
        while len(tree) < MAX_DRAFT_DEPTH:
            row = bar * estimates.stretch * row_prices[len(tree)]
            if len(tree) and reach * estimates.acceptance.rate <= bar * level + row:
                break
            scores: Scores = yield tree
            law, odds, alternatives = _look(scores, last, self.runners)
            chance = estimates.acceptance.chance(odds)
            # The first token is always judged: else nothing would be learnt of a doubtful draft.
            if len(tree) and reach * chance <= row:
                break
            for other, other_odds in alternatives:  # right only where the first token is wrong
                share = _share_of_rest(odds, other_odds)
                worth = reach * (1 - chance) * estimates.runner_chance(share)
                runners.append(Runner(worth, last, other, other_odds))
            token, q = scores.draw(last, law)
            tree = add(tree, last, token, q, odds)
            if token in scores.rules.end_ids:
                # Mostly one round is left, of which a runner-up would spare no more than a level.
                return tree
            reach *= chance
            last = len(tree) - 1
        runners = sorted(runners, reverse=True)[: MAX_DRAFT_NODES - len(tree)]
        for runner in runners[: self._count_worthy(runners, len(tree), estimates, rate)]:
            tree = add(tree, runner.parent, runner.token, None, runner.odds)
        return tree

    def _count_worthy(
        self, runners: Sequence[Runner], nodes: int, estimates: Estimates, rate: float
    ) -> int:
        """How many of the runners-up, the likeliest first, earn the most beyond their rows."""
        verify = self._bare(estimates).verify[1 + nodes :]
        gains = accumulate((runner.worth for runner in runners), initial=0.0)
        tokens_a_second = rate * estimates.stretch
        nets = [
            gain - tokens_a_second * (seconds - verify[0])
            for gain, seconds in zip(gains, verify, strict=False)
        ]
        return nets.index(max(nets))

    def fold(self, state: State, round: Round) -> State:
        load = None if round.p.rules.sample else round.load
        state = state._replace(requests=1 if load is None else load.requests)
        stretch = self._stretch_after(state, round)
        if not round.tree.tokens:
            return state._replace(pause=state.pause.after_plain_round(), stretch=stretch)
        estimates = _judge(state._replace(stretch=stretch), round)
        seconds = self._round_seconds(state, round)
        pays = len(round.tokens) * self._plain_seconds(estimates) > seconds
        longer = min(MAX_RETRY_AFTER_ROUNDS, 8 * estimates.pause.length)
        return estimates._replace(
            tokens=RATE_MEMORY * estimates.tokens + len(round.tokens),
            seconds=RATE_MEMORY * estimates.seconds + seconds,
            pause=Pause(RETRY_AFTER_ROUNDS if pays else longer),
        )

    def _rate_to_beat(self, estimates: Estimates, expected: tuple[float, float]) -> float:
        """Tokens a second that one more token has to beat: those that the answer has reached so
        far, with the (tokens, seconds) expected of the best chain; at least plain decoding's."""
        tokens, seconds = expected
        reached = (estimates.tokens + tokens) / (estimates.seconds + seconds)
        return max(1 / self._plain_seconds(estimates), reached)

    def pays(self) -> bool:
        """Whether drafting is expected to pay here, before anything is known of the draft."""
        return self._best_round(Estimates(), PRIOR_ACCEPTANCE)[0] > 1

    def _bare(self, estimates: Estimates) -> BareCosts:
        """Costs of bare forwards; of forwards that are shared, this request's part."""
        return _tabulate(self.forward_costs, estimates.requests)

    def _plain_seconds(self, estimates: Estimates) -> float:
        """Seconds of a token of plain decoding."""
        return estimates.stretch * self._bare(estimates).verify[1]

    def _level_seconds(self, estimates: Estimates) -> float:
        """Seconds of a level of drafting."""
        return estimates.stretch * self._bare(estimates).level

    def _best_round(self, estimates: Estimates, acceptance_rate: float) -> tuple[float, float]:
        """The expected (tokens, seconds) of a round of the best chain if each token is accepted at
        this rate; those of plain decoding where that is faster."""
        verify, level = self._bare(estimates).verify, self._level_seconds(estimates)
        best = (1.0, self._plain_seconds(estimates))
        chance = tokens = 1.0
        for length in range(1, MAX_DRAFT_DEPTH + 1):
            chance *= acceptance_rate
            tokens += chance
            seconds = length * level + estimates.stretch * verify[length + 1]
            if tokens * best[1] > best[0] * seconds:
                best = tokens, seconds
        return best

    def _round_seconds(self, estimates: Estimates, round: Round) -> float:
        """Seconds of a round. When sampling they are those of what was judged or planned, by the
        model of costs."""
        if not round.p.rules.sample:
            return sum(_own_seconds(round))
        levels = len(round.verdict.accepted) + (round.verdict.kind == "recovered")
        verify = estimates.stretch * self._bare(estimates).verify[1 + levels]
        planned = self._best_round(estimates, estimates.acceptance.rate)[1]
        return max(levels * self._level_seconds(estimates) + verify, planned)

    def _stretch_after(self, estimates: Estimates, round: Round) -> float:
        """``stretch`` with the seconds of this round in it; unchanged when sampling."""
        if round.p.rules.sample or round.verify_seconds <= 0:
            return estimates.stretch
        requests, rows = 1, 1 + len(round.tree)
        if round.load is not None:
            requests, rows = round.load.requests, round.load.rows
        stretch = round.verify_seconds / self.forward_costs.verify_together(requests, rows)
        return RATE_MEMORY * estimates.stretch + (1 - RATE_MEMORY) * stretch


class BareCosts(NamedTuple):
    """Seconds of bare forwards, tabulated by the number of rows or nodes."""

    level: float  # of one draft forward
    verify: tuple[float, ...]  # [rows]: of a target forward
    row_prices: tuple[float, ...]  # [nodes so far]: of one more row to verify


@lru_cache(maxsize=256)
def _tabulate(costs: Costs, requests: int) -> BareCosts:
    costs = costs.per_request(requests)
    rows = range(1, MAX_DRAFT_NODES + MAX_DRAFT_DEPTH + 3)
    verify = (0.0, *(costs.verify(count) for count in rows))
    # Time grows in steps. The first row of a step is dear and opens the way to cheap ones, so the
    # price of a row is the lowest mean over the rows that may follow.
    row_prices = tuple(
        min((verify[n + 1 + more] - verify[n + 1]) / more for more in range(1, MAX_DRAFT_DEPTH + 1))
        for n in range(MAX_DRAFT_NODES)
    )
    return BareCosts(costs.draft, verify, row_prices)


def _own_seconds(round: Round) -> tuple[float, float]:
    """The seconds of drafting and of verifying that a request has to answer for: of a forward that
    was shared, as much as its rows were of all rows."""
    if round.load is None:
        return round.draft_seconds, round.verify_seconds
    share = (1 + len(round.tree)) / round.load.rows
    return round.load.draft_seconds, share * round.verify_seconds


def _judge(estimates: Estimates, round: Round) -> Estimates:
    """The estimates after the verdict on each token of the chain that was looked at, and on what
    stood beside the token that was refused."""
    hits, judged, promised, runners = 0, 0.0, 0.0, Rate(0.0, 0.0)
    path, odds = (ROOT, *round.verdict.path), round.tree.odds
    for parent, accepted in zip(path, (*path[1:], None), strict=True):
        if accepted is None and round.verdict.own is None:
            break  # The answer was cut here: nothing was refused.
        children = [node for node, above in enumerate(round.tree.parents) if above == parent]
        if not children:
            break
        first, others = children[0], children[1:]
        promised += odds[first]
        if accepted == first:
            hits += 1
            judged += 1
            continue
        judged += max(1.0, -log(max(odds[first], LEAST_CONFIDENCE)) - 1)
        offered = sum(_share_of_rest(odds[first], odds[node]) for node in others)
        runners = Rate(accepted is not None, offered)
        break
    return estimates._replace(
        acceptance=estimates.acceptance.fold(hits, judged, promised, ACCEPTANCE_MEMORY),
        runner_honesty=estimates.runner_honesty.fold(*runners, ACCEPTANCE_MEMORY),
    )


def _share_of_rest(first: float, runner: float) -> float:
    """Of the probability that the draft does not give its first choice, the runner-up's share."""
    return runner / max(1 - first, runner)


def _look(
    scores: Scores, node: int, runners: int
) -> tuple[Law, float, Sequence[tuple[int, float]]]:
    """The draft's law after ``node``, its confidence in the token there, and the likeliest
    alternatives with its confidence in each.

    Of a token that is yet to be drawn the confidence is the mean over the draws, and there are no
    alternatives. Raises BrokenLaw on NaN.
    """
    law = None if scores.rules.plain else scores.law(node)
    if isinstance(law, Tensor):
        return law, confidence(scores, node, law), ()
    probabilities = scores.logits(node).float().softmax(-1)
    top = probabilities.topk(min(runners + 1, probabilities.shape[0]))
    likely = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    token = next(iter(likely)) if law is None else law
    odds = likely.pop(token) if token in likely else float(probabilities[token])
    if isnan(odds):
        raise BrokenLaw("the draft's logits hold NaN")
    allowed = [(other, chance) for other, chance in likely.items() if chance > 0]
    return token, odds, allowed[:runners]

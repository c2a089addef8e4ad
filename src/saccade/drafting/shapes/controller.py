"""Shape ``auto``: drafts as long as it pays, judged as it goes; plain decoding where it does not.

A round earns tokens and costs seconds. By the renewal-reward rule one more drafted token pays iff

    P(everything up to it is accepted)  >  R x what it costs,      R = tokens a second

where the cost is a draft forward and a row more to verify (a row alone for a runner-up), P comes
from the draft's own confidence, scaled by how it has kept its word in this answer, and R is what
this answer reaches: the rule raises its own bar until it settles at the best rate it can get.
The confidence in a chosen token is what the draft gives it; in one yet to be drawn, what it gives
its draws on average, the sum of q(x)^2: what is drawn stands (see ``Tree``). Where drafting earns
less than plain decoding it stops, and is tried again ever more seldom.

State is a fold over rounds, of floats alone: a recorded trace replays it. In sampling nothing
measured enters it, so that what is drawn does not depend on how fast the machine was, and nothing
of what was drawn beyond a refusal: a round costs what was judged of it, or what was planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import isnan, log
from typing import ClassVar, NamedTuple

from torch import Tensor

from saccade.core.costs import Costs
from saccade.core.protocols import Growing, Shape, State
from saccade.core.result import Round
from saccade.core.sampling import BrokenLaw, Law, Scores
from saccade.core.tree import ROOT, Tree, add
from saccade.drafting.shapes.fit import Rate
from saccade.drafting.shapes.policies import confidence

LONGEST, MOST = 24, 48  # levels and nodes of one draft
# Before anything is known, and how many tokens' worth that counts: little, so that a draft that is
# no use is soon dropped. Chosen on clips no benchmark draws.
USUAL, TRUST = 0.8, 1.25  # acceptance
KEPT, WORD = 0.9, 1.0  # of what the draft's confidence promised
EAGER = 0.95  # of the bar: a level also opens the way to the levels after it
HOPE = 0.9  # acceptance at which drafting must pay for it to be tried again
FADE, SLOW = 0.9, 0.98  # a round: of rates and seconds, of acceptance
# Whoever gives its favourite so little knows nothing: the refusal counts as several, up to this.
CLUELESS = 1e-4
RETRY, SELDOM = 2, 128  # rounds of plain decoding before drafting is tried again, and at most


class Estimates(NamedTuple):
    """What has been learnt. Sums fade from round to round."""

    accepted: Rate = Rate(USUAL * TRUST, TRUST)  # of the tokens that were judged
    kept: Rate = Rate(KEPT * WORD, WORD)  # the same, of the draft's confidence in them
    saved: Rate = Rate(KEPT * WORD, WORD)  # a runner-up was right, of what the draft said of that
    tokens: float = 0.0  # of rounds that drafted, and
    seconds: float = 0.0  # what they took
    stretch: float = 1.0  # seconds of verifying over those of a bare forward
    plain: int = 0  # rounds since one that drafted
    patience: int = RETRY
    sharing: int = 1  # requests in the forwards, as of the last round

    @property
    def usual(self) -> float:
        """How often a drafted token is accepted, whatever its confidence."""
        return self.accepted.share

    def chance(self, confidence: float) -> float:
        """How often a token of this confidence is accepted."""
        return min(1.0, confidence * self.kept.share)

    def second(self, share: float) -> float:
        """How often a runner-up is right, where the first was wrong and the draft gives it this
        share of the rest."""
        return min(1.0, share * self.saved.share)


@dataclass(frozen=True)
class Auto(Shape):
    """The controller. ``costs`` are of bare forwards here; ``runners`` is how many alternatives to
    a token are weighed (none: a chain)."""

    timed: ClassVar[bool] = True
    optional: ClassVar[bool] = True

    costs: Costs | None = None
    runners: int = 1

    @property
    def branches(self) -> bool:
        return self.runners > 0

    def chained(self) -> Auto:
        return replace(self, runners=0)

    def start(self) -> State:
        return Estimates()

    def grow(self, state: State) -> Growing:
        learnt: Estimates = state
        tree = Tree()
        if 0 < learnt.plain < learnt.patience:  # nothing was learnt since it was given up
            return tree
        expected = self._best(learnt, learnt.usual)
        trying = learnt.plain >= learnt.patience and self._best(learnt, HOPE)[0] > 1
        if not trying and expected[0] <= 1:
            return tree
        rate, level = self._rate(learnt, expected), self._level(learnt)
        bar, prices = EAGER * rate, self._bare(learnt).prices
        last, reach = ROOT, 1.0
        others: list[tuple[float, int, int, float]] = []
        while len(tree) < LONGEST:
            row = bar * learnt.stretch * prices[len(tree)]
            if len(tree) and reach * learnt.usual <= bar * level + row:
                break
            scores: Scores = yield tree
            law, odds, rest = _looked(scores, last, self.runners)
            chance = learnt.chance(odds)
            # a first token is judged always: else nothing would be learnt of a draft in doubt
            if len(tree) and reach * chance <= row:
                break
            for other, odd in rest:  # right only where the first is wrong
                worth = reach * (1 - chance) * learnt.second(_share(odds, odd))
                others.append((worth, last, other, odd))
            token, q = scores.draw(last, law)
            tree = add(tree, last, token, q, odds)
            if token in scores.rules.ends:
                return tree  # mostly a round more: a runner-up would spare it no more than a level
            reach *= chance
            last = len(tree) - 1
        others = sorted(others, reverse=True)[: MOST - len(tree)]
        for _, parent, other, odd in others[: self._worthy(others, len(tree), learnt, rate)]:
            tree = add(tree, parent, other, None, odd)
        return tree

    def _worthy(
        self,
        others: Sequence[tuple[float, int, int, float]],
        nodes: int,
        learnt: Estimates,
        rate: float,
    ) -> int:
        """How many of the runners-up, the likeliest first, earn the most beyond their rows."""
        verify = self._bare(learnt).verify[1 + nodes :]
        gains = accumulate((worth for worth, *_ in others), initial=0.0)
        second = rate * learnt.stretch  # a second's worth in tokens
        nets = [gain - second * (t - verify[0]) for gain, t in zip(gains, verify, strict=False)]
        return nets.index(max(nets))

    def fold(self, state: State, round: Round) -> State:
        load = None if round.p.rules.sample else round.load
        state = state._replace(sharing=1 if load is None else load.requests)
        stretch = self._stretched(state, round)
        if not round.tree.tokens:
            return state._replace(plain=state.plain + 1, stretch=stretch)
        learnt = _judged(state._replace(stretch=stretch), round)
        took = self._seconds(state, round)
        pays = len(round.tokens) * self._alone(learnt) > took
        return learnt._replace(
            tokens=FADE * learnt.tokens + len(round.tokens),
            seconds=FADE * learnt.seconds + took,
            plain=0,
            patience=RETRY if pays else min(SELDOM, 8 * learnt.patience),
        )

    def _rate(self, learnt: Estimates, expected: tuple[float, float]) -> float:
        """Tokens a second to beat: what has been reached, begun with what the best chain is
        expected to reach were every token as likely as the usual one; plain decoding's at least."""
        tokens, seconds = expected
        return max(1 / self._alone(learnt), (learnt.tokens + tokens) / (learnt.seconds + seconds))

    def pays(self) -> bool:
        """Whether drafting is expected to pay here, before anything is known of the draft."""
        return self._best(Estimates(), USUAL)[0] > 1

    def _bare(self, learnt: Estimates) -> _Bare:
        """Costs of bare forwards, of those that are shared this request's part."""
        return _bare(self.prices, learnt.sharing)

    def _alone(self, learnt: Estimates) -> float:
        """Seconds of a token of plain decoding."""
        return learnt.stretch * self._bare(learnt).verify[1]

    def _level(self, learnt: Estimates) -> float:
        """Seconds of a level of drafting."""
        return learnt.stretch * self._bare(learnt).level

    def _best(self, learnt: Estimates, rate: float) -> tuple[float, float]:
        """(tokens, seconds) of a round of the best chain, each token accepted at ``rate``; of plain
        decoding where that is faster."""
        verify, level = self._bare(learnt).verify, self._level(learnt)
        best, chance, tokens = (1.0, self._alone(learnt)), 1.0, 1.0
        for length in range(1, LONGEST + 1):
            chance *= rate
            tokens += chance
            seconds = length * level + learnt.stretch * verify[length + 1]
            if tokens * best[1] > best[0] * seconds:
                best = tokens, seconds
        return best

    def _seconds(self, learnt: Estimates, round: Round) -> float:
        """What a round took; when sampling, what was judged or planned, by the model of costs."""
        if not round.p.rules.sample:
            return sum(_part(round))
        levels = len(round.verdict.accepted) + (round.verdict.kind == "recovered")
        verify = learnt.stretch * self._bare(learnt).verify[1 + levels]
        return max(levels * self._level(learnt) + verify, self._best(learnt, learnt.usual)[1])

    def _stretched(self, learnt: Estimates, round: Round) -> float:
        """``learnt.stretch`` with the seconds of this round taken in, but when sampling."""
        if round.p.rules.sample or round.verify_seconds <= 0:
            return learnt.stretch
        requests, rows = 1, 1 + len(round.tree)
        if round.load is not None:
            requests, rows = round.load.requests, round.load.rows
        took = round.verify_seconds / self.prices.together(requests, rows)
        return FADE * learnt.stretch + (1 - FADE) * took


class _Bare(NamedTuple):
    """Costs by number of rows, looked up."""

    level: float
    verify: tuple[float, ...]  # [rows]
    prices: tuple[float, ...]  # [nodes so far]: of a further row


@lru_cache(maxsize=256)
def _bare(costs: Costs, sharing: int) -> _Bare:
    costs = costs.shared(sharing)
    verify = (0.0, *(costs.verify(rows) for rows in range(1, MOST + LONGEST + 3)))
    # time grows in steps: the first row of one is dear and opens the way to cheap ones
    prices = tuple(
        min((verify[n + 1 + m] - verify[n + 1]) / m for m in range(1, LONGEST + 1))
        for n in range(MOST)
    )
    return _Bare(costs.draft, verify, prices)


def _part(round: Round) -> tuple[float, float]:
    """The seconds of drafting and verifying that a request has to answer for: of a forward that
    was shared, as much as its rows were of all."""
    if round.load is None:
        return round.draft_seconds, round.verify_seconds
    mine = (1 + len(round.tree)) / round.load.rows
    return round.load.draft_seconds, mine * round.verify_seconds


def _judged(learnt: Estimates, round: Round) -> Estimates:
    """With the verdict on each token of the chain that was looked at, and on what stood beside the
    one that was refused."""
    hits, judged, promised, saved = 0, 0.0, 0.0, Rate(0.0, 0.0)
    path, odds = (ROOT, *round.verdict.path), round.tree.odds
    for parent, right in zip(path, (*path[1:], None), strict=True):
        if right is None and round.verdict.own is None:
            break  # the answer was cut here: nothing was refused
        below = [node for node, above in enumerate(round.tree.parents) if above == parent]
        if not below:
            break
        promised += odds[below[0]]
        if right == below[0]:
            hits += 1
            judged += 1
            continue
        judged += max(1.0, -log(max(odds[below[0]], CLUELESS)) - 1)
        offered = sum(_share(odds[below[0]], odds[node]) for node in below[1:])
        saved = Rate(right is not None, offered)
        break
    return learnt._replace(
        accepted=learnt.accepted.fold(hits, judged, SLOW),
        kept=learnt.kept.fold(hits, promised, SLOW),
        saved=learnt.saved.fold(*saved, SLOW),
    )


def _share(first: float, runner: float) -> float:
    """Of what the draft does not give its first choice, what it gives another."""
    return runner / max(1 - first, runner)


def _looked(
    scores: Scores, node: int, runners: int
) -> tuple[Law, float, Sequence[tuple[int, float]]]:
    """The draft's law after ``node``, its confidence in the token there, and in the likeliest
    alternatives; of a token yet to be drawn its mean over the draws, and no alternatives."""
    known = None if scores.rules.plain else scores.law(node)
    if isinstance(known, Tensor):
        return known, confidence(scores, node, known), ()
    whole = scores.logits(node).float().softmax(-1)
    top = whole.topk(min(runners + 1, whole.shape[0]))
    likely = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    law = next(iter(likely)) if known is None else known
    odds = likely.pop(law) if law in likely else float(whole[law])  # else the rules' choice
    if isnan(odds):
        raise BrokenLaw("the draft's logits hold NaN")
    return law, odds, list(likely.items())[:runners]

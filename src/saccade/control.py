"""Shape ``auto``: drafts as long as it pays, judged as it goes; plain decoding where it does not.

A round earns tokens and costs seconds. By the renewal-reward rule one more drafted token pays iff

    P(everything up to it is accepted)  >  R x what it costs,      R = tokens a second so far

where the cost is a draft forward and a row more to verify (a row alone for a runner-up), and P
comes from the draft's own confidence, set right by how often such confidence was accepted. R is
what this answer has reached: the rule raises its own bar until it settles at the best rate it can
get.
Where drafting earns less than plain decoding it stops, and is tried again ever more seldom.

State is a fold over rounds, of floats alone: a recorded trace replays it. In sampling nothing
measured enters it, so that what is drawn does not depend on how fast the machine was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from saccade.cost import Costs
from saccade.sampling import Scores
from saccade.tree import add, height
from saccade.types import ROOT, Growing, Round, State, Tree

BOUNDS = (0.2, 0.4, 0.6, 0.75, 0.87, 0.94, 0.98, 0.995)  # of confidence; a bin between each two
BINS = len(BOUNDS) + 1
LONGEST, MOST = 24, 63  # levels and nodes of one draft
RUNNERS = 3  # up to so many alternatives to a token are weighed
BELIEF = 2.0  # tokens' worth of trust in the draft's own confidence, per bin
FIRST, TRUST = 0.8, 1.0  # acceptance before anything is known, and how much that counts
FADE, SLOW = 0.9, 0.98  # a round: of rates and seconds, of acceptance
RETRY, SELDOM = 4, 64  # rounds of plain decoding before drafting is tried again, and at most


@dataclass(frozen=True)
class Pace:
    """What has been learnt. Sums fade from round to round."""

    hits: tuple[float, ...] = (0.0,) * 2 * BINS  # by confidence: the chain's, then runners-up
    tries: tuple[float, ...] = (0.0,) * 2 * BINS
    accepted: float = FIRST * TRUST
    judged: float = TRUST
    tokens: float = 0.0  # of rounds that drafted, and
    seconds: float = 0.0  # what they took
    stretch: float = 1.0  # seconds of verifying over those of a bare forward
    level: float = 0.0  # seconds of a drafted level, 0 before one was timed
    plain: int = 0  # rounds since one that drafted
    patience: int = RETRY

    def chance(self, confidence: float, runner: bool = False) -> float:
        """How often a token of this confidence is accepted, by what was seen of its like; of an
        unseen like, what the draft believes, but no more than is usual."""
        place = _bin(confidence, runner)
        belief = BELIEF * min(confidence, self.usual)
        return (self.hits[place] + belief) / (self.tries[place] + BELIEF)

    @property
    def usual(self) -> float:
        """How often a drafted token is accepted, whatever its confidence."""
        return self.accepted / self.judged


@dataclass(frozen=True)
class Auto:
    """The controller. ``costs`` are of bare forwards here, written by ``Recipe.fit``."""

    costs: Costs | None = None

    def start(self) -> State:
        return Pace()

    def grow(self, stem: Tree, state: State) -> Growing:
        pace: Pace = state
        bar = self.rate(pace)
        tree, tip, reach = stem, len(stem) - 1, 1.0
        others: list[tuple[float, int, int, float]] = []
        trying = pace.plain >= pace.patience
        while len(tree) < LONGEST:
            price = self.level(pace) + self.row(pace, len(tree) + 1)
            if reach * pace.usual <= bar * price and not (trying and tree is stem):
                break
            scores: Scores = yield tree
            token, q = scores.draw(tip)
            runners = RUNNERS if q is None else 0
            odds, rest = _odds(scores, tip, token, runners)
            for other, confidence in rest:
                others.append((reach * pace.chance(confidence, True), tip, other, confidence))
            tree = add(tree, tip, token, q, odds)
            reach *= pace.chance(odds)
            tip = len(tree) - 1
        for worth, parent, other, confidence in sorted(others, reverse=True):
            if len(tree) >= MOST or worth <= bar * self.row(pace, len(tree) + 1):
                break
            tree = add(tree, parent, other, None, confidence)
        return tree

    def fold(self, state: State, round: Round) -> State:
        pace: Pace = state
        nodes = round.tree
        if not nodes.tokens:
            return replace(self._timed(pace, round), plain=pace.plain + 1)
        pace = self._judged(self._timed(pace, round), round)
        took = self._seconds(pace, round)
        pace = replace(
            pace,
            tokens=FADE * pace.tokens + len(round.tokens),
            seconds=FADE * pace.seconds + took,
            plain=0,
        )
        pays = len(round.tokens) / took > 1 / self._alone(pace)
        return replace(pace, patience=RETRY if pays else min(SELDOM, 2 * pace.patience))

    def rate(self, pace: Pace) -> float:
        """Tokens a second to beat: plain decoding's; what the best chain is expected to reach, were
        every token as likely to be accepted as the usual one; what has been reached, if more."""
        alone, level = self._alone(pace), self.level(pace)
        spent, chance, tokens = alone, 1.0, 1.0
        best = 1 / alone
        for rows in range(1, LONGEST):
            spent += level + self.row(pace, rows)
            chance *= pace.usual
            tokens += chance
            if tokens / spent < best:
                break
            best = tokens / spent
        return max(best, (pace.tokens + 1) / (pace.seconds + alone))

    def level(self, pace: Pace) -> float:
        """Seconds of a draft forward."""
        return pace.level or self._bare.draft

    def row(self, pace: Pace, rows: int) -> float:
        """Seconds that one row on top of ``rows`` adds to a verification."""
        return pace.stretch * (self._bare.verify(rows + 1) - self._bare.verify(rows))

    @property
    def _bare(self) -> Costs:
        assert self.costs is not None, "Auto needs measured costs: see Recipe.fit"
        return self.costs

    def _alone(self, pace: Pace) -> float:
        """Seconds of a token of plain decoding."""
        return pace.stretch * self._bare.verify(1)

    def _seconds(self, pace: Pace, round: Round) -> float:
        """What a round took; by the model of costs where tokens were drawn."""
        if not _drawn(round.tree):
            return round.draft_seconds + round.verify_seconds
        deep = height(round.tree.parents)
        return deep * self._bare.draft + self._bare.verify(1 + len(round.tree))

    def _timed(self, pace: Pace, round: Round) -> Pace:
        """With the seconds of this round taken in, if nothing was drawn."""
        if _drawn(round.tree) or round.verify_seconds <= 0:
            return pace
        bare = self._bare.verify(1 + len(round.tree))
        stretch = FADE * pace.stretch + (1 - FADE) * round.verify_seconds / bare
        deep = height(round.tree.parents)
        if not deep:
            return replace(pace, stretch=stretch)
        level = round.draft_seconds / deep
        if pace.level:
            level = FADE * pace.level + (1 - FADE) * level
        return replace(pace, stretch=stretch, level=level)

    def _judged(self, pace: Pace, round: Round) -> Pace:
        """With the verdict on each token that was looked at: those of the accepted path, and their
        siblings up to the one that was right."""
        hits = [SLOW * value for value in pace.hits]
        tries = [SLOW * value for value in pace.tries]
        accepted, judged = SLOW * pace.accepted, SLOW * pace.judged
        path = (ROOT, *round.verdict.path)
        ended = round.verdict.own is None
        for parent, right in zip(path, (*path[1:], None), strict=True):
            if right is None and ended:
                break  # the answer was cut here: nothing was refused
            below = [n for n, above in enumerate(round.tree.parents) if above == parent]
            for place, node in enumerate(below):
                kind = _bin(round.tree.odds[node], place > 0)
                tries[kind] += 1
                hits[kind] += node == right
                if place == 0:  # the chain itself
                    judged += 1
                    accepted += node == right
        return replace(pace, hits=tuple(hits), tries=tuple(tries), accepted=accepted, judged=judged)


def _bin(confidence: float, runner: bool) -> int:
    return bisect_right(BOUNDS, confidence) + BINS * runner


def _drawn(tree: Tree) -> bool:
    return any(law is not None for law in tree.q)


def _odds(
    scores: Scores, node: int, token: int, runners: int
) -> tuple[float, Sequence[tuple[int, float]]]:
    """The draft's probability of a token after ``node``, and of its likeliest alternatives."""
    law = torch.softmax(scores.logits(node).float(), -1)
    if not runners:
        return float(law[token]), ()
    top = law.topk(min(runners + 1, law.shape[0]))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return float(law[token]), [(other, odds) for other, odds in pairs if other != token][:runners]

"""Replays answers of simulated pairs without a model or a clock.

A pair is what forwards cost in truth and how good its draft is. Tokens of a prompt are easy or hard
in stretches. A calibrated draft is right as often as it says, and an overconfident one says more.
What a shape observes is the true seconds times noise; what counts is the true seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from saccade.core.costs import Costs
from saccade.core.protocols import Shape, State
from saccade.core.result import Round, Verdict
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import ROOT, Tree

TOKENS = 96  # of an answer
PROMPTS = 20
LOOKED_AHEAD = 64  # tokens that a draft may look at beyond the end of an answer
SECOND = 0.15  # of one true forward of one row
NOISE = 0.06  # the standard deviation of the logarithm of observed seconds
OUTLIERS = 0.01  # the share of forwards that take three times as long
RUNNER_RIGHT = 0.4  # how often a runner-up is right where the first token is wrong
CHAINS = (0, 1, 2, 3, 4, 5, 7, 9, 12)
VOCAB = 4
END, RIGHT, WRONG, OTHER = 0, 1, 2, 3  # Each token of the target is RIGHT, but the last is END.
RULES = Sampling(end_ids=(END,))


@dataclass(frozen=True)
class Pair:
    """What forwards cost, in forwards of one row of the target, and how good the draft is."""

    name: str
    step: float  # of the draft
    rows: tuple[int, ...]
    times: tuple[float, ...]  # of the target's forwards by the number of rows
    easy: float = 0.6  # the share of tokens that the draft is nearly always right about
    overconfidence: float = 1.0  # its confidence is its accuracy to the power of one over this
    lengths: tuple[int, ...] = (TOKENS,)  # of the answers, in turn
    prompts: int = PROMPTS

    @property
    def costs(self) -> Costs:
        return Costs(self.rows, tuple(SECOND * each for each in self.times), SECOND * self.step)

    def length(self, prompt: int) -> int:
        """Returns the number of tokens of the answer to a prompt."""
        return self.lengths[prompt % len(self.lengths)]


@dataclass(frozen=True)
class Text:
    """A target's answer as the draft sees it, by place: [place]."""

    right: np.ndarray  # whether the draft's first choice is the target's
    confidence: np.ndarray
    runner: np.ndarray  # whether its second choice is right where the first is not


def text_of(pair: Pair, prompt: int) -> Text:
    noise = np.random.default_rng([prompt, 7])
    count = pair.length(prompt) + LOOKED_AHEAD
    easy = np.clip(pair.easy + noise.normal(0, 0.12), 0.02, 0.98)
    accuracy = np.where(noise.random(count) < easy, 0.98, noise.uniform(0.05, 0.9, count))
    right = noise.random(count) < accuracy
    confidence = accuracy ** (1 / pair.overconfidence)
    return Text(right, confidence, noise.random(count) < RUNNER_RIGHT)


def seconds_of_chain(pair: Pair, length: int) -> float:
    """The true seconds of all answers by drafts of this length; of 0, by plain decoding."""
    costs, total = pair.costs, 0.0
    for prompt in range(pair.prompts):
        right, written = text_of(pair, prompt).right, 0
        while (left := pair.length(prompt) - written) > 0:
            drafted, hits = min(length, left), 0
            while hits < drafted and right[written + hits]:
                hits += 1
            written += hits + 1
            total += drafted * costs.draft + costs.verify(1 + drafted)
    return total


def seconds_of_shape(shape: Shape, pair: Pair, learn: Callable[[Shape, State], Shape]) -> float:
    """The true seconds of all answers by a shape; ``learn`` returns the next answer's shape."""
    total = 0.0
    for prompt in range(pair.prompts):
        state = shape.start()
        for _, seconds, state in replay(shape, pair, prompt):  # noqa: B007 The last state counts.
            total += seconds
        shape = learn(shape, state)
    return total


def replay(shape: Shape, pair: Pair, prompt: int) -> Iterator[tuple[Round, float, State]]:
    """Yields each round of an answer, its true seconds, and the state after it."""
    text, costs = text_of(pair, prompt), pair.costs
    noise = np.random.default_rng([prompt, 11])
    state, written = shape.start(), 0

    def observed(seconds: float) -> float:
        factor = float(np.exp(noise.normal(0, NOISE)))
        return seconds * factor * (3.0 if noise.random() < OUTLIERS else 1.0)

    last = pair.length(prompt) - 1
    while written <= last:
        tree, forwards = grow(shape, state, text, written, last)
        verdict = verdict_on(tree, written, last)
        drafting, verifying = forwards * costs.draft, costs.verify(1 + len(tree))
        round = Round(
            request=0,
            tree=tree,
            verdict=verdict,
            finish=None,
            p=Scores(Tree(), [], RULES, (), 0),
            q=None,
            draft_seconds=observed(drafting),
            verify_seconds=observed(verifying),
            note=tree.confidences,
        )
        state = shape.fold(state, round)
        written += len(verdict.tokens)
        yield round, drafting + verifying, state


def grow(shape: Shape, state: State, text: Text, written: int, last: int) -> tuple[Tree, int]:
    """Returns a draft after ``written`` tokens, and how many forwards it took.

    ``last`` is the place of the token that ends the answer.
    """
    growing, forwards = shape.grow(state), 0
    rows: list[torch.Tensor] = []
    try:
        wanted = next(growing)
        while True:
            forwards += 1
            while len(rows) <= len(wanted):
                place = written + len(rows)
                rows.append(
                    logits(
                        bool(text.right[place]),
                        bool(text.runner[place]),
                        float(text.confidence[place]),
                        place == last,
                    )
                )
            wanted = growing.send(Scores(wanted, rows, RULES, (), 0))
    except StopIteration as stop:
        return stop.value, forwards


@cache
def logits(right: bool, runner: bool, confidence: float, is_last: bool) -> torch.Tensor:
    """The draft's logits at a place."""
    law = torch.full((VOCAB,), 0.1 * (1 - confidence) + 1e-6)
    true = END if is_last else RIGHT
    first, second = (true, WRONG) if right else (WRONG, true if runner else OTHER)
    law[first], law[second] = confidence, 0.7 * (1 - confidence) + 2e-6
    return law.log()


def verdict_on(tree: Tree, written: int, last: int) -> Verdict:
    """Returns which nodes the target accepts after ``written`` tokens."""
    nodes: list[int] = []
    here = ROOT
    while True:
        below = [node for node, above in enumerate(tree.parents) if above == here]
        true = END if written + len(nodes) == last else RIGHT
        hit = [node for node in below if tree.tokens[node] == true]
        if not hit:
            kind = "recovered" if below else "bonus"
            return Verdict(tuple(nodes), (RIGHT,) * len(nodes), RIGHT, kind)
        here = hit[0]
        nodes.append(here)


# -- what is remembered of a pair's costs ------------------------------------------------------

ROWS_TIMED = (1, 8, 26)  # of a slow model


def exact(pair: Pair) -> Costs:
    """Costs as they are, at the few numbers of rows at which a slow model is timed."""
    costs = pair.costs
    return replace(costs, rows=ROWS_TIMED, target=tuple(map(costs.verify, ROWS_TIMED)))


def busy(pair: Pair) -> Costs:
    """Costs of a busy moment: T(26)/T(1) is at least 7.6, and a draft's step 1.7 times as dear."""
    costs = pair.costs
    one = costs.verify(1)
    steep = (one, max(2.4 * one, costs.verify(8)), max(7.6 * one, costs.verify(26)))
    return Costs(ROWS_TIMED, steep, 1.7 * costs.draft)


def too_cheap(pair: Pair) -> Costs:
    """Costs by which everything pays: rows are free, and a draft's step takes half as long."""
    costs = pair.costs
    return Costs((1, 26), (costs.verify(1), 1.05 * costs.verify(1)), 0.5 * costs.draft)


def unmeasured(pair: Pair) -> Costs:
    """Costs by the number of weights alone, in seconds of no clock."""
    return Costs((1, 26), (1.0, 1 + 25 * 0.055), 0.8 * pair.step)


MEMORIES: Sequence[Callable[[Pair], Costs]] = (exact, busy, too_cheap, unmeasured)

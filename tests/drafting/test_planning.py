"""Claims about the stopwatch of planning: what a shape decides counts, and what models do does not.

The clock is a number that the shape and the models move, so nothing here depends on real time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from saccade.core.protocols import Growing, Shape, State
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import Tree, chain
from saccade.drafting import drafters
from saccade.drafting.drafters import TimedShape, drive

GROWING, LEARNING, SCORING = 3.0, 5.0, 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    seconds = [0.0]
    monkeypatch.setattr(drafters, "now", lambda: seconds[0])
    yield seconds


@dataclass(frozen=True)
class Slow(Shape):
    """A chain of ``length`` tokens, each decided in ``GROWING`` seconds."""

    length: int
    clock: list[float]
    fails: bool = False

    def grow(self, state: State) -> Growing:
        tree = Tree()
        for token in range(self.length):
            self.clock[0] += GROWING
            yield tree
            if self.fails:
                raise ValueError("no")
            tree = chain(range(token + 1))
        return tree

    def fold(self, state, round):
        self.clock[0] += LEARNING
        return state


def grow(planning: TimedShape, clock: list[float]) -> Tree:
    def score(trees: dict[int, Tree]) -> dict[int, Scores]:
        clock[0] += SCORING
        return {0: Scores(trees[0], [], Sampling(), (), 0)}

    return drive(score, {0: planning.grow(None)}, {})[0]


def test_growing_and_learning_count_and_scoring_does_not(clock):
    """Claim: a draft of four forwards takes four decisions' seconds, whatever its forwards take,
    and what is learnt from the round is added. Fails if the clock runs on while a tree is scored.
    """
    planning = TimedShape(Slow(4, clock))
    assert grow(planning, clock) == chain(range(4))
    assert planning.seconds == 4 * GROWING and clock[0] == 4 * (GROWING + SCORING)
    planning.fold(None, None)  # type: ignore[arg-type]
    assert planning.seconds == 4 * GROWING + LEARNING


def test_a_shape_that_fails_is_still_seen_to_fail(clock):
    """Claim: the stopwatch hides no error of a shape."""
    planning = TimedShape(Slow(4, clock, fails=True))
    with pytest.raises(drafters.DraftFailed):
        grow(planning, clock)
    assert planning.seconds == GROWING

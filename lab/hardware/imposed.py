"""Imposed acceptance: real forwards, verdicts as asked, to time shapes with random weights.

The words mean what they mean in vLLM: an acceptance *length* is the mean number of drafted tokens
accepted a round, *rates* are the chance of each place of a draft given that those before it stood.
What comes out is no answer; how long it took is real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from saccade.core.errors import OptionError
from saccade.core.protocols import Scoring
from saccade.core.sampling import Law, Scores
from saccade.core.tree import ROOT, Tree, children
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import serial


@dataclass(frozen=True)
class ImposedAcceptance:
    """How many tokens of a draft stand: a mean length, or a rate for each place."""

    length: float | None = None
    rates: tuple[float, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.length is None) == (not self.rates):
            raise OptionError("give an acceptance length or acceptance rates")
        if self.length is not None and self.length < 0:
            raise OptionError(f"an acceptance length of {self.length} is below 0")
        if not all(0 <= rate <= 1 for rate in self.rates):
            raise OptionError("acceptance rates are between 0 and 1")

    def accepted(self, request: int, round: int, depth: int) -> int:
        """How many of the first ``depth`` tokens stand in this round; the last rate goes on."""
        rng = np.random.default_rng([self.seed, request, round])
        if self.length is not None:
            whole = int(self.length)
            return min(depth, whole + int(rng.random() < self.length - whole))
        for place in range(depth):
            if rng.random() >= self.rates[min(place, len(self.rates) - 1)]:
                return place
        return depth


@dataclass(frozen=True)
class ImposedScores(Scores):
    """Scores whose laws let the nodes ``stands`` pass and no other: point masses all of them."""

    stands: tuple[int, ...] = ()  # from the root down

    def law(self, node: int) -> Law | None:
        """The token to accept after ``node``, or the likeliest that refuses what was drafted."""
        before = (ROOT, *self.stands)
        if node in before[:-1]:
            return self.tree.tokens[before[before.index(node) + 1]]
        first, second = self.top(node, 2)
        refused = {self.tree.tokens[child] for child in children(self.tree, node)}
        return next((t for t in (first, second) if t not in refused), _other(refused))

    def every_law(self) -> Callable[[int], Law | None]:
        return self.law


def _other(refused: set[int]) -> int:
    return next(token for token in range(len(refused) + 1) if token not in refused)


class ImposedSession:
    """A session whose forwards are real and whose verdicts are imposed."""

    def __init__(self, session: Scoring, acceptance: ImposedAcceptance) -> None:
        self._session, self._acceptance = session, acceptance
        self._rounds: dict[int, int] = {}

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        found: dict[int, Scores] = {}
        for request, scores in self._session.score(trees).items():
            round = self._rounds[request] = self._rounds.get(request, -1) + 1
            path = _first_path(trees[request])
            count = self._acceptance.accepted(request, round, len(path))
            found[request] = ImposedScores(
                scores.tree,
                scores.rows,
                scores.rules,
                scores.context,
                scores.offset,
                scores.request,
                path[:count],
            )
        return found

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self._session.commit(tokens)


def _first_path(tree: Tree) -> tuple[int, ...]:
    """The first child of the first child, and so on: in a ranked tree, the likeliest path."""
    node, found = ROOT, []
    while below := list(children(tree, node)):
        node = below[0]
        found.append(node)
    return tuple(found)


def imposed(recipe: Recipe, acceptance: ImposedAcceptance) -> Recipe:
    """The recipe with its verdicts imposed. Serial schedules only.

    Raises OptionError for a draft in parallel, which is judged while it goes on.
    """
    if recipe.drafts_beside_target:
        raise OptionError(f"{recipe.name} drafts in parallel: acceptance is imposed serially only")
    return replace(recipe, schedule=replace(serial, run=partial(_imposed, acceptance)))


def _imposed(acceptance: ImposedAcceptance, session: Scoring, *rest: Any) -> Any:
    return serial(ImposedSession(session, acceptance), *rest)

"""Imposes an acceptance on real forwards, so that draft shapes can be timed with random weights.

An acceptance *length* is the mean number of drafted tokens accepted in a round. *Rates* are the
chance that the token at each place of a draft is accepted, given that those before it were. vLLM's
synthetic acceptance has the same two settings but counts otherwise: its length includes the
target's own token, and its rate of a place is the chance that all tokens up to there are accepted.
The text that comes out is no answer, but its timing is real.
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
    """Says how many drafted tokens are accepted, by a mean length or by a rate for each place.

    Exactly one of both is given. Raises OptionError otherwise, and for impossible numbers.
    """

    length: float | None = None  # Without the target's own token.
    rates: tuple[float, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.length is None) == (not self.rates):
            raise OptionError("give an acceptance length or acceptance rates")
        if self.length is not None and self.length < 0:
            raise OptionError(f"an acceptance length of {self.length} is below 0")
        if not all(0 <= rate <= 1 for rate in self.rates):
            raise OptionError(f"acceptance rates must be between 0 and 1, not {self.rates}")

    def accepted(self, request: int, round: int, depth: int) -> int:
        """Returns how many of the first ``depth`` drafted tokens are accepted in this round.

        The same seed, request and round always give the same number. Places beyond the last rate
        have that rate too. Where ``depth`` is less than the length, all are accepted, so the mean
        is then below the length.
        """
        rng = np.random.default_rng([self.seed, request, round])
        if self.length is not None:
            # A length of 3.2 accepts 4 tokens in a fifth of the rounds, and else 3.
            whole = int(self.length)
            return min(depth, whole + int(rng.random() < self.length - whole))
        for place in range(depth):
            if rng.random() >= self.rates[min(place, len(self.rates) - 1)]:
                return place
        return depth


@dataclass(frozen=True)
class ImposedScores(Scores):
    """Scores whose laws make the verdict accept ``accepted_nodes`` and no other node.

    Each law puts all its probability on one token.
    """

    accepted_nodes: tuple[int, ...] = ()  # From the root down.

    def law(self, node: int) -> Law | None:
        """Returns the one token that has all the probability after ``node``.

        Before an accepted node this is that node's token. Elsewhere it is a token that was not
        drafted there, so every node under ``node`` is rejected: the likelier of the target's two
        likeliest tokens that was not drafted, or else the smallest id that was not.
        """
        accepted_path = (ROOT, *self.accepted_nodes)
        if node in accepted_path[:-1]:
            next_node = accepted_path[accepted_path.index(node) + 1]
            return self.tree.tokens[next_node]
        first, second = self.top(node, 2)
        rejected = {self.tree.tokens[child] for child in children(self.tree, node)}
        return next((t for t in (first, second) if t not in rejected), _token_outside(rejected))

    def every_law(self) -> Callable[[int], Law | None]:
        return self.law


def _token_outside(rejected: set[int]) -> int:
    """Returns the smallest id that is not among these."""
    return next(token for token in range(len(rejected) + 1) if token not in rejected)


class ImposedSession:
    """A session whose forwards are real and whose acceptance is imposed."""

    def __init__(self, session: Scoring, acceptance: ImposedAcceptance) -> None:
        self._session, self._acceptance = session, acceptance
        self._rounds: dict[int, int] = {}  # By request, the number of its last round, from 0.

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        imposed_scores: dict[int, Scores] = {}
        for request, scores in self._session.score(trees).items():
            round = self._rounds[request] = self._rounds.get(request, -1) + 1
            path = _first_path(trees[request])
            count = self._acceptance.accepted(request, round, len(path))
            imposed_scores[request] = ImposedScores(
                scores.tree,
                scores.rows,
                scores.rules,
                scores.context,
                scores.answer_length,
                scores.request,
                path[:count],
            )
        return imposed_scores

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self._session.commit(tokens)


def _first_path(tree: Tree) -> tuple[int, ...]:
    """Returns the nodes of the path of first children, from the root's child down.

    It is the likeliest path of a tree whose children are ordered by probability.
    """
    node, path = ROOT, []
    while below := list(children(tree, node)):
        node = below[0]
        path.append(node)
    return tuple(path)


def impose_acceptance(recipe: Recipe, acceptance: ImposedAcceptance) -> Recipe:
    """Returns the recipe with this acceptance imposed.

    Raises OptionError for a recipe that drafts in parallel, whose drafts are verified while
    drafting goes on.
    """
    if recipe.drafts_beside_target:
        raise OptionError(
            f"{recipe.name} drafts in parallel; acceptance can only be imposed on serial methods"
        )
    return replace(
        recipe,
        schedule=replace(serial, run=partial(_serial_with_imposed_acceptance, acceptance)),
    )


def _serial_with_imposed_acceptance(
    acceptance: ImposedAcceptance, session: Scoring, *rest: Any
) -> Any:
    return serial(ImposedSession(session, acceptance), *rest)

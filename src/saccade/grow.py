"""Shapes of a draft. A growing draft is a generator: it yields the tree it wants scored, is sent
the scores, and returns the finished tree; whoever drives it may score many requests' together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saccade.sampling import Scores
from saccade.tree import add
from saccade.types import ROOT, Growing, Round, State, Tree

Paths = tuple[tuple[int, ...], ...]
"""A static tree as paths of top-k ranks: (0, 1) is the runner-up after the best first token."""


@dataclass(frozen=True)
class Chain:
    """``length`` tokens in a row: the draft's arg-max when greedy, else a draw from its law."""

    length: int

    def start(self) -> State:
        return None

    def grow(self, stem: Tree, state: State) -> Growing:
        return grow_chain(stem, self.length)

    def fold(self, state: State, round: Round) -> State:
        return state


@dataclass(frozen=True)
class Static:
    """A fixed tree of top-k ranks; a level is one draft forward. Nodes are chosen, not drawn."""

    paths: Paths

    def __post_init__(self) -> None:
        check_paths(self.paths)

    def start(self) -> State:
        return None

    def grow(self, stem: Tree, state: State) -> Growing:
        return grow_static(stem, self.paths)

    def fold(self, state: State, round: Round) -> State:
        return state


def grow_chain(stem: Tree, length: int) -> Growing:
    tree = stem
    while len(tree) < len(stem) + length:
        scores: Scores = yield tree
        tip = len(tree) - 1
        token, q = scores.draw(tip)
        tree = add(tree, tip, token, q)
    return tree


def grow_static(stem: Tree, paths: Paths) -> Growing:
    tree = stem
    node_of: dict[tuple[int, ...], int] = {(): len(stem) - 1 if len(stem) else ROOT}
    for level in _levels(paths) or [[]]:  # even of an empty tree the root is looked at
        scores: Scores = yield tree
        widest: dict[tuple[int, ...], int] = {}
        for path in level:
            widest[path[:-1]] = max(widest.get(path[:-1], 0), path[-1] + 1)
        best = {above: scores.top(node_of[above], count) for above, count in widest.items()}
        for path in level:
            above, rank = path[:-1], path[-1]
            node_of[path] = len(tree)
            tree = add(tree, node_of[above], best[above][rank])
    return tree


def check_paths(paths: Sequence[Sequence[int]]) -> None:
    """Raises ValueError unless every path's beginnings are paths too."""
    known = {tuple(path) for path in paths}
    for path in known:
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"tree path {list(path)} has no parent {list(path[:-1])}")
        if not path or min(path) < 0:
            raise ValueError(f"a tree path is a list of ranks from 0, not {list(path)}")


def _levels(paths: Paths) -> list[list[tuple[int, ...]]]:
    deepest = max((len(path) for path in paths), default=0)
    return [sorted(p for p in paths if len(p) == depth) for depth in range(1, deepest + 1)]

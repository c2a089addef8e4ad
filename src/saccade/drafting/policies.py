"""Shapes of a draft. A growing draft is a generator: it yields the tree it wants scored, is sent
the scores, and returns the finished tree; whoever drives it may score many requests' together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from saccade.core.protocols import Growing, State
from saccade.core.result import Round
from saccade.core.sampling import Scores
from saccade.core.tree import ROOT, Tree, add

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


@dataclass(frozen=True)
class Best:
    """The ``nodes`` likeliest tree by the draft's law: best first, one draft forward a node."""

    nodes: int

    def start(self) -> State:
        return None

    def grow(self, stem: Tree, state: State) -> Growing:
        return grow_best(stem, self.nodes)

    def fold(self, state: State, round: Round) -> State:
        return state


def grow_best(stem: Tree, nodes: int) -> Growing:
    """Adds the likeliest token not yet in the tree, ``nodes`` times. A child is never likelier than
    its parent, so this order finds the tree of greatest expected acceptance under q."""
    tree = stem
    scores: Scores = yield tree
    tip = len(stem) - 1
    open_: list[tuple[float, int, int]] = []  # (-log of the path's probability, node, token)
    _offer(open_, scores, tip, 0.0, nodes)
    while len(tree) < len(stem) + nodes and open_:
        worth, parent, token = heapq.heappop(open_)
        tree = add(tree, parent, token)
        if len(tree) < len(stem) + nodes:
            scores = yield tree
            _offer(open_, scores, len(tree) - 1, worth, nodes)
    return tree


def _offer(
    heap: list[tuple[float, int, int]], scores: Scores, node: int, worth: float, count: int
) -> None:
    law = torch.log_softmax(scores.logits(node).double(), -1)
    for token in scores.top(node, count):
        if bool(law[token].isfinite()):
            heapq.heappush(heap, (worth - float(law[token]), node, token))


def grow_chain(stem: Tree, length: int) -> Growing:
    """``length`` tokens in a row; fewer where one of them would end the answer."""
    tree = stem
    while len(tree) < len(stem) + length:
        scores: Scores = yield tree
        tip = len(tree) - 1
        token, q = scores.draw(tip)
        tree = add(tree, tip, token, q)
        if token in scores.rules.ends:
            break
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

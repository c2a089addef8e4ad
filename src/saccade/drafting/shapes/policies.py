"""Shapes of a draft. A growing draft is a generator: it yields the tree it wants scored, is sent
the scores, and returns the finished tree; whoever drives it may score many requests' together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.core.errors import MethodError
from saccade.core.protocols import Growing, Shape, State
from saccade.core.sampling import Law, Scores
from saccade.core.tree import ROOT, Tree, add

Paths = tuple[tuple[int, ...], ...]
"""A static tree as paths of top-k ranks: (0, 1) is the runner-up after the best first token."""

LONGEST, LARGEST = 63, 64  # tokens of a chain, nodes of a tree that a user writes


@dataclass(frozen=True)
class Chain(Shape):
    """``length`` tokens in a row: the draft's arg-max when greedy, else a draw from its law.

    Fewer where one of them would end the answer, or where a shape derived from this one stops.
    """

    family: ClassVar[str] = "chain"
    usage: ClassVar[str] = "chain-N"
    examples: ClassVar[tuple[str, ...]] = ("1", "4")

    length: int

    @classmethod
    def read(cls, text: str) -> Shape:
        return Chain(size("chain", text, LONGEST))

    @property
    def written(self) -> str:
        return f"chain-{self.length}"

    @property
    def branches(self) -> bool:
        return False

    @property
    def stepwise(self) -> bool:
        return type(self).grow is Chain.grow

    @property
    def reads_laws(self) -> bool:
        return type(self).goes_on is not Chain.goes_on

    def goes_on(self, scores: Scores, node: int, law: Law | None) -> bool:
        """Whether one more token is drawn after ``node``, decided before the draw (see ``Tree``).

        ``law`` is the draft's there. The first token of a draft is not asked about. Derive from
        ``Chain`` and override this for a chain that stops by itself; it must be a pure function.
        """
        return True

    def longer(self, tree: Tree, scores: Scores) -> Tree | None:
        """The chain with one more token; None where it stops."""
        last = len(tree) - 1
        law = scores.law(last)
        if len(tree) and not self.goes_on(scores, last, law):
            return None
        token, q = scores.draw(last, law)
        return add(tree, last, token, q)

    def grow(self, state: State) -> Growing:
        tree, ended = Tree(), False
        while len(tree) < self.length and not ended:
            scores: Scores = yield tree
            longer = self.longer(tree, scores)
            if longer is None:
                break
            tree, ended = longer, longer.tokens[-1] in scores.rules.ends
        return tree


def confidence(scores: Scores, node: int, law: Law | None) -> float:
    """The draft's probability of the token after ``node``: of its choice when greedy, else the mean
    over its draws, sum q^2, which is known before one is drawn."""
    if isinstance(law, Tensor):
        return float(law.square().sum())
    plain = scores.logits(node).float().softmax(-1)
    return float(plain.max() if law is None else plain[law])


@dataclass(frozen=True)
class Static(Shape):
    """A fixed tree of top-k ranks; a level is one draft forward. Nodes are chosen, not drawn."""

    family: ClassVar[str] = "paths"
    usage: ClassVar[str] = "paths-0,1,0.0,0.1"
    examples: ClassVar[tuple[str, ...]] = ("0,2,0.1,2.0,0.1.0", "2")

    paths: Paths

    def __post_init__(self) -> None:
        check_paths(self.paths)

    @classmethod
    def read(cls, text: str) -> Shape:
        """A user's own tree: ``0,1,0.0,0.1`` for two first tokens and two after the first."""
        try:
            paths = tuple(tuple(int(rank) for rank in path.split(".")) for path in text.split(","))
            check_paths(paths)
        except ValueError as error:
            raise MethodError(
                f"cannot read the tree paths-{text}: write ranks joined by dots, as in "
                f"paths-0,1,0.0,0.1 ({error})"
            ) from error
        if len(set(paths)) > LARGEST:
            raise MethodError(f"a tree of {len(set(paths))} nodes is too large: {LARGEST} at most")
        if (rank := max(map(max, paths))) >= LARGEST:
            raise MethodError(f"a tree's ranks go from 0 to {LARGEST - 1}, not to {rank}")
        return Static(tuple(dict.fromkeys(sorted(paths, key=lambda path: (len(path), path)))))

    @property
    def written(self) -> str:
        return "paths-" + ",".join(".".join(map(str, path)) for path in self.paths)

    @property
    def branches(self) -> bool:
        return any(map(any, self.paths))

    def grow(self, state: State) -> Growing:
        return grow_static(self.paths)


@dataclass(frozen=True)
class Best(Shape):
    """The ``nodes`` likeliest tree by the draft's law: best first, one draft forward a node.

    A child is never likelier than its parent, so this order finds the tree of greatest expected
    acceptance under q.
    """

    family: ClassVar[str] = "best"
    usage: ClassVar[str] = "best-N"
    examples: ClassVar[tuple[str, ...]] = ("1", "5")

    nodes: int

    @classmethod
    def read(cls, text: str) -> Shape:
        return Best(size("best", text, LARGEST))

    @property
    def written(self) -> str:
        return f"best-{self.nodes}"

    @property
    def branches(self) -> bool:
        return self.nodes > 1

    def grow(self, state: State) -> Growing:
        tree = Tree()
        scores: Scores = yield tree
        open_: list[tuple[float, int, int]] = []  # (-log of the path's probability, node, token)
        _offer(open_, scores, ROOT, 0.0, self.nodes)
        while len(tree) < self.nodes and open_:
            worth, parent, token = heapq.heappop(open_)
            tree = add(tree, parent, token)
            if len(tree) < self.nodes:
                scores = yield tree
                _offer(open_, scores, len(tree) - 1, worth, self.nodes)
        return tree


def _offer(
    heap: list[tuple[float, int, int]], scores: Scores, node: int, worth: float, count: int
) -> None:
    law = torch.log_softmax(scores.logits(node).double(), -1)
    for token in scores.top(node, count):
        if bool(law[token].isfinite()):
            heapq.heappush(heap, (worth - float(law[token]), node, token))


def grow_static(paths: Paths) -> Growing:
    tree = Tree()
    node_of: dict[tuple[int, ...], int] = {(): ROOT}
    levels = max((len(path) for path in paths), default=1)  # even of an empty tree one is looked at
    for depth in range(1, levels + 1):
        level = sorted(path for path in paths if len(path) == depth and path[:-1] in node_of)
        scores: Scores = yield tree
        widest: dict[tuple[int, ...], int] = {}
        for path in level:
            widest[path[:-1]] = max(widest.get(path[:-1], 0), path[-1] + 1)
        tops = scores.tops({node_of[above]: count for above, count in widest.items()})
        best = {above: tops[node_of[above]] for above in widest}
        for path in level:
            above, rank = path[:-1], path[-1]
            if rank < len(best[above]):  # the rules may leave fewer tokens than the tree has ranks
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


def size(family: str, text: str, largest: int) -> int:
    """The whole number N of ``FAMILY-N``. Raises MethodError where it is none up to ``largest``."""
    count = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= count <= largest:
        raise MethodError(f"shape={family}-{text}: write {family}-N with N from 1 to {largest}")
    return count

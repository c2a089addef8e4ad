"""Fixed shapes of a draft: chains, static trees and best-first trees.

``CostedShape`` and ``confidence`` are for shapes in other files that decide how far to draft.

A growing draft is a generator. It yields the tree to be scored, is sent the scores, and returns the
finished tree, so the caller may score the trees of many requests together.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from saccade.core.capabilities import Capabilities, Capability, capabilities_that_hold
from saccade.core.costs import Costs
from saccade.core.digits import read_digits
from saccade.core.errors import MethodError
from saccade.core.protocols import CostMemory, Growing, Shape, State
from saccade.core.sampling import Law, Scores
from saccade.core.tree import ROOT, Tree, add

Paths = tuple[tuple[int, ...], ...]
"""A static tree as paths of top-k ranks: (0, 1) is the runner-up after the best first token."""

# The largest shapes that a user may write.
MAX_CHAIN_TOKENS = 63
MAX_TREE_NODES = 64


@dataclass(frozen=True)
class Chain(Shape):
    """``length`` tokens in a row: the draft's arg-max when greedy, else a draw from its law.

    There are fewer where one of them would end the answer, or where ``goes_on`` of a derived class
    stops the chain.
    """

    family: ClassVar[str] = "chain"
    usage: ClassVar[str] = "chain-N"
    examples: ClassVar[tuple[str, ...]] = ("1", "4")

    length: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return Chain(parse_size("chain", text, MAX_CHAIN_TOKENS))

    @property
    def spelling(self) -> str:
        return f"chain-{self.length}"

    @property
    def branches(self) -> bool:
        return False

    @property
    def offers(self) -> Capabilities:
        """The capabilities that the drafter and the schedule may rely on.

        A derived class that overrides ``grow`` does not offer ``GROWS_TOKEN_BY_TOKEN``, and one
        that overrides ``goes_on`` does not offer ``FIXED_LENGTH``.
        """
        return capabilities_that_hold(
            {
                Capability.FIXED_FORM: True,
                Capability.GROWS_TOKEN_BY_TOKEN: type(self).grow is Chain.grow,
                Capability.FIXED_LENGTH: type(self).goes_on is Chain.goes_on,
            }
        )

    def goes_on(self, scores: Scores, node: int, law: Law | None) -> bool:
        """Returns whether one more token is drawn after ``node``, which has to be decided before
        the draw (see ``Tree``).

        ``law`` is the draft's law of that token (see ``confidence``). The first token of a draft is
        always drawn, so this is not called for it. For a chain that stops by itself, derive from
        ``Chain`` and override this; it must be a pure function.
        """
        return True

    def add_token(self, tree: Tree, scores: Scores) -> Tree | None:
        """Returns the chain with one more token; None where it stops."""
        last = len(tree) - 1  # For an empty tree this is -1, which is ``ROOT``.
        law = scores.law(last)
        if len(tree) and not self.goes_on(scores, last, law):
            return None
        token, q = scores.draw(last, law)
        return add(tree, last, token, q)

    def grow(self, state: State) -> Growing:
        tree = Tree()
        ended = False
        while len(tree) < self.length and not ended:
            scores: Scores = yield tree
            longer = self.add_token(tree, scores)
            if longer is None:
                break
            tree = longer
            ended = not scores.may_go_on(tree, len(tree) - 1)
        return tree


def confidence(scores: Scores, node: int, law: Law | None) -> float:
    """Returns how sure the draft is of the token after ``node``: the draft's probability of it.

    ``law`` is the draft's law after ``node``. When greedy it is the id of the token that will be
    drafted; None stands for the draft's likeliest token. When sampling it is a tensor q. The result
    is then the expected probability of the token that will be drawn, sum q^2, which does not depend
    on the draw.
    """
    if isinstance(law, Tensor):
        return float(law.square().sum())
    # The forward may have computed the likeliest token and its probability already.
    computed = scores.computed_top(node)
    if computed is not None and law in (None, computed.token):
        return computed.probability
    plain = scores.logits(node).float().softmax(-1)
    return float(plain.max() if law is None else plain[law])


class CostedShape(Shape):
    """A shape that decides by the measured costs of forwards on this machine.

    ``recipe.plan`` fills in ``costs`` before the first draft. A derived class is a dataclass that
    declares the field ``costs``.
    """

    costs: Costs | None = None

    @property
    def needs(self) -> Capabilities:
        return frozenset({Capability.COSTS})

    def prepare(
        self,
        measure: Callable[[], Costs],
        memory: CostMemory | None = None,
        target_family: str = "",
    ) -> Shape:
        return self if self.costs is not None else replace(cast(Any, self), costs=measure())

    @property
    def forward_costs(self) -> Costs:
        """The costs of forwards here, which ``recipe.plan`` has to fill in first."""
        assert self.costs is not None, (
            f"{type(self).__name__} needs measured costs: see recipe.plan"
        )
        return self.costs


def _parse_rank(text: str) -> int:
    """Returns a child's rank among its siblings. Raises ValueError for a text that is no number."""
    rank = read_digits(text)
    if rank is None:
        raise ValueError(f"ranks from 0 are whole numbers, and {text!r} is none")
    return rank


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
    def parse(cls, text: str) -> Shape:
        """Parses a tree: ``0,1,0.0,0.1`` has two first tokens, and two more after the first."""
        try:
            paths = tuple(tuple(map(_parse_rank, path.split("."))) for path in text.split(","))
            check_paths(paths)
        except ValueError as error:
            raise MethodError(
                f"cannot read the tree paths-{text}: write ranks joined by dots, as in "
                f"paths-0,1,0.0,0.1 ({error})"
            ) from error
        if len(set(paths)) > MAX_TREE_NODES:
            raise MethodError(
                f"a tree of {len(set(paths))} nodes is too large: {MAX_TREE_NODES} at most"
            )
        if (rank := max(map(max, paths))) >= MAX_TREE_NODES:
            raise MethodError(f"a tree's ranks go from 0 to {MAX_TREE_NODES - 1}, not to {rank}")
        by_level = sorted(paths, key=lambda path: (len(path), path))
        return Static(tuple(dict.fromkeys(by_level)))  # Each path once, in this order.

    @property
    def spelling(self) -> str:
        return "paths-" + ",".join(".".join(map(str, path)) for path in self.paths)

    @property
    def branches(self) -> bool:
        return any(rank > 0 for path in self.paths for rank in path)

    @property
    def offers(self) -> Capabilities:
        return frozenset({Capability.FIXED_FORM})

    def grow(self, state: State) -> Growing:
        return grow_static(self.paths)


@dataclass(frozen=True)
class Best(Shape):
    """The likeliest tree of ``nodes`` nodes by the draft's law, with one draft forward per node.

    A child is never likelier than its parent, so taking the likeliest node each time finds the tree
    of greatest expected acceptance under q.
    """

    family: ClassVar[str] = "best"
    usage: ClassVar[str] = "best-N"
    examples: ClassVar[tuple[str, ...]] = ("1", "5")

    nodes: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return Best(parse_size("best", text, MAX_TREE_NODES))

    @property
    def spelling(self) -> str:
        return f"best-{self.nodes}"

    @property
    def branches(self) -> bool:
        return self.nodes > 1

    @property
    def offers(self) -> Capabilities:
        return frozenset({Capability.FIXED_FORM})

    def grow(self, state: State) -> Growing:
        tree = Tree()
        scores: Scores = yield tree
        # Each candidate is (-log of its path's probability, parent, token).
        candidates: list[tuple[float, int, int]] = []
        _push_children(candidates, scores, ROOT, surprise=0.0, count=self.nodes)
        while len(tree) < self.nodes and candidates:
            surprise, parent, token = heapq.heappop(candidates)
            tree = add(tree, parent, token)
            node = len(tree) - 1
            if len(tree) < self.nodes and scores.may_go_on(tree, node):
                scores = yield tree
                _push_children(candidates, scores, node, surprise, self.nodes)
        return tree


def _push_children(
    heap: list[tuple[float, int, int]], scores: Scores, node: int, surprise: float, count: int
) -> None:
    """Pushes the likeliest tokens after ``node``, whose path has a -log probability of
    ``surprise``."""
    law = torch.log_softmax(scores.logits(node).double(), -1)
    for token in scores.top(node, count):
        if bool(law[token].isfinite()):
            heapq.heappush(heap, (surprise - float(law[token]), node, token))


def grow_static(paths: Paths) -> Growing:
    """Grows a static tree of top-k ranks, one level per draft forward."""
    tree = Tree()
    # By the path, the nodes after which a token may be of use.
    open_nodes: dict[tuple[int, ...], int] = {(): ROOT}
    # Even without paths one draft forward scores the root, because a shape may plan its next tree
    # from the draft's law there.
    levels = max((len(path) for path in paths), default=1)
    for depth in range(1, levels + 1):
        level = sorted(path for path in paths if len(path) == depth and path[:-1] in open_nodes)
        if not level and depth > 1:
            break
        scores: Scores = yield tree
        # How many of the likeliest tokens after each parent the level needs.
        counts: dict[tuple[int, ...], int] = {}
        for path in level:
            counts[path[:-1]] = max(counts.get(path[:-1], 0), path[-1] + 1)
        tops = scores.tops({open_nodes[parent]: count for parent, count in counts.items()})
        # The tokens after each parent, likeliest first.
        best = {parent: tops[open_nodes[parent]] for parent in counts}
        for path in level:
            parent = path[:-1]
            rank = path[-1]
            if rank < len(best[parent]):  # The rules may leave fewer tokens than there are ranks.
                node = len(tree)
                tree = add(tree, open_nodes[parent], best[parent][rank])
                if scores.may_go_on(tree, node):
                    open_nodes[path] = node
    return tree


def check_paths(paths: Sequence[Sequence[int]]) -> None:
    """Raises ValueError unless every path is made of ranks from 0, and its parent is a path too.

    A path of one rank needs no parent.
    """
    unique = {tuple(path) for path in paths}
    for path in unique:
        if len(path) > 1 and path[:-1] not in unique:
            raise ValueError(f"tree path {list(path)} has no parent {list(path[:-1])}")
        if not path or min(path) < 0:
            raise ValueError(f"a tree path is a list of ranks from 0, not {list(path)}")


def parse_size(family: str, text: str, largest: int) -> int:
    """Returns the N of ``FAMILY-N``. Raises MethodError unless it is from 1 to ``largest``."""
    count = read_digits(text) or 0
    if not 1 <= count <= largest:
        raise MethodError(f"shape={family}-{text}: write {family}-N with N from 1 to {largest}")
    return count

"""EAGLE-2's dynamic draft tree, with which SAGE's paper contrasts its own (Sec. 6.2).

Li et al., 2024: EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees. A node's
value is the product of the draft's probabilities on its path. Growing has two phases:

    expand   of each level, the k nodes of greatest value get their k likeliest tokens as children
    rerank   the m candidates of greatest value are the tree; where values tie, shallower ones win

A child's value is at most its parent's, so what the second phase keeps is a tree. A level is one
forward of the draft. The paper expands 10 nodes a level, six levels deep. It keeps 60 candidates
for a target of 7B weights, and 50 or 48 for larger targets. The paper drafts with a head. Here any
drafter may grow the tree: ``specvlm/shape=eagle-2`` grows it over SpecVLM's view.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from saccade.core.protocols import Growing, Shape, State
from saccade.core.sampling import Scores
from saccade.core.tree import ROOT, Tree, add
from saccade.drafting.provides import Provides
from saccade.methods.sage import likeliest


@dataclass
class Candidate:
    """A token that the first phase considered.

    ``node`` is its number in the tree that the draft scores. Only candidates that are expanded are
    nodes of that tree; for the others it stays ROOT.
    """

    value: float  # The log of the product of the probabilities on its path.
    parent: Candidate | None
    token: int
    node: int = ROOT


@dataclass(frozen=True)
class Eagle2(Shape):
    """EAGLE-2's tree of at most ``levels`` levels: the root and ``top`` nodes of each level but the
    last are expanded, and at the end the ``nodes`` candidates of greatest value are kept.

    Nodes are chosen, not drawn.
    """

    name: ClassVar[str] = "eagle-2"

    levels: int = 6
    top: int = 10
    nodes: int = 60

    @property
    def spelling(self) -> str:
        return self.name

    def grow(self, state: State) -> Growing:
        tree = Tree()
        levels: list[list[Candidate]] = []
        frontier: list[Candidate | None] = [None]  # The root.
        while frontier and len(levels) < self.levels:
            scores: Scores = yield tree
            children = self._children(scores, frontier)
            levels.append(children)
            expanded = sorted(children, key=lambda child: -child.value)[: self.top]
            if len(levels) < self.levels:
                for child in expanded:
                    child.node = len(tree)
                    parent = ROOT if child.parent is None else child.parent.node
                    tree = add(tree, parent, child.token)
            frontier = [child for child in expanded if scores.may_go_on(tree, child.node)]
        return self._rerank(levels)

    def _children(self, scores: Scores, parents: list[Candidate | None]) -> list[Candidate]:
        """Returns the ``top`` likeliest tokens after each of these nodes, None being the root."""
        nodes = [ROOT if parent is None else parent.node for parent in parents]
        children = []
        likeliest_by_node = likeliest(scores, nodes, self.top)
        for parent, (probabilities, tokens) in zip(parents, likeliest_by_node, strict=True):
            above = 0.0 if parent is None else parent.value
            for p, token in zip(probabilities, tokens, strict=True):
                if p > 0:  # The request's rules may forbid a token.
                    # A value must not exceed the parent's, even if rounding makes p more than 1.
                    children.append(Candidate(above + min(0.0, math.log(p)), parent, token))
        return children

    def _rerank(self, levels: list[list[Candidate]]) -> Tree:
        """Returns the tree of the ``nodes`` candidates of greatest value, level by level."""
        candidates = [(depth, each) for depth, level in enumerate(levels) for each in level]
        candidates.sort(key=lambda entry: (-entry[1].value, entry[0]))
        # Level by level, each parent is added to the tree before its children.
        best = sorted(candidates[: self.nodes], key=lambda entry: entry[0])
        tree = Tree()
        node_of: dict[int, int] = {}  # by the candidate's id()
        for _, candidate in best:
            parent = ROOT if candidate.parent is None else node_of[id(candidate.parent)]
            node_of[id(candidate)] = len(tree)
            tree = add(tree, parent, candidate.token)
        return tree


PROVIDES = Provides(shapes={Eagle2.name: Eagle2()})

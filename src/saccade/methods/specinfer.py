"""SpecInfer: a tree whose siblings are drawn from the draft's law, not chosen.

Miao et al., 2024 (ASPLOS), Sec. 4.3: the draft draws several tokens after a node, and multi-step
speculative sampling judges one after another. A token x drawn from q is accepted with probability

    min(1, p(x) / q(x)),   and after a rejection   p <- norm(max(p - q, 0))

which is ``core/verify.py``, so this file only grows the trees. SpecInfer draws siblings *with
replacement* (``sampled-...``): each from the same q, so that two may be the same token. *Without
replacement* (``distinct-...``; Jeon et al., 2024; Yang et al., 2024) each sibling is drawn from q
with the earlier siblings removed, and that law is stored with it:

    q <- norm(q without x)

Where decoding is greedy nothing is drawn: the siblings are the draft's likeliest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.core.digits import read_digits
from saccade.core.errors import MethodError
from saccade.core.protocols import Growing, Shape, State
from saccade.core.sampling import Law, Scores
from saccade.core.tree import ROOT, Tree, add
from saccade.drafting.provides import Provides
from saccade.drafting.shapes.policies import MAX_TREE_NODES


@dataclass(frozen=True)
class SampledTree(Shape):
    """Every node of level l gets ``widths[l]`` children, drawn with replacement. The root is level
    0. A node after which no token is of use to the answer gets none."""

    family: ClassVar[str] = "sampled"
    usage: ClassVar[str] = "sampled-NxNxN"
    examples: ClassVar[tuple[str, ...]] = ("2", "2x1")

    widths: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Shape:
        parts = text.split("x")
        widths = [read_digits(part) or 0 for part in parts]
        if min(widths) < 1:
            raise MethodError(
                f"cannot read the tree {cls.family}-{text}: write how many children the nodes of "
                f"each level get, joined by x, as in {cls.family}-2x2x1"
            )
        if (nodes := count_nodes(widths)) > MAX_TREE_NODES:
            raise MethodError(
                f"the tree {cls.family}-{text} has {nodes} nodes, and {MAX_TREE_NODES} is the most"
            )
        return cls(tuple(widths))

    @property
    def spelling(self) -> str:
        return f"{self.family}-{'x'.join(map(str, self.widths))}"

    @property
    def branches(self) -> bool:
        return max(self.widths) > 1

    def grow(self, state: State) -> Growing:
        tree = Tree()
        leaves = [ROOT]
        for width in self.widths:
            scores: Scores = yield tree  # The draft has scored every node of the tree so far.
            level_start = len(tree)
            for leaf in leaves:
                tree = self.branch(tree, scores, leaf, width)
            new_nodes = range(level_start, len(tree))
            leaves = [node for node in new_nodes if scores.may_go_on(tree, node)]
            if not leaves:
                break
        return tree

    def branch(self, tree: Tree, scores: Scores, node: int, width: int) -> Tree:
        """Returns the tree with up to ``width`` more children under ``node``."""
        law = scores.law(node)
        if not isinstance(law, Tensor):  # Decoding is greedy, and the law is a single token.
            for token in scores.top(node, width):
                tree = add(tree, node, token)
            return tree
        for _ in range(width):
            if not isinstance(law, Tensor):  # No token is left to draw.
                break
            token, q = scores.draw(node, law)
            tree = add(tree, node, token, q)
            law = self.next_law(law, token)
        return tree

    def next_law(self, law: Tensor, token: int) -> Law | None:
        """Returns the law that the next sibling of ``token`` is drawn from; None if there is none.

        ``law`` is the one that ``token`` was drawn from.
        """
        return law


@dataclass(frozen=True)
class DistinctTree(SampledTree):
    """Every node of level l gets ``widths[l]`` children, drawn without replacement. It gets fewer
    where fewer tokens have a probability above zero."""

    family: ClassVar[str] = "distinct"
    usage: ClassVar[str] = "distinct-NxNxN"
    examples: ClassVar[tuple[str, ...]] = ("3", "2x1")

    # A family must define ``parse`` and ``spelling`` itself, even if they only call the parent's
    # (``provides._check_family``).
    @classmethod
    def parse(cls, text: str) -> Shape:
        return super().parse(text)

    @property
    def spelling(self) -> str:
        return super().spelling

    def next_law(self, law: Tensor, token: int) -> Law | None:
        remaining_law = law.index_fill(0, torch.tensor(token, device=law.device), 0.0)
        # Whether there is another sibling must not depend on which token was drawn: a drawn token
        # stands (see ``Tree``). The number of tokens that ``law`` gives a probability above zero is
        # the same whichever of them was drawn.
        has_other_token = int(law.count_nonzero()) > 1
        return remaining_law / remaining_law.sum() if has_other_token else None


def count_nodes(widths: list[int]) -> int:
    """Returns how many nodes a tree has when every node of level l has ``widths[l]`` children."""
    level, total = 1, 0
    for width in widths:
        level *= width
        total += level
    return total


PROVIDES = Provides(shape_families=(SampledTree, DistinctTree))

"""SAGE's tree grown from live laws instead of planned a round ahead: what planning ahead costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from saccade.core.protocols import Growing, Shape
from saccade.core.result import Round
from saccade.core.tree import ROOT, Tree, add
from saccade.drafting.provides import Provides
from saccade.methods.sage import NODES, W_MAX, Adapted, Reach, confidence, history


@dataclass(frozen=True)
class SageLive(Shape):
    """The adaptive shape; every level is chosen by the laws just scored."""

    def start(self) -> Adapted:
        return Adapted()

    def grow(self, state: Adapted) -> Growing:
        return live(state.most)

    def fold(self, state: Adapted, round: Round) -> Adapted:
        return history(state, round)


def live(most: int) -> Growing:
    """The tree grown from the laws as they are scored; a level is one draft forward."""
    tree, level, reach = Tree(), 1, Reach(1.0, most)
    frontier = [(ROOT, 1.0, 1.0)]  # (node, P of the path, P of the node)
    while frontier and level in reach.levels:
        scores = yield tree
        grown: list[tuple[float, float, int, int]] = []
        for node, chance, parent in frontier:
            law = torch.softmax(scores.logits(node).double(), -1)
            if level == 1:
                reach = Reach(confidence(law), most)
            ranks, tokens = (best.tolist() for best in torch.topk(law, min(2 * W_MAX, len(law))))
            for whole, rank in reach.admitted(level, chance, parent, ranks):
                grown.append((whole, ranks[rank], node, tokens[rank]))
        grown.sort(key=lambda entry: -entry[0])
        frontier = []
        for whole, p, node, token in grown[: NODES - len(tree)]:
            tree = add(tree, node, token)
            frontier.append((len(tree) - 1, whole, p))
        level += 1
    return tree


PROVIDES = Provides(shapes={"sage-live": SageLive()})

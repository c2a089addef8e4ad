"""SAGE: Accelerating Vision-Language Models via Entropy-Guided Adaptive Speculative Decoding.

Tong et al., 2026. A confident draft gets a deep, narrow tree, an uncertain one a wide, shallow one.

    alpha   = 1 - H(P~) / log k,  P~ the top k of the draft's law, renormalised    (Eq. 7-9)
    D       = D_min + alpha (D_max - D_min)                                        (Eq. 10)
    W       = W_min + (1 - alpha) (W_max - W_min)                                  (Eq. 11)
    W_l     = W / l * (0.5 + P_parent)                                             (Eq. 12)
    path in tree  iff  at every level l: rank < W_l and P(path up to l) > theta_l = 0.1 l / D

Algorithm 1 plans the next tree from the round just finished: the draft's law at the root stands for
every level. When the node cap binds, the likeliest paths stay. The mean accepted length moves the
deepest depth (Sec. 3.3). Shape ``sage-live`` grows the tree from the laws just scored instead: the
difference is what planning a round early costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.core.protocols import Growing, Shape
from saccade.core.result import Round
from saccade.core.tree import ROOT, Tree, add
from saccade.drafting.drafters import ModelDrafter
from saccade.drafting.provides import Provides
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.policies import Paths, grow_static
from saccade.methods.specvlm import TREE, VIEW

K, NODES, WINDOW = 10, 64, 10
D_MIN, D_MAX = 3, 8
W_MIN, W_MAX = 2, 10
LOW, HIGH = 2.0, 3.0  # mean accepted draft tokens per round
Ranks = Sequence[float]  # probabilities, likeliest first


def confidence(law: Float[Tensor, " vocab"], k: int = K) -> float:
    """alpha (Eq. 7-9)."""
    top = torch.topk(law, min(k, law.shape[0])).values
    top = top / top.sum()
    entropy = -float(torch.special.xlogy(top, top).sum())
    return 1.0 - entropy / math.log(k)


@dataclass(frozen=True)
class Reach:
    """How deep and wide a tree may be at a confidence."""

    alpha: float
    most: int

    @property
    def deep(self) -> float:
        return D_MIN + self.alpha * (self.most - D_MIN)  # Eq. 10

    @property
    def levels(self) -> range:
        return range(1, math.floor(self.deep + 0.5) + 1)

    def admitted(
        self, level: int, path: float, parent: float, ranks: Ranks
    ) -> list[tuple[float, int]]:
        """The children a node may have: (P of the path down to it, rank)."""
        wide = (W_MIN + (1 - self.alpha) * (W_MAX - W_MIN)) / level * (0.5 + parent)  # Eq. 11-12
        likely = [(path * p, rank) for rank, p in enumerate(ranks) if rank < wide]
        return [child for child in likely if child[0] > 0.1 * level / self.deep]


def plan(ranks: Ranks, reach: Reach) -> Paths:
    """The tree when every level's law gives rank r the probability ``ranks[r]``."""
    found: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for level in reach.levels:
        frontier = [
            (whole, (*path, rank))
            for chance, path in frontier
            for whole, rank in reach.admitted(
                level, chance, ranks[path[-1]] if path else 1.0, ranks
            )
        ]
        found += frontier
    found.sort(key=lambda entry: (-entry[0], len(entry[1]), entry[1]))
    return tuple(path for _, path in found[:NODES])


@dataclass(frozen=True)
class Adapted:
    """What SAGE carries from round to round."""

    paths: Paths = TREE  # the next tree
    most: int = D_MAX  # the deepest it may become
    recent: tuple[int, ...] = ()  # accepted lengths


def history(state: Adapted, round: Round) -> Adapted:
    """The state with its history brought up to date: the window's mean moves the depth by one."""
    recent = (*state.recent, len(round.verdict.accepted))[-WINDOW:]
    mean = sum(recent) / len(recent)
    most = min(D_MAX, max(D_MIN, state.most - (mean < LOW) + (mean > HIGH)))
    return Adapted(state.paths, most, recent)


@dataclass(frozen=True)
class Sage(Shape):
    """The adaptive shape, planned a round ahead. Starts from SpecVLM's tree."""

    def start(self) -> Adapted:
        return Adapted()

    def grow(self, state: Adapted) -> Growing:
        return grow_static(state.paths)

    def fold(self, state: Adapted, round: Round) -> Adapted:
        state = history(state, round)
        if round.q is None:
            return state
        law = torch.softmax(round.q.logits(ROOT).double(), -1)
        ranks = torch.topk(law, min(2 * W_MAX, len(law))).values.tolist()
        return replace(state, paths=plan(ranks, Reach(confidence(law), state.most)))


@dataclass(frozen=True)
class SageLive(Sage):
    """The adaptive shape, grown from the laws as they are scored; a level is one draft forward."""

    def grow(self, state: Adapted) -> Growing:
        tree, level, reach = Tree(), 1, Reach(1.0, state.most)
        frontier = [(ROOT, 1.0, 1.0)]  # (node, P of the path, P of the node)
        while frontier and level in reach.levels:
            scores = yield tree
            grown: list[tuple[float, float, int, int]] = []
            for node, chance, parent in frontier:
                law = torch.softmax(scores.logits(node).double(), -1)
                if level == 1:
                    reach = Reach(confidence(law), state.most)
                best = torch.topk(law, min(2 * W_MAX, len(law)))
                ranks, tokens = (found.tolist() for found in best)
                for whole, rank in reach.admitted(level, chance, parent, ranks):
                    grown.append((whole, ranks[rank], node, tokens[rank]))
            grown.sort(key=lambda entry: -entry[0])
            frontier = []
            for whole, p, node, token in grown[: NODES - len(tree)]:
                tree = add(tree, node, token)
                frontier.append((len(tree) - 1, whole, p))
            level += 1
        return tree

    def fold(self, state: Adapted, round: Round) -> Adapted:
        return history(state, round)


SAGE = Recipe(
    name="sage",
    about="SAGE: a tree as deep or wide as the draft's entropy suggests, over SpecVLM's view",
    drafter=ModelDrafter,
    view=VIEW,
    shape=Sage(),
)

PROVIDES = Provides(recipes=(SAGE,), shapes={"sage": Sage(), "sage-live": SageLive()})

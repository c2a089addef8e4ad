"""SAGE: Accelerating Vision-Language Models via Entropy-Guided Adaptive Speculative Decoding.

Tong et al., 2026. A confident draft gets a deep, narrow tree, an uncertain one a wide, shallow one.

    alpha   = 1 - H(P~) / log k,  P~ the top k of the draft's law, renormalised    (Eq. 7-9)
    D       = D_min + alpha (D_max - D_min)                                        (Eq. 10)
    W       = W_min + (1 - alpha) (W_max - W_min)                                  (Eq. 11)
    W_l     = W / l * (0.5 + P_parent)                                             (Eq. 12)
    path in tree  iff  at every level l: rank < W_l and P(path up to l) > theta_l = 0.1 l / D

That is what Sec. 3.2 states "formally" (``rule=formal``). In its prose the top W_l are always
children, and theta decides which of them are expanded (``rule=prose``).

Algorithm 1 plans the next tree from the last round. ``sage`` takes D and W from that round's law at
the root, and grows the tree over the laws that it scores then. ``sage-ahead`` uses that one law for
every level too. ``sage-live`` takes D and W from the law that was just scored at the root, with no
more forwards; its difference to ``sage`` is what planning early costs. Where the cap on nodes
binds, the likeliest paths stay. The mean accepted length moves the deepest depth (Sec. 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.core.errors import MethodError
from saccade.core.protocols import Growing, Shape
from saccade.core.result import Round
from saccade.core.tree import ROOT, Tree, add
from saccade.drafting.drafters import ModelDrafter
from saccade.drafting.provides import Axis, Provides, Setting, parse_share
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.policies import Paths, grow_static
from saccade.methods.specvlm import TREE, VIEW

IMAGES = 0.2  # the share of an image that the draft sees; of a video SpecVLM's tenth (Sec. 5)

Ranks = Sequence[float]  # probabilities, likeliest first
Range = tuple[int, int]  # least and most
Rule = Literal["formal", "prose"]


def confidence(law: Float[Tensor, " vocab"], k: int = 10) -> float:
    """Returns alpha, the confidence of a law (Eq. 7-9)."""
    top = torch.topk(law, min(k, law.shape[0])).values
    top = top / top.sum()
    entropy = -float(torch.special.xlogy(top, top).sum())
    return 1.0 - entropy / math.log(k)


@dataclass(frozen=True)
class Reach:
    """How deep and wide a tree may be at a confidence ``alpha``."""

    shape: Sage
    alpha: float
    most: int  # levels, at a confidence of 1

    @property
    def deep(self) -> float:
        least = self.shape.depth[0]
        return least + self.alpha * (self.most - least)  # Eq. 10

    @property
    def levels(self) -> range:
        return range(1, math.floor(self.deep + 0.5) + 1)

    def admitted(
        self, level: int, path: float, parent: float, ranks: Ranks
    ) -> list[tuple[float, int]]:
        """Returns the children that a node may have, as (P of the path down to it, rank)."""
        least, most = self.shape.width
        width = (least + (1 - self.alpha) * (most - least)) / level * (0.5 + parent)  # Eq. 11-12
        # A token that the request's rules forbid has probability zero and is never a child.
        likely = [(path * p, rank) for rank, p in enumerate(ranks) if rank < width and p > 0]
        if self.shape.rule == "prose":
            return likely
        return [child for child in likely if self.expands(level, child[0])]

    def expands(self, level: int, path: float) -> bool:
        """Returns whether a node of that level may have children: its path is likelier than
        theta_l."""
        return path > self.shape.theta * level / self.deep


def plan(ranks: Ranks, reach: Reach) -> Paths:
    """Returns the tree where every level's law gives rank r the probability ``ranks[r]``."""
    nodes: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for level in reach.levels:
        children = [
            (whole, (*path, rank))
            for chance, path in frontier
            for whole, rank in reach.admitted(
                level, chance, ranks[path[-1]] if path else 1.0, ranks
            )
        ]
        nodes += children
        frontier = [entry for entry in children if reach.expands(level, entry[0])]
    nodes.sort(key=lambda entry: (-entry[0], len(entry[1]), entry[1]))
    return tuple(path for _, path in nodes[: reach.shape.nodes])


@dataclass(frozen=True)
class Adapted:
    """The state that SAGE carries from round to round."""

    most: int  # the deepest the next tree may become
    alpha: float = 0.5  # the last round's confidence (Algorithm 1, line 3)
    recent: tuple[int, ...] = ()  # accepted lengths
    paths: Paths = TREE  # the next tree of ``sage-ahead``


@dataclass(frozen=True)
class Sage(Shape):
    """The adaptive shape: as deep and wide as the last round's law at the root says, grown over the
    laws as they are scored. A level is one draft forward."""

    named: ClassVar[str] = "sage"

    depth: Range = (3, 8)  # D_min, D_max
    width: Range = (2, 10)  # W_min, W_max
    nodes: int = 64
    top: int = 10  # k
    theta: float = 0.1
    window: int = 10
    moves: Range = (2, 3)  # mean accepted draft tokens a round
    rule: Rule = "prose"

    @property
    def spelling(self) -> str:
        return self.named

    def start(self) -> Adapted:
        return Adapted(self.depth[1])

    def at(self, state: Adapted, law: Float[Tensor, " vocab"]) -> Reach:
        """Returns the reach of a tree whose law at the root is ``law``."""
        return Reach(self, state.alpha, state.most)

    def grow(self, state: Adapted) -> Growing:
        tree, level, reach = Tree(), 1, Reach(self, 1.0, state.most)
        frontier = [(ROOT, 1.0, 1.0)]  # (node, P of the path, P of the node)
        while frontier and level in reach.levels:
            scores = yield tree
            children: list[tuple[float, float, int, int]] = []
            for node, chance, parent in frontier:
                law = torch.softmax(scores.logits(node).double(), -1)
                if level == 1:
                    reach = self.at(state, law)
                best = torch.topk(law, min(2 * self.width[1], len(law)))
                ranks, tokens = best.values.tolist(), best.indices.tolist()
                for whole, rank in reach.admitted(level, chance, parent, ranks):
                    children.append((whole, ranks[rank], node, tokens[rank]))
            children.sort(key=lambda entry: -entry[0])
            frontier = []
            for whole, p, node, token in children[: self.nodes - len(tree)]:
                tree = add(tree, node, token)
                if reach.expands(level, whole):
                    frontier.append((len(tree) - 1, whole, p))
            level += 1
        return tree

    def fold(self, state: Adapted, round: Round) -> Adapted:
        """Moves the depth by one by the window's mean (Sec. 3.3), and takes the next alpha from the
        law at the root."""
        recent = (*state.recent, len(round.verdict.accepted))[-self.window :]
        mean = sum(recent) / len(recent)
        (least, deepest), (low, high) = self.depth, self.moves
        most = min(deepest, max(least, state.most - (mean < low) + (mean > high)))
        state = replace(state, most=most, recent=recent)
        if round.q is None:
            return state
        return self.learn(state, torch.softmax(round.q.logits(ROOT).double(), -1))

    def learn(self, state: Adapted, law: Float[Tensor, " vocab"]) -> Adapted:
        """Returns the state after a round with this law at the root."""
        return replace(state, alpha=confidence(law, self.top))


@dataclass(frozen=True)
class SageAhead(Sage):
    """The next tree is planned whole, by the last root's law at every level; the first tree is
    SpecVLM's."""

    named: ClassVar[str] = "sage-ahead"

    def grow(self, state: Adapted) -> Growing:
        return grow_static(state.paths)

    def learn(self, state: Adapted, law: Float[Tensor, " vocab"]) -> Adapted:
        ranks = torch.topk(law, min(2 * self.width[1], len(law))).values.tolist()
        reach = Reach(self, confidence(law, self.top), state.most)
        return replace(state, paths=plan(ranks, reach))


@dataclass(frozen=True)
class SageLive(Sage):
    """As deep and wide as the law that is scored at the root now says."""

    named: ClassVar[str] = "sage-live"

    def at(self, state: Adapted, law: Float[Tensor, " vocab"]) -> Reach:
        return Reach(self, confidence(law, self.top), state.most)


SAGE = Recipe(
    name="sage",
    about="SAGE: a tree as deep or wide as the draft's entropy suggests, over SpecVLM's view",
    drafter=ModelDrafter,
    view=replace(VIEW, images=IMAGES),
    shape=Sage(),
)


SETTINGS = {
    "depth": "least and most levels of SAGE's trees",
    "width": "least and most width of SAGE's trees",
    "nodes": "the most nodes of SAGE's trees",
    "top": "tokens of a law that SAGE's entropy is taken of",
    "theta": "share a path of SAGE's needs at full depth, 0 to 1",
    "window": "rounds that SAGE's history goes back",
    "moves": "accepted tokens a round below and above which SAGE's depth moves",
    "rule": "what SAGE's theta decides: prose (who is expanded) or formal (who is included)",
}
MAX_SETTING = 1000  # the largest whole number of a setting


def _parse(axis: str, value: str) -> Any:
    """Parses a setting, spelled as its default is. Raises MethodError."""
    if axis == "theta":
        return parse_share(axis, value)
    if axis == "rule":
        if value not in get_args(Rule):
            raise MethodError(f"unknown rule {value!r}; known: {', '.join(get_args(Rule))}")
        return value
    default = _spell(getattr(Sage(), axis))
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in value.split("-")]
    is_ordered = len(numbers) == default.count("-") + 1 and numbers == sorted(numbers)
    in_range = is_ordered and numbers[0] >= 1 and numbers[-1] <= MAX_SETTING
    if not in_range or (axis, value) == ("top", "1"):
        raise MethodError(
            f"{axis}={value} cannot be; it is in whole numbers, as in {axis}={default}"
        )
    return tuple(numbers) if len(numbers) > 1 else numbers[0]


def _spell(value: object) -> str:
    """Returns a setting's value as an override writes it."""
    return "-".join(map(str, value)) if isinstance(value, tuple) else format(value)


def _axis(name: str) -> Axis:
    """Makes an axis that sets a field of SAGE's shapes."""
    default = getattr(Sage(), name)
    return Setting(
        axis=name,
        owner=Sage,
        field=name,
        parse=_parse,
        words=f"{SETTINGS[name]}, as in {_spell(default)}",
        needs="is SAGE's: it needs shape=sage, sage-live or sage-ahead",
        default=default,
        spell=_spell,
    )


PROVIDES = Provides(
    recipes=(SAGE,),
    shapes={each.named: each() for each in (Sage, SageAhead, SageLive)},
    axes={name: _axis(name) for name in SETTINGS},
)

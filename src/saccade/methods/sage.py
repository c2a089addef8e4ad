"""SAGE: Accelerating Vision-Language Models via Entropy-Guided Adaptive Speculative Decoding.

Tong et al., 2026. A confident draft gets a deep, narrow tree, an uncertain one a wide, shallow one.

    alpha   = 1 - H(P~) / log k,  P~ the top k of the draft's law, renormalised    (Eq. 7-9)
    D       = D_min + alpha (D_max - D_min)                                        (Eq. 10)
    W       = W_min + (1 - alpha) (W_max - W_min)                                  (Eq. 11)
    W_1     = W;  W_l = W / l * (0.5 + P_parent) beyond the first level            (Eq. 12)
    path in tree  iff  at every level l: rank < W_l and P(path up to l) > theta_l = 0.1 l / D

That is what Sec. 3.2 states "formally" (``rule=formal``). In its prose the top W_l are always
children, and theta decides which of them are expanded (``rule=prose``).

Algorithm 1 plans the whole next tree from one law, P_out, which is the draft's law at the root of
the last round. The shape ``sage-ahead`` does this, and the method ``sage-paper`` uses it. Its first
tree is SpecVLM's (App. A.1). One law is a poor guess of the laws at deeper levels, so the method
``sage`` takes only D and W from the last round, and grows the tree level by level from the laws
that the draft then scores. The shape ``sage-live`` takes D and W from the law that the draft has
just scored at the root, and needs no more forwards than ``sage``. Comparing the two shows what
taking D and W from the last round costs. Where a tree would have too many nodes, a planned tree
keeps the likeliest paths. A tree that grows level by level keeps its upper levels whole, and the
likeliest nodes of the level that reaches the limit. The mean accepted length moves the D_max in use
(Sec. 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch

from saccade.core.digits import read_digits
from saccade.core.errors import MethodError
from saccade.core.protocols import Growing, Shape
from saccade.core.result import Round
from saccade.core.sampling import Scores
from saccade.core.tree import ROOT, Tree, add
from saccade.drafting.drafters import ModelDrafter
from saccade.drafting.provides import Axis, Provides, Setting, parse_share
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.policies import Paths, grow_static
from saccade.methods.specvlm import TREE, VIEW

# The draft sees this share of an image's tokens. Of a video's it sees a tenth, as SpecVLM's draft
# does. Both shares are in Sec. 5.
IMAGE_KEEP = 0.2

Probabilities = Sequence[float]  # probabilities, likeliest first
Range = tuple[int, int]  # least and most
Rule = Literal["formal", "prose"]


def confidence(probabilities: Probabilities, k: int = 10) -> float:
    """Returns alpha, the confidence of a law with these probabilities (Eq. 7-9)."""
    total = math.fsum(probabilities[:k])
    top = [p / total for p in probabilities[:k]]
    return 1.0 + math.fsum(p * math.log(p) for p in top if p > 0) / math.log(k)


def likeliest(
    scores: Scores, nodes: Sequence[int], count: int
) -> list[tuple[Probabilities, list[int]]]:
    """Returns the ``count`` likeliest tokens after each node, likeliest first: their probabilities
    and their ids. One computation in float32 for all nodes."""
    logits = torch.stack([scores.logits(node) for node in nodes]).float()
    best = torch.topk(logits, min(count, logits.shape[-1]))
    probabilities = (best.values - logits.logsumexp(-1, keepdim=True)).exp()
    return list(zip(probabilities.tolist(), best.indices.tolist(), strict=True))


@dataclass(frozen=True)
class Reach:
    """How deep and wide a tree may be at a confidence ``alpha``."""

    shape: Sage
    alpha: float
    max_levels: int  # the depth at a confidence of 1

    @property
    def depth(self) -> float:
        least = self.shape.depth[0]
        return least + self.alpha * (self.max_levels - least)  # Eq. 10

    @property
    def levels(self) -> range:
        """The levels of the tree, from 1 on: as many as the rounded depth."""
        return range(1, math.floor(self.depth + 0.5) + 1)

    def children(
        self,
        level: int,
        parent_path_probability: float,
        parent_probability: float,
        probabilities: Probabilities,
    ) -> list[tuple[float, int]]:
        """Returns the children that a parent may have, as (P of the path down to the child, rank).

        Args:
            level: the level that the children are on.
            parent_path_probability: P of the path down to the parent, the parent included.
            parent_probability: the parent's own factor in ``parent_path_probability``.
            probabilities: those of the tokens after the parent, likeliest first.
        """
        least, most = self.shape.width
        width = least + (1 - self.alpha) * (most - least)  # Eq. 11
        if level > 1:
            width *= (0.5 + parent_probability) / level  # Eq. 12
        # A token that the request's rules forbid has probability zero and is never a child.
        top_children = [
            (parent_path_probability * p, rank)
            for rank, p in enumerate(probabilities)
            if rank < width and p > 0
        ]
        if self.shape.rule == "prose":
            return top_children
        return [child for child in top_children if self.expands(level, child[0])]

    def expands(self, level: int, path_probability: float) -> bool:
        """Returns whether a path is likelier than theta_l, the bound of its level. Then its node
        may have children, and by the formal rule it is in the tree."""
        return path_probability > self.shape.theta * level / self.depth


def plan(probabilities: Probabilities, reach: Reach) -> Paths:
    """Returns the tree that grows if every node has the same law after it, whose token of rank r
    has the probability ``probabilities[r]``."""
    # Both lists have (P of the path down to a node, the path as ranks).
    nodes: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for level in reach.levels:
        children = []
        for parent_path_p, path in frontier:
            parent_p = probabilities[path[-1]] if path else 1.0
            for path_p, rank in reach.children(level, parent_path_p, parent_p, probabilities):
                children.append((path_p, (*path, rank)))
        nodes += children
        frontier = [entry for entry in children if reach.expands(level, entry[0])]
    # Likelier paths come first; of equally likely ones the shorter, then the one of better ranks.
    nodes.sort(key=lambda entry: (-entry[0], len(entry[1]), entry[1]))
    return tuple(path for _, path in nodes[: reach.shape.nodes])


@dataclass(frozen=True)
class SageState:
    """The state that SAGE carries from round to round."""

    max_levels: int  # the depth of the next tree at a confidence of 1
    last_alpha: float = 0.5  # the last round's confidence (Algorithm 1, line 3)
    recent: tuple[int, ...] = ()  # how many tokens each of the last rounds accepted
    paths: Paths = TREE  # the next tree of ``sage-ahead``


@dataclass(frozen=True)
class Sage(Shape):
    """The adaptive shape: as deep and wide as the draft's law at the last round's root says. It
    grows level by level, from the laws that the draft scores at the level before: one draft forward
    a level."""

    name: ClassVar[str] = "sage"

    depth: Range = (3, 8)  # D_min, D_max
    width: Range = (2, 10)  # W_min, W_max
    nodes: int = 64  # at most, in a tree
    top: int = 10  # k
    theta: float = 0.1  # theta_l at l = D
    window: int = 10  # rounds whose mean accepted length moves the depth
    # The D_max in use falls by one if the mean accepted length is below the first number, and rises
    # by one if it is above the second.
    moves: Range = (2, 3)
    rule: Rule = "prose"

    @property
    def spelling(self) -> str:
        return self.name

    def start(self) -> SageState:
        return SageState(self.depth[1])

    @property
    def most_tokens(self) -> int:
        """How many of a law's tokens a tree or its confidence may depend on."""
        return max(self.width[1], self.top)

    def reach(self, state: SageState, root_probabilities: Probabilities) -> Reach:
        """Returns how far the next tree reaches, by the confidence of the round before.

        ``root_probabilities`` are the probabilities at this round's root, likeliest first. Only
        ``SageLive`` uses them.
        """
        return Reach(self, state.last_alpha, state.max_levels)

    def grow(self, state: SageState) -> Growing:
        # The confidence of 1 is only there to enter the loop: level 1 sets the reach that counts.
        tree = Tree()
        level = 1
        reach = Reach(self, 1.0, state.max_levels)
        frontier = [(ROOT, 1.0, 1.0)]  # (node, P of the path down to it, P of the node alone)
        while frontier and level in reach.levels:
            scores = yield tree
            laws = likeliest(scores, [node for node, *_ in frontier], self.most_tokens)
            if level == 1:
                reach = self.reach(state, laws[0][0])
            # First all children that the rule allows on this level, as (P of the path down to the
            # child, P of the child alone, parent, token).
            children: list[tuple[float, float, int, int]] = []
            for (parent, parent_path_p, parent_p), (probabilities, tokens) in zip(
                frontier, laws, strict=True
            ):
                for path_probability, rank in reach.children(
                    level, parent_path_p, parent_p, probabilities
                ):
                    children.append((path_probability, probabilities[rank], parent, tokens[rank]))
            # Then the likeliest of them become nodes, as many as the tree has room for.
            children.sort(key=lambda entry: -entry[0])
            frontier = []
            for path_probability, p, parent, token in children[: self.nodes - len(tree)]:
                tree = add(tree, parent, token)
                node = len(tree) - 1
                if reach.expands(level, path_probability) and scores.may_go_on(tree, node):
                    frontier.append((node, path_probability, p))
            level += 1
        return tree

    def fold(self, state: SageState, round: Round) -> SageState:
        """Returns the state after a round.

        The mean accepted length of the last rounds changes the D_max in use by at most one level
        (Sec. 3.3). What the draft's law at the round's root changes is in :meth:`learn`.
        """
        recent = (*state.recent, len(round.verdict.accepted))[-self.window :]
        mean = sum(recent) / len(recent)
        least, deepest = self.depth
        low, high = self.moves
        max_levels = state.max_levels
        if mean < low:
            max_levels = max(least, max_levels - 1)
        elif mean > high:
            max_levels = min(deepest, max_levels + 1)
        state = replace(state, max_levels=max_levels, recent=recent)
        if round.q is None:
            return state
        ((probabilities, _),) = likeliest(round.q, [ROOT], self.most_tokens)
        return self.learn(state, probabilities)

    def learn(self, state: SageState, probabilities: Probabilities) -> SageState:
        """Returns the state after a round in which the draft's law at the root had these
        probabilities."""
        return replace(state, last_alpha=confidence(probabilities, self.top))


@dataclass(frozen=True)
class SageAhead(Sage):
    """Algorithm 1: the whole next tree is planned from the draft's law at the last round's root,
    which is taken as the law at every level. The first tree is SpecVLM's, or the first ``nodes``
    nodes of it."""

    name: ClassVar[str] = "sage-ahead"

    def start(self) -> SageState:
        # The nodes of SpecVLM's tree are listed level by level, so any first part is a tree.
        return replace(super().start(), paths=TREE[: self.nodes])

    def grow(self, state: SageState) -> Growing:
        return grow_static(state.paths)

    def learn(self, state: SageState, probabilities: Probabilities) -> SageState:
        reach = Reach(self, confidence(probabilities, self.top), state.max_levels)
        return replace(state, paths=plan(probabilities, reach))


@dataclass(frozen=True)
class SageLive(Sage):
    """The tree is as deep and wide as the probabilities at the root of the same round say."""

    name: ClassVar[str] = "sage-live"

    def reach(self, state: SageState, root_probabilities: Probabilities) -> Reach:
        return Reach(self, confidence(root_probabilities, self.top), state.max_levels)


SAGE = Recipe(
    name="sage",
    about="SAGE: a tree as deep or wide as the draft's entropy suggests, over SpecVLM's view",
    drafter=ModelDrafter,
    view=replace(VIEW, images=IMAGE_KEEP),
    shape=Sage(),
)

SAGE_PAPER = replace(
    SAGE,
    name="sage-paper",
    about="SAGE's Algorithm 1 to the letter: the next tree is planned whole from the last round",
    shape=SageAhead(),
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
    default = _to_text(getattr(Sage(), axis))
    # What is no number becomes 0, which is out of range.
    numbers = [read_digits(part) or 0 for part in value.split("-")]
    has_all_numbers = len(numbers) == len(default.split("-"))
    is_ordered = has_all_numbers and numbers == sorted(numbers)
    in_range = is_ordered and numbers[0] >= 1 and numbers[-1] <= MAX_SETTING
    # With top=1 the confidence would be divided by log 1, which is 0.
    if not in_range or (axis, numbers) == ("top", [1]):
        raise MethodError(
            f"{axis}={value} is not possible: write whole numbers, as in {axis}={default}"
        )
    return tuple(numbers) if len(numbers) > 1 else numbers[0]


def _to_text(value: object) -> str:
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
        choices=f"{SETTINGS[name]}, as in {_to_text(default)}",
        unmet_message="is SAGE's: it needs shape=sage, sage-live or sage-ahead",
        default=default,
        to_text=_to_text,
    )


PROVIDES = Provides(
    recipes=(SAGE, SAGE_PAPER),
    shapes={each.name: each() for each in (Sage, SageAhead, SageLive)},
    axes={name: _axis(name) for name in SETTINGS},
)

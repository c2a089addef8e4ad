"""Claims about the best-first tree: it is the likeliest there is, of exactly the size asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import pytest
import torch
from helpers import FAMILIES, TableSession, answered, random_table, truth
from torch import Tensor

from saccade.core.protocols import Growing, Shape
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import ROOT, Tree, chain, children, path
from saccade.drafting.drafters import drive
from saccade.drafting.shapes.policies import Best, Chain, Static, grow_static
from saccade.methods import resolve

V, DEPTH = 4, 5
Text = tuple[int, ...]


class Counting(TableSession):
    """A table that writes down how large each scored tree was."""

    def __init__(self, table: Mapping[Text, Tensor], rules: list[Sampling]) -> None:
        super().__init__(table, rules)
        self.sizes: list[int] = []

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        self.sizes.append(sum(len(tree) for tree in trees.values()))
        return super().score(trees)


def grown(
    table: Mapping[Text, Tensor], growing: Growing, rules: Sampling | None = None
) -> tuple[Tree, list[int]]:
    session = Counting(table, [rules or Sampling()])
    return drive(session.score, {0: growing}, {})[0], session.sizes


def spelled(tree: Tree, stem: int = 0) -> list[Text]:
    """What each node says from the root, in the order they were drafted."""
    paths = [tuple(tree.tokens[n] for n in path(tree, node)) for node in range(len(tree))]
    return paths[stem:]


def chance_of(table: Mapping[Text, Tensor], text: Text, stem: int = 0) -> float:
    """The probability of a text after its first ``stem`` tokens, law by law."""
    deepest = max(map(len, table))
    chance = 1.0
    for i in range(stem, len(text)):
        row = [float(x) for x in table[text[:i][:deepest]]]
        total = sum(math.exp(x - max(row)) for x in row)
        chance *= math.exp(row[text[i]] - max(row)) / total
    return chance


def chances(
    table: Mapping[Text, Tensor], stem: Text = (), deepest: int = DEPTH
) -> dict[Text, float]:
    """The same of every text under the stem, down to a depth."""
    every = (
        (*stem, *text)
        for length in range(1, deepest + 1)
        for text in product(range(len(table[()])), repeat=length)
    )
    return {text: chance_of(table, text, len(stem)) for text in every}


def likeliest(chance: Mapping[Text, float], nodes: int) -> set[Text]:
    """The brute-force answer: sort everything."""
    return set(sorted(chance, key=lambda text: -chance[text])[:nodes])


@pytest.mark.representatives(8)
@pytest.mark.parametrize("sharp", [0.3, 1.5, 4.0])
@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 30])
@pytest.mark.parametrize("seed", range(4))
def test_a_best_first_tree_is_the_likeliest_there_is(seed, nodes, sharp):
    """Claim: its nodes are the most probable texts of all lengths, in order of probability, exactly
    as many as asked for, chosen (no q), for one draft forward a node.

    Fails if a better text is ever left out: a node's runner-up, a deeper child, a late branch.
    """
    table = random_table(seed, V, DEPTH, sharp=sharp)
    tree, sizes = grown(table, Best(nodes).grow(None))
    texts = spelled(tree)
    chance = {text: chance_of(table, text) for text in texts}
    # whatever is left out under the root or a node, and so all below that, is less likely
    left_out = {(*text, v) for text in ((), *texts) for v in range(V)} - set(texts)
    assert max(chance_of(table, text) for text in left_out) <= min(chance.values())
    assert list(chance.values()) == sorted(chance.values(), reverse=True)
    if max(map(len, texts)) < DEPTH - 1:
        assert set(texts) == likeliest(chances(table, deepest=DEPTH - 1), nodes)
    assert set(tree.q) == {None} and len(set(texts)) == nodes
    assert sizes == list(range(nodes))


def test_control_other_shapes_of_that_size_are_less_likely():
    """Control: an arg-max chain, a static tree and a fan of as many nodes cover less, so the claim
    above has power."""
    table = random_table(0, V, DEPTH + 1)
    chance = chances(table)
    best = sum(chance[text] for text in spelled(grown(table, Best(4).grow(None))[0]))
    for other in (
        Chain(4).grow(None),
        grow_static(((0,), (1,), (0, 0), (1, 0))),
        grow_static(((0,), (1,), (2,), (3,))),
    ):
        assert sum(chance[text] for text in spelled(grown(table, other)[0])) < best


@pytest.mark.parametrize("nodes", [2, 3, 7, 12])
def test_ties_are_settled_the_same_way_every_time(nodes):
    """Claim: where everything is equally likely the tree is still one of the likeliest, of exactly
    the size, without twins, and the same again (shallow before deep, first id before later)."""
    table = {text: torch.zeros(3) for n in range(6) for text in product(range(3), repeat=n)}
    tree, _ = grown(table, Best(nodes).grow(None))
    assert len(tree) == nodes == len(set(spelled(tree)))
    chance = chances(table, deepest=4)
    mass = sorted((chance[text] for text in spelled(tree)), reverse=True)
    assert mass == pytest.approx(sorted(chance.values(), reverse=True)[:nodes])
    assert grown(table, Best(nodes).grow(None))[0] == tree
    assert spelled(tree) == sorted(spelled(tree), key=lambda text: (len(text), text))


def test_a_certain_draft_grows_a_chain():
    """Claim: a law with all its mass on one id gives a chain, and impossible ids are no nodes."""
    table = {
        text: torch.tensor([0.0, float("-inf"), float("-inf")])
        for n in range(8)
        for text in product(range(3), repeat=n)
    }
    tree, sizes = grown(table, Best(6).grow(None))
    assert tree == chain([0] * 6) and len(sizes) == 6


def test_banned_ids_are_no_nodes_however_many_are_wanted():
    """Claim: an id whose logit is -inf is never drafted, even where all else is in the tree."""
    table = random_table(5, V, 6)
    for row in table.values():
        row[2] = float("-inf")
    tree, _ = grown(table, Best(20).grow(None))
    assert len(tree) == 20 and 2 not in tree.tokens
    assert {tree.tokens[child] for child in children(tree, ROOT)} == {0, 1, 3}


def test_a_draft_of_nan_drafts_nothing():
    """Claim: NaN in the laws ends growth instead of running for ever or naming ids."""
    table = {
        text: torch.full((3,), float("nan"))
        for n in range(3)
        for text in product((0, 1, 2), repeat=n)
    }
    tree, sizes = grown(table, Best(4).grow(None))
    assert tree == Tree() and sizes == [0]


def test_requests_grow_in_step():
    """Claim: two requests at different places grow as each would alone, over shared forwards."""
    table = random_table(6, V, 7)
    session = Counting(table, [Sampling(), Sampling()])
    session.commit({1: [3]})
    trees = drive(session.score, {0: Best(6).grow(None), 1: Best(3).grow(None)}, {})
    assert len(session.sizes) == 6
    assert trees[0] == grown(table, Best(6).grow(None))[0]
    assert set(spelled(trees[1])) == {text[1:] for text in likeliest(chances(table, (3,), 4), 3)}


def test_nodes_are_chosen_by_the_law_that_is_sampled_from():
    """Claim: no noise enters the tree, and rules change it as they change the draft's law: under a
    temperature it is the tree of a table with that temperature in it."""
    table = random_table(7, V, 7)
    warm = {text: row / 9 for text, row in table.items()}
    rules = Sampling(True, (lambda ids, scores: scores / 9,), seed=1)
    assert grown(table, Best(8).grow(None), rules) == grown(warm, Best(8).grow(None))
    assert grown(table, Best(8).grow(None), Sampling(True, seed=2)) == grown(
        table, Best(8).grow(None)
    )
    assert grown(warm, Best(8).grow(None)) != grown(table, Best(8).grow(None))


@pytest.mark.representatives(2)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["sd/shape=best-8", "specvlm-self/shape=best-5"])
def test_best_first_is_lossless(method, family):
    """Claim: end to end the greedy answer is the target's, and every tree has its size."""
    result = answered(family, method)
    assert result.ids == truth(family) and result.fallback_reason is None
    assert {len(round.tokens) for round in result.forwards} == {int(method[-1])}
    assert any(len(set(round.parents)) < len(round.parents) for round in result.forwards), "a chain"


@pytest.mark.usefixtures("unchecked")
def test_a_users_own_tree_is_lossless_and_of_his_form():
    """Claim: ``paths-`` drafts the very tree it spells, whatever order it is written in."""
    expected = (ROOT, ROOT, 0, 0, 1)
    for method in ("sd/shape=paths-0,1,0.0,0.2,1.0", "sd/shape=paths-1.0,0.2,0,0.0,1"):
        result = answered("qwen2_5_vl", method)
        assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None
        assert {round.parents for round in result.forwards} == {expected}


def test_the_shape_learns_nothing_and_is_what_its_name_says():
    """Claim: Best carries no state; ``best-N`` is Best(N), ``paths-`` a Static, neither a Chain."""
    assert Best(3).start() is None
    named: dict[str, Shape] = {
        "best-8": Best(8),
        "best-64": Best(64),
        "paths-0,1,0.0": Static(((0,), (1,), (0, 0))),
        "chain-8": Chain(8),
    }
    for name, shape in named.items():
        assert resolve(f"sd/shape={name}").shape == shape

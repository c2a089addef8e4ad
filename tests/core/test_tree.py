"""Claims about pure functions on trees, against walks written out by hand."""

from __future__ import annotations

import pytest
import torch
from helpers import grown, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.core import tree as t
from saccade.core.tree import ROOT, Tree

ROWS = rows()


def _climb(tree: Tree, node: int) -> list[int]:
    above = []
    while node != ROOT:
        above.append(node)
        node = tree.parents[node]
    return above


def test_add_appends_one_node_and_leaves_the_tree_alone():
    """Claim: a tree is a value. Fails if ``add`` wrote into the tree it was given."""
    one = t.add(Tree(), ROOT, 7)
    law = torch.tensor([0.5, 0.5])
    two = t.add(one, 0, 1, law)
    assert (one.tokens, one.parents, one.q) == ((7,), (ROOT,), (None,))
    assert (two.tokens, two.parents) == ((7, 1), (ROOT, 0))
    assert two.q[0] is None and two.q[1] is law
    assert len(Tree()) == 0 and len(two) == 2


def test_a_chain_hangs_each_token_under_the_one_before():
    """Claim: chain([a, b, c]) is a - b - c from the root. Fails on any other parent."""
    chain = t.chain([5, 6, 7])
    assert chain.parents == (ROOT, 0, 1)
    assert t.is_chain(chain) and t.is_chain(Tree())
    assert not t.is_chain(Tree((1, 2), (ROOT, ROOT), (None, None)))
    assert t.depths(chain.parents) == [1, 2, 3]


@settings(max_examples=60)
@given(ROWS)
def test_paths_depths_and_ancestors_are_the_climb_to_the_root(rows):
    """Claim: three functions say what climbing by parents says. Fails if any of them is off."""
    tree = grown(rows)
    seen = t.ancestors(tree.parents)
    assert t.depths(tree.parents) == [len(_climb(tree, n)) for n in range(len(tree))]
    for node in range(len(tree)):
        assert t.path(tree, node) == _climb(tree, node)[::-1]
        assert t.depth(tree, node) == len(_climb(tree, node))
        assert seen[node].nonzero().flatten().tolist() == sorted(_climb(tree, node))
    assert t.path(tree, ROOT) == [] and t.depth(tree, ROOT) == 0


@settings(max_examples=60)
@given(ROWS)
def test_children_partition_the_nodes_in_drafted_order(rows):
    """Claim: every node is one parent's child, once. Fails if one is lost or out of order."""
    tree = grown(rows)
    children = [child for node in range(ROOT, len(tree)) for child in t.children(tree, node)]
    assert sorted(children) == list(range(len(tree)))
    for node in range(ROOT, len(tree)):
        below = t.children(tree, node)
        assert below == sorted(below)


@settings(max_examples=60)
@given(ROWS, st.lists(st.integers(0, 3), max_size=6))
def test_follow_walks_as_far_as_the_tokens_are_in_the_tree(rows, tokens):
    """Claim: the nodes met spell a prefix of the tokens, the longest there is on first matches.

    Fails if it stops early, goes on past a missing token, or changes branch.
    """
    tree = grown(rows)
    nodes = t.follow(tree, tokens)
    assert [tree.tokens[n] for n in nodes] == tokens[: len(nodes)]
    assert t.path(tree, nodes[-1] if nodes else ROOT) == nodes
    if len(nodes) < len(tokens):
        here = nodes[-1] if nodes else ROOT
        assert tokens[len(nodes)] not in [tree.tokens[c] for c in t.children(tree, here)]


def test_shared_counts_leading_nodes_with_equal_token_and_parent():
    """Claim: only a common beginning counts. Fails if q or a later match is counted."""
    one = Tree((1, 2, 3), (ROOT, 0, 0), (None, None, None))
    assert t.count_shared_nodes(one, one) == 3
    assert t.count_shared_nodes(one, t.add(one, 2, 9)) == 3
    assert t.count_shared_nodes(one, Tree((1, 2, 3), (ROOT, 0, 1), (None,) * 3)) == 2
    assert t.count_shared_nodes(one, Tree((1, 9, 3), (ROOT, 0, 0), (None,) * 3)) == 1
    assert t.count_shared_nodes(one, Tree()) == 0


@pytest.mark.parametrize(
    "bad",
    [
        Tree((1, 2), (ROOT,), (None, None)),
        Tree((1,), (ROOT,), ()),
        Tree((1,), (0,), (None,)),
        Tree((1, 2), (1, ROOT), (None, None)),
        Tree((1,), (-2,), (None,)),
        Tree((4,), (ROOT,), (None,)),
        Tree((-1,), (ROOT,), (None,)),
    ],
)
def test_what_is_not_a_tree_has_a_fault(bad):
    """Claim: ragged fields, parents after children or below ROOT, and unknown ids are faults."""
    assert t.find_fault(bad, 4) is not None


@settings(max_examples=30)
@given(ROWS)
def test_a_sound_tree_has_no_fault(rows):
    """Claim: nothing sound has a fault. The control of the test above."""
    tree = grown(rows)
    assert t.find_fault(tree, 10**6) is None

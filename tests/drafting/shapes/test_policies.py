"""Claims about growth: what is drafted, from which laws, with how many forwards."""

from __future__ import annotations

import pytest
import torch
from helpers import TableSession, random_table

from saccade.core.noise import uniform
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, chain, depths, path
from saccade.drafting.drafters import drive
from saccade.drafting.shapes.policies import Chain, Static, check_paths, grow_static

V, DEPTH = 4, 4
TABLE = random_table(0, V, DEPTH)
PATHS = ((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 1), (0, 0, 0))


def _best(history: tuple[int, ...], rank: int = 0) -> int:
    return TABLE[history].argsort(descending=True, stable=True)[rank].item()


class Counting(TableSession):
    forwards = 0

    def score(self, trees):
        self.forwards += 1
        return super().score(trees)


def _grow(growing, rules=None) -> tuple[Tree, int]:
    session = Counting(TABLE, [Sampling() if rules is None else rules])
    return drive(session.score, {0: growing}, {})[0], session.forwards


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_greedy_chain_is_the_drafts_own_greedy_text(length):
    """Claim: arg-max after arg-max, one forward a token, no q. Fails if one is lost or twice."""
    tree, forwards = _grow(Chain(length).grow(None))
    expected: list[int] = []
    for _ in range(length):
        expected.append(_best(tuple(expected)))
    assert tree == chain(expected) and forwards == length


def test_a_sampled_chain_carries_the_laws_it_was_drawn_from():
    """Claim: token i is the keyed draw from q_i, and q_i is the law after the ones before."""
    tree, _ = _grow(Chain(3).grow(None), Sampling(True, seed=9))
    for node in range(3):
        law = TABLE[tree.tokens[:node]].softmax(-1)
        assert torch.allclose(tree.q[node], law)
        u = uniform(9, 0, "draft", node, 0)
        assert tree.tokens[node] == int((law.cumsum(0) <= u).sum())


def test_a_static_tree_holds_the_ranks_it_names():
    """Claim: node (r1, r2, ...) is the r-th likeliest token at each level; a level is a forward."""
    tree, forwards = _grow(grow_static(PATHS))
    assert len(tree) == len(PATHS) and forwards == 3
    spelled = {tuple(tree.tokens[n] for n in path(tree, node)) for node in range(len(tree))}
    expected = set()
    for ranks in PATHS:
        tokens: tuple[int, ...] = ()
        for rank in ranks:
            tokens += (_best(tokens, rank),)
        expected.add(tokens)
    assert spelled == expected
    assert depths(tree.parents) == sorted(depths(tree.parents)) and set(tree.q) == {None}


def test_requests_grow_in_step_over_shared_forwards():
    """Claim: two requests cost the forwards of the longer, and grow as each would alone."""
    session = Counting(TABLE, [Sampling(), Sampling()])
    session.commit({1: [3]})
    trees = drive(session.score, {0: Chain(3).grow(None), 1: Chain(2).grow(None)}, {})
    assert session.forwards == 3
    assert trees[0] == _grow(Chain(3).grow(None))[0]
    assert trees[1].tokens == (_best((3,)), _best((3, _best((3,)))))


@pytest.mark.parametrize("paths", [((0, 1),), ((0,), (1, 0)), ((-1,),), ((),)])
def test_paths_without_parents_or_with_negative_ranks_are_refused(paths):
    """Claim: an impossible static tree is an error when it is built, not when it grows."""
    with pytest.raises(ValueError, match="path"):
        Static(paths)


def test_shapes_of_fixed_form_learn_nothing():
    """Claim: Chain and Static carry no state; check_paths lets a sound tree pass (control)."""
    for shape in (Chain(2), Static(PATHS)):
        assert shape.start() is None
    assert check_paths(PATHS) is None

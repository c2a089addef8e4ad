"""Claims about ``verify``: exact in law, by integrating its noise out instead of sampling it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from helpers import grown, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.core import verify as module
from saccade.core.result import Verdict
from saccade.core.tree import ROOT, Tree, add, chain, children, path
from saccade.core.verify import residual, verify

V = 4


class Coin(float):
    """A noise number whose comparison the test decides; it writes down the chance it met."""

    flip: Callable[[float], bool]

    def __lt__(self, chance: float) -> bool:
        return self.flip(chance)


def outcomes(tree, p, monkeypatch) -> Iterator[tuple[float, tuple[int, ...], torch.Tensor]]:
    """(probability, accepted tokens, law of the target's own token) of every way verify can go."""
    laws: list = []

    def remember(law, u):
        laws.append(law)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(module, "draw", remember)
        pending: list[list[bool]] = [[]]
        while pending:
            script = pending.pop()
            made: list[tuple[float, bool]] = []

            def flip(chance, script=script, made=made):
                decision = script[len(made)] if len(made) < len(script) else True
                if chance != chance:  # a comparison with NaN is false
                    chance, decision = 0.0, False
                made.append((chance, decision))
                return decision

            def noise(role, below, sibling, flip=flip):
                coin = Coin(0.5)
                coin.flip = flip
                return coin

            verdict = verify(tree, p, noise)
            weight = 1.0
            for chance, decision in made:
                weight *= chance if decision else 1 - chance
            decisions = [decision for _, decision in made]
            for i in range(len(script), len(made)):
                if decisions[i]:
                    pending.append([*decisions[:i], False])
            if weight > 0:
                yield weight, verdict.accepted, laws[-1]


def emitted(tree, p, monkeypatch) -> torch.Tensor:
    """The exact law of the first token verify lets through."""
    law = torch.zeros(V, dtype=torch.double)
    for weight, accepted, own in outcomes(tree, p, monkeypatch):
        if accepted:
            law[accepted[0]] += weight
        else:
            law += weight * own.double()
    return law


def _laws(seed: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.softmax(1.5 * torch.randn(V, generator=generator), -1) for _ in range(count)]


@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_sampled_siblings_leave_p_exactly(siblings, seed, monkeypatch):
    """Claim: over draws of siblings from q, the first token follows p to 1e-6, whatever q is.

    The noise is integrated out, so any wrong accept rule or residual moves the law by far more.
    """
    p, q = _laws(seed, 2)
    law = torch.zeros(V, dtype=torch.double)
    for drawn in product(range(V), repeat=siblings):
        tree = Tree(drawn, (ROOT,) * siblings, (q,) * siblings)
        chance = torch.stack([q[x] for x in drawn]).double().prod()
        law += chance * emitted(tree, lambda node: p, monkeypatch)
    assert (law - p).abs().max() < 1e-6


@pytest.mark.parametrize("tokens", [(0,), (1, 0), (3, 1, 2), (2, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_chosen_siblings_leave_p_exactly(tokens, seed, monkeypatch):
    """Claim: chosen nodes (q=None), duplicates too, leave p for the first token to 1e-6."""
    (p,) = _laws(seed, 1)
    tree = Tree(tokens, (ROOT,) * len(tokens), (None,) * len(tokens))
    assert (emitted(tree, lambda node: p, monkeypatch) - p).abs().max() < 1e-6


def test_mixed_siblings_leave_p_exactly(monkeypatch):
    """Claim: a chosen node before a sampled one is fine. Fails if the residual forgets either."""
    p, q = _laws(11, 2)
    law = torch.zeros(V, dtype=torch.double)
    for x in range(V):
        tree = Tree((2, x), (ROOT, ROOT), (None, q))
        law += q[x].double() * emitted(tree, lambda node: p, monkeypatch)
    assert (law - p).abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(ROOT, 0), (ROOT, ROOT, 0, 1), (ROOT, 0, 0)])
def test_two_levels_leave_the_joint_law_exactly(shape, monkeypatch):
    """Claim: the joint law of two tokens is p(a) p(b | a) to 1e-6, over chains and trees.

    Fails if a level uses another level's law, or a branch another branch's.
    """
    size = 3
    generator = torch.Generator().manual_seed(5)
    p0, q0 = (torch.softmax(torch.randn(size, generator=generator), -1) for _ in range(2))
    p1, q1 = (torch.softmax(torch.randn(size, size, generator=generator), -1) for _ in range(2))
    joint = torch.zeros(size, size, dtype=torch.double)
    for drawn in product(range(size), repeat=len(shape)):
        laws = tuple(q0 if parent == ROOT else q1[drawn[parent]] for parent in shape)
        tree = Tree(drawn, shape, laws)
        weight = torch.stack([laws[i][x] for i, x in enumerate(drawn)]).double().prod()

        def p(node, tree=tree):
            tokens = [tree.tokens[n] for n in path(tree, node)]
            return p0 if not tokens else p1[tokens[0]] if len(tokens) == 1 else p0

        for chance, accepted, own in outcomes(tree, p, monkeypatch):
            share = weight * chance
            if len(accepted) >= 2:
                joint[accepted[0], accepted[1]] += share
            elif len(accepted) == 1:
                joint[accepted[0]] += share * own.double()
            else:  # the second token comes from p itself, a round later
                joint += share * own.double()[:, None] * p1.double()
    assert (joint - p0.double()[:, None] * p1.double()).abs().max() < 1e-6


def test_control_a_soft_law_on_a_chosen_node_is_seen(monkeypatch):
    """Control: an arg-max node that carries q instead of None must fail
    ``test_chosen_siblings_leave_p_exactly``.

    It is the classic silent error; here it moves the law by more than 0.1 in total variation.
    """
    p, q = _laws(3, 2)
    best = int(q.argmax())
    wrong = emitted(Tree((best,), (ROOT,), (q,)), lambda node: p, monkeypatch)
    assert (wrong - p).abs().sum() / 2 > 0.1


def test_control_a_forgotten_residual_is_seen(monkeypatch):
    """Control: going on with p after a refusal must fail
    ``test_sampled_siblings_leave_p_exactly``, by more than 0.02."""
    p, q = _laws(1, 2)
    monkeypatch.setattr(module, "residual", lambda p, q: p)
    law = torch.zeros(V, dtype=torch.double)
    for x in range(V):
        law += q[x].double() * emitted(Tree((x,), (ROOT,), (q,)), lambda node: p, monkeypatch)
    assert (law - p).abs().sum() / 2 > 0.02


def _half(role: str, below: int, sibling: int) -> float:
    return 0.5


@settings(max_examples=80)
@given(rows(12, 3), st.lists(st.integers(0, 2), min_size=13, max_size=13))
def test_greedy_follows_the_target_and_nothing_else(rows, choices):
    """Claim: what is accepted is the longest branch of the target's own choices, then its next.

    The naive walk below knows no probabilities. Fails on a wrong branch, an early or a late stop.
    """
    tree = grown(rows)
    choice = {node: choices[node + 1] for node in range(ROOT, len(tree))}
    verdict = verify(tree, lambda node: choice[node], _half)
    here, walked = ROOT, []
    while True:
        match = [c for c in children(tree, here) if tree.tokens[c] == choice[here]]
        if not match:
            break
        here = match[0]
        walked.append(here)
    assert verdict.path == tuple(walked)
    assert verdict.tokens == (*(tree.tokens[n] for n in walked), choice[here])
    assert verdict.kind == ("recovered" if children(tree, here) else "bonus")


def test_an_empty_tree_is_plain_decoding():
    """Claim: with nothing drafted the target's token is the only one. Fails if it comes twice."""
    assert verify(Tree(), lambda node: 7, _half) == Verdict((), (), 7, "bonus")


def test_where_the_target_has_not_looked_the_walk_ends_without_its_token():
    """Claim: p(node) None ends the round after the accepted nodes. Fails if a token is made up."""
    verdict = verify(chain([4, 5]), lambda node: {ROOT: 4, 0: 5}.get(node), _half)
    assert verdict == Verdict((0, 1), (4, 5), None, None)
    assert verify(Tree(), lambda node: None, _half).tokens == ()


@pytest.mark.parametrize("looked", range(4))
def test_nothing_below_a_node_the_target_has_not_looked_at_is_asked_for(looked):
    """Claim: after the first None the walk asks neither for further laws nor for noise, and tells
    no token. Fails if it goes on with None as a law, or with another node's."""
    tree, nodes = chain([4, 5, 6]), []

    def p(node):
        nodes.append(node)
        return (4, 5, 6)[node + 1] if len(nodes) <= looked and node < 2 else None

    def noise(*key):
        pytest.fail("noise was drawn")

    verdict = verify(tree, p, noise)
    assert verdict == Verdict(tuple(range(looked)), (4, 5, 6)[:looked], None, None)
    assert nodes == list(range(ROOT, looked))


def test_residual_is_what_p_has_over_q():
    """Claim: norm(max(p - q, 0)), p itself where nothing is left, p as it came untouched."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.6, 0.2])
    assert torch.allclose(residual(p, q), torch.tensor([1.0, 0.0, 0.0]))
    assert torch.allclose(residual(p, 0), torch.tensor([0.0, 0.6, 0.4]))
    assert torch.equal(residual(p, p), p)
    assert residual(2, 1) == 2
    assert torch.equal(p, torch.tensor([0.5, 0.3, 0.2]))


def test_residual_of_a_draft_with_a_shorter_vocabulary():
    """Claim: ids the draft does not know keep all their mass. Fails if q must be as long as p."""
    p, q = torch.tensor([0.4, 0.2, 0.4]), torch.tensor([0.9, 0.1])
    assert torch.allclose(residual(p, q), torch.tensor([0.0, 0.2, 0.8]))


def test_a_draft_law_of_nan_rejects_and_leaves_p(monkeypatch):
    """Claim: a node whose q is NaN is never accepted, and p stands for what comes instead.

    min(1, p / nan) is 1 in one order of arguments: then any drafted token would pass.
    """
    (p,) = _laws(2, 1)
    nan = torch.full((V,), float("nan"))
    for x in range(V):
        tree = Tree((x,), (ROOT,), (nan,))
        assert torch.equal(emitted(tree, lambda node: p, monkeypatch), p.double())
        assert verify(tree, lambda node: 3, _half).tokens == (3,)


def test_noise_is_asked_by_role_depth_and_sibling():
    """Claim: no two decisions of a round share a noise number. Fails if a key repeats."""
    keys = []

    def noise(role, below, sibling):
        keys.append((role, below, sibling))
        return 0.999999

    p = torch.tensor([0.25, 0.25, 0.25, 0.25])
    tree = Tree((0, 1, 2), (ROOT, ROOT, ROOT), (None,) * 3)
    verify(tree, lambda node: p, noise)
    accepted = add(add(Tree(), ROOT, 0), 0, 1)
    verify(accepted, lambda node: p, lambda *key: keys.append(key) or 0.0)
    assert keys == [
        ("accept", 0, 0), ("accept", 0, 1), ("accept", 0, 2), ("own", 0, 0),
        ("accept", 0, 0), ("accept", 1, 0), ("own", 2, 0),
    ]  # fmt: skip

"""SAGE's Sec. 3.2 says twice what theta does, and the two differ.

In prose the top W_l tokens are a node's candidates, and those whose probability exceeds theta_l
have their subtree expanded; "formally" a path is included if and only if its cumulative probability
exceeds theta_l at every level. D is 3 to 8, W 2 to 10, theta_l a tenth of l / D.
"""

from __future__ import annotations

from dataclasses import replace

from saccade.methods.sage import Reach, Sage, plan

SURE = (0.99, 0.006, 0.004)  # at a confidence of 1: D = 8, W_1 = 2, theta_1 = .1 / 8


def test_theta_gates_expansion_in_prose_and_inclusion_formally() -> None:
    """Claim: under a law whose second token is below theta_1 the prose drafts it and does not
    expand it; formally neither is in the tree. Both follow the first token. Fails where one
    reading does for both, or where an unlikely token's subtree is expanded."""
    trees = {}
    for rule in ("prose", "formal"):
        shape = replace(Sage(), rule=rule)
        trees[rule] = set(plan(SURE, Reach(shape, alpha=1.0, max_levels=8)))
    assert {path for path in trees["prose"] if len(path) == 1} == {(0,), (1,)}
    assert {path for path in trees["formal"] if len(path) == 1} == {(0,)}
    for tree in trees.values():
        assert (0,) * 8 in tree and all(path[0] == 0 for path in tree if len(path) > 1)
    assert trees["formal"] < trees["prose"]


def test_width_decays_beyond_the_first_level_only() -> None:
    """Claim: "beyond the first level" Eq. 12 multiplies the width by (0.5 + P_parent) / l; the root
    has W children. Under a flat law W is 10: ten first tokens, and each of them has
    10 / 2 x (0.5 + .05) = 2.75, so three, children. Fails where the root's width is
    W x (0.5 + 1), which is 15."""
    flat = (0.05,) * 20
    tree = plan(flat, Reach(replace(Sage(), theta=0.0, nodes=1000), alpha=0.0, max_levels=3))
    assert sorted(path for path in tree if len(path) == 1) == [(rank,) for rank in range(10)]
    assert {path[1] for path in tree if len(path) == 2} == {0, 1, 2}

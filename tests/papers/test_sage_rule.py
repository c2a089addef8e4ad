"""SAGE's Sec. 3.2 says twice what theta does, and the two differ.

In prose the top W_l tokens are a node's candidates, and those whose probability exceeds theta_l
have their subtree expanded; "formally" a path is included if and only if its cumulative probability
exceeds theta_l at every level. D is 3 to 8, W 2 to 10, theta_l a tenth of l / D.
"""

from __future__ import annotations

from dataclasses import replace

from saccade.methods.sage import Reach, Sage, plan

SURE = (0.99, 0.006, 0.004)  # at a confidence of 1: D = 8, W_1 = 2 x 1.5 = 3, theta_1 = .1 / 8


def test_theta_gates_expansion_in_prose_and_inclusion_formally() -> None:
    """Claim: under a law whose second and third token are below theta_1 the prose drafts both and
    expands neither; formally neither is in the tree. Both follow the first. Fails where one
    reading does for both, or where an unlikely token's subtree is expanded."""
    trees = {}
    for rule in ("prose", "formal"):
        shape = replace(Sage(), rule=rule)
        trees[rule] = set(plan(SURE, Reach(shape, alpha=1.0, most=8)))
    assert {path for path in trees["prose"] if len(path) == 1} == {(0,), (1,), (2,)}
    assert {path for path in trees["formal"] if len(path) == 1} == {(0,)}
    for tree in trees.values():
        assert (0,) * 8 in tree and all(path[0] == 0 for path in tree if len(path) > 1)
    assert trees["formal"] < trees["prose"]

"""One verification for greedy and sampling, chains and trees.

Theorem (Leviathan et al. 2023, Thm 1; Chen et al. 2023; over siblings, SpecInfer 2024, Thm 4.2):
accept a token x drawn from q with probability min(1, p(x)/q(x)), and after a refusal go on with
norm(max(p - q, 0)); the token that stands follows p exactly, whatever q is. A *chosen* token is a
draw from the point mass on it: accept with probability p(x), go on with p without x.
Greedy decoding is the case in which p is a point mass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.core.result import TargetTokenKind, Verdict
from saccade.core.sampling import Law, draw, prob
from saccade.core.tree import ROOT, Tree, children

Noise = Callable[[str, int, int], float]
"""(role, below, sibling) -> a uniform number in [0, 1).

The role says what the number decides: with "accept" whether a drafted token is accepted, and with
"own" which token the target itself draws. ``below`` is how many accepted tokens stand between the
committed text and the token in question: 0 for the first one. ``sibling`` is a drafted token's
place among its siblings, and 0 for the target's own token.
"""


def verify(tree: Tree, p: Callable[[int], Law | None], noise: Noise) -> Verdict:
    """Walk down from the root, accepting at most one child a level, and return the verdict.

    Where no child is accepted, the target draws its own token, and the walk ends.
    ``p(node)`` is the target's law after ``node`` (``ROOT``: after the committed text). It is None
    where the target has not scored ``node``: the walk ends there, without a token of the target's
    own.
    """
    node = ROOT
    accepted: list[int] = []
    while True:
        law = p(node)
        if law is None:
            return _verdict(tree, accepted, target_token=None, kind=None)
        refused = False
        for sibling, child in enumerate(children(tree, node)):
            x = tree.tokens[child]
            q = tree.q[child]  # None for a chosen token.
            # A NaN in q must reject the token. ``min`` and ``max`` return their first argument if
            # it is NaN, so the chance is NaN too, and no noise is below it. The residual is then p
            # itself. The tiny number only prevents a division by zero.
            chance = prob(law, x) if q is None else min(prob(law, x) / max(prob(q, x), 1e-38), 1.0)
            # Drawing noise takes time, so it is skipped where the chance is 0 or 1.
            is_certain = chance >= 1 or chance <= 0
            if is_certain:
                is_accepted = chance >= 1
            else:
                is_accepted = noise("accept", len(accepted), sibling) < chance
            if is_accepted:
                accepted.append(child)
                node = child
                break
            law = residual(law, x if q is None else q)
            refused = True
        else:
            target_token = (
                law if isinstance(law, int) else draw(law, noise("own", len(accepted), 0))
            )
            return _verdict(tree, accepted, target_token, "recovered" if refused else "bonus")


def residual(p: Law, q: Law) -> Law:
    """norm(max(p - q, 0)): what is left of p once a draw from q has been refused.

    Where nothing is left (p = q up to rounding, so that a refusal had probability zero) p stands.
    """
    if isinstance(p, int):
        return p
    excess = p.clone()
    if isinstance(q, int):
        excess[q] = 0.0
    else:
        excess[: q.shape[0]] -= q.to(excess)
        excess.clamp_(min=0.0)
    total: Float[Tensor, ""] = excess.sum()
    return excess / total if bool(total > 0) and bool(torch.isfinite(total)) else p


def _verdict(
    tree: Tree, path: list[int], target_token: int | None, kind: TargetTokenKind | None
) -> Verdict:
    tokens = tuple(tree.tokens[node] for node in path)
    return Verdict(tuple(path), tokens, target_token, kind)

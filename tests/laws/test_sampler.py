"""Claims about the sampler alone: one token over one law, many configurations of rules and drafts.

Draws are made many at a time (one row a draw), by the package's own laws: ``Sampling.law`` for
target and draft, ``verify``'s accept rule and residual written out over rows in ``vectorised``,
which is held against ``verify`` itself draw by draw. Chi-square at alpha 1e-4 with fixed seeds.

Power: over 7 degrees of freedom a million draws find a law 0.005 away in total variation: the
non-centrality is at least 4 x 0.005^2 x 10^6 = 100, against 34 that are needed for a chance of
0.99. The planted laws below are that far away, and must fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from helpers import chi_square
from torch import Tensor
from transformers.generation import logits_process as hf

from saccade.core.sampling import Law, Sampling, draw
from saccade.core.tree import ROOT, Tree
from saccade.core.verify import residual, verify

pytestmark = pytest.mark.usefixtures("unchecked")

V, ALPHA, MANY = 8, 1e-4, 1_000_000

TEMPERATURES, TOP_K, TOP_P = (0.6, 1.0, 1.5), (None, 4), (None, 0.85)
DRAFTS = ("drawn", "chosen")
CONFIGURATIONS = list(product(TEMPERATURES, TOP_K, TOP_P, DRAFTS))


def laws(temperature: float, top_k: int | None, top_p: float | None) -> tuple[Tensor, Tensor]:
    """The laws of a target and of a draft by these rules, in Hugging Face's order."""
    rules: list = [hf.TemperatureLogitsWarper(temperature)]
    rules += [] if top_k is None else [hf.TopKLogitsWarper(top_k)]
    rules += [] if top_p is None else [hf.TopPLogitsWarper(top_p)]
    generator = torch.Generator().manual_seed(5)
    sampling = Sampling(True, tuple(rules))
    law_pair = [sampling.law(0.7 * torch.randn(V, generator=generator), []) for _ in range(2)]
    p, q = (torch.as_tensor(law) for law in law_pair)
    return p, q


def drawn(law: Tensor, u: Tensor) -> Tensor:
    """``draw`` for many quantiles at once."""
    cumulative = law.double().cumsum(-1)
    token = torch.searchsorted(cumulative, u * cumulative[-1], right=True)
    return token.clamp(max=int(law.nonzero()[-1]))


def vectorised(p: Tensor, q: Tensor, draft: str, u: Sequence[Tensor]) -> Tensor:
    """One drafted token verified, for every row of noise (drafting, accepting, the target's own).

    ``residual`` is the package's: there is one for each id that can have been refused.
    """
    x = drawn(q, u[0]) if draft == "drawn" else q.argmax().expand(len(u[0]))
    chance = (p[x] / q[x].clamp(min=1e-38)).clamp(max=1.0) if draft == "drawn" else p[x]
    accepted = u[1] < chance
    own = torch.empty_like(x)
    for token in x.unique().tolist():
        mine = x == token
        left = residual(p, q if draft == "drawn" else token)
        assert isinstance(left, Tensor)
        own[mine] = drawn(left, u[2][mine])
    return torch.where(accepted, x, own)


def noise(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(count, generator=generator, dtype=torch.double) for _ in range(3)]


def counted(tokens: Tensor) -> Tensor:
    return torch.bincount(tokens, minlength=V)


def normal(law: Tensor) -> Tensor:
    return law.double() / law.double().sum()


EVERY = pytest.mark.parametrize(("temperature", "top_k", "top_p", "draft"), CONFIGURATIONS)


def moved(p: Tensor, distance: float) -> Tensor:
    """A law ``distance`` away from p in total variation, on the ids p has."""
    order = p.argsort(descending=True)
    law = p.double().clone()
    law[order[0]] -= distance
    law[order[1]] += distance
    return law


@pytest.mark.representatives(3)
@EVERY
def test_a_million_verified_tokens_follow_the_rules_of_each_configuration(
    temperature, top_k, top_p, draft
):
    """Claim: for each temperature, top-k and top-p and for drawn and chosen drafts, what stands
    follows the target's law with all rules applied. A million draws: finds 0.005.
    Control: the same draws are told from a law 0.005 away, in every configuration.
    """
    p, q = laws(temperature, top_k, top_p)
    seed = 100 + CONFIGURATIONS.index((temperature, top_k, top_p, draft))
    counts = counted(vectorised(p, q, draft, noise(MANY, seed)))
    assert chi_square(counts, normal(p)) > ALPHA
    assert chi_square(counts, normal(moved(p, 0.005))) < ALPHA


@pytest.mark.parametrize("left_out", ["temperature", "top-k", "top-p"])
def test_control_a_rule_left_out_of_the_target_is_noticed(left_out):
    """Control: verified by the target's law without one of the rules, the test must fail."""
    p, q = laws(0.6, 4, 0.85)
    wrong, _ = laws(
        1.0 if left_out == "temperature" else 0.6,
        None if left_out == "top-k" else 4,
        None if left_out == "top-p" else 0.85,
    )
    assert not torch.allclose(p, wrong), "the rule does nothing here"
    tokens = vectorised(wrong, q, "drawn", noise(MANY, 4))
    assert chi_square(counted(tokens), normal(p)) < ALPHA


@pytest.mark.representatives(12)
@EVERY
def test_the_rows_are_what_verify_does(temperature, top_k, top_p, draft):
    """Claim: row by row, 200 draws of the vectorised sampler are those of ``verify`` over the same
    noise, so that what is counted above is the package's verification.
    """
    p, q = laws(temperature, top_k, top_p)
    u = noise(200, 5)
    tokens = vectorised(p, q, draft, u)
    for row, token in enumerate(tokens.tolist()):
        first, accept, own = (float(each[row]) for each in u)
        x = draw(q, first) if draft == "drawn" else int(q.argmax())
        tree = Tree((x,), (ROOT,), (q if draft == "drawn" else None,))

        def law(node: int) -> Law | None:
            return p if node == ROOT else None

        def draw_number(role: str, below: int, sibling: int, accept=accept, own=own) -> float:
            return accept if role == "accept" else own

        assert verify(tree, law, draw_number).tokens == (token,)


def test_there_are_24_configurations():
    """Claim: the list is what it says, and no two of its targets are alike."""
    assert len(CONFIGURATIONS) == 24
    targets = {tuple(laws(*one[:3])[0].tolist()) for one in CONFIGURATIONS}
    assert len(targets) == 12

"""SpecVLM's choice: our view ``specvlm-official`` against what its published code computes.

``utils/utils.py``: the budget is ``int(n * (1 - drop_rate))``; stage I is the fewest tokens by
falling score whose sum reaches lambda of all, at most the budget; stage II takes places
``linspace(0, left - 1, rest)``, truncated, of what is left in prompt order. ``inference.py`` sets
lambda .4 for both families and drops .9. The draft's prompt is cut and its positions count anew.
``tree_choices/choices.py`` has 25 nodes; each one's children are the likeliest tokens there.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch

from saccade.core.errors import MethodError
from saccade.core.prompt import Prompt
from saccade.drafting.shapes.policies import Paths
from saccade.drafting.views import saliency
from saccade.methods import resolve, specvlm
from saccade.methods.specvlm import OFFICIAL, TREE, TwoStage

# visual tokens -> kept at a drop rate of .9, by the published product: its float is just below .1
BUDGETS = {1960: 195, 12544: 1254, 1000: 99, 105: 10, 10: 0}
BY_DEPTH = {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
CHILDREN = {"": 4, "0": 3, "1": 2, "2": 2, "3": 1, "00": 3, "01": 2, "02": 2, "10": 1} | {
    "000": 3,
    "0000": 2,
}
"""Of each node of the published tree that has any: ranks from the root down -> how many."""


def prompt_of(seen: int) -> Prompt:
    visual = torch.ones(seen + 2, dtype=torch.bool)
    visual[0] = visual[-1] = False
    rows = torch.arange(seen + 2)
    return Prompt(
        full_ids=rows,
        embeds=torch.zeros(seen + 2, 2),
        positions=rows[None],
        visual=visual,
        fixed=~visual,
        grid=torch.zeros(seen, 4, dtype=torch.long),
        places=rows,
        next_position=seen + 2,
    )


def published(scores: list[float], share: float, budget: int) -> list[int]:
    """The choice by plain loops over the description above."""
    ranked = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    first, mass = [], 0.0
    for j in ranked:
        if mass >= share * sum(scores) or len(first) == budget:
            break
        first.append(j)
        mass += scores[j]
    left = sorted(set(range(len(scores))) - set(first))
    more = budget - len(first)
    step = (len(left) - 1) / (more - 1) if more > 1 else 0.0
    return sorted(first + [left[int(i * step + 1e-9)] for i in range(more)])


@pytest.mark.parametrize("seen", BUDGETS)
def test_the_budget_is_the_published_product(seen):
    """Claim: rounded down, a tenth of 1,960 tokens is 195, as the float product of the published
    code; at least one stays. Ours by default is the nearest number."""
    assert saliency.budget(seen, OFFICIAL.keep, OFFICIAL.rounding) == max(1, BUDGETS[seen])
    assert saliency.budget(seen, specvlm.VIEW.keep, specvlm.VIEW.rounding) == int(seen / 10 + 0.5)


@pytest.mark.parametrize("seed", range(8))
def test_the_official_view_is_the_published_choice(seed):
    """Claim: over random long-tailed scores the view keeps what the published steps keep, both
    ends of the rest among them. Control: ours by default keeps others."""
    noise = torch.Generator().manual_seed(seed)
    target_attention = torch.rand(400, generator=noise) ** 9
    selection = OFFICIAL.select(prompt_of(400), target_attention, 40)
    assert selection.tolist() == published(target_attention.double().tolist(), 0.4, 40)
    assert selection.tolist() != TwoStage(0.4)(prompt_of(400), target_attention, 40).tolist()


def test_the_official_switches():
    """Claim: lambda .4, positions anew by their own switch, the tree of 25 by its depths; the
    other switches are those of any view, by name."""
    recipe = resolve("specvlm/view=specvlm-official/positions=repacked")
    assert recipe.view == replace(OFFICIAL, positions="repacked")
    assert recipe.view.select.share == 0.4
    assert resolve("specvlm/view=specvlm-official/keep=0.2").view == replace(OFFICIAL, keep=0.2)
    assert Counter(map(len, TREE)) == BY_DEPTH and len(TREE) == 25


def grown(paths: Paths) -> dict[str, list[int]]:
    """The ranks of each node's children, by the ranks that lead to it."""
    children: dict[str, list[int]] = {}
    for *above, rank in sorted(paths):
        children.setdefault("".join(map(str, above)), []).append(rank)
    return children


def test_the_tree_is_the_published_one():
    """Claim: the 25 paths are those of the published code, node by node. Control: a tree that has
    as many nodes at every depth, with one leaf below another parent, is not."""
    published = {node: list(range(count)) for node, count in CHILDREN.items()}
    assert grown(TREE) == published
    moved = tuple((3, 0, 0) if path == (1, 0, 0) else path for path in TREE)
    assert Counter(map(len, moved)) == BY_DEPTH and grown(moved) != published


def test_lambda_zero_keeps_no_token_for_its_attention():
    """Claim: at lambda 0 the choice is stage II alone, whatever is attended. Fails where the most
    attended token is kept for a share of nothing."""
    target_attention = torch.zeros(100)
    target_attention[37] = 1.0
    kept = TwoStage(0.0)(prompt_of(100), target_attention, 10).tolist()
    assert 37 not in kept and kept == TwoStage(0.0)(prompt_of(100), torch.ones(100), 10).tolist()


def test_eq_6_knows_no_budget_read_literally():
    """Claim: read literally stage I takes as many as lambda asks for, and stage II the whole budget
    again (Eq. 6 and 7), by the name ``view=specvlm-literal``, at any lambda and share. Fails where
    the budget caps V_R, or the reading is in reach of Python alone."""
    target_attention = torch.ones(100)
    for name, count in (("", 50 + 10), ("/lambda=0.2", 20 + 10), ("/lambda=0.2/keep=0.3", 20 + 30)):
        view = resolve(f"specvlm/view=specvlm-literal{name}").view
        kept = view.select(prompt_of(100), target_attention, view.budget(prompt_of(100)))
        assert len(kept) == count


def test_a_stage_one_that_fills_the_budget_is_reported_once(caplog):
    """Claim: where lambda asks for more than the budget a warning says that stage II is idle and
    what to do, once for a lambda; with a fitting lambda nothing is said."""
    specvlm._warn_that_stage_two_is_idle.cache_clear()
    with caplog.at_level(logging.WARNING):
        TwoStage(0.01)(prompt_of(100), torch.ones(100), 10)
        assert not caplog.records
        for _ in range(3):
            TwoStage(0.5)(prompt_of(100), torch.ones(100), 10)
    (record,) = caplog.records
    assert "stage II never acts" in record.getMessage()
    assert "lambda" in record.getMessage()


@pytest.mark.parametrize("name", ["specvlm/draw=1", "sd/view=random/draw=x"])
def test_a_draw_is_the_random_views(name):
    """Claim: SD-Rand is repeated over draws by ``view=random/draw=N``, and by nothing else."""
    assert resolve("sd-tree/view=random/draw=3").view.select.draw == 3
    with pytest.raises(MethodError, match="draw"):
        resolve(name)

"""What HIPPO's sentences decide that its equations do not: gamma, and whose seconds count."""

from __future__ import annotations

import pytest
from helpers import backbone, qwen25

from saccade.core.costs import Costs
from saccade.drafting import recipe
from saccade.drafting.parallel.worker_drafter import reading_patience
from saccade.drafting.shapes.fit import MAX_CHAIN_LENGTH, Fit
from saccade.drafting.shapes.policies import Chain
from saccade.methods import resolve

FLAT = (1, 26), (1.0, 1.0)  # rows, seconds: a GPU, where rows cost nothing
STEEP = (1, 26), (1.0, 26.0)


@pytest.mark.parametrize(
    ("costs", "gamma"),
    [
        (Costs(*FLAT, draft=0.2), 5),
        (Costs(*FLAT, draft=0.3), 3),
        (Costs(*FLAT, draft=2.0), 1),
        (Costs(*FLAT, draft=0.001), MAX_CHAIN_LENGTH),
        (Costs(*STEEP, draft=0.9), MAX_CHAIN_LENGTH),  # what is judged grows with what is drafted
    ],
)
def test_gamma_is_what_the_draft_writes_while_the_target_judges(costs, gamma, monkeypatch):
    """Claim: ``hippo/shape=fit`` drafts T_target / T_draft tokens, rounded down and at least one,
    for the whole answer. Fails for the serial rule, which counts the draft's steps as waited for,
    and where ``fit`` is refused in the parallel schedule."""
    monkeypatch.setattr(recipe.cost_measurement, "measure_costs", lambda *models, **lengths: costs)
    settled = recipe.plan(resolve("hippo/shape=fit"), backbone(qwen25()), None, 300)
    assert settled.shape == Chain(gamma)
    assert Fit(costs=costs).for_parallel() == Chain(gamma)


def test_the_serial_rule_is_another():
    """Control: at a draft of a tenth of the target's step the serial schedule's ``fit`` drafts
    fewer than the ten that would be free beside it."""
    shape = Fit(costs=Costs(*FLAT, draft=0.1))
    assert shape.for_parallel() == Chain(10)
    assert isinstance(chosen := shape.choose(shape.start()), int) and chosen < 10


@pytest.mark.parametrize(("tokens", "seconds"), [([0], 60), ([100_000], 160), ([50_000] * 4, 260)])
def test_a_draft_of_a_long_prompt_is_waited_for_longer(tokens, seconds):
    """Claim: a minute and a second for every thousand tokens of all prompts. Fails where an hour of
    video, which a draft beside a 72B target reads for minutes, is given up after a minute."""
    assert reading_patience(tokens) == seconds

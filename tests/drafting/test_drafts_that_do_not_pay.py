"""Claims about ``auto`` after answers in which its draft model did not pay: the draft does not even
read the prompts of the next ones, and now and then it is tried again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import AMOUNT, FAMILIES, input_for, noisy, truth

import saccade
from saccade.core.costs import Costs
from saccade.core.result import Round, Verdict
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import Tree
from saccade.drafting.shapes import cost_measurement
from saccade.drafting.shapes.auto import Auto
from saccade.model.backbone import Backbone

FAMILY = "qwen2_vl"
COSTS = Costs((1, 64), (1.0, 1.1), 0.02)
NEVER_PAYS = replace(COSTS, draft=0.9, acceptance=0.2)
PAYS = replace(COSTS, draft=0.05, acceptance=0.9)


@pytest.mark.parametrize(
    ("remembered", "sample", "is_read"),
    [
        pytest.param(NEVER_PAYS, False, False, id="it did not pay"),
        pytest.param(PAYS, False, True, id="it paid"),
        pytest.param(None, False, True, id="nothing is known of it"),
        pytest.param(NEVER_PAYS, True, True, id="no clock decides about draws"),
    ],
)
def test_a_draft_that_did_not_pay_reads_no_prompt(monkeypatch, remembered, sample, is_read):
    """Claim: where earlier answers have shown that a draft does not pay, no forward of it runs, and
    the answer is the target's. Fails if the prompt is read for a draft that nobody asks, if a draft
    that pays is left out, or if the seconds of earlier answers decide what is drawn."""
    monkeypatch.setattr(cost_measurement.CorrectedCosts, "load", lambda self: remembered)
    monkeypatch.setattr(cost_measurement, "measure_costs", lambda *_, **__: COSTS)
    monkeypatch.setattr(cost_measurement, "affordable_share", lambda *_, **__: 1.0)
    target = Backbone(FAMILIES[FAMILY](0))
    draft = Backbone(noisy(FAMILIES[FAMILY], 0, AMOUNT))
    forwards = []
    forward = draft.forward
    vars(draft)["forward"] = lambda *args, **named: forwards.append(1) or forward(*args, **named)
    result = saccade.run(
        target,
        input_for(FAMILY),
        draft=draft,
        method="auto",
        max_new_tokens=12,
        do_sample=sample,
        eos_token_id=[],
    )
    assert result.fallback_reason is None
    assert bool(forwards) is is_read
    assert any("did not pay" in warning for warning in result.warnings) is not is_read
    assert not any("no draft model" in warning for warning in result.warnings)
    if not sample:
        assert result.ids == truth(FAMILY)[:12]


@pytest.mark.parametrize(
    ("level", "acceptance"), [(0.03, 0.0), (0.2, 0.0), (0.45, 0.3), (0.7, 0.5), (0.9, 0.5)]
)
def test_a_draft_that_is_not_tried_is_tried_again(level, acceptance):
    """Claim: a draft that did not pay is left out of the next answer, and is tried again after at
    most 64 answers, whatever it costs, and after 4 where it costs little. Fails if one bad answer,
    or seconds of a busy hour, end drafting for good or for long."""
    auto = Auto(replace(COSTS, draft=level, acceptance=acceptance))
    assert not auto.is_expected_to_pay()
    rules = Scores(Tree(), [], Sampling(), (), 0)
    plain = Round(0, Tree(), Verdict((), (), 3, "bonus"), None, rules, None, 0.0, 1.0)
    most = 4 if level < 0.1 else 64  # A draft that could gain much is tried again soon.
    for _ in range(most):
        learnt = auto.learnt_costs(auto.fold(auto.start(), plain))
        assert learnt is not None
        auto = Auto(learnt)
        if auto.is_expected_to_pay():
            break
    assert auto.is_expected_to_pay()


def test_an_answer_of_a_single_round_teaches(monkeypatch):
    """Claim: the round that ends an answer teaches like any other, so an answer whose only draft is
    right raises the acceptance that the next one begins by. Fails if only answers whose first draft
    is refused teach anything, which makes every draft of short answers look bad."""
    saved = []
    monkeypatch.setattr(cost_measurement.CorrectedCosts, "load", lambda self: PAYS)
    monkeypatch.setattr(cost_measurement.CorrectedCosts, "save", lambda self, c: saved.append(c))
    monkeypatch.setattr(cost_measurement, "affordable_share", lambda *_, **__: 1.0)
    target, draft = (Backbone(FAMILIES[FAMILY](0)) for _ in range(2))
    result = saccade.run(
        target,
        input_for(FAMILY),
        draft=draft,
        method="auto",
        max_new_tokens=2,
        do_sample=False,
        eos_token_id=[],
    )
    assert result.ids == truth(FAMILY)[:2]
    assert [len(round.accepted) for round in result.rounds] == [0, 1]
    (costs,) = saved
    assert costs.acceptance > PAYS.acceptance


def test_another_draft_of_the_same_shape_is_not_mistaken_for_it():
    """Claim: what earlier answers showed of a draft is not believed of one with other weights, and
    is found again for the same weights. Fails if a retrained draft inherits the acceptance of the
    one before."""
    target = Backbone(FAMILIES[FAMILY](0))
    good, other = (Backbone(noisy(FAMILIES[FAMILY], seed, AMOUNT)) for seed in (0, 1))
    cost_measurement.CorrectedCosts(target, good, 256, 256).save(PAYS)
    same = Backbone(noisy(FAMILIES[FAMILY], 0, AMOUNT))
    assert cost_measurement.CorrectedCosts(target, same, 256, 256).load() == PAYS
    assert cost_measurement.CorrectedCosts(target, other, 256, 256).load() is None

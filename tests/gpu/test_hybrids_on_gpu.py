"""Claims about models with states on a GPU, over a pretended one: captured steps, right answers,
and few launches a round."""

from __future__ import annotations

import logging
from copy import deepcopy

import budgets
import pytest
import torch
from helpers import AMOUNT, HYBRIDS, few, noisy, truth
from pretended import pretend_gpus

from saccade.model import cuda_graphs
from saccade.model.backbone import Backbone

MOST: dict[str, dict[str, float]] = {
    "ar": {"sync": 1.5, "transfer": 3, "launch": 10},
    "sd": {"sync": 7, "transfer": 19, "launch": 75},
    "sd-tree": {"sync": 7, "transfer": 20, "launch": 95},
    "specvlm": {"sync": 7, "transfer": 20, "launch": 95},
    "lookup": {"sync": 1.5, "transfer": 3, "launch": 10},
    "sage": {"sync": 12, "transfer": 24, "launch": 95},
}
"""What a round does at most. The launches are those of all layers together: an ordinary step of a
model of 28 layers would need thousands."""


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_5", marks=pytest.mark.extra)])
@pytest.mark.parametrize("method", few(MOST, 1))
def test_a_hybrid_is_captured_within_its_budget(method, family, monkeypatch, caplog):
    """Claim: on a GPU a hybrid's steps are replayed with the ids of generate, nothing waits while
    it is captured, no devices are mixed, a second answer captures nothing, and a round starts few
    kernels. Fails if each layer copies or commits its state by itself."""
    monkeypatch.setattr(cuda_graphs, "MIN_KEYS", 256)  # which the CPU is through with sooner
    monkeypatch.setattr(budgets, "FAMILY", family)
    expected, make = truth(family, 0, budgets.TOKENS), HYBRIDS[family]
    with pretend_gpus() as record, torch.no_grad(), caplog.at_level(logging.WARNING):
        target = Backbone(deepcopy(make(0)).to("cuda"))
        draft = Backbone(deepcopy(noisy(make, 0, AMOUNT)).to("cuda"))
        for _ in range(2):
            counted = budgets.answer(record, target, draft, method)
            assert counted.ids == expected and counted.fallback is None
            assert record.errors == []
    assert counted.counts["replay"] >= counted.rounds and counted.captures == 0
    assert "captured" not in caplog.text, "captured steps were given up"
    for kind, most in MOST[method].items():
        assert counted.a_round(kind) <= most, (kind, counted.a_round(kind))

"""Claims about every method on a GPU, over a pretended one: right answers, nothing that a GPU would
refuse, and no more waiting, copying and launching than was written down."""

from __future__ import annotations

import json
import logging

import budgets
import pytest
import torch
from helpers import answered, few, truth
from pretended import pretend_gpus

BUDGETS = json.loads(budgets.STORED.read_text())


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", budgets.METHODS)
def test_a_method_is_right_and_within_its_budget(method, caplog):
    """Claim: on a GPU a method gives the ids of `generate`, falls back on nothing, mixes no
    devices, waits for nothing while it captures, runs captured steps, and in a second answer does
    no more a round than its row in docs/results/gpu-budgets.json. Fails for a method without a row:
    `make gpu-budgets` writes them."""
    expected = truth("qwen2_5_vl", 0, budgets.TOKENS)
    with pretend_gpus() as record, torch.no_grad(), caplog.at_level(logging.WARNING):
        target, draft = budgets.pair()
        for _ in range(2):
            counted = budgets.answer(record, target, draft, method)
            assert counted.ids == expected
            assert counted.fallback is None
            assert record.errors == []
    assert counted.counts["replay"] > 0
    assert "captured" not in caplog.text, "captured steps were given up"
    assert budgets.excess(method, counted, BUDGETS[method]) == []


@pytest.mark.extra
def test_control_a_method_over_its_budget_is_seen():
    """Control: half of what `sd` does is too little for it, and so are fewer captures."""
    method = "sd"
    with pretend_gpus() as record, torch.no_grad():
        target, draft = budgets.pair()
        counted = budgets.answer(record, target, draft, method)
    own = budgets.stored(counted)
    assert budgets.excess(method, counted, own) == []
    halved = {kind: number / 2 for kind, number in own.items()}
    assert len(budgets.excess(method, counted, {**own, "sync": own["sync"] / 2})) == 1
    assert len(budgets.excess(method, counted, halved)) >= 3


def test_no_budget_outlives_its_method():
    """Claim: the written rows are those of the methods there are."""
    assert set(BUDGETS) == set(budgets.METHODS)


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["ar", "sd", "specvlm"])
def test_a_second_answer_captures_nothing(method):
    """Claim: what was captured for one answer serves the next. Fails where each session captures
    its own."""
    with pretend_gpus() as record, torch.no_grad():
        target, draft = budgets.pair()
        first = budgets.answer(record, target, draft, method)
        second = budgets.answer(record, target, draft, method)
    assert first.captures > 0
    assert second.captures == 0


@pytest.mark.extra
@pytest.mark.parametrize("method", few(["pearl", "hippo", "pearl-specvlm"], 1))
def test_a_parallel_draft_on_a_second_gpu(method):
    """Claim: with the draft of a parallel method on a second GPU the answer is `generate`'s, rounds
    are those of one GPU, both models replay captured steps, and nothing waits in a capture. Fails
    if what the two processes send each other lies on the other's device, or if captures of the
    second device stay empty."""
    expected = truth("qwen2_5_vl", 0, budgets.TOKENS)
    rounds = set()
    for places in (("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
        with pretend_gpus(2) as record, torch.no_grad():
            target, draft = budgets.pair(*places)
            for _ in range(2):
                counted = budgets.answer(record, target, draft, method)
                assert counted.ids == expected
                assert counted.fallback is None
                assert record.errors == [] and all(size > 0 for size in record.sizes)
            assert counted.captures == 0 and counted.counts["replay"] > counted.rounds
            assert all(model.graphs[model.key_layer_count]._captured for model in (target, draft))
        rounds.add(counted.rounds)
    assert len(rounds) == 1


@pytest.mark.representatives(1)
@pytest.mark.parametrize("places", [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")])
def test_target_and_draft_on_two_gpus(places):
    """Claim: with target and draft on two GPUs of one process the answer is `generate`'s, every
    capture holds its steps, and as much of the draft is accepted as on one device. Fails where the
    second device's graphs stay empty: then its first output stands for all later ones."""
    expected = truth("qwen2_5_vl", 0, budgets.TOKENS)
    alone = answered("qwen2_5_vl", "sd", count=budgets.TOKENS)
    with pretend_gpus(2) as record, torch.no_grad():
        target, draft = budgets.pair(*places)
        for _ in range(2):
            counted = budgets.answer(record, target, draft, "sd")
            assert counted.ids == expected
            assert counted.rounds == len(alone.rounds) - 1
            assert all(size > 0 for size in record.sizes)
            assert counted.counts["replay"] >= counted.rounds
            assert record.errors == []

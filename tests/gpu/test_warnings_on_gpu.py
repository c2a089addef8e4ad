"""Claims about what an answer says of itself where a GPU makes a method pointless."""

from __future__ import annotations

import budgets
import pytest
import torch
from beside import Inside, hired
from helpers import WORDS, input_for
from pretended import pretend_gpus

import saccade
from saccade.engine.request_batch import SHARED_GPU, SLOW_EXACT


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("method", "places", "settings", "expected"),
    [
        ("pearl", ("cuda:0", "cuda:0"), {}, {SHARED_GPU}),
        ("pearl", ("cuda:0", "cuda:1"), {}, set()),
        ("pearl", ("cpu", "cpu"), {}, set()),
        ("sd", ("cuda:0", "cuda:0"), {}, set()),
        ("ar", ("cuda:0", "cuda:0"), {}, set()),
        ("ar", ("cuda:0", "cuda:0"), {"exact": True}, {SLOW_EXACT}),
        ("ar", ("cpu", "cpu"), {"exact": True}, set()),
    ],
)
def test_pointless_choices_are_named(method, places, settings, expected):
    """Claim: a parallel method whose draft shares the target's GPU says so in its result, and so
    does `exact` on a GPU; on two GPUs, on a CPU, and of serial methods nothing is said. Fails if
    a user waits for a speedup that cannot come."""
    with pretend_gpus(2), torch.no_grad(), hired(Inside()), budgets.fixed_prices():
        target, draft = budgets.pair(*places)
        result = saccade.run(
            target, input_for(budgets.FAMILY), draft=draft, method=method, max_new_tokens=4,
            do_sample=False, **WORDS, **settings,
        )  # fmt: skip
    assert set(result.warnings) == expected

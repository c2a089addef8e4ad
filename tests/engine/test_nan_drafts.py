"""Claims about drafts whose logits are NaN: they cost speed and change no token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import (
    noisy,
    qwen25,
)
from one_video import greedy_ids, run_on_video

# test_greedy.py runs the same code with shapes and types checked.
pytestmark = pytest.mark.usefixtures("unchecked")


def _poisoned(amount: float = 0.0) -> Any:
    """A draft whose head answers NaN."""
    broken = copy.deepcopy(noisy(qwen25, 0, amount))
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    return broken


@pytest.mark.parametrize("method", ["sd", "sd-tree", "sage"])
def test_a_draft_of_nan_logits_changes_no_greedy_token(method):
    """Claim: NaN in the draft costs speed only."""
    result = run_on_video(qwen25(), _poisoned(), method)
    assert result.ids == greedy_ids(24)


@pytest.mark.parametrize("method", ["sd", "sd-tree"])
def test_a_draft_of_nan_logits_changes_no_sampled_law(method):
    """Claim: when sampling, a NaN draft is given up or refused: what is emitted is the target's.

    With the temperature near zero the target's law is its arg-max, so the answer is known; a NaN
    in an accept rule such as min(1, p / q) would let any token through.
    """
    settings = dict(do_sample=True, temperature=1e-3, seed=0)
    result = run_on_video(qwen25(), _poisoned(), method, **settings)
    assert result.ids == greedy_ids(24)

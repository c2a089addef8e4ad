"""Claims about a caller who set a default device for torch."""

from __future__ import annotations

import pytest
import torch
from helpers import AMOUNT, WORDS, backbone, few, input_for, noisy, qwen25, truth

import saccade
from saccade.methods import METHODS

SOME_METHODS = [
    name for name in METHODS if name != "head" and not METHODS[name].drafts_beside_target
]


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", few(SOME_METHODS, 4))
def test_a_default_device_of_the_caller_changes_no_answer(method):
    """Claim: with any default device the answer is that without one, and the default is the
    caller's again afterwards. Fails where a tensor names no device: on "meta" it has no numbers,
    and on "cuda" it meets tensors of the CPU."""
    expected, inputs = truth("qwen2_5_vl"), input_for("qwen2_5_vl")
    target, draft = backbone(qwen25()), backbone(noisy(qwen25, 0, AMOUNT))
    settings = {"max_new_tokens": len(expected), "do_sample": False, **WORDS}
    with torch.device("meta"):
        result = saccade.run(target, inputs, draft=draft, method=method, **settings)
        assert result.ids == expected and result.fallback_reason is None
        assert torch.get_default_device().type == torch.zeros(1).device.type == "meta"
        rounds = saccade.stream(target, inputs, method="ar", max_new_tokens=3, do_sample=False)
        for _ in rounds:
            assert torch.zeros(1).device.type == "meta"
        assert rounds.results[0].ids == expected[:3]


def test_generate_returns_a_batch_whatever_the_default_device():
    """Claim: ``saccade.generate`` too gives its rows on the inputs' device."""
    inputs = input_for("qwen2_5_vl")
    with torch.device("meta"):
        rows = saccade.generate(qwen25(), inputs, method="ar", max_new_tokens=4, do_sample=False)
    assert tuple(rows[0, -4:].tolist()) == truth("qwen2_5_vl")[:4]

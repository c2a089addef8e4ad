"""Claims about low precision: answers differ only where two tokens are nearly equally likely."""

from __future__ import annotations

import copy
import itertools
from functools import cache
from typing import Any

import pytest
import torch
from helpers import (
    backbone,
    noisy,
    qwen25,
    truth,
    video_input,
)
from ties import along, parting

import saccade
from saccade.core import verify as verify_module

pytestmark = pytest.mark.usefixtures("unchecked")


PROMPTS = 6


@cache
def low(dtype: torch.dtype, seed: int = 0, amount: float = 0.0) -> Any:
    model = noisy(qwen25, seed, amount) if amount else qwen25(seed)
    return backbone(copy.deepcopy(model).to(dtype))


def partings(dtype: torch.dtype, draft: Any, count: int = 32, prompts: int = PROMPTS) -> list[Any]:
    """How each of several drafted answers in low precision differs from the plain one."""
    target = low(dtype)
    differences = []
    for seed in range(prompts):
        inputs = video_input(seed, (2, 4, 4))
        inputs["pixel_values_videos"] = inputs["pixel_values_videos"].to(dtype)
        settings = dict(max_new_tokens=count, do_sample=False)
        plain = saccade.run(target, inputs, method="ar", **settings).ids
        drafted = saccade.run(target, inputs, draft=draft, method="sd", **settings).ids
        differences.append(parting(target, inputs, plain, drafted))
    return differences


@pytest.mark.representatives(1)
@pytest.mark.parametrize("prompts", [PROMPTS, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_divergence_in_low_precision_is_a_near_tie(dtype, prompts):
    """Claim: teacher-forced, each first difference of a drafted answer stands where the target's
    two best tokens are closer than its own rounding. Fails on a wrong token of any other kind.
    """
    differences = [one for one in partings(dtype, low(dtype, 0, 0.05), prompts=prompts) if one]
    assert dtype != torch.bfloat16 or differences, "nothing parted: the oracle was not asked"
    assert all(one.near_tie for one in differences)


def test_control_a_bug_is_no_near_tie(monkeypatch):
    """Control: with tokens of an unrelated draft let through unverified, the oracle must call at
    least nine in ten of the differences a bug (a wrong token may happen to be a runner-up).
    """
    honest, counter = verify_module.prob, itertools.count()

    def gullible(law: Any, token: int) -> float:
        return 1.0 if next(counter) % 3 == 0 else honest(law, token)

    monkeypatch.setattr(verify_module, "prob", gullible)
    differences = [one for one in partings(torch.bfloat16, low(torch.bfloat16, 9), 8) if one]
    assert len(differences) > PROMPTS // 2
    assert sum(not one.near_tie for one in differences) >= 0.9 * len(differences)


def test_noise_is_what_the_number_of_rows_changes():
    """Claim: the noise the oracle allows for is rounding: at most 1e-4 in fp32, and in bf16 far
    below the spread of the logits in both.
    """
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 0.6)):
        inputs = video_input(0)
        inputs["pixel_values_videos"] = inputs["pixel_values_videos"].to(dtype)
        ids = truth("qwen2_5_vl")[:24]
        one = along(low(dtype), inputs, ids, 1)
        noise = float((along(low(dtype), inputs, ids, 8) - one).abs().max())
        assert noise <= most and noise < float(one.std()) / 4

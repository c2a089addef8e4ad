"""Answers with a draft in a process of its own."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from beside import Pace, paced
from helpers import (
    backbone,
    input_for,
    noisy,
    qwen25,
    truth,
)

import saccade
from saccade.core.result import Result
from saccade.model.backbone import Backbone

GAMMA, COUNT = 5, 24

INPUTS = input_for("qwen2_5_vl")


def answer(draft: Any = None, method: str = "pearl", **settings: Any) -> Result:
    settings = {"max_new_tokens": COUNT, "do_sample": False, **settings}
    draft = backbone(noisy(qwen25, 0, 0.05)) if draft is None else draft
    target = settings.pop("target", backbone(qwen25()))
    return saccade.run(target, INPUTS, draft=draft, method=method, **settings)


@cache
def unhurried() -> Backbone:
    """The target with 20 ms before each forward, so that any draft is ready before it is done."""
    return paced(copy.deepcopy(qwen25()), Pace(step=0.02))


def drafted(result: Result) -> int:
    return sum(len(round.tokens) for round in result.rounds)


def check_next_answer() -> None:
    """Asserts that the next answer drafts as if nothing had happened."""
    result = answer(target=unhurried())
    assert result.ids == truth("qwen2_5_vl")[:COUNT]
    assert result.fallback_reason is None and drafted(result) > 0


def token(epoch: int, *ids: int) -> list[tuple[Any, ...]]:
    return [("token", 0, epoch, each, None, 0.0) for each in ids]

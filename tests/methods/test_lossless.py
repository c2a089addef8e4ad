"""The papers' one common claim: whatever drafts, the greedy answer is the target's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from by_hand import Run, real
from helpers import (
    dealt,
    frames_input,
    llama,
    no_seconds,
    noisy,
    onevision,
    prompt_of,
    qwen2,
    qwen25,
    text_input,
    video_input,
)

from lab.reference import decode_greedily

COUNT = 24
MAKE: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "qwen2_5_vl": (qwen25, lambda: video_input(11, grid=(4, 6, 8))),
    "qwen2_vl": (qwen2, lambda: no_seconds(video_input(12, grid=(3, 8, 8)))),
    "llava_onevision": (onevision, lambda: frames_input(13, frames=8)),
    "llama": (llama, lambda: text_input(14, length=24)),
}
TWO_MODELS = ["sage", "sage/shape=sage-live", "specvlm"]
ONE_MODEL = ["std", "std/shape=sage", "streaming", "layerskip", "lookup", "specvlm-self"]
DRAFTS: dict[str, Callable[[Any], Any]] = {
    "close": lambda make: noisy(make, 0, 0.05),
    "unrelated": lambda make: make(1),
    "itself": lambda make: None,
}
CASES = [(method, draft) for method in TWO_MODELS for draft in ("close", "unrelated")]
CASES += [(method, "itself") for method in ONE_MODEL]


@cache
def run_of(family: str, method: str, draft: str) -> Run:
    make, inputs = MAKE[family]
    return real(method, make(), inputs(), DRAFTS[draft](make), count=COUNT)


@cache
def plain(family: str) -> list[int]:
    """By uncached forwards of the modules, one a token."""
    make, inputs = MAKE[family]
    return decode_greedily(make(), prompt_of(make(), inputs()), COUNT)


@pytest.mark.parametrize("family", list(MAKE))
def test_plain_decoding_is_the_modules_greedy_answer(family):
    """Claim: ``ar`` is arg-max after arg-max by uncached forwards. Fails on any cache error."""
    run = run_of(family, "ar", "itself")
    assert list(run.result.ids) == plain(family)
    assert len(run.rounds) == COUNT - 1 and len(set(plain(family))) > 8


@pytest.mark.representatives(3)
@pytest.mark.parametrize(("case", "family"), dealt(CASES, MAKE))
def test_the_answer_is_the_targets_own(case, family):
    """Claim: ids equal the cache-free reference's (and so ``ar``'s), for drafts good and bad, with
    video and on text alone.

    Not by drafting nothing: something is drafted, and every round ends in a token of the target's
    own. Fails on one token kept wrongly in any round.
    """
    run = run_of(family, *case)
    assert list(run.result.ids) == plain(family)
    assert sum(len(round.tree) for round in run.rounds)
    assert all(round.verdict.own is not None for round in run.rounds[:-1])


@pytest.mark.representatives(2)
@pytest.mark.parametrize(("method", "draft"), [case for case in CASES if case[1] != "unrelated"])
def test_control_drafts_are_both_accepted_and_refused(method, draft):
    """Control: over the families, each method has tokens accepted and tokens refused, so that the
    equality above was put to the test.
    """
    rounds = [round for family in MAKE for round in run_of(family, method, draft).rounds]
    assert sum(len(round.verdict.accepted) for round in rounds) > 4
    assert "recovered" in {round.verdict.kind for round in rounds}

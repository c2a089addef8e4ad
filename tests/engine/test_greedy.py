"""Claims about every method: its greedy answer is the target's own, token for token (fp32)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    FAMILIES,
    TEXT,
    WORDS,
    answered,
    backbone,
    dealt,
    few,
    hf_greedy,
    input_for,
    left_padded,
    llama,
    no_seconds,
    noisy,
    prompt_of,
    qwen25,
    stubbed,
    truth,
    video_input,
)
from one_video import INPUTS, greedy_ids, run_on_video
from torch import nn

import saccade
from lab import reference
from saccade.core.costs import Costs
from saccade.core.tree import Tree, chain
from saccade.drafting.shapes.fit import Fit
from saccade.methods import METHODS, resolve, specvlm

# On other machines Fit would choose other shapes: here its costs are given.
CHEAP = Costs((1, 2, 4, 8, 26), (1.0, 1.05, 1.1, 1.2, 1.6), draft=0.05)

# The draft here is a model; ``tests/model/test_heads.py`` has the answers of heads.
NAMED = [name for name in METHODS if name != "head"]
SOME_METHODS = [
    *NAMED,
    "sd/shape=chain-1",
    "sd/shape=chain-12",
    "sd/view=none",
    "sd-tree/drafter=self",
    "specvlm/shape=chain-7/view=uniform",
    "specvlm/view=random/positions=repacked",
    "specvlm/keep=0.01",
    "specvlm-self/view=attention/keep=0.5",
    "sd/shape=sage-live",
]

BATCHED = ["sd-tree", "tabed", "hippo", "std"]  # ``test_batch.py`` has eight requests of each


def _assert_lossless(family: str, method: str, seed: int = 0, fused: bool | None = None) -> None:
    result = answered(family, method, seed=seed, fused=fused)
    assert result.ids == truth(family, seed)
    assert result.fallback_reason is None and result.finish_reason == "length"
    assert sum(len(r.accepted) + (r.own is not None) for r in result.rounds) == 40


@pytest.mark.representatives(4)
@pytest.mark.parametrize(
    "method", few(sorted(SOME_METHODS, key="hippo".__eq__), len(SOME_METHODS) - 1)
)
def test_a_method_answers_like_plain_greedy_decoding(method):
    """Claim: lossless: 40 tokens equal transformers' generate and the cache-free reference.

    Drafts are right about two times in three, so rounds of every acceptance occur; one wrong key,
    mask, position or token anywhere changes all that follows. No draft may have failed silently.
    """
    _assert_lossless("qwen2_5_vl", method)


@pytest.mark.representatives(3)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("method", "family"), dealt(NAMED, [*FAMILIES][1:]))
def test_a_method_is_lossless_in_every_family(method, family):
    """Claim: nothing is Qwen2.5-only: one position axis or three, other towers, no media at all."""
    _assert_lossless(family, method)


@pytest.mark.representatives(2)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("method", "family"), dealt(NAMED, ["qwen2_5_vl", "llama"]))
def test_a_method_over_the_modules_answers_the_same(method, family):
    """Claim: the fallback decoder is as lossless as the fused one, on other random weights."""
    _assert_lossless(family, method, seed=1, fused=False)


@pytest.mark.representatives(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl"])
@pytest.mark.parametrize(
    ("grid", "seconds"), [((8, 4, 4), 3.0), ((12, 2, 2), 0.5), ((2, 12, 4), 1.0)]
)
def test_text_goes_on_from_the_last_token_however_far_the_videos_time_went(family, grid, seconds):
    """Claim: positions of the answer are generate's own where a video's time positions exceed the
    text's: long clips, few cells. Going on from the largest position instead shifts every token.
    """
    inputs = video_input(0, grid, seconds=seconds)
    if family == "qwen2_vl":
        inputs = no_seconds(inputs)
    model = FAMILIES[family]()
    for method in ("ar", "sd", "specvlm-self"):
        draft = noisy(FAMILIES[family], 0, 0.05)
        result = saccade.run(model, inputs, draft=draft, method=method, max_new_tokens=20)
        assert list(result.ids) == hf_greedy(model, inputs, 20)


@pytest.mark.representatives(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("method", ["sd", "sd-tree", "specvlm", "sage"])
def test_a_draft_with_another_tower_and_depth_changes_nothing(method):
    """Claim: a draft that has nothing to do with the target costs speed only.

    It sees its own rows and agrees by chance, so nearly every round is a refusal.
    """
    draft = qwen25(9, layers=1)
    target = backbone(qwen25())
    assert not backbone(draft).shares_rows_with(target)
    result = saccade.run(
        target, input_for("qwen2_5_vl"), draft=draft, method=method, max_new_tokens=40
    )
    assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None
    assert result.acceptance_rate < 0.2


@pytest.mark.parametrize("trees", [(), (specvlm.TREE,)])
def test_a_fitted_shape_answers_the_same(trees):
    """Claim: a shape that changes from round to round is as lossless as a fixed one."""
    recipe = replace(resolve("specvlm"), shape=Fit(trees, CHEAP))
    result = answered("qwen2_5_vl", recipe, amount=0.1)
    assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None
    assert len({len(r.tokens) for r in result.rounds}) > 1, "the shape never changed"


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_is_its_own_arg_max(family):
    """Claim: teacher-forced, every token of a drafted answer is the target's arg-max there.

    The control changes one token in the middle and must be noticed.
    """
    model = FAMILIES[family](2)
    result = answered(family, "sd", seed=2)
    prompt = prompt_of(model, input_for(family, 2))
    ids = list(result.ids)
    assert reference.teacher_forced_argmax(model, prompt, ids) == ids
    ids[20] = (ids[20] + 1) % 200
    assert reference.teacher_forced_argmax(model, prompt, ids) != ids


@pytest.mark.representatives(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("family", "method"), dealt(FAMILIES, ["sd", "sd-tree", "sd/shape=chain-11"])
)
def test_a_target_drafting_for_itself_accepts_everything(method, family):
    """Claim: a copy of the target as draft, with the video, is never refused.

    The first test of any drafter: a draft that lost the video, a position, a banned id or one key
    would disagree somewhere. For a tree the leading branch must be accepted to its end.
    """
    result = answered(family, method, amount=0.0)
    assert result.ids == truth(family) and result.fallback_reason is None
    deepest = 5 if method == "sd-tree" else len(result.forwards[0].tokens)
    full = result.forwards[:-1]  # the limit cuts the last
    assert [len(r.accepted) for r in full] == [deepest] * len(full)
    if method != "sd-tree":
        assert result.acceptance_rate is not None
        assert sum(len(r.tokens) for r in full) == sum(len(r.accepted) for r in full)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_that_fits_the_limit_has_an_acceptance_rate_of_one(family):
    """Claim: with 43 = 1 + 7 x (5 + 1) tokens nothing is cut, and the rate is exactly 1."""
    assert answered(family, "sd", amount=0.0, count=43).acceptance_rate == 1.0


@pytest.mark.parametrize("method", ["specvlm-self/keep=1", "sd/drafter=self", "std/view=full"])
def test_a_self_draft_that_keeps_everything_is_never_refused(method):
    """Claim: over all of its own keys the target agrees with itself, whatever view kept them."""
    result = answered("qwen2_5_vl", f"{method}/shape=chain-5", count=42)
    assert result.ids == truth("qwen2_5_vl", 0, 42) and result.acceptance_rate == 1.0
    assert result.draft_visual_tokens == result.visual_tokens == 18


def test_control_a_draft_without_the_video_is_refused():
    """Control: the same copy, blind, must be refused often: the tests above have power."""
    result = answered("qwen2_5_vl", "sd/view=none", amount=0.0)
    assert result.ids == truth("qwen2_5_vl")
    assert result.acceptance_rate < 0.5 and result.draft_visual_tokens == 0


@pytest.mark.representatives(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "method", few(sorted(NAMED, key=lambda name: name not in BATCHED), len(BATCHED))
)
def test_a_batch_answers_like_three_single_runs(method):
    """Claim: three requests of different lengths and grids, left-padded, answer as each alone.

    Requests of different acceptance get out of step at once; any shared row would show.
    """
    many = [
        video_input(0),
        video_input(1, (2, 4, 4), before=2),
        video_input(2, (4, 4, 6), after=11),
    ]
    target, draft = backbone(qwen25()), backbone(noisy(qwen25, 0, 0.05))
    settings = dict(draft=draft, method=method, max_new_tokens=24, **WORDS)
    out = saccade.generate(target, left_padded(many), **settings)
    for row, inputs in zip(out, many, strict=True):
        alone = saccade.generate(target, inputs, **settings)
        assert row[-24:].tolist() == alone[0, -24:].tolist()


def test_a_batch_whose_requests_end_apart_is_padded_like_hugging_faces():
    """Claim: each request stops at its own end, and answers are padded to the longest."""
    many = [
        video_input(0),
        video_input(1, (2, 4, 4), before=2),
        video_input(2, (4, 4, 6), after=11),
    ]
    batch = left_padded(many)
    model = qwen25()
    with torch.no_grad():
        free = model.generate(**batch, max_new_tokens=20)[:, -20:]
        ends = [int(free[0, 3]), int(free[2, 11])]
        expected = model.generate(**batch, max_new_tokens=20, eos_token_id=ends, pad_token_id=0)
    out = saccade.generate(
        model, batch, draft=noisy(qwen25, 0, 0.05), method="sd",
        max_new_tokens=20, eos_token_id=ends, pad_token_id=0,
    )  # fmt: skip
    assert out.tolist() == expected.tolist()


def test_text_only_models_are_no_special_case():
    """Claim: no media at all: an empty visual set, nothing pruned, the same loop."""
    result = answered("llama", "specvlm")
    assert result.visual_tokens == result.draft_visual_tokens == 0
    assert result.ids == truth("llama")
    assert llama().config.model_type == "llama"


def test_the_first_drafted_token_is_verified_too():
    """Claim: an always wrong draft of length one is never accepted; a right one always."""

    def wrong(request: int, text: list[int], round: int) -> Tree:
        return chain([(greedy_ids()[len(text)] + 1) % TEXT])

    def right(request: int, text: list[int], round: int) -> Tree:
        return chain([greedy_ids()[len(text)]])

    refused = run_on_video(qwen25(), None, stubbed(wrong))
    assert refused.ids == greedy_ids(24) and refused.acceptance_rate == 0.0
    accepted = run_on_video(qwen25(), None, stubbed(right))
    assert accepted.ids == greedy_ids(24) and accepted.acceptance_rate == 1.0
    assert (len(refused.forwards), len(accepted.forwards)) == (23, 12)


class _Coarse(nn.Module):
    """A head whose logits are whole numbers: exact ties at nearly every step."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.round(nn.functional.linear(hidden, self.weight) / 4)


def _coarse(model: Any) -> Any:
    tied = copy.deepcopy(model)
    tied.lm_head = _Coarse(tied.lm_head)
    return tied


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["ar", "sd", "sd-tree", "specvlm-self"])
def test_exact_ties_go_to_the_first_id(method):
    """Claim: with logits tied at most steps, the answer is still transformers', token for token.

    Last-wins, or a rank computed with >= for >, picks another of the tied ids.
    """
    model = _coarse(qwen25())
    expected = hf_greedy(model, INPUTS, 24)
    with torch.no_grad():
        ids = torch.cat([INPUTS["input_ids"], torch.tensor([expected])], 1)
        types = torch.nn.functional.pad(INPUTS["mm_token_type_ids"], (0, 24))
        changes = {"input_ids": ids, "mm_token_type_ids": types, "attention_mask": None}
        logits = model(**{**INPUTS, **changes}).logits[0, -25:-1]
    ties = (logits == logits.max(-1, keepdim=True).values).sum(-1)
    assert int((ties > 1).sum()) > 12, "hardly any ties: the test proves nothing"
    result = run_on_video(model, _coarse(noisy(qwen25, 0, 0.05)), method)
    assert list(result.ids) == expected and result.fallback_reason is None
    last = [int((row == row.max()).nonzero().max()) for row in logits]
    assert last != expected

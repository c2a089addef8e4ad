"""Bugs of other libraries, each a named claim (numbers as in the reliability survey)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import (
    IMAGE,
    TEXT,
    VIDEO,
    answered,
    few,
    hf_greedy,
    input_for,
    llama,
    noisy,
    qwen25,
    stubbed,
    truth,
    video_input,
)
from torch import nn

import saccade
from saccade.core.tree import ROOT, Tree, chain
from saccade.model import trial
from saccade.model.backbone import Backbone

# test_greedy.py runs the same code with shapes and types checked.
pytestmark = pytest.mark.usefixtures("unchecked")

FAMILY = "qwen2_5_vl"
INPUTS = input_for(FAMILY)


def _answer(count: int = 40) -> tuple[int, ...]:
    return truth(FAMILY)[:count]


def _run(model: Any, draft: Any, method: Any = "sd", inputs: Any = INPUTS, **settings: Any) -> Any:
    settings = {"max_new_tokens": 24, **settings}
    return saccade.run(model, inputs, draft=draft, method=method, **settings)


@pytest.mark.parametrize("method", few(["sd", "sd-tree", "specvlm", "sd/shape=chain-12"], 2))
def test_an_end_inside_an_accepted_run_ends_the_answer(method):
    """Claim: declare each emitted token in turn the end: the answer stops right there.

    Walking every index puts the end at every place of a round. Running past it fails at once.
    """
    for end in dict.fromkeys(_answer(20)):
        result = answered(FAMILY, method, eos_token_id=end, count=24)
        assert result.ids == _answer(_answer().index(end) + 1)
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("amount", few([0.05, 0.0], 1))
def test_the_length_limit_and_the_end_give_different_finish_reasons(amount):
    """Claim: over every limit x every place of the end, up to two rounds, ids and finish reason
    are those of looking at one token after the other.
    """
    for limit in range(1, 9):
        for at in range(9):
            result = answered(FAMILY, "sd", eos_token_id=_answer()[at], count=limit, amount=amount)
            assert result.ids == _answer(min(limit, at + 1))
            assert result.finish_reason == ("stop" if at < limit else "length")


@pytest.mark.parametrize("method", ["sd", "sd-tree"])
def test_tokens_after_the_end_count_nowhere(method):
    """Claim: tokens of the rounds are the ids emitted, accepted counts exclude what was cut, and
    no round accepts more than it drafted.
    """
    for at in range(1, 14):
        result = answered(FAMILY, method, eos_token_id=_answer()[at], amount=0.0)
        spelled = tuple(token for r in result.rounds for token in r.emitted)
        assert spelled == result.ids == _answer(at + 1)
        assert all(len(r.accepted) <= len(r.tokens) for r in result.rounds)
        last = result.rounds[-1]
        cut_inside = at % 6 != 0  # the first token is the prefill's
        assert (last.own is None) == cut_inside and (last.kind is None) == cut_inside


def test_a_rejected_end_token_ends_nothing():
    """Claim: a draft that proposes the end every round changes nothing."""
    end = next(i for i in range(TEXT) if i not in _answer())
    result = _run(qwen25(), None, stubbed(lambda *_: chain([end] * 3)), eos_token_id=end)
    assert result.ids == _answer(24) and result.finish_reason == "length"
    assert result.acceptance_rate == 0.0


def test_the_first_drafted_token_is_verified_too():
    """Claim: an always wrong draft of length one is never accepted; a right one always."""

    def wrong(request: int, text: list[int], round: int) -> Tree:
        return chain([(_answer()[len(text)] + 1) % TEXT])

    def right(request: int, text: list[int], round: int) -> Tree:
        return chain([_answer()[len(text)]])

    refused = _run(qwen25(), None, stubbed(wrong))
    assert refused.ids == _answer(24) and refused.acceptance_rate == 0.0
    accepted = _run(qwen25(), None, stubbed(right))
    assert accepted.ids == _answer(24) and accepted.acceptance_rate == 1.0
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
        told = {"input_ids": ids, "mm_token_type_ids": types, "attention_mask": None}
        logits = model(**{**INPUTS, **told}).logits[0, -25:-1]
    ties = (logits == logits.max(-1, keepdim=True).values).sum(-1)
    assert int((ties > 1).sum()) > 12, "hardly any ties: the test proves nothing"
    result = _run(model, _coarse(noisy(qwen25, 0, 0.05)), method)
    assert list(result.ids) == expected and result.fallback_reason is None
    last = [int((row == row.max()).nonzero().max()) for row in logits]
    assert last != expected


@pytest.mark.parametrize("fused", [None, False])
def test_positions_hold_over_many_rounds_of_mixed_acceptance(fused):
    """Claim: 120 tokens over rounds that accept 0 to 5 equal generate. Drift in a position, even
    by one after some refusal, changes the rest of the answer.
    """
    result = answered(FAMILY, "sd", fused=fused, count=120)
    assert list(result.ids) == hf_greedy(qwen25(), INPUTS, 120)
    assert {len(r.accepted) for r in result.rounds} == set(range(6))


def _generated_positions(model: Any, inputs: Any, count: int) -> list[list[int]]:
    """(t, h, w) at which transformers' generate feeds each generated token but the last."""
    fed: list[list[int]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        where = kwargs["position_ids"]
        if where.shape[-1] == 1:
            fed.append(where[-3:, 0, 0].tolist())

    handle = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    try:
        hf_greedy(model, inputs, count)
    finally:
        handle.remove()
    return fed


@pytest.mark.parametrize("seconds", [0.5, 3.0])
@pytest.mark.parametrize("method", ["sd", "sd-tree"])
def test_verified_rows_stand_where_generate_puts_them(method, seconds, monkeypatch):
    """Claim: every row of every verification is at the position at which plain generate feeds the
    token of its depth, on all three axes (the video shifts them by its own delta).
    """
    model, inputs = copy.deepcopy(qwen25()), video_input(0, seconds=seconds)
    expected = _generated_positions(model, inputs, 25)
    assert expected[0] != [inputs["input_ids"].shape[1]] * 3, "the video shifts nothing"
    target = Backbone(model)
    trial.check(target)  # whose forwards are not the answer's
    seen: list[list[list[int]]] = []
    forward = target.forward

    def spy(embeds: torch.Tensor, positions: Any, *rest: Any) -> torch.Tensor:
        axes = torch.as_tensor(positions).expand(target.axes, -1)  # a list: text, alike on each
        seen.append(axes.T.tolist())
        return forward(embeds, positions, *rest)

    monkeypatch.setattr(target, "forward", spy)
    stream = saccade.stream(
        target, inputs, draft=noisy(qwen25, 0, 0.05), method=method, max_new_tokens=20
    )
    assert next(stream).opening and len(seen) == 1, "the prefill gives the first token"
    generated = 1
    for count, round in enumerate(stream):
        depths: list[int] = []
        for parent in round.tree.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        rows = [generated - 1] + [generated + depth for depth in depths]
        assert seen[-1] == [expected[row] for row in rows]
        assert len(seen) == count + 2, "one prefill, then one forward a round"
        generated += len(round.tokens)


def test_two_interleaved_streams_keep_their_own_positions():
    """Claim: two prompts with different rope deltas, decoded turn by turn on one model object,
    answer as alone. Positions kept on the module would be the other prompt's.
    """
    model = qwen25()
    several = [video_input(0, seconds=0.5), video_input(1, (4, 6, 4), before=9, seconds=2.0)]
    alone = [hf_greedy(model, inputs, 24) for inputs in several]
    draft = noisy(qwen25, 0, 0.05)
    streams = [
        saccade.stream(model, inputs, draft=draft, method="sd", max_new_tokens=24)
        for inputs in several
    ]
    live = list(streams)
    while live:
        live = [stream for stream in live if next(stream, None) is not None]
    assert [list(stream.results[0].ids) for stream in streams] == alone


def test_a_text_draft_beside_a_video_target():
    """Claim: a draft without any tower is no error: it drafts from the ids, or drafting is given
    up with a reason, and the answer is the target's.
    """
    result = _run(qwen25(), llama(), "sd/view=none")
    assert result.ids == _answer(24)


@pytest.mark.parametrize("method", ["sd", "sd-tree", "lookup"])
def test_placeholders_of_media_are_never_drafted(method):
    """Claim: a draft whose favourite is the video placeholder proposes it never.

    Its head is bent so that it would at every step; the target's answer stays what it is.
    """
    obsessed = copy.deepcopy(qwen25())
    with torch.no_grad():
        obsessed.lm_head.weight[VIDEO] = 50 * obsessed.lm_head.weight[:TEXT].abs().max(0).values
        obsessed.lm_head.weight[IMAGE] = -obsessed.lm_head.weight[VIDEO]
    favourites = hf_greedy(obsessed, INPUTS, 6)
    assert VIDEO in favourites or IMAGE in favourites
    result = _run(qwen25(), obsessed, method)
    assert result.ids == _answer(24) and result.fallback_reason is None
    assert not {VIDEO, IMAGE} & {token for r in result.rounds for token in r.tokens}


def test_drafted_placeholders_are_refused_like_any_wrong_token():
    """Claim: even proposed, a placeholder is a wrong token, not a crash or a missing feature."""
    result = _run(qwen25(), None, stubbed(lambda *_: chain([VIDEO, IMAGE, VIDEO])))
    assert result.ids == _answer(24) and result.fallback_reason is None


SAMPLED = dict(do_sample=True, temperature=0.9, max_new_tokens=16)


@pytest.mark.parametrize("method", ["ar", "sd", "sd-tree", "specvlm"])
def test_a_seed_names_the_answer(method):
    """Claim: one seed, one answer; eight seeds, eight answers; torch's own seed plays no part.

    At this temperature two of 28 pairs would coincide with a chance below 1e-9.
    """
    model, draft = qwen25(), noisy(qwen25, 0, 0.05)
    answers = []
    for seed in (*range(8), 3):
        torch.manual_seed(len(answers))
        answers.append(_run(model, draft, method, seed=seed, **SAMPLED).ids)
    assert answers[8] == answers[3]
    assert len(set(answers)) == 8


def test_requests_of_a_batch_draw_their_own_noise():
    """Claim: the same prompt twice in one batch gives two answers, and the same two again."""
    one = video_input(0)
    batch = {name: torch.cat([value, value]) for name, value in one.items()}
    settings = dict(draft=noisy(qwen25, 0, 0.05), method="sd", seed=5, **SAMPLED)
    first = saccade.generate(qwen25(), batch, **settings).tolist()
    assert first[0] != first[1]
    assert saccade.generate(qwen25(), batch, **settings).tolist() == first


def test_interleaved_streams_keep_their_seeds():
    """Claim: two seeded answers drawn turn by turn are those drawn alone: no shared generator."""
    model, draft = qwen25(), noisy(qwen25, 0, 0.05)
    alone = [_run(model, draft, "sd", seed=seed, **SAMPLED).ids for seed in (1, 2)]
    streams = [
        saccade.stream(model, INPUTS, draft=draft, method="sd", seed=seed, **SAMPLED)
        for seed in (1, 2)
    ]
    live = list(streams)
    while live:
        live = [stream for stream in live if next(stream, None) is not None]
    assert [stream.results[0].ids for stream in streams] == alone


def test_without_a_seed_answers_differ_and_torchs_seed_fixes_custom_generate():
    """Claim: unseeded calls draw fresh noise; through generate, torch.manual_seed names it."""
    model, draft = qwen25(), noisy(qwen25, 0, 0.05)
    assert len({_run(model, draft, "sd", **SAMPLED).ids for _ in range(4)}) == 4
    told = dict(custom_generate=saccade.generate, draft=draft, method="sd", **SAMPLED)
    drawn = []
    for seed in (7, 8, 7):
        torch.manual_seed(seed)
        drawn.append(model.generate(**INPUTS, **told).tolist())
    assert drawn[0] == drawn[2] != drawn[1]


def _poisoned(amount: float = 0.0) -> Any:
    """A draft whose head answers NaN."""
    broken = copy.deepcopy(noisy(qwen25, 0, amount))
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    return broken


@pytest.mark.parametrize("method", ["sd", "sd-tree", "sage"])
def test_a_draft_of_nan_logits_changes_no_greedy_token(method):
    """Claim: NaN in the draft costs speed only."""
    result = _run(qwen25(), _poisoned(), method)
    assert result.ids == _answer(24)


@pytest.mark.parametrize("method", ["sd", "sd-tree"])
def test_a_draft_of_nan_logits_changes_no_sampled_law(method):
    """Claim: when sampling, a NaN draft is given up or refused: what is emitted is the target's.

    With the temperature near zero the target's law is its arg-max, so the answer is known; a NaN
    in an accept rule such as min(1, p / q) would let any token through.
    """
    settings = dict(do_sample=True, temperature=1e-3, seed=0)
    result = _run(qwen25(), _poisoned(), method, **settings)
    assert result.ids == _answer(24)

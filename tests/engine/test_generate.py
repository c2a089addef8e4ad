"""Claims about generate, run and stream: the same answers as transformers, under any settings."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    MadeBy,
    StubDraft,
    answered,
    backbone,
    hf_greedy,
    input_for,
    left_padded,
    llama,
    noisy,
    qwen25,
    stubbed,
    text_input,
    truth,
    video_input,
)
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria
from transformers.generation.logits_process import SuppressTokensLogitsProcessor

import saccade
from saccade.cli.caption import caption
from saccade.cli.chat import chat
from saccade.cli.compare import compare
from saccade.cli.describe import describe
from saccade.core import generation_settings
from saccade.core.errors import MethodError, ModelError, OptionError
from saccade.core.tree import Tree

# test_greedy.py runs the same code with shapes and types checked.
pytestmark = pytest.mark.usefixtures("unchecked")

INPUTS = input_for("qwen2_5_vl")
LENGTH = INPUTS["input_ids"].shape[1]
BATCH = left_padded(
    [video_input(0), video_input(1, (2, 4, 4), before=2), video_input(2, (4, 4, 6), after=11)]
)


def _answer() -> list[int]:
    return list(truth("qwen2_5_vl"))


def _draft() -> Any:
    return noisy(qwen25, 0, 0.05)


def _hf(inputs: Any = INPUTS, **settings: Any) -> list[list[int]]:
    with torch.no_grad():
        return qwen25().generate(**inputs, **settings).tolist()


def _direct(inputs: Any = INPUTS, method: str = "sd", **settings: Any) -> list[list[int]]:
    return saccade.generate(qwen25(), inputs, draft=_draft(), method=method, **settings).tolist()


def _custom(inputs: Any = INPUTS, method: str = "sd", **settings: Any) -> list[list[int]]:
    return (
        qwen25()
        .generate(
            **inputs, custom_generate=saccade.generate, draft=_draft(), method=method, **settings
        )
        .tolist()
    )


BOTH_WAYS = pytest.mark.parametrize("call", [_direct, _custom], ids=["direct", "custom_generate"])


@pytest.mark.representatives(3)
@BOTH_WAYS
@pytest.mark.parametrize("method", ["ar", "sd", "sd-tree", "specvlm", "std"])
def test_generate_is_a_drop_in(call, method):
    """Claim: called directly or by transformers, the ids are generate's, prompt included."""
    assert call(method=method, max_new_tokens=24) == _hf(max_new_tokens=24)


@BOTH_WAYS
def test_a_padded_batch_comes_back_as_transformers_pads_it(call):
    """Claim: prompts keep their left padding and answers line up behind them."""
    assert call(BATCH, max_new_tokens=12) == _hf(BATCH, max_new_tokens=12)


def test_text_only_prompts_need_no_media():
    """Claim: a video model asked in text alone, and a text model, answer like generate."""
    inputs = text_input(3) | {"mm_token_type_ids": torch.zeros(1, 12).int()}
    assert _direct(inputs, max_new_tokens=12) == _hf(inputs, max_new_tokens=12)
    out = saccade.generate(llama(), text_input(3), draft=noisy(llama), method="sd-tree",
                           max_new_tokens=12)  # fmt: skip
    assert out[0, 12:].tolist() == hf_greedy(llama(), text_input(3), 12)


PROCESSORS: dict[str, Callable[[list[int]], dict[str, Any]]] = {  # of what is answered without
    "repetition_penalty": lambda a: dict(repetition_penalty=1.6),
    "no_repeat_ngram_size": lambda a: dict(no_repeat_ngram_size=1),
    "bad_words_ids": lambda a: dict(bad_words_ids=[[a[3]], [a[0], a[1]]]),
    "min_new_tokens": lambda a: dict(min_new_tokens=9, eos_token_id=a[4]),
    "min_length": lambda a: dict(min_length=LENGTH + 9, eos_token_id=a[4]),
    "sequence_bias": lambda a: dict(sequence_bias={(a[3],): -9.0, (a[0], a[1]): -9.0}),
    "suppress_tokens": lambda a: dict(suppress_tokens=[a[2]]),
    "begin_suppress_tokens": lambda a: dict(begin_suppress_tokens=[a[0]]),
    "exponential_decay_length_penalty": lambda a: dict(
        exponential_decay_length_penalty=(4, 1.5), eos_token_id=5
    ),
    "encoder_repetition_penalty": lambda a: dict(encoder_repetition_penalty=1.4),
    "forced_eos_token_id": lambda a: dict(forced_eos_token_id=5),
}


@pytest.mark.representatives(4)
@pytest.mark.parametrize("method", ["sd/shape=chain-1", "sd/shape=chain-9", "sd-tree"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_act_at_every_node_as_in_generate(name, method):
    """Claim: each rule changes the answer, and changes it as transformers does, in any block.

    A rule that is ignored, applied once a round, or blind to the path gives another answer.
    """
    settings = dict(max_new_tokens=30, **PROCESSORS[name](_answer()))
    expected = _hf(**settings)
    assert expected[0][LENGTH:] != _answer()[:30], "no effect"
    assert _direct(method=method, **settings) == expected


@pytest.mark.representatives(2)
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_arrive_through_custom_generate(name):
    """Claim: the processors transformers made ready are the ones that act."""
    settings = dict(max_new_tokens=30, **PROCESSORS[name](_answer()))
    assert _custom(method="sd-tree", **settings) == _hf(**settings)


@BOTH_WAYS
def test_the_callers_own_processor_acts_too(call):
    """Claim: logits_processor= is applied, and the caller's list stays as it was."""
    mine = LogitsProcessorList([SuppressTokensLogitsProcessor(_answer()[:6:2])])
    settings = dict(max_new_tokens=16, logits_processor=mine)
    assert call(**settings) == _hf(**settings) != _hf(max_new_tokens=16)
    assert len(mine) == 1


def _allowed(batch: int, ids: torch.Tensor) -> list[int]:
    """A grammar that depends on the request and on the last token."""
    last = int(ids[-1])
    return [(last * 7 + i + 20 * batch) % 240 for i in range(5)]


@pytest.mark.parametrize(
    "call",
    [
        _direct,
        _custom,
    ],
    ids=["direct", "custom_generate"],
)
def test_allowed_tokens_hold_at_every_node(call):
    """Claim: prefix_allowed_tokens_fn constrains drafts and target like generate."""
    settings = dict(max_new_tokens=16, prefix_allowed_tokens_fn=_allowed)
    assert call(**settings) == _hf(**settings) != _hf(max_new_tokens=16)


def test_allowed_tokens_depend_on_the_request():
    """Claim: in a batch the function is called with each request's own number."""
    two = left_padded([video_input(0), video_input(1)])
    settings = dict(max_new_tokens=8, prefix_allowed_tokens_fn=_allowed)
    assert _direct(two, **settings) == _hf(two, **settings)


@pytest.mark.representatives(3)
@pytest.mark.parametrize("method", ["sd", "sd-tree"])
@pytest.mark.parametrize("least", [1, 4, 5, 6, 7, 13])
def test_min_new_tokens_counts_tokens(method, least):
    """Claim: the end comes no earlier than ``least`` tokens, wherever rounds end.

    The answer's own fifth token is the end: counting rounds instead of tokens stops elsewhere.
    """
    settings = dict(max_new_tokens=20, min_new_tokens=least, eos_token_id=_answer()[4])
    assert _direct(method=method, **settings) == _hf(**settings)


@BOTH_WAYS
def test_several_ends_are_all_ends(call):
    """Claim: any id of a list ends the answer, the first met wins."""
    a = _answer()
    for ends in ([a[9], a[6]], [a[12], 239], [239]):
        settings = dict(max_new_tokens=20, eos_token_id=ends)
        assert call(**settings) == _hf(**settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 2),
        ("output_attentions", True),
        ("output_scores", True),
        ("cache_implementation", "static"),
        ("prompt_lookup_num_tokens", 3),
    ],
)
@BOTH_WAYS
def test_what_would_be_computed_otherwise_is_refused_by_name(call, name, value):
    """Claim: an argument this engine does not honour is an error that names it, both ways."""
    with pytest.raises(OptionError, match=name):
        call(max_new_tokens=4, **{name: value})


def test_unknown_arguments_are_refused_before_any_work(monkeypatch):
    """Claim: a typo costs no forward: stream() itself raises, before vision."""
    target = backbone(qwen25())
    monkeypatch.setattr(target, "prompts", lambda inputs: pytest.fail("work was begun"))
    for settings in (
        dict(max_tokens=3),
        dict(method="spec"),
        dict(stop_strings=["x"]),
        dict(num_beams=2),
        dict(max_length=3),
    ):
        with pytest.raises((OptionError, MethodError)):
            saccade.stream(target, INPUTS, **{"method": "ar", **settings})


def test_a_method_that_needs_a_draft_says_so():
    """Claim: no draft model is a ModelError with both ways out, not a silent plain decoding."""
    with pytest.raises(ModelError, match="draft=.*drafter=self"):
        saccade.generate(qwen25(), INPUTS, method="sd", max_new_tokens=4)


def test_run_answers_one_request():
    """Claim: a batch is for generate, and run says so."""
    with pytest.raises(OptionError, match="one request"):
        saccade.run(qwen25(), BATCH, method="ar", max_new_tokens=4)


class _Streamer:
    def __init__(self) -> None:
        self.prompt: list[int] | None = None
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        if self.prompt is None:
            self.prompt = value[0].tolist()
        else:
            self.tokens += value.tolist()

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_every_token_and_an_end():
    """Claim: what transformers' streamers are promised. Fails if a round's tokens are lost."""
    streamer = _Streamer()
    out = _direct(max_new_tokens=14, streamer=streamer)
    assert streamer.prompt == INPUTS["input_ids"][0].tolist()
    assert streamer.tokens == out[0][LENGTH:] and streamer.ended == 1
    with pytest.raises(OptionError, match="single request"):
        _direct(BATCH, max_new_tokens=4, streamer=_Streamer())


def test_rounds_are_streamed_as_they_happen():
    """Claim: stream yields rounds whose tokens make the answer; results come at the end only."""
    phases: list[str] = []
    stream = saccade.stream(
        qwen25(), INPUTS, draft=_draft(), method="sd", max_new_tokens=20, on_phase=phases.append
    )
    first = next(stream)
    assert first.opening and phases == ["vision", "prefill"], "the draft has yet to read"
    second = next(stream)
    assert phases == ["vision", "prefill", "guide", "decode"] and not stream.results
    rounds = [first, second, *stream]
    assert [t for r in rounds for t in r.emitted] == _answer()[:20]
    assert [r.finish for r in rounds] == [None] * (len(rounds) - 1) + ["length"]
    for record in (r.to_record() for r in rounds):
        own = () if record.kind is None else (record.kind,)
        assert record.kinds == ("accepted",) * len(record.accepted) + own
        assert len(record.kinds) == len(record.emitted)
    assert stream.results[0].ids == tuple(_answer()[:20])


def test_closing_a_stream_stops_the_work():
    """Claim: after close nothing more comes. Fails if decoding goes on behind it."""
    stream = saccade.stream(qwen25(), INPUTS, method="ar", max_new_tokens=20)
    next(stream)
    stream.close()
    assert list(stream) == [] and stream.results == []


class _Letters:
    """A tokenizer of which only ``decode`` is used: one to three letters an id."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join("abcdefgh"[i % 8] * (i % 3 + 1) for i in ids)


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", ["ar", "sd", "sd-tree", "sd/shape=chain-12"])
def test_stop_strings_end_the_answer_where_the_text_first_holds_them(method):
    """Claim: the answer ends with the first token whose text completes a stop string, across
    tokens and rounds, and the text is cut before it.

    All substrings of two to five letters of the whole answer are tried against a plain search.
    """
    letters, answer = _Letters(), _answer()[:20]
    whole = letters.decode(answer)
    model, draft = backbone(qwen25()), backbone(_draft())
    for at, size in [(0, 2), (5, 3), (9, 5), (14, 4), (20, 2), (26, 5)]:
        stop = whole[at : at + size]
        count = next(n for n in range(1, 21) if stop in letters.decode(answer[:n]))
        result = saccade.run(
            model, INPUTS, draft=draft, method=method, max_new_tokens=20,
            stop_strings=["#", stop], tokenizer=letters,
        )  # fmt: skip
        assert result.ids == tuple(answer[:count]) and result.finish_reason == "stop"
        assert result.text == whole[: whole.find(stop)]


def test_of_several_stops_in_one_token_the_earliest_cuts():
    """Claim: a token that holds a stop string twice, or several, is cut before the first of them,
    in whatever order they are named. Fails if a stop string is shown.
    """
    letters = _Letters()
    spelt = [letters.decode([token]) for token in _answer()[:20]]
    answer = next(
        i for i in range(20) if len(spelt[i]) > 1 and spelt[i][0] not in "".join(spelt[:i])
    )
    token, before = spelt[answer], "".join(spelt[:answer])  # a letter twice or thrice
    for stops in ([token[:1]], [token[:2], token[:1]], [token[:1], token[:2], token]):
        result = saccade.run(
            backbone(qwen25()), INPUTS, method="ar", max_new_tokens=20,
            stop_strings=stops, tokenizer=letters,
        )  # fmt: skip
        assert result.ids == tuple(_answer()[: answer + 1]) and result.text == before


def test_stopping_criteria_are_asked_token_by_token():
    """Claim: a criterion that ends after n tokens ends exactly there, inside an accepted run."""
    for limit in (1, 3, 6, 7, 11):
        criteria = [MaxLengthCriteria(max_length=LENGTH + limit)]
        result = answered("qwen2_5_vl", "sd", stopping_criteria=criteria, amount=0.0)
        assert result.ids == truth("qwen2_5_vl")[:limit] and result.finish_reason == "stop"


@pytest.mark.representatives(6)
@BOTH_WAYS
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 12])
def test_the_limit_may_fall_inside_an_accepted_run(call, limit):
    """Claim: max_new_tokens is exact for every remainder of a round (chain of 5 accepts 6)."""
    assert call(max_new_tokens=limit) == _hf(max_new_tokens=limit)


@BOTH_WAYS
def test_max_length_counts_the_prompt(call):
    """Claim: max_length and transformers' default length give answers of the same length."""
    assert call(max_length=LENGTH + 9) == _hf(max_length=LENGTH + 9)


def test_the_default_length_is_transformers_through_custom_generate():
    """Claim: with no limit given at all, model.generate is as long with us as without."""
    with pytest.warns(UserWarning, match="model-agnostic default"):
        ours, theirs = _custom(), _hf()
    assert ours == theirs


def test_the_default_length_of_our_own_calls():
    """Claim: an answer whose length nobody says gets 256 tokens at most, in Python and from the
    command line, as `generate` says; a model's own config goes before that."""
    assert generation_settings.answer_limits(GenerationConfig(), LENGTH).max_new_tokens == 256
    assert (
        generation_settings.answer_limits(GenerationConfig(max_new_tokens=9), LENGTH).max_new_tokens
        == 9
    )
    assert (
        generation_settings.answer_limits(
            GenerationConfig(max_length=LENGTH + 9), LENGTH
        ).max_new_tokens
        == 9
    )
    for command in (describe, chat, compare, caption):
        assert inspect.signature(command).parameters["max_new_tokens"].default == 256
    assert "256 tokens at most" in " ".join((inspect.getdoc(saccade.generate) or "").split())


def test_a_generation_config_is_used_and_not_written_to():
    """Claim: generation_config= gives the settings; keywords go over it; it stays as it was."""
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.6, pad_token_id=0)
    before = copy.deepcopy(config).to_dict()
    expected = _hf(max_new_tokens=9, repetition_penalty=1.6)
    assert _direct(generation_config=config) == expected
    assert _direct(generation_config=config, max_new_tokens=4) == [expected[0][: LENGTH + 4]]
    assert config.to_dict() == before


@pytest.mark.parametrize(
    "call",
    [
        _direct,
        _custom,
    ],
    ids=["direct", "custom_generate"],
)
def test_answers_are_padded_with_the_id_asked_for(call):
    """Claim: pad_token_id= is honoured. Fails if the model's own id is used."""
    settings = dict(max_new_tokens=12, eos_token_id=_answer()[3], pad_token_id=7)
    assert call(BATCH, **settings) == _hf(BATCH, **settings)


def test_a_draft_with_its_own_tower_needs_its_inputs_under_custom_generate():
    """Claim: transformers has used the pixels up; the error says what to give; giving it works."""
    other = qwen25(9, layers=1)
    settings = dict(custom_generate=saccade.generate, draft=other, method="sd", max_new_tokens=8)
    with pytest.raises(OptionError, match="draft_inputs="):
        qwen25().generate(**INPUTS, **settings)
    out = qwen25().generate(**INPUTS, draft_inputs=INPUTS, **settings)
    assert out.tolist() == _hf(max_new_tokens=8)


def test_penalties_over_a_padded_batch_are_refused_under_custom_generate():
    """Claim: processors made for padded ids cannot be right for unpadded ones: refused by name."""
    with pytest.raises(OptionError, match="padded batch with penalties"):
        _custom(BATCH, max_new_tokens=4, repetition_penalty=1.3)


def test_penalties_over_a_batch_act_per_request():
    """Claim: directly, each request of a batch is penalised by its own prompt and answer only."""
    many = [video_input(0), video_input(1)]
    settings = dict(max_new_tokens=10, repetition_penalty=1.6)
    out = _direct(left_padded(many), **settings)
    for row, inputs in zip(out, many, strict=True):
        assert row[-10:] == hf_greedy(qwen25(), inputs, 10, repetition_penalty=1.6)


def test_the_callers_inputs_are_not_written_to():
    """Claim: inputs can be used again: tensors are as they were, no key added or lost."""
    inputs = video_input(5)
    before = {name: value.clone() for name, value in inputs.items()}
    _direct(inputs, max_new_tokens=6)
    _custom(inputs, max_new_tokens=6)
    assert inputs.keys() == before.keys()
    assert all(torch.equal(inputs[name], before[name]) for name in before)


def test_measures_of_a_result_add_up():
    """Claim: counts, rates and times of a result are those of its rounds."""
    result = answered("qwen2_5_vl", "specvlm", count=30)
    assert result.method == "specvlm"
    assert (result.prompt_tokens, result.visual_tokens, result.draft_visual_tokens) == (31, 18, 2)
    assert result.tau == 29 / len(result.forwards)
    accepted = sum(len(r.accepted) for r in result.rounds)
    assert result.acceptance_rate == accepted / sum(len(r.tokens) for r in result.rounds)
    t = result.timings
    assert 0 < t.first_token < t.total
    assert t.vision + t.prefill + t.guide + t.decode <= t.total + 1e-3
    assert result.tokens_per_second == 29 / t.decode
    plain = answered("qwen2_5_vl", "ar", count=6)
    assert (plain.tau, plain.acceptance_rate, plain.draft_visual_tokens) == (1.0, None, None)


def test_the_first_token_does_not_wait_for_the_draft():
    """Claim: the first token is the prefill's and comes before the draft has read; the draft goes
    on from it. Fails if a slow, or broken, draft holds it up."""
    done: list[str] = []

    class Slow(StubDraft):
        def read_prompts(self, prefills: Any, earlier: Any = None) -> float:
            done.append("ready")
            return super().read_prompts(prefills, earlier)

        def commit(self, tokens: Any) -> None:
            done.append(f"commit {list(tokens[0])}")
            super().commit(tokens)

    method = replace(
        stubbed(lambda *_: Tree()), drafter=MadeBy(lambda setup: Slow(lambda *_: Tree()))
    )
    stream = saccade.stream(qwen25(), INPUTS, method=method, max_new_tokens=6)
    first = next(stream)
    assert first.opening and list(first.emitted) == _answer()[:1] and done == []
    rounds = list(stream)
    assert done[:2] == ["ready", f"commit {_answer()[:1]}"]
    assert not any(round.opening for round in rounds) and len(stream.results[0].forwards) == 5


def test_an_answer_of_one_token_needs_no_draft():
    """Claim: where the first token ends every request (a limit of one, an end) the draft reads
    nothing; in a conversation it reads, since a turn may follow. Fails if one-word answers pay."""
    for settings in ({"max_new_tokens": 1}, {"eos_token_id": _answer()[0]}):
        result = saccade.run(qwen25(), INPUTS, draft=_draft(), method="specvlm", **settings)
        assert list(result.ids) == _answer()[:1] and result.draft_visual_tokens is None
        assert result.timings.draft_prefill == 0 and result.fallback_reason is None
    kept = saccade.stream(
        qwen25(), INPUTS, draft=_draft(), method="specvlm", max_new_tokens=1, keep=True
    )
    list(kept)
    assert kept.results[0].draft_visual_tokens is not None

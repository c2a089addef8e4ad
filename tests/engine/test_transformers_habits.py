"""What users of transformers try first: it works as there, or a sentence names what does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from helpers import (
    chi_square,
    input_for,
    left_padded,
    llama,
    noisy,
    qwen25,
    text_input,
    video_input,
)
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation import GenerateDecoderOnlyOutput

import saccade
from saccade.core.errors import OptionError

pytestmark = pytest.mark.usefixtures("unchecked")

INPUTS = input_for("qwen2_5_vl")
BATCH = left_padded([video_input(0), video_input(1, (2, 4, 4), before=2)])
SAMPLED = dict(do_sample=True, temperature=0.9, top_k=20)


class Numbers:
    """A tokenizer of which every id is a word, and which streamers accept."""

    def decode(self, token_ids: Any, **how: Any) -> str:
        return "".join(f"<{token}>" for token in torch.as_tensor(token_ids).flatten().tolist())

    def encode(self, text: str, **how: Any) -> list[int]:
        return []


def _draft() -> Any:
    return noisy(qwen25, 0, 0.05)


def _generate(inputs: Any = INPUTS, **settings: Any) -> Any:
    with torch.no_grad():
        return qwen25().generate(**inputs, **settings)


def _direct(inputs: Any = INPUTS, **settings: Any) -> Any:
    return saccade.generate(qwen25(), inputs, draft=_draft(), method="sd", **settings)


def _custom(inputs: Any = INPUTS, **settings: Any) -> Any:
    call = saccade.generate.with_(draft=_draft(), method="sd")
    return qwen25().generate(**inputs, custom_generate=call, **settings)


BOTH_WAYS = pytest.mark.parametrize("call", [_direct, _custom], ids=["direct", "custom_generate"])


def test_a_seed_that_is_no_whole_number_is_refused_before_any_work() -> None:
    """Claim: a seed that is bound by ``with_`` is checked like one that is given directly."""
    call = saccade.generate.with_(draft=_draft(), method="sd", seed="x")
    with pytest.raises(OptionError, match="seed='x' is not a whole number"):
        qwen25().generate(**INPUTS, custom_generate=call, max_new_tokens=4)
    with pytest.raises(OptionError, match="seed='x' is not a whole number"):
        _direct(seed="x")


# -- streamers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["model.generate", "with_"])
def test_a_streamer_through_transformers_gets_everything_once(place: str) -> None:
    """Claim: a streamer given to ``model.generate`` or bound by ``with_`` gets the prompt once,
    then every token, then the end. Fails where it gets nothing, the prompt twice, or no prompt (a
    streamer that skips prompts would then skip the answer's first tokens)."""
    got: list[Any] = []

    class Recorder:
        def put(self, value: torch.Tensor) -> None:
            got.append(value.flatten().tolist())

        def end(self) -> None:
            got.append("end")

    bound: dict[str, Any] = {"streamer": Recorder()} if place == "with_" else {}
    given: dict[str, Any] = {} if place == "with_" else {"streamer": Recorder()}
    call = saccade.generate.with_(draft=_draft(), method="sd", **bound)
    ids = qwen25().generate(**INPUTS, custom_generate=call, max_new_tokens=12, **given)
    prompt, *pieces, end = got
    assert prompt == INPUTS["input_ids"][0].tolist() and end == "end"
    assert [*prompt, *(token for piece in pieces for token in piece)] == ids[0].tolist()


def test_an_iterating_streamer_ends_in_every_case() -> None:
    """Claim: who reads a TextIteratorStreamer gets the text and then the end, also where the call
    is refused: it never waits for ever. Fails by the streamer's own time limit."""
    for settings in ({"max_new_tokens": 6}, {"max_new_tokens": 6, "output_attentions": True}):
        streamer = TextIteratorStreamer(Numbers(), skip_prompt=True, timeout=60)  # type: ignore[arg-type]
        raised: list[BaseException] = []

        def work(streamer: Any = streamer, settings: Any = settings, raised: Any = raised) -> None:
            try:
                _custom(streamer=streamer, **settings)
            except OptionError as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        text = "".join(streamer)
        thread.join()
        answer = _generate(max_new_tokens=6)[0, INPUTS["input_ids"].shape[1] :].tolist()
        is_refused = "output_attentions" in settings
        assert bool(raised) == is_refused
        assert text.count("<") == (0 if is_refused else len(answer))


def test_a_plain_text_streamer_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: transformers' TextStreamer with ``skip_prompt`` prints the answer's tokens, all of
    them, both ways."""
    answer = _generate(max_new_tokens=6)[0, INPUTS["input_ids"].shape[1] :].tolist()
    for call in (_direct, _custom):
        call(streamer=TextStreamer(Numbers(), skip_prompt=True), max_new_tokens=6)  # type: ignore[arg-type]
        assert capsys.readouterr().out.strip() == "".join(f"<{token}>" for token in answer)


def test_two_streamers_are_one_too_many() -> None:
    """Claim: a streamer bound by ``with_`` and another given to ``generate`` are refused."""

    class Quiet:
        def put(self, value: torch.Tensor) -> None: ...

        def end(self) -> None: ...

    call = saccade.generate.with_(streamer=Quiet())
    with pytest.raises(OptionError, match="streamer= is given twice"):
        qwen25().generate(**INPUTS, custom_generate=call, streamer=Quiet(), max_new_tokens=2)


# -- what transformers does not pass on ------------------------------------------------------------


def test_an_assistant_model_drafts() -> None:
    """Claim: ``assistant_model=`` beside ``custom_generate=saccade.generate`` is the draft; with
    ``draft=`` of another model it is refused. Fails where the assistant is dropped: the method
    needs a draft and would raise."""
    expected = _generate(max_new_tokens=12).tolist()
    settings: dict[str, Any] = dict(
        custom_generate=saccade.generate, max_new_tokens=12, method="sd"
    )
    answer = qwen25().generate(**INPUTS, assistant_model=_draft(), **settings)
    assert answer.tolist() == expected
    with pytest.raises(OptionError, match="two drafts"):
        qwen25().generate(**INPUTS, assistant_model=_draft(), draft=qwen25(1), **settings)
    with pytest.raises(saccade.ModelError, match="draft"):  # the control: nobody drafts
        qwen25().generate(**INPUTS, **settings)


def test_stop_strings_through_transformers_need_a_bound_tokenizer() -> None:
    """Claim: with a tokenizer bound by ``with_`` an answer ends at the same token as in a direct
    call, wherever the stop strings are given; without one the sentence has the call that works."""
    whole = _direct(max_new_tokens=20)[0, INPUTS["input_ids"].shape[1] :].tolist()
    stop = f"<{whole[6]}>"
    direct = _direct(max_new_tokens=20, tokenizer=Numbers(), stop_strings=[stop])
    assert direct.shape[1] < INPUTS["input_ids"].shape[1] + 20
    bound = saccade.generate.with_(draft=_draft(), method="sd", tokenizer=Numbers())
    own: dict[str, Any] = {"max_new_tokens": 20}
    beside = qwen25().generate(**INPUTS, custom_generate=bound, stop_strings=[stop], **own)
    inside = saccade.generate.with_(**bound.keywords, stop_strings=stop)
    assert beside.tolist() == direct.tolist()
    assert qwen25().generate(**INPUTS, custom_generate=inside, **own).tolist() == direct.tolist()
    with pytest.raises(OptionError, match=r"custom_generate=saccade.generate.with_\(tokenizer="):
        qwen25().generate(
            **INPUTS,
            custom_generate=saccade.generate,
            tokenizer=Numbers(),
            stop_strings=[stop],
            **own,
        )


def test_a_setting_bound_to_the_callable_is_sent_to_generate() -> None:
    """Claim: what transformers prepares (here the length) is refused in ``with_`` where it calls,
    by name, and honoured in a direct call."""
    short = saccade.generate.with_(max_new_tokens=3)
    assert short(qwen25(), INPUTS).shape[1] == INPUTS["input_ids"].shape[1] + 3
    with pytest.raises(OptionError, match=r"max_new_tokens= .* give it to model.generate"):
        qwen25().generate(**INPUTS, custom_generate=short, max_length=60)


# -- ways to call ----------------------------------------------------------------------------------


def test_inputs_may_be_keywords_or_ids_alone() -> None:
    """Claim: ``generate(model, **inputs)`` is ``generate(model, inputs)``, and ids alone are a
    prompt; nothing, and parts given twice, are refused."""
    expected = _generate(max_new_tokens=8).tolist()
    own: dict[str, Any] = {"draft": _draft(), "method": "sd", "max_new_tokens": 8}
    assert saccade.generate(qwen25(), **INPUTS, **own).tolist() == expected
    ids = text_input(3)["input_ids"]
    with torch.no_grad():
        text = llama().generate(ids, max_new_tokens=5).tolist()
    assert saccade.generate(llama(), ids, max_new_tokens=5, method="ar").tolist() == text
    assert saccade.generate(llama(), input_ids=ids, max_new_tokens=5, method="ar").tolist() == text
    for call in (saccade.generate, saccade.run, saccade.stream):
        with pytest.raises(OptionError, match="nothing to answer"):
            call(llama(), max_new_tokens=5)
    with pytest.raises(OptionError, match="input_ids= .* once"):
        saccade.generate(llama(), text_input(3), input_ids=ids)


def test_run_and_stream_take_inputs_as_generate_does() -> None:
    """Claim: ``run`` and ``stream`` take ``**inputs`` and ids alone, and answer as with ``inputs``;
    several requests are still too many for ``run``."""
    expected = saccade.run(qwen25(), INPUTS, max_new_tokens=6).ids
    assert saccade.run(qwen25(), **INPUTS, max_new_tokens=6).ids == expected
    assert saccade.stream(qwen25(), **INPUTS, max_new_tokens=6).finish()[0].ids == expected
    ids = text_input(3)["input_ids"]
    alone = saccade.run(llama(), ids, max_new_tokens=5).ids
    assert saccade.run(llama(), input_ids=ids, max_new_tokens=5).ids == alone
    with pytest.raises(OptionError, match="one request"):
        saccade.run(llama(), input_ids=ids.repeat(2, 1), max_new_tokens=5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": 0.7}, r"temperature=0.7 .* do_sample=True"),
        ({"top_p": 0.9}, r"top_p=0.9 .* do_sample=True"),
        ({"torch_dtype": torch.bfloat16}, "dtype= belongs to the call that loads"),
        ({"dtype": "bfloat16"}, "dtype= belongs to the call that loads"),
        ({"attn_implementation": "sdpa"}, "Saccade computes attention itself"),
        ({"fps": 2}, "give it to Model.describe"),
        ({"num_frames": 8}, "give it to Model.describe"),
        ({"max_frames": 8}, "num_frames="),
        ({"prompt": "x"}, "as a positional argument"),
        ({"stream": True}, "Model.stream"),
        ({"assistant_model": None, "max_tokens": 3}, "did you mean max_new_tokens"),
        ({"num_beams": 4}, "do_sample=True"),
        ({"prompt_lookup_num_tokens": 3}, 'method="lookup"'),
        ({"output_hidden_states": True}, "call the model itself"),
        ({"output_scores": True}, "return_dict_in_generate=True"),
        ({"num_return_sequences": 2}, "do_sample"),
    ],
    ids=str,
)
def test_other_keywords_are_answered_with_the_right_one(
    settings: dict[str, Any], sentence: str
) -> None:
    """Claim: what does not work is refused in one sentence that says what to write instead."""
    settings = {name: value for name, value in settings.items() if value is not None}
    with pytest.raises(OptionError, match=sentence):
        saccade.generate(qwen25(), INPUTS, max_new_tokens=2, **settings)


def test_greedy_on_purpose_ignores_sampling_rules() -> None:
    """Claim: with ``do_sample=False`` the rules of sampling change nothing, as in transformers, and
    values without an effect are accepted without it."""
    expected = _direct(max_new_tokens=6).tolist()
    assert _direct(max_new_tokens=6, do_sample=False, temperature=0.3).tolist() == expected
    assert _direct(max_new_tokens=6, temperature=0.0, top_p=1.0).tolist() == expected


def test_run_and_stream_send_these_to_generate() -> None:
    """Claim: a result of ``run`` has no scores, and the sentence says what has."""
    for name in ("return_dict_in_generate", "num_return_sequences"):
        with pytest.raises(OptionError, match=rf"{name}=.* only saccade.generate"):
            saccade.run(qwen25(), INPUTS, do_sample=True, **{name: 2 if "num" in name else True})


def test_the_module_lists_its_api() -> None:
    """Claim: ``dir(saccade)`` has every public name, before any of them was used."""
    assert set(saccade.__all__) <= set(dir(saccade)) and "__version__" in dir(saccade)


# -- what generate returns -------------------------------------------------------------------------

RULES: dict[str, Any] = {"repetition_penalty": 1.3, "suppress_tokens": [3]}


@pytest.mark.representatives(2)
@BOTH_WAYS
@pytest.mark.parametrize("inputs", [INPUTS, BATCH], ids=["one", "batch"])
def test_scores_and_logits_are_those_of_generate(call: Any, inputs: Any) -> None:
    """Claim: ids, processed scores and raw logits are ``generate``'s, step by step, and scores
    differ from logits where a rule acts. A padded batch with such rules is refused through
    transformers, so it has none, and its scores are its logits."""
    rules = RULES if inputs is INPUTS else {}
    settings: dict[str, Any] = dict(
        max_new_tokens=9, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    theirs, ours = (each(inputs, **settings, **rules) for each in (_generate, call))
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(theirs[name])
        for one, other in zip(ours[name], theirs[name], strict=True):
            assert one.dtype == torch.float32
            torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)
    assert torch.equal(ours.scores[0], ours.logits[0]) == (not rules)
    alone = call(inputs, max_new_tokens=9, return_dict_in_generate=True)
    assert alone.scores is None and alone.logits is None


def test_a_drafted_tree_returns_the_scores_of_its_path() -> None:
    """Claim: with a tree too, each step's scores are those of the token that was emitted: their
    largest is it. Fails where rows of refused siblings are taken."""
    out = saccade.generate(
        *(qwen25(), INPUTS), draft=_draft(), method="sd-tree", max_new_tokens=16,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    answer = out.sequences[0, INPUTS["input_ids"].shape[1] :].tolist()
    assert [int(scores[0].argmax()) for scores in out.scores] == answer


# -- several answers -------------------------------------------------------------------------------


@BOTH_WAYS
def test_several_answers_stand_next_to_each_other(call: Any) -> None:
    """Claim: of n answers to each of two prompts, the rows are prompt by prompt as in transformers,
    answers to one prompt differ, and one seed gives the same again."""
    settings: dict[str, Any] = dict(
        do_sample=True, temperature=1.5, num_return_sequences=3, max_new_tokens=10, seed=5
    )
    out = call(BATCH, **settings)
    length = BATCH["input_ids"].shape[1]
    assert out.shape[0] == 6
    assert out[:, :length].tolist() == BATCH["input_ids"].repeat_interleave(3, 0).tolist()
    for prompt in range(2):
        assert len({tuple(row) for row in out[3 * prompt : 3 * prompt + 3].tolist()}) == 3
    assert call(BATCH, **settings).tolist() == out.tolist()


@pytest.mark.parametrize("method", [pytest.param("ar", marks=pytest.mark.extra), "sd"])
def test_each_of_several_answers_follows_the_law(method: str) -> None:
    """Claim: over seeds, the first token of every one of n answers has the target's probabilities,
    and two answers to one prompt are independent. Controls: the law of another temperature is
    refused by the same test, and equal answers would fail the second."""
    inputs, count, rounds = text_input(3), 4, 60
    settings: dict[str, Any] = dict(do_sample=True, temperature=1.0, top_k=4, max_new_tokens=2)
    with torch.no_grad():
        logits = llama()(**inputs).logits[0, -1].float()
        first = llama().generate(
            **inputs, **settings, return_dict_in_generate=True, output_scores=True
        )
    law = torch.softmax(first.scores[0][0], -1)
    draws = torch.stack(
        [
            saccade.generate(
                llama(),
                inputs,
                draft=noisy(llama, 0, 0.2),
                method=method,
                num_return_sequences=count,
                seed=seed,
                **settings,
            )[:, inputs["input_ids"].shape[1]]
            for seed in range(rounds)
        ]
    )
    kept = law.topk(4).indices
    for sequence in range(count):
        counts = (draws[:, sequence, None] == kept).sum(0)
        assert int(counts.sum()) == rounds
        assert chi_square(counts, law[kept]) > 1e-3
    pooled = (draws.flatten()[:, None] == kept).sum(0)
    colder = torch.softmax(logits[kept] / 0.5, -1)
    assert chi_square(pooled, colder) < 1e-3
    equal = float((draws[:, 0] == draws[:, 1]).float().mean())
    expected = float(law[kept].square().sum())
    spread = (expected * (1 - expected) / rounds) ** 0.5
    assert abs(equal - expected) < 4 * spread

"""Claims about thinking models: where reasoning begins and ends, and what clients get of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import openai
import pytest
import torch
from serve.live import Live, made, serving

from saccade.inputs import Pair
from saccade.serve import request_reader
from saccade.serve.detokenizer import StreamingDetokenizer
from saccade.serve.formats.chat_forms import ChatForm
from saccade.serve.formats.reasoning import GrammarAfterReasoning, Marks, Reasoning, find_marks
from saccade.serve.formats.response_items import ItemStream
from saccade.serve.request_schema import ChatRequest

THINK = Marks("<think>", "</think>", 7, 8)
SPLITS = [
    ("open", "I see.\n</think>\n\nRed.", "I see.", "Red."),
    ("open", "<think>\nI see.\n</think>\n\nRed.", "I see.", "Red."),
    ("open", "I see", "I see", ""),
    ("open", "\n</think>Red.", "", "Red."),
    ("open", "a < b </thin", "a < b </thin", ""),
    ("open", "a</think>b</think>c", "a", "b</think>c"),
    ("possible", "<think>\nI see.\n</think>\n\nRed.", "I see.", "Red."),
    ("possible", "\n <think>x</think>Red.", "x", "Red."),
    ("possible", "Red <think>x</think>", "", "Red <think>x</think>"),
    ("possible", "<thin ice", "", "<thin ice"),
    ("possible", "  ", "", "  "),
    ("possible", "", "", ""),
    ("closed", "<think>x</think>Red.", "", "<think>x</think>Red."),
]


@pytest.mark.parametrize(("start", "text", "reasoning", "rest"), SPLITS)
def test_reasoning_and_answer_are_separated(start, text, reasoning, rest):
    """Claim: both parts are right for a whole answer, and of an unfinished answer each is a
    beginning of what it becomes. Fails if a piece of a mark is ever shown."""
    split = Reasoning(THINK, start).split
    assert split(text, is_complete=True) == (reasoning, rest)
    longest = ("", "")
    for end in range(len(text) + 1):
        early = split(text[:end], is_complete=False)
        assert reasoning.startswith(early[0]) and rest.startswith(early[1]), text[:end]
        assert early[0].startswith(longest[0]) and early[1].startswith(longest[1])
        longest = early


def test_tokens_of_reasoning_are_counted():
    """Claim: tokens up to the closing mark count, all of them where it never comes, and none of an
    answer without reasoning. Blanks before the opening mark belong to the reasoning."""
    assert Reasoning(THINK, "open").count_tokens([1, 2, 8, 3], "I see</think>Red") == 3
    assert Reasoning(THINK, "open").count_tokens([1, 2], "I see") == 2
    assert Reasoning(THINK, "possible").count_tokens([7, 2, 8, 3], "<think>x</think>Red") == 3
    assert Reasoning(THINK, "possible").count_tokens([4, 7, 2, 8, 3], "\n<think>x</think>Red") == 4
    assert Reasoning(THINK, "possible").count_tokens([2, 8, 3], "x</think>Red") == 0
    assert Reasoning(THINK, "closed").count_tokens([7, 8], "<think></think>") == 0


def test_a_form_follows_the_reasoning():
    """Claim: while the model reasons everything but the end is allowed, and the form begins after
    the closing mark. Where reasoning is only possible, the form or the mark may come first."""

    def inner(answer: Any) -> torch.Tensor:
        return torch.tensor([number == 3 + len(answer) for number in range(10)])

    opened = GrammarAfterReasoning(inner, 7, 8, True, (9,), 10)
    for answer in ([], [1], [7, 1]):
        mask = opened(answer)
        assert mask is not None and mask.nonzero()[:, 0].tolist() == list(range(9))
    assert opened([1, 8]).nonzero().tolist() == [[3]] and opened([8, 3]).nonzero().tolist() == [[4]]
    possible = GrammarAfterReasoning(inner, 7, 8, False, (9,), 10)
    assert possible([]).nonzero()[:, 0].tolist() == [3, 7]
    assert possible([3]).nonzero().tolist() == [[4]]
    assert possible([7, 2]).sum() == 9 and possible([7, 8]).nonzero().tolist() == [[3]]


def _tokenizer(*added: str) -> Any:
    class Tokenizer:
        added_tokens_decoder = {
            number: SimpleNamespace(content=text) for number, text in enumerate(added)
        }

    return Tokenizer()


def test_marks_come_from_the_tokenizer_or_the_template():
    """Claim: both places show the marks, whatever the model is called; elsewhere there are none."""
    marks = find_marks(_tokenizer("<think>", "x", "</think>"), "")
    assert marks == Marks("<think>", "</think>", 0, 2)
    assert find_marks(_tokenizer("[THINK]", "[/THINK]"), None) == Marks("[THINK]", "[/THINK]", 0, 1)
    assert find_marks(_tokenizer("x"), "{{ '<think>' }} {{ '</think>' }}") == Marks(
        "<think>", "</think>"
    )
    assert find_marks(_tokenizer("<think>"), "{{ messages }}") is None
    # Marks that are tokens come before other marks of the template.
    mixed = find_marks(_tokenizer("[THINK]", "[/THINK]"), "{{ text.split('</think>') }}")
    assert mixed == Marks("[THINK]", "[/THINK]", 0, 1)
    ends = {"a<think>\n": "open", "<think>\n\n</think>\n\n": "closed", "assistant\n": "possible"}
    assert {end: THINK.start_after(end) for end in ends} == ends


TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is not defined or enable_thinking %}<think>
{% else %}<think>

</think>

{% endif %}{% if reasoning_effort %}effort {{ reasoning_effort }}
<think>
{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def thinking(models: Pair) -> Iterator[Live]:
    """A server whose template opens the reasoning with a mark that is no token."""
    processor = copy.copy(models.target.processor)
    processor.chat_template = TEMPLATE
    pair = (replace(each, processor=processor) for each in (models.target, models.draft))
    with serving(lambda: made(Pair(*pair), "specvlm")) as live:
        yield live


@pytest.fixture(scope="module")
def marked(models: Pair) -> Iterator[Live]:
    """A server that takes two tokens, which its model does write, for the marks of reasoning."""
    ids = [models.target.tokenizer.encode(text) for text in ("The", " gone")]
    assert [len(each) for each in ids] == [1, 1]
    marks = Marks("The", " gone", ids[0][0], ids[1][0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_reader, "find_marks", lambda *_: marks)
        with serving(lambda: made(models, "specvlm")) as live:
            yield live


def _message(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def _deltas(answer: Any) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line[6:]) for line in lines]
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def _joined(deltas: list[dict[str, Any]], field: str) -> str:
    return "".join(each.get(field) or "" for each in deltas)


def test_reasoning_that_the_prompt_opens_has_a_field_of_its_own(thinking):
    """Claim: after a prompt that ends in the opening mark all is reasoning until the closing one,
    streamed too, and content is null. Fails if the prompt's end is not noticed."""
    message = _message(thinking.ask("hi", max_tokens=24))
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert message["content"] is None  # This model never ends its reasoning.
    deltas = _deltas(thinking.ask("hi", max_tokens=24, stream=True))
    for field in ("reasoning", "reasoning_content"):
        assert _joined(deltas, field) == message["reasoning"]
    assert not _joined(deltas, "content")
    hidden = thinking.ask("hi", max_tokens=24, include_reasoning=False, stream=True)
    assert not _joined(_deltas(hidden), "reasoning")
    assert "reasoning" not in _message(thinking.ask("hi", max_tokens=24, include_reasoning=False))
    assert _message(thinking.ask("hi", guided_regex="Red\\."))["content"] == "Red."


def test_reasoning_and_content_are_parts_of_one_answer(marked, server):
    """Claim: the answer is the one without a parser, apart in two fields, streamed too; what is
    reasoning is counted. Fails if a token is lost or counted twice."""
    whole = _message(server.ask("hi"))["content"]
    answer = marked.ask("hi")
    message, usage = _message(answer), answer.json()["usage"]
    assert "The" + message["reasoning"] + " gone" + message["content"] == whole
    assert message["reasoning"] and message["content"]
    spent = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 2 < spent < usage["completion_tokens"]
    deltas = _deltas(marked.ask("hi", stream=True))
    assert _joined(deltas, "reasoning") == message["reasoning"]
    assert _joined(deltas, "content") == message["content"]


def test_the_form_of_an_answer_follows_its_reasoning(marked):
    """Claim: an answer of a form, and a required form of JSON, may reason first; content is the
    form alone. Fails if the form holds the reasoning, or is dropped with it."""
    for form, content in ((dict(guided_regex="Red\\."), "Red."),
                          (dict(guided_json={"const": "x"}), '"x"')):  # fmt: skip
        answer = marked.ask("hi", max_tokens=64, **form)
        assert _message(answer)["content"].strip() == content
        assert answer.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.extra
def test_the_responses_api_has_reasoning_as_an_item(marked):
    """Claim: reasoning is an item before the message, in the official client's types, and can be
    sent back."""
    with openai.OpenAI(base_url=f"{marked.url}/v1", api_key="none", max_retries=0) as client:
        settings: dict[str, Any] = dict(model="shapes", temperature=0, max_output_tokens=16)
        response = client.responses.create(input="hi", **settings)
        reasoning, message = response.output
        assert (reasoning.type, message.type) == ("reasoning", "message")
        assert reasoning.content[0].text == _message(marked.ask("hi"))["reasoning"]
        assert response.output_text == _message(marked.ask("hi"))["content"]
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        with client.responses.create(input="hi", stream=True, **settings) as events:
            names = [event.type for event in events]
        assert names.index("response.reasoning_text.done") < names.index(
            "response.output_text.delta"
        )
        items = [{"role": "user", "content": "hi"}, *response.output,
                 {"role": "user", "content": "and?"}]  # fmt: skip
        assert client.responses.create(input=items, **settings).output_text


def test_special_tokens_as_marks_are_written(models):
    """Claim: where the marks are special tokens the text has them and no other special token."""
    tokenizer = models.target.tokenizer
    opening, closing, other = ("<|im_start|>", "<|vision_end|>", "<|im_end|>")
    ids = tokenizer.convert_tokens_to_ids([opening, closing])
    marks = Marks(opening, closing, *ids)
    decode = marks.decoder(tokenizer)
    written = tokenizer.encode(f"{opening}red{closing} blue{other}")
    assert decode is not None and decode(written) == f"{opening}red{closing} blue"
    assert Marks("The", " gone", *tokenizer.encode("The gone")).decoder(tokenizer) is None


def test_thinking_is_switched_off_by_the_template(thinking):
    """Claim: enable_thinking=false, and reasoning_effort none where the template has no such word,
    give an answer without reasoning."""
    switched_off = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = thinking.ask("hi", max_tokens=24, **switched_off)
    assert _message(answer)["content"] and "reasoning" not in _message(answer)
    assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ reasoning_effort }}", {"reasoning_effort": "none"}),
        ("{{ enable_thinking }}", {"enable_thinking": False}),
        ("{{ thinking }}", {}),
    ],
)
def test_the_effort_goes_where_the_template_takes_it(thinking, template, expected):
    """Claim: a template gets the variables that it reads, and no others. Fails if an unknown
    variable reaches ``apply_chat_template``, which has options of such names."""
    body = {"model": "x", "messages": [{"role": "user", "content": "x"}]}
    request = ChatRequest(**body, reasoning_effort="none", chat_template_kwargs={"padding": True})
    reader = thinking.service.engine.reader
    assert reader._template_variables(request, template) == expected


def test_the_template_gets_the_effort(thinking):
    """Claim: what a template writes about the effort is in the prompt."""
    with_effort = thinking.ask("hi", max_tokens=2, reasoning_effort="high").json()
    without = thinking.ask("hi", max_tokens=2).json()
    assert with_effort["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]


def test_reasoning_is_sent_back(thinking):
    """Claim: a message with reasoning alone, or beside its content, is taken, and reaches a
    template that reads it."""
    user = {"role": "user", "content": "hi"}
    lengths = []
    for more in ({"content": "yes"}, {"content": "yes", "reasoning": "long thoughts"},
                 {"content": None, "reasoning": "long thoughts"}):  # fmt: skip
        messages = [user, {"role": "assistant", **more}, user]
        answer = thinking.ask(messages=messages, max_tokens=2)
        assert answer.status_code == 200, answer.text
        lengths.append(answer.json()["usage"]["prompt_tokens"])
    assert lengths[1] > lengths[0] and lengths[1] > lengths[2] > 0


def test_a_template_that_cannot_use_a_variable_is_400(models):
    """Claim: what a template does with a client's variable never is a fault of the server."""
    processor = copy.copy(models.target.processor)
    processor.chat_template = "{{ style + 1 }}"
    strict = Pair(replace(models.target, processor=processor), None)
    with serving(lambda: made(strict, "ar")) as live:
        answer = live.ask(chat_template_kwargs={"style": "x"})
        assert answer.status_code == 400 and "style" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("tokens", "of_message"),
    [
        ([b"I think", b" so", b"</think>", b"\n\n", b"Yes", b"."], 2),
        ([b"I think</think>", b"Yes", b"."], 2),
        ([b"I think</think>Yes", b"."], 2),
        ([b"I think", b"</think>\n", b"\nYes", b"."], 2),
        ([b"</think>", b"\n", b"Yes", b"."], 2),
        ([b"so", b"</think>", b"\xf0", b"\x9f", b"\x99", b"\x82", b" Yes"], 5),
        ([b"so", b"</think>", b"\n", b"a", b"\xf0\x9f", b"\x99\x82", b"\xc3", b"\xa9", b"."], 6),
        ([b"so", b"</think>", b"ST", b"AR"], 2),
        ([b"so", b"</thi", b"nk>", b"S", b"T", b"A"], 3),
    ],
)
@pytest.mark.parametrize("stops", [(), ("STOP", "thinking")])
def test_a_message_has_the_log_probabilities_of_its_own_tokens(
    tokens: list[bytes], of_message: int, stops: tuple[str, ...]
) -> None:
    """Claim: a token that ends the reasoning, or stands between it and the message, is no token of
    the message, and every token with a part of the message's text is one, also where its text is
    held back because a character or a stop string may go on. Fails if the tokens of a message are
    found by the lengths of their texts."""

    def decode(ids: Sequence[int]) -> str:
        return b"".join(tokens[each] for each in ids).decode(errors="replace")

    stream = ItemStream(ChatForm(reasoning=Reasoning(Marks("<think>", "</think>"), "open")))
    detokenizer = StreamingDetokenizer(decode, stops)
    events = []
    for token in range(len(tokens)):
        piece = detokenizer.write([token])
        entries = [{"token": token, "logprob": -1.0}]
        events += stream.write(piece, entries, detokenizer.length)
    text = decode(range(len(tokens)))
    events += stream.write(detokenizer.finish(text)) + stream.end(Mock(finish_reason="stop"))
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    message = text.partition("</think>")[2].strip("\n")
    assert "".join(each["delta"] for each in deltas) == message
    sent = [entry["token"] for each in deltas for entry in each["logprobs"]]
    assert sent == [*range(len(tokens))][-of_message:]
    assert stream.items[-1]["content"][0]["logprobs"] == [
        {"token": token, "logprob": -1.0} for token in sent
    ]

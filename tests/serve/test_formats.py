"""Claims about structured output and tool calls: every answer has its form, and is plain
decoding's."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from helpers import few
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from serve.live import QUESTION, Live, made, request, serving, text_part, video_part
from tokenizers import AddedToken

from saccade.core.errors import OptionError
from saccade.core.sampling import BrokenLaw, Sampling, Scores
from saccade.core.tree import Tree, add
from saccade.engine.request import Request
from saccade.engine.request_batch import RequestBatch
from saccade.inputs import Pair, ask
from saccade.inputs.literal_text import find_control_token
from saccade.methods import resolve
from saccade.serve.formats import grammar, tool_calls
from saccade.serve.formats.strict_json import Unfinished, read_object
from saccade.serve.request_schema import CalledFunction

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
WORDS = ("Describe the video.", "hi", "What colour is it?", "How many objects?", "Spot it")


@pytest.fixture(scope="module")
def auto(models: Pair) -> Iterator[Live]:
    with serving(lambda: made(models, "auto")) as live:
        yield live


@pytest.fixture(scope="module")
def plain(models: Pair) -> Iterator[Live]:
    with serving(lambda: made(models, "ar")) as live:
        yield live


def _texts(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"stop"}
    return [choice["message"]["content"] for choice in answer.json()["choices"]]


def _fits(text: str) -> None:
    answer = json.loads(text)
    assert set(answer) == {"colour", "count"} and answer["colour"] in ("red", "blue", "green")
    assert type(answer["count"]) is int and 0 <= answer["count"] <= 99


def _nested(depth: int) -> dict[str, Any]:
    return {"properties": {"a": _nested(depth - 1)}} if depth else {}


@pytest.mark.slow
def test_a_hundred_answers_have_their_schema(auto, plain, clips):
    """Claim: of 100 answers under auto, greedy and sampled, with a video and without, each is JSON
    of the schema; the greedy ones are plain decoding's."""
    contents: list[Any] = [*WORDS, [video_part(clips[0]), text_part(QUESTION)]]
    texts = []
    for content in contents:
        (text,) = _texts(auto.ask(content, **KEPT))
        assert [text] == _texts(plain.ask(content, **KEPT))
        texts.append(text)
        drawn = dict(temperature=1.0, n=8, seed=len(texts))
        texts += _texts(auto.ask(content, **KEPT, **drawn))
        texts += _texts(auto.ask(content, **KEPT, **drawn, top_p=0.9, repetition_penalty=1.1))
    assert len(texts) == 102 and len(set(texts)) > 20
    for text in texts:
        _fits(text)


KEPT = {"response_format": FORMAT, "max_tokens": 200}


@pytest.fixture(scope="module")
def plainly(plain) -> list[str]:
    """Plain decoding's answer of this form."""
    if Version(version("llguidance")) < Version("1.8"):
        pytest.skip("this llguidance does not bound the space between the parts of JSON")
    return _texts(plain.ask("hi", **KEPT))


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", few(["sage", "hippo", "specvlm", "lookup"], 2))
def test_every_way_of_drafting_obeys(models, plainly, method):
    """Claim: trees, chains, text found again and a draft in a process of its own: the same JSON."""
    with serving(lambda: made(models, method)) as live:
        answer = live.ask("hi", **KEPT)
    assert _texts(answer) == plainly
    assert answer.json()["saccade"]["fallback_reason"] is None


@pytest.mark.representatives(1)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_in_its_own_process_obeys_too(models, vocabulary, sampled):
    """Claim: all that hippo's draft proposes follows the grammar, greedy and drawn, and some of it
    stands. Fails if its rules lose the grammar on their way."""
    rules = vocabulary.grammar(grammar.json_schema_grammar(SCHEMA), "x")
    target, draft = models.target, models.draft_backbone
    settings = dict(max_new_tokens=60, do_sample=sampled, seed=3)
    inputs = ask(target, "hi")
    request = Request.of(target.backbone, inputs, grammar=rules, **settings)
    call = RequestBatch(target.backbone, resolve("hippo"), request, draft=draft)
    answer = [token for opening in call.read() if opening for token in opening.emitted]
    drafted = accepted = 0
    for round in call.rounds():
        for place, token in enumerate(round.tree.tokens):
            mask = rules([*answer, *round.tree.tokens[:place]])
            assert mask is None or mask[token], (answer, round.tree.tokens)
        answer += round.emitted
        drafted, accepted = drafted + len(round.tree), accepted + sum(round.verdict.accepted)
    call.close()
    assert drafted and accepted and call.drafter.reason is None


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"(red|blue) [0-9]{2}"}, r"(red|blue) [0-9]{2}"),
        ({"structured_outputs": {"regex": r"[a-c]{3,5}!"}}, r"[a-c]{3,5}!"),
        ({"structured_outputs": {"json": {"const": "x"}}}, '"x"'),
        ({"guided_json": {"enum": [1, 22]}}, "1|22"),
    ],
    ids=["guided_regex", "regex", "json", "guided_json"],
)
def test_extensions_are_followed(auto, plain, fields, pattern):
    """Claim: vLLM's names hold answers to patterns and schemas too."""
    (text,) = _texts(auto.ask("hi", max_tokens=64, **fields))
    assert re.fullmatch(pattern, text.strip()), text
    assert [text] == _texts(plain.ask("hi", max_tokens=64, **fields))


SHORT = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"enum": ["a", "bc"]}}}
ENDING: list[Any] = [{"response_format": SHORT}, {"guided_regex": r"(red|blue) [0-9]{2}"}]


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["auto", "ar"])
def test_a_form_ends_where_the_config_names_no_end(models, plain, method, monkeypatch):
    """Claim: of a checkpoint whose ``eos_token_id`` is null an answer with a form ends with it,
    drafted and plain, and is the answer of one that names its end; one whose tokenizer names none
    either is refused in a sentence. Fails if it runs on to max_tokens."""
    named = [_texts(plain.ask("hi", max_tokens=40, **fields)) for fields in ENDING]
    for loaded in (models.target, models.draft):
        monkeypatch.setattr(loaded.backbone.model.generation_config, "eos_token_id", None)
    with serving(lambda: made(models, method)) as live:
        assert [_texts(live.ask("hi", max_tokens=40, **fields)) for fields in ENDING] == named
        drawn = _texts(live.ask("hi", max_tokens=40, temperature=1, n=3, seed=5, **ENDING[1]))
        assert all(re.fullmatch(ENDING[1]["guided_regex"], text) for text in drawn)
    endless = grammar.GrammarVocabulary(SimpleNamespace(eos_token_id=None), 1024, [])
    with pytest.raises(OptionError, match="names no token that ends an answer"):
        endless.grammar(grammar.regex_grammar("a"), "x")


def test_any_object_is_an_object(auto):
    """Claim: json_object is held to an object; one that max_tokens cuts off says so."""
    body = auto.ask("hi", response_format={"type": "json_object"}, max_tokens=200).json()
    (choice,) = body["choices"]
    assert choice["message"]["content"].lstrip().startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_a_stream_has_the_form_too(auto, plainly):
    """Claim: the pieces together are the JSON of the whole answer."""
    streamed = auto.ask("hi", **KEPT, stream=True).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert ["".join(delta.get("content", "") for delta in deltas)] == plainly


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (
            {"response_format": {**FORMAT, "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
        ),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_json": {"$ref": "http://127.0.0.1:1/x"}}, "guided_json"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        ({"guided_json": _nested(80)}, "JSON schema"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_a_form_that_cannot_be_followed_is_400(auto, fields, field):
    """Claim: what the library cannot hold to the letter is refused in one sentence."""
    answer = auto.ask("hi", **fields)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert field in message or "response_format" in message
    assert "\n" not in message and ". " not in message


# -- the grammar alone --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary(models: Pair) -> grammar.GrammarVocabulary:
    target = models.target
    return grammar.GrammarVocabulary(target.tokenizer, target.backbone.vocab, [1018, 1016])


def test_a_grammar_is_a_function_of_the_answer(models, vocabulary):
    """Claim: in whatever order it is asked, forwards, backwards and across branches, it says what a
    fresh one says."""
    encode = models.target.tokenizer.encode
    source = grammar.json_schema_grammar(SCHEMA)
    whole = [encode('{"colour": "red", "count": 7}'), encode('{"count": 55'), [5, 5, 5]]
    prefixes = [tuple(ids[:end]) for ids in whole for end in range(len(ids) + 1)]
    prefixes += [(*whole[0], 1018), (*whole[0], 1018, 7)]
    used = vocabulary.grammar(source, "x")
    order = torch.randperm(4 * len(prefixes), generator=torch.Generator().manual_seed(3))
    for place in order.tolist():
        prefix = prefixes[place % len(prefixes)]
        mask, fresh = used(prefix), vocabulary.grammar(source, "x")(prefix)
        assert (mask is None) == (fresh is None)
        assert mask is None or fresh is None or torch.equal(mask, fresh)
    ended = used(tuple(whole[0]))
    assert ended is not None and ended.nonzero()[:, 0].tolist() == [1016, 1018]
    assert used((5, 5)) is None and used((*whole[0], 1018)) is None


def test_drafts_see_what_answers_may_hold(models, vocabulary):
    """Claim: at every node of a tree laws and likeliest tokens are the grammar's; elsewhere raw."""
    encode = models.target.tokenizer.encode
    rules = Sampling(sample=True, grammar=vocabulary.grammar(grammar.regex_grammar("ab|cd"), "x"))
    a, b, c, d = (encode(letter)[0] for letter in "abcd")
    tree = add(add(Tree(), -1, a), -1, 7)
    rows = list(torch.randn(3, 1024, generator=torch.Generator().manual_seed(0)))
    scores = Scores(tree, rows, rules, [3, 3, 3], 0)
    root, after, beside = (scores.law(node) for node in (-1, 0, 1))
    assert isinstance(root, torch.Tensor) and isinstance(after, torch.Tensor)
    assert {c, a} <= set(root.nonzero()[:, 0].tolist()) and not {b, d, 7} & set(
        root.nonzero()[:, 0].tolist()
    )
    assert after.nonzero()[:, 0].tolist() == [b] and scores.top(0, 1) == [b]
    assert isinstance(beside, torch.Tensor) and bool((beside > 0).all())
    assert scores.top(-1, 2)[0] in root.nonzero()[:, 0].tolist()


def test_a_draft_without_these_ids_goes_on(vocabulary):
    """Claim: where a smaller vocabulary has none of the allowed ids, its law is its own."""
    rules = Sampling(grammar=vocabulary.grammar(grammar.regex_grammar("zz"), "x"))
    logits = torch.arange(8.0)
    assert rules.law(logits, (), ()) == 7


# -- tools --------------------------------------------------------------------------------------

QWEN = """{% if tools %}<|im_start|>system
tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %} <tool_call></tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% for part in m.content %}{{ part.text }}{% endfor %}{% for call in m.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = QWEN.replace("<tool_call></tool_call>", '{"name": n, "parameters": p}')
LLAMA = LLAMA.replace("<tool_call>\n", "").replace("\n</tool_call>", "")
LLAMA = LLAMA.replace('"arguments"', '"parameters"')
PAINT = {
    "name": "paint",
    "description": "Paints it.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}
TOOLS = [
    {"type": "function", "function": PAINT},
    {"type": "function", "function": {"name": "count", "parameters": PAINT["parameters"]}},
]


@pytest.fixture(scope="module", params=[QWEN, LLAMA], ids=["qwen", "llama"])
def calling(request: Any, models: Pair) -> Iterator[Live]:
    """A server whose chat template tells of tools."""
    processor = copy.copy(models.target.processor)
    processor.chat_template = request.param
    target = replace(models.target, processor=processor)
    with serving(lambda: made(Pair(target, models.draft), "auto")) as live:
        yield live


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        pytest.param("required", {"paint", "count"}, marks=pytest.mark.slow),  # as the client asks
        ({"type": "function", "function": {"name": "count"}}, {"count"}),
    ],
    ids=["required", "named"],
)
def test_a_call_that_is_due_is_made(calling, choice, names):
    """Claim: required calls are made and parsed, streamed and not, with arguments of the schema."""
    fields = dict(tools=TOOLS, tool_choice=choice, max_tokens=200)
    body = calling.ask("hi", **fields).json()
    (whole,) = body["choices"]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    (call,) = whole["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] in names
    assert json.loads(call["function"]["arguments"])["colour"] in ("red", "blue")
    text = calling.ask("hi", stream=True, **fields).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [each for chunk in chunks for each in chunk["choices"]]
    (part,) = [each["delta"]["tool_calls"][0] for each in choices if "tool_calls" in each["delta"]]
    assert part["function"] == call["function"] and part["index"] == 0
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert not any(each["delta"].get("content") for each in choices)


@pytest.fixture
def client(calling: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as api_client:
        yield api_client


@pytest.mark.extra
@pytest.mark.representatives(1)
def test_the_client_gets_calls(client):
    """Claim: in the client's own types a required call is whole, and streamed as pieces that the
    client puts together to the same call; what it gave goes on by the client's own message."""
    fields: dict[str, Any] = dict(
        model="shapes", tools=TOOLS, tool_choice="required", max_tokens=200, temperature=0
    )
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(messages=messages, **fields).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls
    (call,) = whole.message.tool_calls
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    with client.chat.completions.stream(messages=messages, **fields) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.tool_calls
    (put_together,) = final.message.tool_calls
    assert put_together.function.name == call.function.name
    assert put_together.function.arguments == call.function.arguments
    messages += [whole.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    on = client.chat.completions.create(messages=messages, **fields | {"tool_choice": "none"})
    assert on.choices[0].message.tool_calls is None and on.choices[0].message.content is not None


@pytest.mark.extra
@pytest.mark.representatives(1)
def test_what_a_call_gave_goes_on(calling):
    """Claim: a call and its result are taken as turns; without a need to call, words are words."""
    call = {"id": "1", "type": "function"}
    call["function"] = {"name": "paint", "arguments": '{"colour": "red"}'}  # type: ignore[assignment]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    for choice in ("auto", "none", None):
        answer = calling.ask(messages=messages, tools=TOOLS, tool_choice=choice)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")
    longer = calling.ask(messages=messages, tools=TOOLS).json()["usage"]["prompt_tokens"]
    shorter = calling.ask(messages=messages, tools=TOOLS, tool_choice="none").json()["usage"]
    assert shorter["prompt_tokens"] < longer


def test_tools_that_would_speak_for_the_template_are_refused(calling, models):
    """Claim: a description that spells a control token is 400."""
    spoilt = [{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}]
    answer = calling.ask("hi", tools=spoilt)
    assert answer.status_code == 400 and "<|im_end|>" in answer.json()["error"]["message"]
    assert find_control_token(models.target.processor, ["nothing"]) is None


def test_a_template_without_tools_is_reported(auto):
    """Claim: a model whose template carries no tools refuses them by name."""
    answer = auto.ask("hi", tools=TOOLS)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


MARKED = ["</tool_call>", "<tool_call>", "<tool_call>{}</tool_call>", 'a "b" \\ </tool_call> é\n']


def written(**arguments: Any) -> str:
    """A call as Qwen's models write it."""
    call = json.dumps({"name": "paint", "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


PARTED = [
    (tool_calls.QWEN, "hi", "hi", []),
    (tool_calls.QWEN, "so\n<tool_call>\n{}\n</tool_call>", None, []),
    (
        tool_calls.QWEN,
        'a <tool_call>{"name": "paint", "arguments": {}}</tool_call>',
        "a",
        ["paint"],
    ),
    (tool_calls.QWEN, 'a <tool_call>{"name": "other", "arguments": {}}</tool_call>', None, []),
    (tool_calls.QWEN, 'a <tool_call>{"name": "paint", "argu', None, []),
    (
        tool_calls.QWEN,
        '<tool_call>{"name": "paint", "arguments": {"a": "é"}}</tool_call>\n'
        '<tool_call>{"name": "count", "arguments": {}}</tool_call>',
        "",
        ["paint", "count"],
    ),
    *((tool_calls.QWEN, f"{written(text=text)} b", "", ["paint"]) for text in MARKED),
    (
        tool_calls.QWEN,
        f"{written(t='</tool_call>')}{written(t='<tool_call>')}",
        "",
        ["paint", "paint"],
    ),
    (
        tool_calls.QWEN,
        '<tool_call>{"name": "other", "arguments": {"t": "<tool_call>{"}}</tool_call> a',
        None,
        [],
    ),
    (tool_calls.QWEN, f"<tool_call> is a mark. {written()}", "<tool_call> is a mark.", ["paint"]),
    (tool_calls.QWEN, f"<tool_call>{{a}}</tool>{written()}", "<tool_call>{a}</tool>", ["paint"]),
    (
        tool_calls.QWEN,
        '<tool_call>{"name": "paint", "arguments": {"x": NaN}}</tool_call>',
        None,
        [],
    ),
    (tool_calls.QWEN, '<tool_call>{"name": "paint", "arguments": {"x": 01}}</tool_call>', None, []),
    (tool_calls.QWEN, '<tool_call>{"name": "paint", "arguments": {}} and</tool_call>', None, []),
    (tool_calls.QWEN, '<tool_call>{"name": "paint", "arguments": {}}', None, []),
    (tool_calls.LLAMA, '{"name": "paint", "parameters": {"x": -Infinity}}', None, []),
    (tool_calls.LLAMA, "hi", "hi", []),
    (tool_calls.LLAMA, ' {"name": "paint", "parameters": {"a": 1}}', "", ["paint"]),
    (tool_calls.LLAMA, '{"name": "paint", "parameters": {}}; {"name": "count", "parameters": {}}',
     "", ["paint", "count"]),
    (tool_calls.LLAMA, '{"name": "paint", "parameters": {}} and', None, []),
    (tool_calls.LLAMA, '{"a": 1}', None, []),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "words", "names"), PARTED)
def test_words_and_calls_are_distinguished(dialect, text, words, names):
    """Claim: calls of known functions are calls, all else is words; what is told while an answer is
    under way is the beginning of what is told at its end."""
    known = {"paint", "count"}
    whole, calls = tool_calls.split_answer(dialect, text, known, is_complete=True)
    assert whole == (text if words is None else words)
    assert [call.name for call in calls] == names
    for end in range(len(text) + 1):
        early, certain = tool_calls.split_answer(dialect, text[:end], known, is_complete=False)
        assert whole.startswith(early) and calls[: len(certain)] == certain


@pytest.mark.parametrize("dialect", [tool_calls.QWEN, tool_calls.LLAMA])
@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": 1e400, "y": 1.10, "z": -0.0}',
        '{"x": 12345678901234567890123}',
        '{"x": "</tool_call>"}',
        '{"x": "\\ud83d \\u00e9 é"}',
        '{ "x" : [ true , null , {"y": {} } ] }',
        "{}",
    ],
)
def test_arguments_are_the_models_own_words(dialect, arguments):
    """Claim: a client gets the arguments as the model wrote them, which are JSON: no number loses
    digits or becomes Infinity. Sent back, they are taken."""
    text = f'{{"name": "paint", "{dialect.arguments_key}": {arguments}}}'
    whole = f"{dialect.opening}{text}{dialect.closing}"
    words, (call,) = tool_calls.split_answer(dialect, whole, {"paint"}, is_complete=True)
    assert (words, call.arguments) == ("", arguments)
    assert CalledFunction(name=call.name, arguments=call.arguments)


PIECES = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"a"',
    '"',
    "\\",
    "1",
    "-",
    ".5",
    "e9",
    "true",
    "nul",
    " ",
    "\n",
]


@settings(deadline=None, max_examples=500, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_strict_json_reads_what_json_reads(text):
    """Claim: it takes what the library takes, but for names of numbers that are none; what is taken
    is unfinished at every place before its end, and never called wrong there."""
    text = "{" + text

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        known, end = json.JSONDecoder(parse_constant=refuse).raw_decode(text)
    except ValueError:
        with pytest.raises(ValueError):
            read_object(text)
        return
    members, position = read_object(text)
    assert position == end and {key: json.loads(raw) for key, raw in members.items()} == known
    for early in range(end):
        with pytest.raises(Unfinished):
            read_object(text[:early])


def test_a_parser_that_gives_up_ends_that_answer(vocabulary, monkeypatch):
    """Claim: a grammar too large to follow is a broken law, which ends one request alone."""
    used = vocabulary.grammar(grammar.regex_grammar("a+"), "x")

    class Broken:
        def try_consume_tokens(self, tokens: list[int]) -> int:
            return len(tokens)

        def compute_logit_bias(self) -> bytes:
            return bytes(1024)

        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "too large"

    monkeypatch.setattr(used, "_matcher", Broken())
    monkeypatch.setattr(grammar, "_matcher", lambda vocabulary, source: Broken())
    with pytest.raises(BrokenLaw, match="too large"):
        used((64,))
    monkeypatch.setattr(Broken, "try_consume_tokens", lambda matcher, tokens: 0)
    with pytest.raises(BrokenLaw, match="too large"):
        used((65,))


def test_a_parser_that_gave_up_at_a_draft_is_replaced(vocabulary, monkeypatch):
    """Claim: a parser that gave up at one text, where a draft was, says what is allowed after
    another one. Fails if everything is allowed from then on."""
    source = grammar.regex_grammar("a+"), "x"
    used, fresh = vocabulary.grammar(*source), vocabulary.grammar(*source)
    monkeypatch.setattr(used, "_matcher", SimpleNamespace(is_error=lambda: True))
    (token,) = fresh(()).nonzero()[:1, 0].tolist()
    for answer in ((), (token,)):
        allowed = used(answer)
        assert allowed is not None and torch.equal(allowed, fresh(answer))


def test_forms_do_not_mix(calling):
    """Claim: a call that is due and another form cannot both be had."""
    answer = calling.post(
        request("hi", tools=TOOLS, tool_choice="required", response_format=FORMAT)
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"


@pytest.fixture(scope="module")
def marked(models: Pair) -> grammar.GrammarVocabulary:
    """A vocabulary whose tokenizer has the marks of calls as added tokens, as Qwen's have."""
    tokenizer = copy.deepcopy(models.target.tokenizer)
    marks = ("<tool_call>", "</tool_call>", "<think>")
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return grammar.GrammarVocabulary(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def _drawn_answer(rules: grammar.Grammar, seed: int, end: int) -> list[int]:
    """An answer of tokens that the grammar allows, drawn one by one."""
    generator, answer = torch.Generator().manual_seed(seed), list[int]()
    while end not in answer and len(answer) < 200:
        mask = rules(answer)
        assert mask is not None and mask.any(), "an allowed token led out of the grammar"
        answer.append(int(torch.multinomial(mask.float(), 1, generator=generator)))
    return answer


@pytest.mark.parametrize(
    "source",
    [grammar.regex_grammar(r"<tool_call>\n[ab]</tool_call>"),
     grammar.regex_grammar(r"[<](think|x)>!"),
     grammar.json_schema_grammar({"const": "<think> a"}),
     grammar.json_schema_grammar({"type": "object", "properties": {"<tool_call>": {"const": 1}},
                                  "required": ["<tool_call>"], "additionalProperties": False})],
    ids=["regex", "built up", "constant", "key"],
)  # fmt: skip
def test_a_form_may_contain_the_text_of_an_added_token(marked, source):
    """Claim: a form whose text spells an added token is followed to its end, whatever allowed
    tokens are drawn. Fails if a mask allows a token that the parser then refuses, after which the
    rest of the answer had no form."""
    (end,) = marked.eos_ids
    for seed in range(6):
        answer = _drawn_answer(marked.grammar(source, "x"), seed, end)
        assert answer[-1] == end


def test_a_form_may_contain_the_text_of_the_end_token(marked, models):
    """Claim: inside a form the text of the token that ends an answer does not end it."""
    (end,) = marked.eos_ids
    text = models.target.tokenizer.decode([end])
    rules = marked.grammar(grammar.json_schema_grammar({"const": f"{text} a"}), "x")
    answer = _drawn_answer(rules, 0, end)
    assert json.loads(models.target.tokenizer.decode(answer[:-1])) == f"{text} a"


def test_a_required_call_is_written_with_its_marks_tokens(marked):
    """Claim: where the marks of a call are tokens, a required call begins and ends with them, as
    models write it, and is parsed. Fails on marks that are spelled by letters."""
    tools = [{"name": "paint", "parameters": SCHEMA}]
    source = tool_calls.call_grammar(tool_calls.QWEN, tools, marked)
    tokenizer, (end,) = marked._tokenizer, marked.eos_ids
    for seed in range(4):
        answer = _drawn_answer(marked.grammar(source, "tools"), seed, end)
        marks = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
        assert [answer[0], answer[-2]] == marks
        text = tokenizer.decode(answer[:-1])
        words, (call,) = tool_calls.split_answer(tool_calls.QWEN, text, {"paint"}, is_complete=True)
        assert words == "" and set(json.loads(call.arguments)) == {"colour", "count"}

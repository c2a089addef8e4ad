"""Claims about tools of a checkpoint whose own template, in the manner of Hermes, carries them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serve.live import Live, made, serving

from lab.checkpoints import make
from saccade.inputs import Pair, load_pair

TEMPLATE = """{%- if tools %}<|im_start|>system
# Tools

<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>

For each call write an object within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}{% for m in messages %}{% if m.role == "tool" %}<|im_start|>user
<tool_response>
{% for part in m.content %}{{ part.text }}{% endfor %}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% for part in m.content %}{{ part.text }}{% endfor %}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("paint", "count")
]
# A random model calls nothing by itself. A form lets it do so, and the server must notice the call.
OBJECT = r'\{"name": "paint", "arguments": \{"colour": "(red|blue)"\}\}'
CALL = rf"Well\.\n<tool_call>\n{OBJECT}\n</tool_call>"
SETTINGS: dict[str, Any] = dict(model="shapes", tools=TOOLS, temperature=0, max_tokens=200)


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = make("qwen2.5-vl", tmp_path_factory.mktemp("checkpoint") / "tools")
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    with serving(lambda: made(Pair(*load_pair(str(folder), None)), "lookup")) as live:
        yield live


@pytest.fixture
def client(calling: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def _ask(client: openai.OpenAI, choice: Any, **more: Any) -> list[Any]:
    """The choice of a whole answer and the one that the client makes of a stream."""
    settings = {"messages": [{"role": "user", "content": "hi"}], **SETTINGS, **more}
    whole = client.chat.completions.create(tool_choice=choice, **settings)
    with client.chat.completions.stream(tool_choice=choice, **settings) as stream:
        final = stream.get_final_completion()
    return [whole.choices[0], final.choices[0]]


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"paint", "count"}),
     ({"type": "function", "function": {"name": "count"}}, {"count"})],
    ids=["required", "named"],
)  # fmt: skip
def test_a_call_that_must_be_made_is_made(client, choice, names):
    """Claim: even a random model makes it, with arguments of the schema, streamed too."""
    for answer in _ask(client, choice):
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls" and call.function.name in names
        assert json.loads(call.function.arguments)["colour"] in ("red", "blue")


def test_a_call_that_the_model_chooses_is_noticed(client):
    """Claim: with auto what the model writes as a call is one, and the words before it are content;
    with none, and without tools, the same text is content. Fails if words become calls."""
    form = {"guided_regex": CALL}
    for answer in _ask(client, "auto", extra_body=form):
        (call,) = answer.message.tool_calls
        assert answer.message.content == "Well." and answer.finish_reason == "tool_calls"
        assert call.function.name == "paint" and json.loads(call.function.arguments)
    for answer in _ask(client, "none", extra_body=form):
        assert not answer.message.tool_calls and answer.finish_reason == "stop"
        assert answer.message.content.endswith("</tool_call>")


def test_results_go_on(client):
    """Claim: the client's own message with its call, and a tool's result, are the next prompt, and
    longer results make a longer one."""
    (answer, _) = _ask(client, "required")
    (call,) = answer.message.tool_calls
    counts = []
    for result in ("done", "done, and a good deal more"):
        turns = [
            {"role": "user", "content": "hi"},
            answer.message,
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
        settings = {**SETTINGS, "max_tokens": 4}
        usage = client.chat.completions.create(messages=turns, **settings).usage
        counts.append(usage.prompt_tokens)
    assert counts[0] < counts[1]


@pytest.mark.extra
def test_the_responses_api_calls_too(client, calling):
    """Claim: the flat tools of ``responses`` are the same tools, streamed in the official events,
    and ``function_call_output`` goes on. Fails if a call loses its id on the way."""
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    settings: dict[str, Any] = dict(model="shapes", tools=tools, temperature=0)
    named = {"type": "function", "name": "count"}
    response = client.responses.create(input="hi", tool_choice=named, **settings)
    (call,) = response.output
    assert (call.type, call.name, call.status) == ("function_call", "count", "completed")
    with client.responses.stream(input="hi", tool_choice=named, **settings) as stream:
        names = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert streamed.arguments == call.arguments
    assert "response.function_call_arguments.done" in names
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    items: list[Any] = [{"role": "user", "content": "hi"}, call, result]
    last = client.responses.create(input=items, max_output_tokens=4, **settings)
    assert last.output[-1].type == "message"
    extra = {"guided_regex": CALL}
    both = client.responses.create(input="hi", extra_body=extra, **settings).output
    assert [item.type for item in both] == ["message", "function_call"]


def test_a_schema_is_followed_to_the_end(client):
    """Claim: a random model's answer of a schema ends by itself and parses."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
    settings = {**SETTINGS, "tools": openai.omit}
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "hi"}], response_format=form, **settings
    )
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(answer.choices[0].message.content)["colour"] in ("red", "blue")

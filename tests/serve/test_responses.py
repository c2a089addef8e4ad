"""Claims about what the official client's ``responses`` get from our server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from serve.live import Live, image_part, text_part, video_part

from saccade.serve.api_errors import ApiError
from saccade.serve.responses_schema import ResponsesRequest

SETTINGS: dict[str, Any] = dict(model="shapes", temperature=0, max_output_tokens=24)
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "paint", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def _chat(server: Live, *messages: dict[str, Any], **settings: Any) -> str:
    """The chat's answer to the same words."""
    answer = server.ask(messages=list(messages), **{"max_tokens": 24, **settings})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _address(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def test_a_text_is_the_chats_answer(client, server):
    """Claim: a string, a list and instructions are the chat with these messages; the response has
    the official type, with usage and status."""
    response = client.responses.create(input="hi", **SETTINGS)
    Response.model_validate(response.model_dump(warnings=False))
    assert response.output_text == _chat(server, _user("hi"))
    assert response.status == "completed" and response.incomplete_details is None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    brief_response = client.responses.create(input="hi", instructions="Be brief.", **SETTINGS)
    system = {"role": "system", "content": "Be brief."}
    assert brief_response.output_text == _chat(server, system, _user("hi"))
    assert brief_response.instructions == "Be brief."
    items = [_user([{"type": "input_text", "text": "hi"}])]
    assert client.responses.create(input=items, **SETTINGS).output_text == response.output_text


@pytest.mark.extra
def test_pictures_and_videos_are_read(client, server, picture, clips):
    """Claim: input_image with a bare address, and a video part, are the chat's media."""
    words = {"type": "input_text", "text": "What is this?"}
    image = {"type": "input_image", "image_url": _address(picture), "detail": "auto"}
    response = client.responses.create(input=[_user([image, words])], **SETTINGS)
    expected = _chat(server, _user([image_part(picture), text_part("What is this?")]))
    assert response.output_text == expected
    video = [_user([video_part(clips[0]), words])]
    response = client.responses.create(input=video, **SETTINGS)  # type: ignore[arg-type]
    expected = _chat(server, _user([video_part(clips[0]), text_part("What is this?")]))
    assert response.output_text == expected


def test_a_stream_is_the_response_in_events(client, server):
    """Claim: events have the official types, numbers without a gap and the official order, and the
    last one has the response that is not streamed. Fails if an event lacks a field of its type."""
    whole = client.responses.create(input="hi", **SETTINGS)
    body = {"input": "hi", "stream": True, **SETTINGS}
    with server.client.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    names = [line[7:] for line in lines if line.startswith("event: ")]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in events] and len(lines) == 2 * len(names)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
    assert "".join(deltas) == whole.output_text and len(deltas) > 1
    count = len(deltas)
    assert [name.removeprefix("response.") for name in names] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * count,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    last = events[-1]["response"]
    assert last["output"][0]["content"] == [whole.output[0].content[0].model_dump()]
    with client.responses.stream(input="hi", **SETTINGS) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_an_answer_that_is_cut_is_incomplete(client):
    """Claim: max_output_tokens is kept, and its reason is said, streamed too."""
    settings = {**SETTINGS, "max_output_tokens": 2}
    response = client.responses.create(input="hi", **settings)
    assert response.status == "incomplete" and response.usage.output_tokens == 2
    assert response.incomplete_details.reason == "max_output_tokens"
    with client.responses.create(input="hi", stream=True, **settings) as events:
        last = list(events)[-1]
    assert last.type == "response.incomplete" and last.response.status == "incomplete"


@pytest.mark.extra
def test_a_form_is_followed(client):
    """Claim: text.format and the client's parse give objects of the schema."""
    form = {"type": "json_schema", "name": "shape", "schema": SCHEMA, "strict": True}
    settings = {**SETTINGS, "max_output_tokens": 100}
    response = client.responses.create(input="hi", text={"format": form}, **settings)
    assert json.loads(response.output_text)["colour"] in ("red", "blue")
    assert response.text.format.name == "shape"

    class Shape(BaseModel):
        colour: Literal["red", "blue"]

    parsed = client.responses.parse(input="hi", text_format=Shape, **settings)
    assert isinstance(parsed.output_parsed, Shape)


def test_probabilities_are_the_chats(client, server):
    """Claim: include and top_logprobs give every token's log-probability in the item's text, and in
    the pieces of a stream too: the last token's as well, which may add no text."""
    wishes = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, **SETTINGS}
    response = client.responses.create(input="hi", **wishes)
    entries = response.output[0].content[0].logprobs
    chat = server.ask("hi", logprobs=True, top_logprobs=2, max_tokens=24).json()
    expected = chat["choices"][0]["logprobs"]["content"]
    assert [each.token for each in entries] == [each["token"] for each in expected]
    assert [each.logprob for each in entries] == pytest.approx([e["logprob"] for e in expected])
    assert all(len(each.top_logprobs) == 2 for each in entries)
    with client.responses.create(input="hi", stream=True, **wishes) as events:
        deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [entry for delta in deltas for entry in delta.logprobs]
    assert [each.token for each in streamed] == [each.token for each in entries]
    assert [each.logprob for each in streamed] == pytest.approx([e.logprob for e in entries])


def test_an_earlier_response_is_sent_back(client, server):
    """Claim: output items of a response, as objects or dumped, are the assistant's turn."""
    first = client.responses.create(input="hi", **SETTINGS)
    expected = _chat(
        server, _user("hi"), {"role": "assistant", "content": first.output_text}, _user("and?")
    )
    for items in (first.output, [item.model_dump() for item in first.output]):
        inputs: Any = [_user("hi"), *items, _user("and?")]
        assert client.responses.create(input=inputs, **SETTINGS).output_text == expected


def test_items_become_messages():
    """Claim: reasoning, text and calls of one turn are one message, results are a tool's, and a new
    turn begins after them. Reasoning without text adds nothing. Fails if calls are parted from
    their turn or lose their order."""
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "output": "done"}
    items = [
        {"role": "developer", "content": "be brief"},
        _user("hi"),
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "reasoning", "id": "rs_2", "summary": []},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}]},
        {**call, "call_id": "1", "id": "fc_1", "status": "completed"},
        {**call, "call_id": "2"},
        {**result, "call_id": "1"},
        {**result, "call_id": "2", "output": [{"type": "input_text", "text": "done"}]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        _user("and?"),
    ]  # fmt: skip
    chat = ResponsesRequest.model_validate_json(
        json.dumps({"model": "x", "input": items, "instructions": "first"})
    ).completion_request
    roles = ["system", "system", "user", "assistant", "tool", "tool", "assistant", "assistant"]
    assert [turn.role for turn in chat.messages] == [*roles, "user"]
    turn = chat.messages[3]
    assert turn.reasoning_text == "hm" and turn.content[0].text == "yes"
    assert [each.id for each in turn.tool_calls] == ["1", "2"]


REFUSED: list[tuple[str, Any, str]] = [
    ("previous_response_id", "resp_1", "send the earlier items again"),
    ("conversation", "conv_1", "send the earlier items again"),
    ("background", True, "wait for the answer"),
    ("tools", [{"type": "web_search"}], "tools"),
    ("input", [], "input"),
    *(("input", [value], "input") for value in ("hello", 1, None, ["x"])),
    ("input", [{"type": "item_reference", "id": "x"}], "input"),
    ("input", [{"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}],
     "only text"),
    ("input", [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "x"}],
     "arguments"),
    ("input", [{"type": "function_call", "call_id": "1", "name": "f",
                "arguments": '{"a": 1e99999999999999999999}'}], "arguments"),
    ("messages", [], "messages"),
    ("input", [{"type": "reasoning", "summary": []}], "input: "),
    ("n", 2, "n"),
    ("max_output_tokens", 10**6, "max_output_tokens: this server writes at most"),
    ("input", [{"role": "user", "content": [
        {"type": "input_image", "image_url": "http://127.0.0.1/x.png"}]}], ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "reason"), REFUSED, ids=str)
def test_what_is_not_supported_is_refused(server, name, value, reason):
    """Claim: it is 400 and a sentence that says what was wrong or what to do instead."""
    answer = server.client.post("/v1/responses", json={"input": "hi", **SETTINGS, name: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert reason in error["message"]
    assert error["param"] in (None, name) or error["param"].startswith(f"{name}.")


def test_what_changes_nothing_is_accepted(client, server):
    """Claim: the fields that the client's users often send change nothing, null ones neither."""
    more: dict[str, Any] = dict(store=True, truncation="auto", metadata={"a": "b"}, user="me")
    more |= dict(parallel_tool_calls=True, previous_response_id=None, include=[], tools=[])
    more |= dict(reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"})
    more |= dict(service_tier="auto", prompt_cache_key="x", safety_identifier="x")
    response = client.responses.create(input="hi", **SETTINGS, **more)
    assert response.output_text == _chat(server, _user("hi"))
    assert response.metadata == {"a": "b"} and response.store is False


def test_an_error_in_a_stream_is_raised(client, server, monkeypatch):
    """Claim: what ends a stream early is an error event, which the client raises."""
    object.__setattr__(server.service.settings, "timeout_seconds", 1.0)
    before = server.queue._engine.step
    monkeypatch.setattr(server.queue._engine, "step", lambda: iter(()))
    try:
        with pytest.raises(openai.APIError, match="too long"):
            list(client.responses.create(input="hi", stream=True, **SETTINGS))
    finally:
        object.__setattr__(server.service.settings, "timeout_seconds", 600.0)
        monkeypatch.setattr(server.queue._engine, "step", before)


def test_fields_are_called_as_the_client_calls_them_and_files_as_they_are():
    """Claim: an error names the client's fields. The name of a file is left as it is."""
    error = ApiError(400, "messages[0]: messages.mp4 and in/messages are no videos", "messages")
    renamed = error.with_field_names({"messages": "input"})
    assert renamed.param == "input"
    assert renamed.message == "input[0]: messages.mp4 and in/messages are no videos"
    place = ApiError(400, "messages.0.content is missing").with_field_names({"messages": "input"})
    assert place.message == "input.0.content is missing"

"""Claims about conversations that clients send back as their libraries hold them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from PIL import Image
from serve.live import Live, made, request, serving

from saccade.inputs import Pair
from saccade.serve.request_schema import ChatRequest

USER = {"role": "user", "content": "hi"}
SILENT: list[dict[str, Any]] = [
    {"annotations": []},
    {"annotations": None, "audio": None, "function_call": None, "tool_calls": None},
    {"tool_calls": []},
    {"refusal": None, "reasoning_content": None, "reasoning": None},
    {"refusal": "", "reasoning_content": "", "thinking_blocks": [], "provider_fields": {}},
    {"name": None, "id": None, "parsed": None},
]
HINT = {"cache_control": {"type": "ephemeral"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server(models: Pair) -> Iterator[Live]:
    """A server with the embedded target."""
    with serving(lambda: made(Pair(models.target), "ar")) as live:
        yield live


def test_a_hint_for_another_providers_cache_changes_nothing() -> None:
    """Claim: ``cache_control``, with which clients mark parts, messages and system prompts for
    another provider, is left out; any other unknown field that says something is refused."""
    part = {"type": "text", "text": "hi"}
    messages = [{"role": "system", "content": "be kind", **HINT},
                {"role": "user", "content": [{**part, **HINT}]}]  # fmt: skip
    read = ChatRequest.model_validate({"model": "shapes", "messages": messages})
    plain = [{"role": "system", "content": "be kind"}, {"role": "user", "content": [part]}]
    assert read == ChatRequest.model_validate({"model": "shapes", "messages": plain})
    with pytest.raises(ValueError, match="cache_controls"):
        messages = [{"role": "user", "content": [{**part, "cache_controls": {"a": 1}}]}]
        ChatRequest.model_validate({"model": "shapes", "messages": messages})


@pytest.mark.representatives(1)
@pytest.mark.parametrize("more", SILENT, ids=str)
def test_silent_fields_of_an_answer_change_nothing(server: Live, more: dict[str, Any]) -> None:
    """Claim: an assistant's message with null and empty fields is the message without them."""
    plain = [USER, {"role": "assistant", "content": "yes"}, USER]
    replayed = [USER, {"role": "assistant", "content": "yes", **more}, USER]
    first, second = (server.ask(messages=messages) for messages in (plain, replayed))
    assert first.status_code == second.status_code == 200, second.text
    assert first.json()["choices"] == second.json()["choices"]
    assert first.json()["usage"]["prompt_tokens"] == second.json()["usage"]["prompt_tokens"]


def test_the_official_client_sends_its_own_message_back(server: Live) -> None:
    """Claim: ``message.model_dump()`` of the client is taken, as a whole and in a parsed form."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        settings: dict[str, Any] = dict(model="shapes", max_tokens=4, temperature=0)
        messages: list[Any] = [USER]
        message = client.chat.completions.create(messages=messages, **settings).choices[0].message
        assert "annotations" in message.model_dump()
        for dumped in (message.model_dump(), message.model_dump(exclude_none=True), message):
            client.chat.completions.create(messages=[USER, dumped, USER], **settings)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hi", "tool_calls": None, "tool_call_id": None},
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None}]},
        {"role": "system", "content": "hi", "annotations": []},
    ],
)
def test_other_messages_and_parts_may_be_silent_too(message: dict[str, Any]) -> None:
    """Claim: what holds for an assistant's message holds for every message and part."""
    request = ChatRequest.model_validate({"model": "x", "messages": [message, USER]})
    (plain, _) = request.messages
    assert plain.content


def test_calls_are_replayed_as_streams_put_them_together() -> None:
    """Claim: an index in a call, an empty content beside it and null fields are taken."""
    dumped = ChatCompletionMessage.model_validate({"role": "assistant", "tool_calls": [CALL]})
    for turn in (
        dumped.model_dump(),
        {"role": "assistant", "content": [], "tool_calls": [{**CALL, "index": 0}]},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "custom": None}]},
    ):
        given = [USER, turn, {"role": "tool", "tool_call_id": "1", "content": "done"}]
        request = ChatRequest.model_validate_json(json.dumps({"model": "x", "messages": given}))
        assert request.messages[1].tool_calls[0].function.name == "f"


@pytest.mark.parametrize(
    "more",
    [
        {"audio": {"id": "1"}},
        {"function_call": {"name": "f", "arguments": "{}"}},
        {"refusal": "no"},
        {"tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"x": NaN}'}}]},
        {"tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[]"}}]},
        {"content": None, "tool_calls": []},
        {"content": []},
    ],
)
def test_fields_that_say_something_are_refused(server: Live, more: dict[str, Any]) -> None:
    """Control: what is not known and not empty is refused by its name, and so is a message that
    says nothing at all."""
    answer = server.ask(messages=[USER, {"role": "assistant", "content": "yes", **more}, USER])
    assert answer.status_code == 400
    assert next(iter(more)) in answer.json()["error"]["message"]


@pytest.mark.extra
def test_pictures_come_in_lines_and_without_padding(server: Live) -> None:
    """Claim: a short and a long picture whose base64 comes in lines, or unpadded, is that picture.

    A long one takes another way into the server: it is cut out of the body before that is parsed.
    """
    for side in (16, 300):
        image = Image.effect_noise((side, side), 90).convert("RGB")
        kept = BytesIO()
        image.save(kept, "PNG")
        data = kept.getvalue() + b"\0" * (1 + -len(kept.getvalue()) % 3)  # so that it is padded
        coded = base64.b64encode(data).decode()
        assert coded.endswith("==")
        lines = base64.encodebytes(data).decode()
        answers = []
        for written in (coded, coded.rstrip("="), lines, lines.replace("\n", "\r\n")):
            url = {"url": f"data:image/png;base64,{written}"}
            parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "what?"}]
            answer = server.post(request("x", messages=[{"role": "user", "content": parts}]))
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"])
        assert all(answer == answers[0] for answer in answers)

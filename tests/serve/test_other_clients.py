"""Claims about what litellm and LangChain get from our server. Skipped where they are missing."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from serve.live import Live, image_part, text_part

# The clients' own warnings are not about our server.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

SCHEMA: dict[str, Any] = {
    "title": "Shape",
    "description": "A shape.",
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
MANY: dict[str, Any] = dict(presence_penalty=0.5, frequency_penalty=0.5, n=2, seed=3, user="me")


def _chat(server: Live, content: Any, **settings: Any) -> str:
    answer = server.ask(content, **{"max_tokens": 24, **settings})
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture
def completion(server: Live) -> Any:
    litellm = pytest.importorskip("litellm")

    def complete(content: Any, **settings: Any) -> Any:
        messages = settings.pop("messages", [{"role": "user", "content": content}])
        return litellm.completion(
            model="hosted_vllm/shapes", api_base=f"{server.url}/v1", api_key="none",
            messages=messages, **{"temperature": 0, "max_tokens": 24, **settings},
        )  # fmt: skip

    return complete


def test_litellm_gets_the_answers(server, completion, picture):
    """Claim: text, pictures, streams, penalties with several choices, and a message sent back."""
    answer = completion("hi")
    assert answer.choices[0].message.content == _chat(server, "hi")
    parts = [image_part(picture), text_part("What is this?")]
    assert completion(parts).choices[0].message.content == _chat(server, parts)
    streamed = "".join(
        each.choices[0].delta.content or "" for each in completion("hi", stream=True)
    )
    assert streamed == answer.choices[0].message.content
    many = completion("What moves?", **{**MANY, "temperature": 1.5})
    assert len(many.choices) == 2
    user = {"role": "user", "content": "hi"}
    replayed = [user, answer.choices[0].message.model_dump(), user]
    assert completion(None, messages=replayed).choices[0].message.content
    own = completion("hi", top_k=5, min_tokens=2, extra_body={
        "repetition_penalty": 1.1, "chat_template_kwargs": {"enable_thinking": False},
    })  # fmt: skip
    assert own.choices[0].message.content


def test_litellm_gets_forms_and_responses(server, completion):
    """Claim: a schema is followed, and litellm's ``responses`` are ours."""
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
    answer = completion("hi", response_format=form, max_tokens=100)
    assert json.loads(answer.choices[0].message.content)["colour"] in ("red", "blue")
    litellm = pytest.importorskip("litellm")
    settings: dict[str, Any] = dict(api_base=f"{server.url}/v1", api_key="none", temperature=0)
    response = litellm.responses(
        model="openai/shapes", input="hi", max_output_tokens=24, **settings
    )
    assert response.output[0].content[0].text == _chat(server, "hi")
    events = litellm.responses(
        model="openai/shapes", input="hi", max_output_tokens=24, stream=True, **settings
    )
    text = "".join(getattr(each, "delta", "") for each in events)
    assert text == _chat(server, "hi")


@pytest.fixture
def chat_model(server: Live) -> Any:
    langchain = pytest.importorskip("langchain_openai")

    def make(**settings: Any) -> Any:
        return langchain.ChatOpenAI(
            model="shapes", base_url=f"{server.url}/v1", api_key="none", temperature=0,
            max_retries=0, **{"max_tokens": 24, **settings},
        )  # fmt: skip

    return make


@pytest.mark.parametrize("uses_responses", [False, True])
def test_langchain_gets_the_answers(server, chat_model, picture: Path, uses_responses):
    """Claim: text, pictures, streams, a conversation and structured output, by both of its APIs."""
    model = chat_model(use_responses_api=uses_responses)
    first = model.invoke("hi")
    assert first.text == _chat(server, "hi")
    assert "".join(piece.text for piece in model.stream("hi")) == first.text
    data = base64.b64encode(picture.read_bytes()).decode()
    image = {"type": "image", "base64": data, "mime_type": "image/png"}
    question = {"role": "user", "content": [image, text_part("What is this?")]}
    parts = [image_part(picture), text_part("What is this?")]
    assert model.invoke([question]).text == _chat(server, parts)
    assert model.invoke([("user", "hi"), first, ("user", "and?")]).text
    shaped = chat_model(use_responses_api=uses_responses, max_tokens=100)
    answer = shaped.with_structured_output(SCHEMA, method="json_schema").invoke("hi")
    assert answer["colour"] in ("red", "blue")


def test_langchain_sends_what_it_likes(chat_model):
    """Claim: its penalties, seeds and extra fields are taken."""
    settings = {key: value for key, value in MANY.items() if key not in ("n", "user")}
    more = {"top_k": 5, "ignore_eos": False, "include_reasoning": True}
    assert chat_model(extra_body=more, **settings).invoke("hi").text

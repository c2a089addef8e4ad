"""Claims about what is refused: by its name, with a 4xx and a sentence that gives nothing away."""

from __future__ import annotations

import copy
import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve.live import (
    Live,
    coded,
    frames_part,
    image_part,
    jpeg,
    made,
    request,
    serving,
    text_part,
    video_part,
)

from saccade.inputs import Pair, media
from saccade.inputs.media import Limits
from saccade.inputs.media.fetch import Sources
from saccade.serve.api_errors import ApiError
from saccade.serve.request_schema import ChatRequest
from saccade.serve.responses_schema import ResponsesRequest
from saccade.serve.routes import parse_request
from saccade.serve.server_settings import MediaSettings


def _refused(response: httpx.Response, *statuses: int) -> dict[str, Any]:
    """The error of a refusal, which is one clean sentence."""
    assert response.status_code in (statuses or (400,)), response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    message = error["message"]
    assert message and len(message) <= 500 and "\n" not in message and ". " not in message
    assert not re.search(r"\b0x|/tmp|/home|Traceback|Errno|pydantic|site-packages", message)
    assert str(Path.cwd()) not in message
    return error


# -- fields -------------------------------------------------------------------------------------

UNSUPPORTED: dict[str, Any] = {
    "logit_bias": {"5": 1},
    "store": True,
    "best_of": 2,
    "echo": True,
    "use_beam_search": True,
    "length_penalty": 0.5,
    "include_stop_str_in_output": True,
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 5,
    "chat_template": "x",
    "documents": [{}],
    "modalities": ["audio"],
    "audio": {},
    "prediction": {},
    "functions": [{}],
    "function_call": "auto",
    "web_search_options": {},
}
UNKNOWN: dict[str, Any] = dict.fromkeys(("guided_choice", "temprature", "__class__", "sücher"), 1)
WRONG: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", 0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", 10**30),
    ("max_completion_tokens", 10**9),
    ("n", 0),
    ("n", 9),
    ("n", 10**30),
    ("seed", 2**63),
    ("seed", 1.5),
    ("seed", "x"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["x"] * 17),
    ("stop", 5),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"more": 1}),
    ("logprobs", 3),
    ("top_logprobs", 21),
    ("top_logprobs", 2),
    ("model", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages", [{"role": "tool", "content": "x"}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": []}]),
    ("messages", [{"role": "user", "content": None}]),
    ("messages", [{"role": "user", "content": "x", "name": 5}]),
    ("messages", [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]),
    ("messages", [{"role": "user", "content": "x"}, {"role": "assistant", "content": " "}]),
    ("messages", [{"role": "user", "content": "x"}, {"role": "assistant"}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}]),
    ("min_p", 1.5),
    ("presence_penalty", 2.5),
    ("frequency_penalty", "1"),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**9]),
    ("ignore_eos", 1),
    ("continue_final_message", True),
    ("reasoning_effort", "much"),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"tokenize": True}),
    ("chat_template_kwargs", {"add_generation_prompt": False}),
    ("chat_template_kwargs", {"style": "<|im_end|>"}),
    ("chat_template_kwargs", 5),
    ("mm_processor_kwargs", {"min_pixels": 10**9}),
    ("mm_processor_kwargs", {"min_pixels": 9, "max_pixels": 8}),
    ("repetition_penalty", 0),
    ("metadata", {"a": 1}),
    ("tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("tools", [{"type": "function"}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "g"}}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "yaml"}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "objct"}}}),
    ("guided_regex", "(ab"),
    ("guided_json", {"$ref": "#/nowhere"}),
    ("structured_outputs", {"regex": "a", "json": {}}),
    ("structured_outputs", {}),
    ("messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]),
    ("user", 5),
    ("metadata", {"functions": 5}),
]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_its_name(server, name):
    """Claim: a value that would change the answer is refused; null and the neutral one are not."""
    error = _refused(server.ask(**{name: UNSUPPORTED[name]}))
    assert error["param"].startswith(name) and name in error["message"]
    assert "not supported" in error["message"]
    assert server.ask(**{name: None}, max_tokens=1).status_code == 200


def test_neutral_values_are_taken(server):
    """Claim: clients that always send the defaults are served."""
    neutral: dict[str, Any] = dict(presence_penalty=0, frequency_penalty=0.0, logit_bias={})
    neutral |= dict(best_of=1, echo=False, use_beam_search=False, length_penalty=1.0, functions=[])
    neutral |= dict(modalities=["text"], function_call="none", prompt_cache_key="x", priority=1)
    neutral |= dict(include_stop_str_in_output=False, bad_words=[], allowed_token_ids=[])
    neutral |= dict(response_format={"type": "text"}, tools=[], tool_choice="none", user="me")
    neutral |= dict(metadata={"a": "b"}, store=False, service_tier="auto", parallel_tool_calls=True)
    neutral |= dict(messages=[{"role": "user", "content": "hi", "name": "me"}])
    assert server.ask(**neutral).status_code == 200


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_refused_by_its_name(server, name):
    """Claim: no field is ignored, not even null."""
    for value in (UNKNOWN[name], None):
        error = _refused(server.ask(**{name: value}))
        assert error["param"] == name and name in error["message"]


@pytest.mark.parametrize("name", ["Name", "tool", "user"])
def test_an_unknown_field_of_a_message_is_named(server, name):
    """Claim: an unknown field inside a message is named, also if it looks like a type's name."""
    error = _refused(server.ask(messages=[{"role": "user", "content": "hi", name: "x"}]))
    assert error["param"].endswith(f".{name}") and name in error["message"]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_refused_at_its_place(server, name, value):
    """Claim: the field's name is told, as param or in the sentence."""
    error = _refused(server.ask(**{name: value}))
    assert name in f"{error['param']} {error['message']}"


IMAGE = {"type": "image_url", "image_url": {"url": "x", "min_pixels": 10}, "max_pixels": 5}
PLACES = {  # What is sent, and the field that is at fault.
    "top_k": ("chat", {"top_k": 0}, "top_k"),
    "a function without a name": (
        "chat",
        {"tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name",
    ),
    "bounds of two places": (
        "chat",
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages.0.content.0.image_url",
    ),
    "a call without arguments": (
        "responses",
        {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]},
        "input.0.arguments",
    ),
    "a text without a text": (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input.0.content.0.text",
    ),
    "a summary": (
        "responses",
        {"input": [{"type": "reasoning", "summary": 5}]},
        "input.0.summary",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_field_at_fault_is_named_as_the_client_sent_it(name):
    """Claim: an error names the way through the request to the field that is wrong, or missing.
    Fails if it names a schema's own words for the members of a union, or the union's first member
    where the client chose another."""
    kind, fields, param = PLACES[name]
    schemas = {"chat": ChatRequest, "responses": ResponsesRequest}
    words = [{"role": "user", "content": "hi"}]
    whole = {"messages": words} if kind == "chat" else {"input": "hi"}
    text = json.dumps({"model": "x", **whole, **fields}).encode()
    with pytest.raises(ApiError) as error:
        parse_request(schemas[kind], text)
    assert (error.value.status, error.value.param) == (400, param)


def test_a_model_that_is_not_there_is_404(server):
    """Claim: chat and list say 404 with what there is, whatever the name holds."""
    for name in ("gpt-4", "../../etc/passwd", "x" * 5000, "\x00\n\r"):
        assert "shapes" in _refused(server.ask(model=name), 404)["message"]
    _refused(server.client.get("/v1/models/gpt-4"), 404)
    assert server.client.get("/v1/models/shapes").json()["id"] == "shapes"


@pytest.mark.parametrize("path", ["/nothing", "/v1/embeddings", "/docs", "/v1/chat/completions/"])
def test_a_path_that_is_not_there_is_404(server, path):
    """Claim: errors have the same form everywhere; a wrong verb is 405 and says which is right."""
    assert server.client.post(path, json={}, follow_redirects=False).status_code in (404, 307)
    wrong = server.client.get("/v1/chat/completions")
    _refused(wrong, 405)
    assert wrong.headers["allow"] == "POST"


# -- bodies -------------------------------------------------------------------------------------


def _messages(text: str) -> str:
    return f'{{"model": "shapes", "messages": [{{"role": "user", "content": {text}}}]}}'


BODIES = {
    "empty": b"",
    "no JSON": b"hello",
    "half": b'{"model": "shapes", ',
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep tools": b'{"tools":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "NaN": b'{"temperature": NaN}',
    "infinity": b'{"temperature": Infinity}',
    "1e999": b'{"temperature": 1e999}',
    "a number of 10,000 digits": b'{"seed": ' + b"9" * 10_000 + b"}",
    "a lone surrogate": _messages('"\\ud800"').encode(),
    "a lone surrogate as a name": b'{"\\ud800": 1}',
    "not UTF-8": _messages('"\xff"').encode("latin-1"),
    "UTF-16": _messages('"hi"').encode("utf-16"),
    "a NUL": b"\x00" * 100,
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_request_is_400(server, name):
    """Claim: whatever bytes come, one sentence and 400."""
    json_ = {"Content-Type": "application/json"}
    _refused(server.post(content=BODIES[name], headers=json_))


def test_only_json_is_taken(server):
    """Claim: what another site's page can make a browser send is 415; charset is no matter."""
    data = json.dumps(request()).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        _refused(server.post(content=data, headers={"Content-Type": kind}), 415)
    right = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert server.post(content=data, headers=right).status_code == 200


@pytest.fixture(scope="module")
def small(models) -> Any:
    """A server that takes 10 kB, with a key and few media."""
    with serving(
        lambda: made(models, media=MediaSettings(max_items=3)),
        key="sesame",
        max_body_bytes=10_000,
        timeout_seconds=8.0,
    ) as live:
        yield live


def test_a_body_that_is_too_large_is_413(small):
    """Claim: with its length announced and without, and nothing of it stays."""
    large = json.dumps(request("x" * 20_000)).encode()
    json_ = {"Content-Type": "application/json"}
    _refused(small.post(content=large, headers=json_), 413)
    _refused(small.post(content=iter([large[:9000], large[9000:]]), headers=json_), 413)
    assert small.ask("x" * 500).status_code == 200


def _raw(live: Live, sent: bytes, seconds: float = 10.0) -> bytes:
    """What comes back over a bare socket for these bytes."""
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as line:
        line.sendall(sent)
        return line.recv(65536)


HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n"
    b"Content-Type: application/json\r\n"
)


@pytest.mark.slow
def test_a_body_that_lies_about_its_length_or_never_comes_is_refused(small):
    """Claim: absurd lengths are 4xx, and a body that stops coming is 408 when its time is over."""
    for length in (b"99999999999999999999", b"-1", b"x", b"9" * 5000):
        assert b" 4" in _raw(small, HEAD + b"Content-Length: " + length + b"\r\n\r\n")[:20]
    assert b" 413 " in _raw(small, HEAD + b"Expect: 100-continue\r\nContent-Length: 20000\r\n\r\n")
    assert b" 408 " in _raw(small, HEAD + b"Content-Length: 100\r\n\r\n{")
    assert small.empties()


@pytest.mark.parametrize("key", ["schlüssel", "voilà"])
def test_a_key_may_have_any_letters(models, key):
    """Claim: a key with letters beyond ASCII, sent in UTF-8, opens the server. Fails if a byte of a
    letter is taken for a blank, such as the last one of "à"."""
    with serving(lambda: made(models, "ar"), key=key) as live:
        headers = {b"Authorization": f"Bearer {key}".encode()}
        with httpx.Client(base_url=live.url, headers=headers) as client:
            assert client.get("/v1/models").status_code == 200
        _refused(live.client.get("/v1/models", headers={"Authorization": "Bearer x"}), 401)


def test_a_key_is_asked_for(small):
    """Claim: without the key, or with another, 401 on every /v1 path; health needs none."""
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "sesame"},
        {"Authorization": "Basic sesame"},
        {"Authorization": "Bearer"},
        {b"Authorization": "Bearer sesam\xe9".encode("latin-1")},
    ):
        with httpx.Client(base_url=small.url, headers=headers) as client:
            answer = client.post("/v1/chat/completions", content=b"never read")
            _refused(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
            _refused(client.get("/v1/models"), 401)
            assert client.get("/health").status_code == 200
    assert small.client.get("/v1/models").status_code == 200


# -- media --------------------------------------------------------------------------------------


def _video(url: str) -> list[Any]:
    return [{"type": "video_url", "video_url": {"url": url}}, text_part("hi")]


VIDEOS = {
    "no data": "data:video/mp4;base64,",
    "no base64": "data:video/mp4;base64,@@@@",
    "half base64": "data:video/mp4;base64,abc",
    "not said to be base64": "data:video/mp4,abcd",
    "text": "data:text/plain;base64," + coded(b"hello"),
    "no video": "data:video/mp4;base64," + coded(b"<html>not found</html>"),
    "a playlist": "data:video/mp4;base64," + coded(b"ffconcat version 1.0\nfile 'ok.mp4'\n"),
    "an empty frame": "data:video/jpeg;base64,,",
    "a broken frame": "data:video/jpeg;base64," + coded(b"\xff\xd8\xff\xe0nothing"),
    "a file": "file:///etc/passwd",
    "a relative file": "file:../../etc/passwd",
    "http": "http://127.0.0.1:1/x.mp4",
    "https": "https://example.com/x.mp4",
    "metadata": "http://169.254.169.254/latest/meta-data/",
    "ftp": "ftp://example.com/x.mp4",
    "no scheme": "/etc/passwd",
    "gopher": "gopher://127.0.0.1:70/",
    "a NUL": "data:video/mp4;base64,\x00",
}


@pytest.mark.representatives(3)
@pytest.mark.parametrize("name", VIDEOS)
def test_bad_media_are_refused_in_a_sentence(server, name):
    """Claim: 400, 413, 415 or 422, never the address in the sentence, and the server goes on."""
    for content in (
        _video(VIDEOS[name]),
        [{"type": "image_url", "image_url": {"url": VIDEOS[name]}}, text_part("hi")],
        [{"type": "image_url", "image_url": VIDEOS[name]}, text_part("hi")],
    ):
        error = _refused(server.ask(content), 400, 413, 415, 422)
        assert error["param"] == "messages"
        assert "passwd" not in error["message"] and "example" not in error["message"]
        assert "127.0" not in error["message"] and "169.254" not in error["message"]
    assert server.ask().status_code == 200


@pytest.mark.parametrize(
    ("url", "option"),
    [
        ("file:///etc/passwd", "--media-root"),
        ("http://example.com/x.mp4", "--media-host"),
        ("http://127.0.0.1:1/x.mp4", "--private-media-hosts"),
    ],
)
def test_a_refused_address_names_the_option_that_allows_it(server, url, option):
    """Claim: whoever runs the server reads in the refusal which option opens such addresses."""
    assert option in _refused(server.ask(_video(url)))["message"]


def test_too_many_media_are_refused_before_any_is_read(small, clips, picture):
    """Claim: four where three are allowed is 400 with the number, though they are nonsense."""
    nonsense = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = _refused(small.ask([nonsense] * 4))
    assert "at most 3" in error["message"]
    assert "at most 3" not in _refused(small.ask([nonsense] * 3), 400, 415)["message"]


@pytest.fixture(scope="module")
def open_(models, clips: list[Path]) -> Any:
    """A server with a folder, whose requests may choose up to six frames."""
    root = clips[0].parent
    media_ = MediaSettings(
        Sources(root=root), Limits(max_frames=6, root=root), clients_may_choose_frames=True
    )
    with serving(lambda: made(models, media=media_)) as live:
        yield live


def test_files_are_read_under_the_folder_alone(open_, clips, picture):
    """Claim: file:// under the root is the same answer as the bytes; beside it, and by .. or a
    link, it is refused."""
    one, many = video_part(clips[0]), dict(max_tokens=24)
    named = open_.ask(_video(clips[0].as_uri()), **many).json()
    assert named["choices"] == open_.ask([one, text_part("hi")], **many).json()["choices"]
    link = clips[0].parent / "link.png"
    if not link.exists():
        link.symlink_to(picture)
    outside = clips[0].parent / ".." / picture.parent.name / picture.name
    for path in (picture, link, outside, Path("/etc/passwd")):
        error = _refused(open_.ask(_video(f"file://{path}")))
        assert path.parent.name not in error["message"]


def test_frames_are_chosen_by_the_server_unless_it_allows_otherwise(server, open_, clips):
    """Claim: both fields are refused by name; where allowed they are honoured within ceilings."""
    content = [video_part(clips[0]), text_part("hi")]
    choose: dict[str, Any] = {"media_io_kwargs": {"video": {"num_frames": 2}}}
    process: dict[str, Any] = {"mm_processor_kwargs": {"num_frames": 2}}
    for given in (choose, process):
        assert next(iter(given)) in _refused(server.ask(content, **given))["message"]
        few = open_.ask(content, **given).json()["usage"]["prompt_tokens"]
        more = {name: {"num_frames": 6} for name in process}
        assert few < open_.ask(content, **more).json()["usage"]["prompt_tokens"]
    for wrong in (
        {"num_frames": 7},
        {"num_frames": 0},
        {"num_frames": 10**30},
        {"fps": 0},
        {"fps": 1e9},
        {"fps": 1, "num_frames": 2},
        {"size": {"height": 1}},
    ):
        _refused(open_.ask(content, mm_processor_kwargs=wrong), 400, 413, 422)
    _refused(open_.ask(content, media_io_kwargs={"image": {}}))


def test_a_number_of_frames_of_a_list_is_refused(open_, clips):
    """Claim: a list of frames is taken whole; a count for it is refused, not ignored."""
    frames = [jpeg(frame) for frame in media.read(clips[0]).frames[:4]]
    content = [frames_part(frames), text_part("hi")]
    error = _refused(open_.ask(content, mm_processor_kwargs={"num_frames": 2}))
    assert error["param"] == "num_frames"
    assert open_.ask(content).status_code == 200


def test_a_video_among_many_frames_is_lowered_with_a_warning(open_, clips):
    """Claim: a rate that would pass the ceiling is lowered, and the answer says so."""
    content = [video_part(clips[0]), text_part("hi")]
    answer = open_.ask(content, mm_processor_kwargs={"fps": 30.0}).json()
    assert any("instead of" in warning for warning in answer["saccade"]["warnings"])


# -- lengths ------------------------------------------------------------------------------------


def test_a_context_that_overflows_is_refused_with_numbers(server):
    """Claim: prompt, limit and context are told; endless text is not even tokenized."""
    error = _refused(server.ask("word " * 40_000))
    assert re.search(r"\d{5} tokens of prompt and 16 of answer .* 32768", error["message"])
    error = _refused(server.ask("x" * 600_000))
    assert "600000 characters" in error["message"]


def test_a_limit_over_the_servers_is_refused_under_the_name_it_came(server):
    """Claim: both names of the limit are told as they were sent, with what is allowed."""
    for name in ("max_tokens", "max_completion_tokens"):
        error = _refused(server.ask(**{name: 257}))
        assert error["param"] == name and "256" in error["message"]


def test_no_refusal_names_the_checkpoint(models, picture):
    """Claim: a target that reads no pictures, loaded from a folder, does not tell that folder."""
    text_only = replace(models.target, name="/secret/models/x", processor=models.target.tokenizer)
    with serving(lambda: made(Pair(text_only, None), "ar")) as live:
        error = _refused(live.ask([image_part(picture), text_part("hi")]))
        assert "secret" not in error["message"] and "text only" in error["message"]


def test_a_template_that_refuses_is_400(models):
    """Claim: what a chat template raises is told as 400, not a fault of the server."""
    processor = copy.copy(models.target.processor)
    processor.chat_template = (
        "{{ raise_exception('Only user and assistant roles are supported!') }}"
    )
    strict = Pair(replace(models.target, processor=processor), None)
    with serving(lambda: made(strict, "ar")) as live:
        assert "Only user and assistant" in _refused(live.ask())["message"]

"""Claims about the fields clients send beside the usual ones, and the table that tells of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from PIL import Image
from serve.live import (
    Live,
    image_part,
    inputs_of,
    made,
    request,
    serving,
    text_part,
    video_part,
)  # fmt: skip

import saccade
from saccade.inputs.training_domain import read_training_domain
from saccade.serve.api_errors import NOT_SUPPORTED
from saccade.serve.request_reader import scaled_size
from saccade.serve.request_schema import IGNORED_FIELDS, ChatRequest, TextRequest

DOCS = Path(__file__).parents[2] / "docs/http.md"


def _text(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def _listed() -> dict[str, str]:
    """Every field of the documented table, and what is said to happen to it."""
    section = DOCS.read_text().split("## Supported, ignored, refused")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (supported|ignored|refused)\b", section, re.M)
    return {field: state for names, state in rows for field in re.findall(r"`(\w+)`", names)}


def test_the_table_is_what_the_server_takes():
    """Claim: every field of the two forms is in the table, as honoured, taken without effect, or
    taken at its neutral value alone; nothing else is."""
    listed = _listed()
    known = {*ChatRequest.model_fields, *TextRequest.model_fields}
    assert listed.keys() == known
    assert {name for name, state in listed.items() if state == "refused"} == NOT_SUPPORTED & known
    assert {name for name, state in listed.items() if state == "ignored"} == IGNORED_FIELDS & known


def test_harmless_fields_change_nothing(server, caplog):
    """Claim: what is ignored leaves the answer as it is, and the log names it once."""
    more: dict[str, Any] = dict(metadata={"a": "b"}, store=False, service_tier="flex", user="me")
    more |= dict(parallel_tool_calls=False, verbosity="low", safety_identifier="x", priority=3)
    more |= dict(prompt_cache_key="x", prompt_cache_options={}, prompt_cache_retention="24h")
    more |= dict(cache_salt="x", request_id="x", spaces_between_special_tokens=True)
    more |= dict(add_special_tokens=False)
    assert IGNORED_FIELDS & ChatRequest.model_fields.keys() <= more.keys()
    caplog.set_level("WARNING")
    assert _text(server.ask(**more)) == _text(server.ask(**more))
    assert sum("priority" in line for line in caplog.messages) == 1
    assert not any("store" in line for line in caplog.messages)
    named = [{"role": "user", "content": "hi", "name": "me"}]
    assert _text(server.ask("hi")) == _text(server.ask(messages=named, **more))


@pytest.mark.extra
def test_rules_are_transformers_own(server, models):
    """Claim: repetition_penalty and min_p give the answers of `saccade.run` with the same names."""
    for fields, given in (
        (dict(repetition_penalty=5.0), dict(repetition_penalty=5.0, do_sample=False)),
        (
            dict(temperature=1.0, min_p=0.3, seed=3),
            dict(temperature=1.0, min_p=0.3, seed=3, do_sample=True),
        ),
    ):
        alone = saccade.run(
            models.target.backbone,
            inputs_of(models, "hi"),
            draft=models.draft.backbone,
            method="specvlm",
            tokenizer=models.target.tokenizer,
            **{"max_new_tokens": 16, **given},
        )
        assert _text(server.ask("hi", **fields)) == alone.text
    assert _text(server.ask("hi", repetition_penalty=5.0)) != _text(server.ask("hi"))


def test_penalties_and_limits_are_the_librarys(server, models):
    """Claim: presence and frequency penalties, min_tokens and ignore_eos give the answers of
    `saccade.run`, and each of them another answer than none. Fails if one is accepted and lost."""
    endless = {"ignore_eos": True}  # So that the answer is long enough for tokens to come again.
    length = 16
    plain = {
        "ignore_eos" in given: _text(server.ask("hi", max_tokens=length, **given))
        for given in ({}, endless)
    }
    for fields, without, given in (
        ({**endless, "presence_penalty": 2.0}, endless, dict(presence_penalty=2.0)),
        ({**endless, "frequency_penalty": 2.0}, endless, dict(frequency_penalty=2.0)),
        ({"min_tokens": 12}, {}, dict(min_new_tokens=12)),
        (endless, {}, {}),
        ({**endless, "skip_special_tokens": False}, endless, dict(skip_special_tokens=False)),
    ):
        no_end = {"eos_token_id": []} if "ignore_eos" in fields else {}
        alone = saccade.run(
            models.target.backbone,
            inputs_of(models, "hi"),
            draft=models.draft.backbone,
            method="specvlm",
            tokenizer=models.target.tokenizer,
            **{"max_new_tokens": length, "do_sample": False, **no_end, **given},
        )
        text = _text(server.ask("hi", **{"max_tokens": length, **fields}))
        assert text == alone.text
        assert text != plain["ignore_eos" in without], fields


def test_a_token_may_be_a_stop(server, models):
    """Claim: stop_token_ids end the answer before the token, beside the model's own ends, and
    alone where ignore_eos takes those away."""
    whole = _text(server.ask("hi"))
    (token,) = models.target.tokenizer.encode(" gone")
    assert " gone" in whole
    for more in ({}, {"ignore_eos": True}):
        answer = server.ask("hi", stop_token_ids=[token], **more).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 3
        text = answer["choices"][0]["message"]["content"]
        assert " gone" not in text and whole.startswith(text)
        streamed = server.ask("hi", stop_token_ids=[token], stream=True, **more).text
        chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line[6:7] == "{"]
        pieces = [choice["delta"].get("content") for each in chunks for choice in each["choices"]]
        assert "".join(piece or "" for piece in pieces) == text


@pytest.mark.extra
def test_all_is_a_number_of_likeliest_tokens(server):
    """Claim: a top_k of -1, vLLM's word for all, is the answer of no top_k at that temperature."""
    drawn: dict[str, Any] = dict(temperature=1.0, seed=5, max_tokens=24)
    assert _text(server.ask("hi", top_k=-1, **drawn)) == _text(server.ask("hi", **drawn))
    assert _text(server.ask("hi", top_k=1, **drawn)) == _text(server.ask("hi", max_tokens=24))


def test_pictures_have_as_many_pixels_as_is_asked(server, tmp_path):
    """Claim: min_pixels and max_pixels scale a picture, in its address, beside it and for the whole
    request, the nearest first; both stay within what the processor does itself."""
    path = tmp_path / "picture.png"
    Image.linear_gradient("L").resize((200, 100)).convert("RGB").save(path)
    url = image_part(path)["image_url"]["url"]

    def tokens(in_address: Any = None, beside: Any = None, **request_fields: Any) -> int:
        part = {"type": "image_url", "image_url": {"url": url, **(in_address or {})}}
        answer = server.ask([{**part, **(beside or {})}, text_part("hi")], **request_fields)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    small, large = {"max_pixels": 5_000}, {"min_pixels": 80_000}
    plain = tokens()
    fewer = tokens(small)
    assert fewer < plain < tokens(large)
    assert tokens(None, small) == tokens(mm_processor_kwargs=small) == fewer
    assert (
        tokens(small, {"max_pixels": 50_000}, mm_processor_kwargs={"max_pixels": 40_000}) == fewer
    )
    assert tokens({"max_pixels": 10**12}) == plain


@for_all(
    sides=st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    bounds=st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)),
)
def test_a_picture_is_scaled_to_the_nearer_bound(sides, bounds):
    """Claim: a scaled picture has at most max_pixels, also where it was enlarged; it is not smaller
    than min_pixels where it has sides to spare; within the bounds it stays as it is."""
    low, high = sorted(bounds)
    height, width = scaled_size(*sides, low, high)
    assert 1 <= height * width <= high
    if low <= sides[0] * sides[1] <= high:
        assert (height, width) == sides
    if sides[0] * sides[1] < low and high >= low + height + width:
        assert height * width >= low


@pytest.mark.extra
def test_videos_are_scaled_too(server, clips):
    """Claim: max_pixels is of each frame of a video."""
    part = video_part(clips[0])
    few = {**part, "max_pixels": 3_000}
    counts = [server.ask([each, text_part("hi")]).json()["usage"]["prompt_tokens"]
              for each in (few, part)]  # fmt: skip
    assert counts[0] < counts[1]


def test_an_address_may_be_a_bare_string(server, picture, clips):
    """Claim: image_url and video_url as strings, with vLLM's uuid beside, are the same media, also
    where they are so long that they are cut out of the body."""
    for part in (image_part(picture), video_part(clips[0])):
        kind = part["type"]
        bare = {"type": kind, kind: part[kind]["url"], "uuid": "abc"}
        answers = [server.ask([each, text_part("hi")]).json() for each in (part, bare)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1


@pytest.mark.extra
def test_a_last_message_may_be_finished(server):
    """Claim: with add_generation_prompt a last message of the assistant is a finished turn, with
    continue_final_message it is continued, and without either field too."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The ring"}]

    def tokens(**more: Any) -> int:
        answer = server.ask(messages=messages, **more)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    continued = tokens()
    fields = dict(continue_final_message=True, add_generation_prompt=False)
    assert tokens(**fields) == continued < tokens(add_generation_prompt=True)
    assert tokens(continue_final_message=False) == tokens(add_generation_prompt=True)
    user = [{"role": "user", "content": "hi"}]
    bare = server.ask(messages=user, add_generation_prompt=False).json()["usage"]["prompt_tokens"]
    assert bare < server.ask(messages=user).json()["usage"]["prompt_tokens"]
    assert server.ask(messages=messages, continue_final_message=True,
                      add_generation_prompt=True).status_code == 400  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [("min_tokens", 5), ("ignore_eos", True)],
)
def test_a_form_decides_where_its_answer_ends(server, field, value):
    """Claim: what would let no answer of a form end is refused by its name."""
    answer = server.ask("hi", guided_regex="ab", **{field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


@pytest.mark.extra
def test_pictures_of_low_detail_are_small(server, tmp_path):
    """Claim: low shrinks a large picture to fewer tokens; high and auto leave it."""
    path = tmp_path / "large.png"
    Image.linear_gradient("L").resize((1400, 700)).convert("RGB").save(path)
    tokens = {}
    for detail in ("low", "high", "auto", None):
        part = image_part(path)
        part["image_url"] |= {} if detail is None else {"detail": detail}
        answer = server.ask([part, text_part("hi")])
        assert answer.status_code == 200, answer.text
        tokens[detail] = answer.json()["usage"]["prompt_tokens"]
    assert tokens["low"] < tokens["high"] == tokens["auto"] == tokens[None]


def test_an_answer_that_was_begun_goes_on(server):
    """Claim: the last message of the assistant is continued: its beginning is prompt, and what
    follows it in the whole answer is the answer."""
    whole = _text(server.ask("Describe the video.", max_tokens=24))
    words = whole.split(" ")
    begun = " ".join(words[: len(words) // 2])
    messages = [
        {"role": "user", "content": "Describe the video."},
        {"role": "assistant", "content": begun},
    ]
    answer = server.ask(messages=messages, max_tokens=24)
    assert whole.startswith(begun + _text(answer)[: len(whole) - len(begun)])
    assert _text(answer)


def test_plain_text_is_completed(server, models):
    """Claim: /v1/completions goes on from a text without a template, streamed and not."""
    body = {"model": "shapes", "prompt": "The video shows a", "max_tokens": 12, "temperature": 0}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    completion = answer.json()
    assert completion["object"] == "text_completion" and completion["id"].startswith("cmpl-")
    (choice,) = completion["choices"]
    alone = saccade.run(
        models.target.backbone,
        models.target.tokenizer("The video shows a", return_tensors="pt"),
        draft=models.draft.backbone,
        method="specvlm",
        tokenizer=models.target.tokenizer,
        max_new_tokens=12,
        do_sample=False,
    )
    assert choice["text"] == alone.text and choice["finish_reason"] == alone.finish_reason
    text = server.client.post("/v1/completions", json={**body, "stream": True}).text
    pieces = re.findall(r'"text": "((?:[^"\\]|\\.)*)"', text)
    assert "".join(pieces).encode().decode("unicode_escape") == alone.text
    for wrong in ({"prompt": ""}, {"prompt": ["a"]}, {"echo": True}, {"messages": []}):
        refused = server.client.post("/v1/completions", json={**body, **wrong})
        assert refused.status_code == 400 and list(wrong)[0] in refused.text


@pytest.mark.parametrize("origin", ["https://a.example", "*"])
def test_pages_of_an_origin_may_ask(models, origin):
    """Claim: with --cors a page's preflight and answer are allowed, of no other origin; without it
    none is."""
    headers = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type, authorization",
    }
    with serving(lambda: made(models, "ar"), cors_origins=(origin,)) as live:
        preflight = live.client.options("/v1/chat/completions", headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        answer = live.post(request(max_tokens=1), headers={"Origin": "https://a.example"})
        assert answer.headers["access-control-allow-origin"] == origin
        other = live.client.options(
            "/v1/chat/completions", headers={**headers, "Origin": "https://b.example"}
        )
        assert (other.status_code == 200) == (origin == "*")


def test_no_page_may_ask_by_default(server: Live):
    """Claim: without --cors there is no header that lets a page read an answer."""
    answer = server.post(request(max_tokens=1), headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers


LONG = "A small red circle moves to the left of the large blue square. " * 12


def _with_document(text: str = LONG, **more: Any) -> list[Any]:
    return [{"type": "document", "text": text, **more}, text_part("What moves?")]


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["ar", "specvlm", "specvlm-self"])
def test_a_document_is_what_describe_reads(models, method):
    """Claim: a part of type document is a document: the prompt is `saccade.inputs.ask`'s, the
    answer plain decoding's, and views prune it. Fails if it arrived as words of the question."""
    draft = models.draft.backbone
    inputs = inputs_of(models, "What moves?", documents=[LONG])
    alone = saccade.run(
        models.target.backbone, inputs, draft=draft, method=method,
        tokenizer=models.target.tokenizer, max_new_tokens=16, do_sample=False,
    )  # fmt: skip
    with serving(lambda: made(models, method)) as live:
        answer = live.ask(_with_document())
        assert _text(answer) == alone.text
        body = answer.json()
        assert body["usage"]["prompt_tokens"] == alone.prompt_tokens
        drafted = [len(round.tokens) for round in alone.rounds if round.tokens]
        assert body["metrics"]["speculative_decoding"]["per_step_drafted"] == drafted
        assert body["saccade"]["warnings"] == list(alone.warnings)
        if method == "specvlm-self":  # as a part of the words there is nothing to prune
            words = live.ask([text_part(LONG), text_part("What moves?")]).json()
            assert words["saccade"]["warnings"] and not body["saccade"]["warnings"]


@pytest.mark.parametrize(
    ("part", "param"),
    [({"text": " "}, "messages.0.content.0.text"), ({"title": "x"}, "messages.0.content.0.title")],
)
def test_a_document_that_is_none_is_reported(server, part, param):
    """Claim: an empty one and a field it does not have are named, without the form's own names."""
    error = server.ask(_with_document(**part)).json()["error"]
    assert error["code"] == 400 and error["param"] == param


def domain_warning() -> str:
    """What the embedded pair says of pictures it was not trained on."""
    domain = read_training_domain("shapes")
    assert domain is not None
    return domain.warning


@pytest.mark.extra
def test_what_the_embedded_pair_cannot_know_is_reported(server, clips, tmp_path):
    """Claim: asked about frames that are not of its drawn world, the embedded pair's answer says
    so, for images and videos, streamed or not; about a drawn clip or words it does not."""
    noise = np.random.default_rng(0).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "photo.png")
    photo, clip = image_part(tmp_path / "photo.png"), video_part(clips[0])
    for content, unknown in (([photo], True), ([clip, photo], True), ([clip], False), ([], False)):
        body = server.ask([*content, text_part("What is this?")]).json()
        assert (domain_warning() in body["saccade"]["warnings"]) == unknown
    more = dict(stream=True, stream_options={"include_usage": True})
    text = server.ask([photo, text_part("What is this?")], **more).text
    last = [line for line in text.splitlines() if line.startswith("data: {")][-1]
    assert domain_warning() in json.loads(last[6:])["saccade"]["warnings"]

"""Claims about what breaks behind the server: it costs one answer at most, and says so."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from helpers import MadeBy, StubDraft
from serve.live import (
    QUESTION,
    Live,
    made,
    request,
    serving,
    slowed,
    soon,
    text_part,
    video_part,
)

from saccade.core.tree import Tree, chain
from saccade.drafting.parallel import process
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import serial
from saccade.drafting.shapes.policies import Chain
from saccade.inputs.media import decoder_pool
from saccade.model.session import Session
from saccade.serve import completion_handler

TEXTS = ["hi", "hello", "a red box"]


def _together(live: Live, texts: Sequence[str] = TEXTS, **settings: Any) -> list[httpx.Response]:
    """Answers to questions that are asked at once."""
    with ThreadPoolExecutor(len(texts)) as threads:
        return list(threads.map(lambda text: live.ask(text, **settings), texts))


def _content(response: httpx.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def plain(server) -> list[str]:
    return [_content(server.ask(text)) for text in TEXTS]


def test_a_draft_that_raises_costs_one_request_its_speed(models, plain):
    """Claim: of three together the one whose draft raises says why; all answers are right."""
    drafts: list[int] = []

    def drafter(team: Any) -> StubDraft:
        mine = len(drafts)
        drafts.append(mine)

        def propose(request: int, text: list[int], round: int) -> Tree:
            if mine == 1 and round == 1:
                raise RuntimeError("only here")
            return chain([5])

        return StubDraft(propose)

    engine = made(models, Recipe("stub", "", MadeBy(drafter), Chain(1), serial))
    slowed(engine, 0.02)
    with serving(lambda: engine) as live:
        answers = _together(live)
        metrics = live.client.get("/metrics").text
    assert [_content(answer) for answer in answers] == plain
    reasons = [answer.json()["saccade"]["fallback_reason"] for answer in answers]
    assert sorted(reasons, key=bool) == [
        None, None, "drafting failed with RuntimeError: only here"
    ]  # fmt: skip
    assert "saccade_spec_decode_fallbacks_total 1.0" in metrics


@pytest.mark.representatives(1)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_target_of_nan_ends_one_request(models, plain, monkeypatch, stream):
    """Claim: NaN in one request's logits is a 500, or an error event, for it alone; the next one
    with the same words is well."""
    engine = made(models, "ar")
    slowed(engine, 0.05)
    score = Session.score

    def poisoned(self: Session, trees: Any) -> Any:
        scores = score(self, trees)
        if 1 in scores and scores[1].answer_length == 2:
            scores[1] = copy.copy(scores[1])
            object.__setattr__(scores[1], "rows", [row * float("nan") for row in scores[1].rows])
        return scores

    with serving(lambda: engine) as live:
        with monkeypatch.context() as patch:
            patch.setattr(Session, "score", poisoned)
            answers = _together(live, stream=stream)
        if stream:
            broken = [answer for answer in answers if '"error"' in answer.text]
            assert broken[0].text.endswith("\n\ndata: [DONE]\n\n")
        else:
            broken = [answer for answer in answers if answer.status_code != 200]
            assert broken[0].status_code == 500
            assert [_content(a) for a in answers if a not in broken] == [
                text for text, a in zip(plain, answers, strict=True) if a not in broken
            ]
        assert len(broken) == 1 and "NaN" in broken[0].text
        assert live.empties()
        assert [_content(live.ask(text)) for text in TEXTS] == plain


@pytest.mark.slow
def test_a_draft_process_that_is_killed_is_reported(models, plain):
    """Claim: SIGKILL of the draft's process mid-answer leaves the answer; the reason is told."""
    engine = made(models, "hippo", rows=2)
    slowed(engine, 0.05)
    process._dismiss()
    before = set(psutil.Process().children(recursive=True))
    with serving(lambda: engine) as live:
        body = request(TEXTS[1], stream=True, stream_options={"include_usage": True})
        text, last_event = "", {}
        with live.client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                last_event = event
                delta = event["choices"][0]["delta"].get("content") if event["choices"] else ""
                if delta and not text:
                    workers = set(psutil.Process().children(recursive=True)) - before
                    assert workers
                    for each in workers:
                        each.kill()
                text += delta or ""
        assert text == plain[1]
        assert "drafting failed" in last_event["saccade"]["fallback_reason"]
        again = live.ask(TEXTS[1])
        assert _content(again) == plain[1] and not again.json()["saccade"]["fallback_reason"]
    process._dismiss()  # the next one, kept for later answers
    assert set(psutil.Process().children(recursive=True)) <= before


DEATHS = {
    "crashes": "os.kill(os.getpid(), signal.SIGSEGV)",
    "runs out of memory": "os.kill(os.getpid(), signal.SIGKILL)",
    "talks nonsense": "os.write(3, b'x' * 100)",
}


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize("death", DEATHS)
def test_a_decoder_that_dies_is_one_refusal(models, clips, monkeypatch, death):
    """Claim: a decoder that crashes over a video is a 4xx for it, and the next is answered."""
    honest = decoder_pool.CHILD_COMMAND
    code = (
        "import os, signal, saccade.inputs.media.decoder_pool as g\n"
        f"g.read = lambda *_: {DEATHS[death]}"
    )
    content = [video_part(clips[0]), text_part(QUESTION)]
    with serving(lambda: made(models, "ar")) as live:
        monkeypatch.setattr(decoder_pool, "CHILD_COMMAND", f"{code}\ng.serve_requests()")
        refused = live.ask(content)
        monkeypatch.setattr(decoder_pool, "CHILD_COMMAND", honest)
        assert refused.status_code in (400, 413), refused.text
        assert live.ask(content).status_code == 200 and live.empties()


def test_an_engine_that_breaks_tells_everyone(models):
    """Claim: when the engine thread dies, every waiting client is told, streamed or not, /health
    says 503, and so does every new request."""
    engine = made(models, "ar", rows=2, queue=4)
    pool = slowed(engine)
    with serving(lambda: engine) as live:
        with ThreadPoolExecutor(4) as threads:
            futures = [threads.submit(live.ask, stream=stream) for stream in (True, False) * 2]
            assert soon(lambda: live.queue.running_count == 2 and live.queue.waiting_count == 2)
            pool._pool = None  # type: ignore[assignment]
            answers = [each.result(10) for each in futures]
        for answer in answers:
            assert '"error"' in answer.text
            assert "NoneType" not in answer.text and "Traceback" not in answer.text
        assert {a.status_code for a in answers} == {200, 503}  # of streams the event says it
        assert live.client.get("/health").status_code == 503
        assert live.client.get("/live").status_code == 200
        assert live.ask().status_code == 503
        assert live.empties()


def test_an_error_in_writing_ends_that_answer_alone(models, plain, monkeypatch):
    """Claim: a tokenizer that fails over one piece ends that stream with an error event."""
    engine = made(models, "ar")
    calls: list[int] = []
    detokenizer = completion_handler.StreamingDetokenizer

    def failing(decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> Any:
        def fail_once(ids: Sequence[int]) -> str:
            calls.append(len(ids))
            if len(calls) == 3:
                raise OverflowError("out of range integral type conversion attempted")
            return decode(ids)

        return detokenizer(fail_once, stops)

    monkeypatch.setattr(completion_handler, "StreamingDetokenizer", failing)
    with serving(lambda: engine) as live:
        broken = live.ask(stream=True).text
        assert '"code": 500' in broken and "integral" not in broken and "[DONE]" in broken
        assert live.empties()
        assert _content(live.ask(TEXTS[0])) == plain[0]

"""Claims about clients that hang up: what they held is free within a second."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from serve.live import (
    QUESTION,
    Live,
    Slow,
    made,
    request,
    serving,
    slowed,
    soon,
    text_part,
    video_part,
)

from saccade.inputs.media import decoder_pool

SOON = 1.0  # seconds
LONG = dict(temperature=2.0, seed=2, max_tokens=256)  # seconds of it, at three tenths a step


@pytest.fixture(scope="module")
def slow(models) -> Iterator[tuple[Live, Slow]]:
    """A server with two rows, whose steps take three tenths of a second, so that no answer ends
    soon."""
    engine = made(models, "ar", rows=2, queue=6)
    pool = slowed(engine, 0.3)
    with serving(lambda: engine) as live:
        yield live, pool


@contextmanager
def quick(pool: Slow) -> Iterator[None]:
    """In this block nothing slows steps down."""
    seconds, pool.seconds = pool.seconds, 0.0
    try:
        yield
    finally:
        pool.seconds = seconds


def answered_at_once(slow: tuple[Live, Slow], *words: str, **settings: Any) -> Any:
    """The choices of an answer that nothing slows down."""
    live, pool = slow
    with quick(pool):
        return live.ask(*words, **settings).json()["choices"]


@contextmanager
def hung_up(live: Live, body: dict) -> Iterator[socket.socket]:
    """A request over a bare socket, which is closed at the end."""
    data = json.dumps(body).encode()
    host, port = live.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=30) as line:
        line.sendall(head.encode() + data)
        yield line


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    "answers",
    [(1, 2), pytest.param((1,) * 8 + (2, 2), marks=pytest.mark.slow)],
    ids=["twice", "ten times"],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_disconnects_at_the_first_token_frees_its_rows(slow, stream, answers):
    """Claim: every time, streamed and not, with one answer and with two, rows and places are free
    within a second, long before the answer would have been complete."""
    live, pool = slow
    for n in answers:
        pool.rounds.clear()
        with hung_up(live, request(stream=stream, n=n, **LONG)) as line:
            assert soon(lambda: sum(map(bool, pool.rounds.values())) == live.queue.slots_in_use > 0)
            if stream:
                assert b"assistant" in line.recv(65536)
        assert live.empties(SOON)
        assert len(pool._pool) == 0 and sum(pool.rounds.values()) < 40 * n


def test_control_an_answer_that_is_waited_for_takes_longer(slow):
    """Control: the same answer, left alone for that second, still holds its row."""
    live, pool = slow
    with hung_up(live, request(**LONG)):
        assert soon(lambda: live.queue.running_count == 1)
        assert not live.empties(SOON) and live.queue.running_count == 1
    assert live.empties(SOON)


def test_who_hangs_up_while_queued_leaves_the_queue(slow):
    """Claim: with both rows taken, the third's place is free at once and the others go on."""
    live, pool = slow
    alone = answered_at_once(slow, max_tokens=8)
    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(live.ask, max_tokens=8) for _ in range(2)]
        assert soon(lambda: live.queue.running_count == 2)
        with hung_up(live, request(**LONG)):
            assert soon(lambda: live.queue.waiting_count == 1)
        assert soon(lambda: live.queue.waiting_count == 0, SOON)
        with quick(pool):
            assert [other.result().json()["choices"] for other in others] == [alone] * 2
    assert live.empties(SOON)


def test_a_client_that_disconnects_harms_no_other(slow):
    """Claim: an answer beside one that is broken off is the one it is alone."""
    live, pool = slow
    alone = answered_at_once(slow, "hello", max_tokens=8)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(live.ask, "hello", max_tokens=8)
        with hung_up(live, request(stream=True, **LONG)):
            assert soon(lambda: live.queue.running_count == 2)
        assert soon(lambda: live.queue.running_count < 2, SOON)
        with quick(pool):
            assert other.result().json()["choices"] == alone
    assert live.empties(SOON)


@pytest.mark.extra
def test_who_hangs_up_while_its_video_is_decoded_frees_place_and_decoder(
    models, clips, monkeypatch
):
    """Claim: the place is free within a second, though both decoders hang over such videos; and
    the next video is read, because the hanging decoders were ended."""
    honest = decoder_pool.CHILD_COMMAND
    hanging = "import time, saccade.inputs.media.decoder_pool as g\n"
    hanging += "g.read = lambda *_: time.sleep(60)\ng.serve_requests()"
    content = [video_part(clips[0]), text_part(QUESTION)]
    with serving(lambda: made(models, "ar")) as live:
        assert live.service.engine is not None
        decoding = live.service.engine.reader._decoders._busy
        for stream in (True, False, True):
            monkeypatch.setattr(decoder_pool, "CHILD_COMMAND", hanging)
            with hung_up(live, request(content, stream=stream)):
                assert soon(lambda: live.queue.slots_in_use == 1)
                assert soon(lambda: len(decoding) == 1)
            monkeypatch.setattr(decoder_pool, "CHILD_COMMAND", honest)
            assert live.empties(SOON) and soon(lambda: not decoding, SOON)
        assert live.ask(content).status_code == 200
        metrics = live.client.get("/metrics").text
        assert "saccade_request_cancelled_total 3.0" in metrics and '"499"' not in metrics


def test_who_hangs_up_before_its_body_is_whole_holds_nothing(slow):
    """Claim: half a request takes no place, and closing it leaves none."""
    live, _ = slow
    host, port = live.url.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as line:
            line.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                b"Content-Type: application/json\r\nContent-Length: 5000\r\n\r\n{"
            )
            assert live.queue.slots_in_use == 0
    assert live.empties(SOON) and live.ask(max_tokens=1).status_code == 200


def test_who_never_reads_its_stream_loses_its_place(models):
    """Claim: a client that takes nothing of a large stream holds its place for the answer's time
    and no longer."""
    with serving(lambda: made(models, "ar", most_tokens=2048), timeout_seconds=2.0) as live:
        many = request(stream=True, logprobs=True, top_logprobs=20, n=4, temperature=2.0, seed=3)
        with hung_up(live, many | {"max_tokens": 2048, "ignore_eos": True}):
            assert soon(lambda: live.queue.slots_in_use == 4)
            assert not live.empties(1.0), "control: the answers do not end by themselves"
            assert live.empties(10.0)

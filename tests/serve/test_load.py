"""Claims about more clients than places: each is served or told, and nothing is left."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serve.live import QUESTION, made, request, serving, soon, text_part, video_part
from serve.test_lifecycle import process

from saccade.inputs import Pair


@dataclass(frozen=True)
class Outcome:
    """What one of many requests came to."""

    kind: int  # which of the questions it asked
    status: int
    text: str
    wait: str | None
    resident: int  # bytes of the server when it ended
    seconds: float


def _questions(clips: Sequence[Path]) -> list[dict[str, Any]]:
    """Different videos, none, greedy and drawn."""
    drawn = dict(temperature=1.3, seed=9)
    return [
        *(request([video_part(clip), text_part(QUESTION)], max_tokens=32) for clip in clips),
        request([video_part(clips[0]), text_part(QUESTION)], max_tokens=32, **drawn),
        request("hello", max_tokens=32),
        request("hello", max_tokens=32, **drawn),
    ]


def _text(answer: httpx.Response) -> str:
    """The text of an answer, streamed or not; what else came where it is none."""
    if answer.status_code != 200:
        return answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"][0]["message"]["content"]
    events = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")]
    return "".join(
        choice["delta"].get("content") or "" for event in events for choice in event["choices"]
    )


def _load(
    url: str, bodies: Sequence[dict[str, Any]], clients: int, requests: int, pid: int
) -> list[Outcome]:
    """So many requests from so many clients at once; who is refused waits a little."""
    server, left, lock = psutil.Process(pid), iter(range(requests)), threading.Lock()
    outcomes: list[Outcome] = []

    def one() -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while True:
                with lock:
                    number = next(left, None)
                if number is None:
                    return
                kind = number % len(bodies)
                began = time.monotonic()
                body = bodies[kind] | {"stream": number % 3 == 0}
                answer = client.post("/v1/chat/completions", json=body)
                wait = answer.headers.get("retry-after")
                outcome = Outcome(
                    kind,
                    answer.status_code,
                    _text(answer),
                    wait,
                    server.memory_info().rss,
                    time.monotonic() - began,
                )
                with lock:
                    outcomes.append(outcome)
                if wait is not None:
                    time.sleep(min(float(wait), 1.0))

    threads = [threading.Thread(target=one) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _judge(outcomes: Sequence[Outcome], alone: Sequence[str], requests: int) -> dict[str, Any]:
    """Asserts that every client got an answer or a refusal, and returns what there is to report."""
    counts = Counter(outcome.status for outcome in outcomes)
    assert len(outcomes) == requests and set(counts) <= {200, 429}, counts
    for outcome in outcomes:
        if outcome.status == 200:
            assert outcome.text == alone[outcome.kind]
        else:
            assert outcome.wait is not None and 1 <= int(outcome.wait) <= 60
    assert {outcome.kind for outcome in outcomes if outcome.status == 200} == set(range(len(alone)))
    half = [outcome.resident for outcome in outcomes[len(outcomes) // 2 :]]
    third = max(1, len(half) // 3)
    before, after = sum(half[:third]) / third, sum(half[-third:]) / third
    return {
        "statuses": dict(counts),
        "drift": after / before - 1,
        "resident_mb": max(half) / 2**20,
        "longest": max(outcome.seconds for outcome in outcomes),
    }


@pytest.mark.slow
def test_more_clients_than_places(models: Pair, clips):
    """Claim: 12 clients, 48 requests, 6 places: each is 200 and the serial answer, or 429 with
    Retry-After; both happen; afterwards the engine is empty."""
    bodies = _questions(clips)
    with serving(lambda: made(models, rows=2, queue=4)) as live:
        alone = [_text(live.post(body)) for body in bodies]
        assert len(set(alone)) > 3
        outcomes = _load(live.url, bodies, 12, 48, os.getpid())
        report = _judge(outcomes, alone, 48)
        assert report["statuses"][200] >= 6 and report["statuses"][429] >= 1, report
        assert live.empties() and len(live.queue._engine) == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["specvlm", "ar"])
def test_32_clients_200_requests_queue_8(clips, method, capsys):
    """Claim: a real server with 4 rows and a queue of 8: the same, its memory drifts less than 5 %
    over the second half, and it is over within two minutes."""
    bodies = _questions(clips)
    with process("--method", method, "--rows", "4", "--queue", "8") as (running, url):
        assert soon(lambda: httpx.get(f"{url}/ready").status_code == 200, 120)
        alone = [_text(httpx.post(f"{url}/v1/chat/completions", json=body)) for body in bodies]
        began = time.monotonic()
        outcomes = _load(url, bodies, 32, 200, running.pid)
        report = _judge(outcomes, alone, 200) | {"seconds": time.monotonic() - began}
        assert abs(report["drift"]) < 0.05 and report["seconds"] < 120, report
        metrics = httpx.get(f"{url}/metrics").text
        assert "saccade_num_requests_running 0.0" in metrics
        assert "saccade_num_requests_waiting 0.0" in metrics
    with capsys.disabled():
        print(f"\n{method}: {report}")  # noqa: T201 - the figures of docs/reliability.md

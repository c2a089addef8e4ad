"""Claims about a server's life: loading, ready, draining, over; and what it counts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from helpers import few
from prometheus_client.parser import text_string_to_metric_families
from serve.live import (
    QUESTION,
    Slow,
    made,
    request,
    serving,
    slowed,
    soon,
    text_part,
    video_part,
)

from saccade import cli
from saccade.cli import serve as command
from saccade.core.errors import ModelError, OptionError
from saccade.inputs.media.fetch import Sources
from saccade.inputs.training_domain import read_training_domain
from saccade.serve.server_settings import ServerSettings
from saccade.serve.service import Engine, Service

LONG = dict(temperature=2.0, seed=1, max_tokens=40)


# -- loading ------------------------------------------------------------------------------------


def test_while_the_models_load_it_lives_but_is_not_ready(models):
    """Claim: /live is 200 at once; /health, /ready and chat are 503 until there is an engine."""
    go = threading.Event()

    def start() -> Engine:
        assert go.wait(30)
        return made(models, "ar")

    with serving(start, wait=False) as live:
        get = live.client.get
        try:
            assert get("/live").status_code == 200 and get("/version").json()["version"]
            for answer in (get("/health"), get("/ready"), live.ask()):
                assert answer.status_code == 503 and "loaded" in answer.json()["error"]["message"]
            assert get("/v1/models").status_code == 200
            assert "saccade_num_requests_running 0.0" in get("/metrics").text
        finally:
            go.set()
        assert soon(lambda: get("/health").status_code == 200)
        for path in ("/health", "/ready", "/live"):  # as some load balancers ask
            assert live.client.head(path).status_code == 200
        assert get("/ready").status_code == 200 and live.ask().status_code == 200


def _main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of the command line, run in this process."""
    monkeypatch.setattr("sys.argv", ["saccade", "serve", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def _one_sentence(output: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith("saccade: ")]
    assert "Traceback" not in output and ". " not in line
    return line


def test_models_that_cannot_be_loaded_end_it_with_a_sentence(monkeypatch, capsys):
    """Claim: a checkpoint that is not there is exit code 2 and one sentence, no traceback."""
    assert _main(monkeypatch, "--target", "/no/such/folder", "--port", "0") == 2
    assert "/no/such/folder" in _one_sentence(capsys.readouterr().err)


def test_a_port_in_use_ends_it_with_a_sentence(monkeypatch, capsys):
    """Claim: exit code 2 and what to do, before any model is loaded; so with an unknown host."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        assert _main(monkeypatch, "--port", number) == 2
        sentence = _one_sentence(capsys.readouterr().err)
        assert number in sentence and "choose another --port" in sentence
    assert _main(monkeypatch, "--host", "no.such.host.invalid", "--port", "0") == 2
    assert "no.such.host.invalid" in _one_sentence(capsys.readouterr().err)


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--media-root", "/no/such/folder"], "--media-root"),
        (["--api-key", " "], "API key is empty"),
        (["--private-media-hosts"], "--media-host"),
        (["--method", "nonsense"], "nonsense"),
    ],
)
def test_options_that_cannot_be_are_refused_before_listening(monkeypatch, capsys, words, message):
    """Claim: exit code 2 and a sentence that names the option."""
    assert _main(monkeypatch, "--port", "0", *words) == 2
    assert message in _one_sentence(capsys.readouterr().err)


def test_hosts_that_are_named_are_not_thereby_private(monkeypatch):
    """Claim: --media-host alone opens no way into the operator's network."""
    sources: list[Sources] = []

    def noted(**given: Any) -> Sources:
        sources.append(Sources(**given))
        raise OptionError("stop here")

    monkeypatch.setattr("saccade.inputs.media.fetch.Sources", noted)
    for more, private in ([], False), (["--private-media-hosts"], True):
        assert _main(monkeypatch, "--media-host", "example.com", *more) == 2
        made_ = sources.pop()
        assert made_.allows_private_hosts == private and made_.hosts == ("example.com",)


# -- signals ------------------------------------------------------------------------------------


class Running:
    """`run` in the main thread, and a thread that acts while it does."""

    def __init__(self, models: Any, drain: float, seconds: float = 0.1) -> None:
        self.service = Service(ServerSettings())
        self.engine = made(models, "ar", rows=2, queue=4)
        self.pool: Slow = slowed(self.engine, seconds)
        self.drain, self.url = drain, ""
        self.lasted = 0.0

    def __call__(self, act: Callable[[httpx.Client], Any], start: Any = None) -> Any:
        """What ``act`` returned, once the server has ended."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]

        def work() -> Any:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                assert soon(lambda: _answers(client))
                return act(client)

        with ThreadPoolExecutor(1) as threads:
            acting = threads.submit(work)
            command.run_server(
                self.service, start or (lambda: self.engine), "127.0.0.1", port, self.drain
            )
            return acting.result(10)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/live").status_code == 200
    except httpx.TransportError:
        return False


def _signal(number: int = signal.SIGTERM) -> float:
    os.kill(os.getpid(), number)
    return time.monotonic()


def _post(client: httpx.Client, **settings: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json=request(**settings))


@pytest.mark.representatives(1)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("number", few([signal.SIGTERM, signal.SIGINT], 1))
def test_a_signal_lets_answers_end_and_takes_no_new_ones(models, stream, number):
    """Claim: what runs is answered whole; meanwhile /health is 503, /live 200, and new ones 503."""
    run = Running(models, drain=20)

    def act(client: httpx.Client) -> Any:
        assert soon(lambda: client.get("/health").status_code == 200)
        alone = _post(client)
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(_post, client, stream=stream)
            assert soon(lambda: self_running(run))
            _signal(number)
            assert soon(lambda: run.service.is_draining)
            answers = client.get("/health"), client.get("/live"), _post(client)
            return alone, future.result(30), [answer.status_code for answer in answers]

    alone, answer, statuses = run(act)
    assert statuses == [503, 200, 503]
    text = alone.json()["choices"][0]["message"]["content"]
    if stream:
        events = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")]
        pieces = [c["delta"].get("content", "") for e in events for c in e["choices"]]
        assert "".join(pieces) == text and answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"][0]["message"]["content"] == text
    assert not run.engine.queue._thread.is_alive()


def self_running(run: Running) -> bool:
    return run.engine.queue.running_count == 1


@pytest.mark.representatives(1)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_when_draining_ends_waiting_requests_are_refused(models, stream):
    """Claim: after --drain seconds the answer is a 503, or an error event, and the server ends."""
    run = Running(models, drain=0.5, seconds=0.2)

    def act(client: httpx.Client) -> Any:
        assert soon(lambda: client.get("/health").status_code == 200)
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(_post, client, stream=stream, **LONG)
            assert soon(lambda: self_running(run))
            return _signal(), future.result(30)

    began, answer = run(act)
    assert time.monotonic() - began < 10
    assert "shutting down" in answer.text
    assert answer.status_code == (200 if stream else 503)


def test_an_idle_server_ends_at_once(models):
    """Claim: with nobody to answer, a signal ends it long before the time to drain."""
    run = Running(models, drain=60)

    def act(client: httpx.Client) -> float:
        assert soon(lambda: client.get("/health").status_code == 200)
        return _signal()

    began = run(act)
    assert time.monotonic() - began < 10


def test_a_signal_while_the_models_load_ends_it(models):
    """Claim: nobody waits for a load that takes long; what it gives in the end is put away."""
    run = Running(models, drain=60)
    go = threading.Event()

    def start() -> Engine:
        assert go.wait(30)
        return run.engine

    began = run(lambda client: _signal(), start)
    assert time.monotonic() - began < 10
    go.set()
    assert soon(lambda: not run.engine.queue._thread.is_alive())


def test_a_second_signal_ends_it_at_once(models, monkeypatch):
    """Claim: the second asks for nothing more; the exit code is the signal's."""
    run = Running(models, drain=0.6)
    codes: list[int] = []
    monkeypatch.setattr(command.os, "_exit", codes.append)

    def act(client: httpx.Client) -> Any:
        assert soon(lambda: client.get("/health").status_code == 200)
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(_post, client, **LONG)
            assert soon(lambda: self_running(run))
            _signal()
            assert soon(lambda: run.service.is_draining) and codes == []
            _signal()
            assert soon(lambda: codes == [128 + signal.SIGTERM])
            return future.result(30)

    run(act)


def test_what_kept_the_models_from_loading_is_raised():
    """Claim: an error of loading ends the server and is the caller's."""

    def start() -> Engine:
        raise ModelError("no checkpoint here")

    with pytest.raises(ModelError, match="no checkpoint here"):
        command.run_server(Service(ServerSettings()), start, "127.0.0.1", 0, 60)


@contextmanager
def process(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A real ``saccade serve`` of the embedded pair, which says first what that knows, and then its
    address; killed if it is still there in the end."""
    serve = [sys.executable, "-m", "saccade", "serve", "--port", "0", "--threads", "1", *words]
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        try:
            domain = read_training_domain("shapes")
            assert domain is not None and running.stderr.readline() == domain.warning + "\n"
            line = running.stderr.readline()
            match = re.search(r"http://[0-9.:]+", line)
            assert match, line + running.stderr.read()
            yield running, match[0]
        finally:
            running.kill()


def _ready(url: str) -> bool:
    return httpx.get(f"{url}/ready").status_code == 200


@pytest.mark.slow
def test_a_real_process_answers_drains_and_exits_with_0(clips):
    """Claim: the line after what the pair knows is its address, a video is answered, SIGTERM lets
    the answers under way end, the exit code is 0, no child is left and nothing is noise."""
    with process("--method", "specvlm") as (running, url):
        assert soon(lambda: _ready(url), 120)
        content = [video_part(clips[0]), text_part(QUESTION)]
        with ThreadPoolExecutor(2) as threads:
            body = request(content, n=8, temperature=2.0, seed=1, max_tokens=100)
            posts = [
                threads.submit(
                    httpx.post, f"{url}/v1/chat/completions", json=body | more, timeout=120
                )
                for more in ({}, {"stream": True})
            ]
            assert soon(lambda: "requests_running 8.0" in httpx.get(f"{url}/metrics").text, 60)
            children = psutil.Process(running.pid).children(recursive=True)
            running.send_signal(signal.SIGTERM)
            answers = [post.result() for post in posts]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert "[DONE]" in answers[1].text and "error" not in answers[1].text
        assert running.wait(60) == 0
        assert running.stderr is not None
        assert running.stderr.read().splitlines() == ["ready: shapes"]
        assert children
        assert soon(lambda: not any(each.is_running() for each in children))


@pytest.mark.slow
def test_a_second_signal_ends_a_real_process_and_its_children(clips):
    """Claim: it is over within two seconds, with 143, and no child stays for long."""
    with process("--method", "hippo") as (running, url):
        assert soon(lambda: _ready(url), 120)
        body = request([video_part(clips[0]), text_part(QUESTION)], n=8, temperature=2.0)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(_ignored, f"{url}/v1/chat/completions", body | {"max_tokens": 2048})
            assert soon(lambda: "requests_running 8.0" in httpx.get(f"{url}/metrics").text, 60)
            children = psutil.Process(running.pid).children(recursive=True)
            running.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            running.send_signal(signal.SIGTERM)
            assert running.wait(2) == 128 + signal.SIGTERM
        # one that is still importing sees only afterwards that its parent has gone
        assert children and soon(lambda: not any(each.is_running() for each in children), 60)


def _ignored(url: str, body: Any) -> None:
    try:
        httpx.post(url, json=body, timeout=60)
    except httpx.TransportError:
        return


# -- time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_has_its_time(models, stream):
    """Claim: after --timeout seconds it is a 504, or an error event, and the rows are free; so
    for one that waited in the queue."""
    engine = made(models, "ar", rows=1)
    pool = slowed(engine, 0.1)
    with serving(lambda: engine, timeout_seconds=0.6) as live:
        with ThreadPoolExecutor(2) as threads:
            futures = [threads.submit(live.ask, stream=stream, **LONG) for _ in range(2)]
            for each in futures:
                answer = each.result()
                assert answer.status_code == (200 if stream else 504)
                assert "took too long" in answer.text and '"code":504' in answer.text.replace(
                    ": ", ":"
                )
        assert live.empties()
        pool.seconds = 0.0
        assert live.ask(max_tokens=1).status_code == 200


@pytest.mark.extra
def test_a_queue_that_is_full_says_when_to_come_again(models):
    """Claim: over rows and queue it is 429 with Retry-After in seconds; n answers need n places."""
    engine = made(models, "ar", rows=1, queue=2)
    slowed(engine, 0.05)
    with serving(lambda: engine) as live:
        with ThreadPoolExecutor(2) as threads:
            futures = [threads.submit(live.ask, n=n) for n in (1, 1)]
            assert soon(lambda: live.queue.slots_in_use == 2)
            refused = live.ask(n=2)
            assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert "400" in str(live.ask(n=4).json()["error"]["code"])  # never to be had
            assert all(each.result().status_code == 200 for each in futures)
        assert live.ask(n=3).status_code == 200 and live.empties()


# -- counting -----------------------------------------------------------------------------------


def _numbers(text: str) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            numbers[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return numbers


@pytest.mark.slow
def test_what_is_counted_adds_up(models, clips):
    """Claim: /metrics is the sum of what answers told: tokens, drafts, places, reasons, refusals,
    as many times between tokens as tokens after first ones; running and waiting are what the queue
    holds."""
    engine = made(models, "specvlm", rows=1, queue=4)
    pool = slowed(engine, 0.0)
    with serving(lambda: engine) as live:
        content = [video_part(clips[0]), text_part(QUESTION)]
        answers = [live.ask(content, max_tokens=most) for most in (8, 200)]
        answers += [live.ask(content, n=2, temperature=1.5, seed=2, max_tokens=12)]
        for refused in (live.ask(nonsense=1), live.ask(model="x"), live.ask(temperature=9)):
            assert refused.status_code in (400, 404)
        pool.seconds = 0.5
        with ThreadPoolExecutor(3) as threads:
            futures = [threads.submit(live.ask, max_tokens=8) for _ in range(3)]
            assert soon(lambda: live.queue.running_count == 1 and live.queue.slots_in_use == 3)
            busy = _numbers(live.client.get("/metrics").text)
            answers += [each.result() for each in futures]
        now = _numbers(live.client.get("/metrics").text)
    bodies = [answer.json() for answer in answers]
    spec = [each["metrics"]["speculative_decoding"] for each in bodies]
    assert busy["saccade_num_requests_running"] == 1 and busy["saccade_num_requests_waiting"] == 2
    assert now["saccade_num_requests_running"] == now["saccade_num_requests_waiting"] == 0

    reasons = [choice["finish_reason"] for each in bodies for choice in each["choices"]]
    for reason in ("stop", "length"):
        assert now.get(f"saccade_request_success_total{{{reason}}}", 0) == reasons.count(reason)
    written = sum(each["usage"]["completion_tokens"] for each in bodies)
    assert now["saccade_generation_tokens_total"] == written
    drafts = "saccade_spec_decode_num_"
    assert now[drafts + "drafts_total"] == sum(each["num_spec_steps"] for each in spec) > 0
    assert now[drafts + "draft_tokens_total"] == sum(each["num_draft_tokens"] for each in spec)
    accepted = sum(each["num_accepted_draft_tokens"] for each in spec)
    assert now[drafts + "accepted_tokens_total"] == accepted > 0
    places = [v for k, v in now.items() if k.startswith(drafts + "accepted_tokens_per_pos_total")]
    assert sum(places) == accepted and places == sorted(places, reverse=True)
    assert now["saccade_spec_decode_fallbacks_total"] == 0
    assert now["saccade_request_refused_total{400}"] == 2
    assert now["saccade_request_refused_total{404}"] == 1
    assert now["saccade_request_cancelled_total"] == 0
    assert now["saccade_time_to_first_token_seconds_count"] == len(reasons)
    assert now["saccade_e2e_request_latency_seconds_count"] == len(reasons)
    assert now["saccade_inter_token_latency_seconds_count"] == written - len(reasons)


# -- leaving nothing ----------------------------------------------------------------------------


@pytest.mark.extra
def test_servers_after_each_other_leave_no_thread_and_no_child(models, clips: list[Path]):
    """Claim: two servers in one process, with media and streams, end with all they started."""
    threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
    for _ in range(2):
        with serving(lambda: made(models)) as live:
            content = [video_part(clips[0]), text_part(QUESTION)]
            assert live.ask(content, stream=True).status_code == 200
            assert set(threading.enumerate()) - threads
            assert set(psutil.Process().children(recursive=True)) - children
    assert soon(lambda: set(threading.enumerate()) <= threads), threading.enumerate()
    assert soon(lambda: set(psutil.Process().children(recursive=True)) <= children)

"""Claims about several servers behind one port: who answers, what a death costs, how they end."""

from __future__ import annotations

import base64
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from saccade.cli import serve_replicas as several
from saccade.cli.application import app as cli_app
from saccade.core.errors import OptionError, SaccadeError
from saccade.corpus import manifest
from saccade.corpus.worker import CorpusWorker
from saccade.inputs.media import FrameSampling
from saccade.serve.server_settings import ServerSettings

rays_own_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # at its import

TOKENS, QUESTION = 12, "Describe the video in detail."
LATE = 240.0  # seconds: a machine may be busy

pytestmark = pytest.mark.usefixtures("unchecked")

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: uv sync --extra ray",
)


def until(what: Callable[[], Any], seconds: float = LATE) -> Any:
    """What it gives as soon as that is true of something; an AssertionError when time is up."""
    end = time.monotonic() + seconds
    while not (outcome := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)
    return outcome


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """``saccade serve`` in a process of its own, its address and what it says; nothing is left."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log_path = folder / "said.txt"
    command = [sys.executable, "-m", "saccade", "serve", "--port", str(port), *words]
    quiet = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=quiet)
    whole = psutil.Process(process.pid)
    family: set[psutil.Process] = set()
    try:
        yield process, f"http://127.0.0.1:{port}", log_path
    finally:
        with suppress(psutil.NoSuchProcess):
            family |= {whole, *whole.children(recursive=True)}
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(30)


def replica_processes(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    replicas = []
    for each in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if "ServeReplica" in " ".join(each.cmdline()):
                replicas.append(each)
    return replicas


def messages(video: Path | None) -> list[Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": QUESTION}]
    if video is not None:
        data = base64.b64encode(video.read_bytes()).decode()
        parts.insert(
            0, {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}
        )
    return [{"role": "user", "content": parts}]


def count_answers(url: str) -> dict[str, float]:
    """Answers given so far, by replica."""
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if sample.name in ("saccade_num_requests_running", "saccade_request_success_total"):
                name = sample.labels["replica"]
                count = sample.value if sample.name.endswith("_total") else 0.0
                counts[name] = counts.get(name, 0.0) + count
    return counts


class Viewer:
    """An openai client that does not try again, and who answered it."""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.answered: list[str] = []

    def asks(self, video: Path | None, stream: bool, **more: Any) -> str:
        """The answer's text."""
        settings = {"max_tokens": TOKENS, "temperature": 0, **more}
        raw = self._client.chat.completions.with_raw_response.create(
            model="shapes",
            messages=messages(video),
            stream=stream,
            **settings,
        )
        self.answered.append(raw.headers["x-saccade-replica"])
        got: Any = raw.parse()
        if not stream:
            return got.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in got if chunk.choices)

    def listens(self) -> Iterator[Any]:
        """A long answer's chunks, which come as long as they are asked for."""
        return iter(
            self._client.chat.completions.create(
                model="shapes",
                messages=messages(None),
                stream=True,
                temperature=2,
                seed=1,
                max_tokens=400,
            )
        )


@needs_ray
@pytest.mark.timeout(900)
def test_two_replicas_answer_as_one_and_a_death_costs_none_but_its_own(
    videos: Path, tmp_path: Path
) -> None:
    """Claim: answers of two replicas are the serial ones, streamed or not, and both have answered.

    A replica killed is replaced, and no later request fails. Metrics tell of each replica apart. A
    full house says 429. After SIGTERM a stream is ended whole, and no process is left.
    """
    clips = sorted(videos.glob("clip*.mp4"))[:3]
    work = manifest.CaptionSettings(
        method="ar",
        max_new_tokens=TOKENS,
        sampling=FrameSampling(num_frames=4),
        load=(("device", "cpu"),),
        threads=1,
    )
    jobs = [job for job in manifest.read_jobs(videos, QUESTION) if Path(job.video_path) in clips]
    truth = {Path(row.video).name: row.text for row in CorpusWorker(work)(jobs)}
    words = (
        "--replicas 2 --threads 1 --rows 2 --queue 2 --num-frames 4 --device cpu --drain 60 "
        "--method specvlm/shape=chain-3"
    )
    with serving(tmp_path, *words.split()) as (process, url, log_path):
        until(lambda: b"ready" in log_path.read_bytes() or process.poll() is not None)
        assert process.poll() is None, log_path.read_text()
        viewer = Viewer(url)

        def ask(number: int) -> tuple[str, str | None]:
            clip = clips[number % 3]
            return viewer.asks(clip, stream=number % 2 == 0), truth[clip.name]

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, range(8)))
        assert all(got == wanted for got, wanted in answers), answers
        assert len(set(viewer.answered)) == 2
        counted = count_answers(url)
        assert set(counted) == set(viewer.answered)
        assert all(counted[name] == viewer.answered.count(name) for name in counted)

        # both houses full: two rows and two places each
        with ExitStack() as open_streams:
            streams = [viewer.listens() for _ in range(6)]
            for each in streams:
                open_streams.callback(each.close)  # type: ignore[attr-defined]
            with pytest.raises(openai.RateLimitError) as refused:
                viewer.asks(None, stream=False, n=4)
            assert int(refused.value.response.headers["retry-after"]) >= 1

        old = set(counted)
        replica_processes(process)[0].kill()
        for number in range(6):
            got, wanted = ask(number)
            assert got == wanted
        until(lambda: len(now := count_answers(url)) == 2 and set(now) - old)
        assert [ask(number)[0] for number in range(3)] == [truth[clip.name] for clip in clips]

        family = psutil.Process(process.pid).children(recursive=True)
        stream = viewer.listens()
        chunks = [next(stream)]
        process.send_signal(signal.SIGTERM)
        chunks += stream
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        assert process.wait(120) == 0, log_path.read_text()
        until(lambda: not any(each.is_running() for each in family), 30)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_that_is_not_there_ends_the_command(tmp_path: Path) -> None:
    """Claim: replicas that cannot load end the command with the sentence that says why."""
    words = f"--replicas 1 --device cpu --target {tmp_path / 'nothing'}"
    with serving(tmp_path, *words.split()) as (process, _, log_path):
        assert process.wait(LATE) == 2
        assert "no checkpoint folder at" in log_path.read_text().replace("\n", " ")
        assert "Traceback" not in log_path.read_text()


def test_ray_without_its_server_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: where Ray is installed and Ray Serve is not, the command says what to install."""
    ray = Mock()
    monkeypatch.setattr(several, "join_cluster", lambda *_, **__: ray)
    monkeypatch.setitem(sys.modules, "saccade.serve.ray_replicas", None)  # Importing it fails.
    with pytest.raises(OptionError, match="Ray Serve"):
        several.run_replicas(
            ServerSettings(), "127.0.0.1", 8000, 1.0, cluster="a:1", replicas=1, max_replicas=None
        )
    ray.shutdown.assert_called_once()


@needs_ray
@rays_own_warnings
def test_settings_reach_another_process_and_ray_takes_them() -> None:
    """Claim: settings are plain values, and Ray Serve accepts what they ask of it.

    Places bound what a replica is given, rows when another is started; few replicas do not scale.
    """
    from ray import serve

    from saccade.serve import ray_replicas

    settings = ServerSettings(max_running=3, max_waiting=4, threads=2)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert "secret" not in repr(replace(settings, api_key="secret"))  # Ray may log what it is given
    growing = ray_replicas.deployment_options(settings, 2, 5, 9.0, uses_gpus=True)
    service = serve.deployment(ray_replicas.Replica, **growing)
    assert service.max_ongoing_requests == 7
    scaling = growing["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 5)
    assert scaling["target_ongoing_requests"] == 3
    assert service.ray_actor_options["num_gpus"] == 1 and service.ray_actor_options["num_cpus"] == 2
    fixed = ray_replicas.deployment_options(settings, 2, 2, 9.0)
    assert fixed["num_replicas"] == 2 and "autoscaling_config" not in fixed


@needs_ray
@rays_own_warnings
def test_merged_metrics_keep_every_sample_apart() -> None:
    """Claim: each sample of each server is there once, with its replica; nothing is added up."""
    from saccade.serve.metrics import Metrics
    from saccade.serve.ray_replicas import merge_metrics

    servers = {"one": Metrics(), "two": Metrics()}
    for count, server in enumerate(servers.values(), 3):
        server.cancelled.inc(count)
    text = merge_metrics(
        {name: server.text().decode() for name, server in servers.items()}
    ).decode()
    for name, count in (("one", 3), ("two", 4)):
        assert text.count(f'saccade_request_cancelled_total{{replica="{name}"}} {count}.0\n') == 1
    assert text.count("# TYPE saccade_request_cancelled_total counter") == 1
    alone = servers["one"].text().decode().splitlines()
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == 2 * sum(not line.startswith("#") for line in alone)


def test_without_ray_replicas_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: without the extra, --replicas is refused in a sentence that names both extras."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name)
    )
    with socket.socket() as free:  # the usual port may be taken by a server of somebody's
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    result = CliRunner().invoke(cli_app, ["serve", "--replicas", "2", "--port", port])
    assert isinstance(result.exception, OptionError)
    assert "PATH/TO/CLONE[ray,serve]" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--ray auto", "give --replicas"),
        ("--max-replicas 2", "give --replicas"),
        ("--replicas 3 --max-replicas 2", "less than"),
        ("--replicas 2 --port 0", "--port"),
        ("--replicas 2 --method nothing", "nothing"),
    ],
)
def test_settings_that_cannot_be_are_refused(words: str, reason: str) -> None:
    """Claim: what makes no sense is refused before any cluster is started or joined."""
    result = CliRunner().invoke(cli_app, ["serve", *words.split()])
    assert isinstance(result.exception, SaccadeError) and reason in str(result.exception)


def test_a_port_that_is_taken_is_refused() -> None:
    """Claim: on a cluster of this machine, a port somebody listens on is named, and not waited for.

    Control: the same port free is not what the refusal is about.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=str(port)):
            several.open_listen_socket("127.0.0.1", port).close()
    several.open_listen_socket("127.0.0.1", port).close()
    for mistyped in ("0.0.0..0", "x" * 64):
        with pytest.raises(OptionError, match="cannot listen on"):
            several.open_listen_socket(mistyped, port)

"""A server in this process on a thread of its own, over the embedded pair, and what to send it."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import uvicorn
from PIL import Image

from saccade import inputs
from saccade.drafting.recipe import Recipe
from saccade.engine.scheduler import Event, Scheduler
from saccade.inputs import Pair
from saccade.methods import resolve
from saccade.serve.listen_socket import HeaderTimeoutProtocol, open_listen_socket
from saccade.serve.routes import make_app
from saccade.serve.server_settings import MediaSettings, ServerSettings
from saccade.serve.service import Engine, Service, make_engine

METHOD = "specvlm"
NO_TLS = False  # A client of plain HTTP need not read the certificates, which takes 60 ms.
QUESTION = "Describe the video."


@dataclass(frozen=True)
class Live:
    """A server that listens; ``service`` looks inside one of this process."""

    url: str
    service: Service
    key: str | None = None
    client: httpx.Client = field(default_factory=httpx.Client)

    def post(self, body: Any = None, **more: Any) -> httpx.Response:
        if body is not None:
            more["json"] = body
        return self.client.post("/v1/chat/completions", **more)

    def ask(self, text: str = "hi", **settings: Any) -> httpx.Response:
        """A question about nothing, answered greedily."""
        return self.post(request(text, **settings))

    @property
    def queue(self) -> Any:
        assert self.service.engine is not None
        return self.service.engine.queue

    def empties(self, seconds: float = 1.0) -> bool:
        """Whether every place and row is free within that time."""
        return soon(lambda: not self.queue.slots_in_use and not self.queue.running_count, seconds)


def request(text: Any = "hi", **settings: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "model": "shapes", "messages": messages, "max_tokens": 16, "temperature": 0, **settings
    }  # fmt: skip


def soon(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it becomes true within that time."""
    end = time.monotonic() + seconds
    while not (is_true := true()) and time.monotonic() < end:
        time.sleep(0.005)
    return is_true


def made(
    models: Pair,
    method: str | Recipe = METHOD,
    *,
    rows: int = 4,
    queue: int = 32,
    media: MediaSettings | None = None,
    most_tokens: int = 256,
    prefix_cache: int = 256 << 20,
) -> Engine:
    """The engine that ``saccade serve`` makes of these models."""
    recipe = resolve(method) if isinstance(method, str) else method
    settings = ServerSettings(
        media=media or MediaSettings(),
        max_running=rows,
        max_waiting=queue,
        max_answer_tokens=most_tokens,
        prefix_cache_bytes=prefix_cache,
    )
    return make_engine(settings, recipe, models.target, models.draft)


class Slow:
    """A pool that takes its time over every step, and counts the rounds of those in it."""

    def __init__(self, pool: Scheduler, seconds: float) -> None:
        self._pool, self.seconds = pool, seconds
        self.rounds: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def step(self) -> Iterator[Event]:
        time.sleep(self.seconds)
        for each in self._pool.step():
            self.rounds[each.number] = self.rounds.get(each.number, 0) + (each.round is not None)
            yield each


def slowed(engine: Engine, seconds: float = 0.1) -> Slow:
    """Makes an engine slow, before it has anything to do."""
    pool = engine.queue._engine = Slow(engine.queue._engine, seconds)  # type: ignore[assignment]
    return pool


@contextmanager
def serving(
    start: Callable[[], Engine], *, key: str | None = None, wait: bool = True, **limits: Any
) -> Iterator[Live]:
    """A server on a thread; ``limits`` are fields of its settings."""
    service = Service(ServerSettings(api_key=key, **limits))
    line = open_listen_socket("127.0.0.1", 0)
    url = "http://{}:{}".format(*line.getsockname())
    config = uvicorn.Config(
        make_app(service, start),
        http=HeaderTimeoutProtocol,
        log_level="critical",
        timeout_graceful_shutdown=3,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([line],), name="uvicorn")
    thread.start()
    headers = {} if key is None else {b"Authorization": f"Bearer {key}".encode()}
    try:
        with httpx.Client(base_url=url, timeout=60, headers=headers, verify=NO_TLS) as client:
            assert soon(lambda: server.started)
            assert not wait or soon(lambda: service.engine is not None, 60)
            yield Live(url, service, key, client)
    finally:
        server.should_exit = True
        thread.join(30)
        line.close()
        assert not thread.is_alive()


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def video_part(path: Path) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{coded(path.read_bytes())}"
    return {"type": "video_url", "video_url": {"url": url}}


def image_part(path: Path) -> dict[str, Any]:
    url = f"data:image/png;base64,{coded(path.read_bytes())}"
    return {"type": "image_url", "image_url": {"url": url}}


def frames_part(frames: list[bytes]) -> dict[str, Any]:
    url = "data:video/jpeg;base64," + ",".join(map(coded, frames))
    return {"type": "video_url", "video_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def jpeg(frame: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(frame).save(out, "JPEG")
    return out.getvalue()


@dataclass(frozen=True)
class Endpoint:
    """Where the client tests ask: our own server, or the one the environment names."""

    client: openai.OpenAI
    model: str
    ours: Live | None

    def chat(self, content: Any = "hi", **settings: Any) -> Any:
        """A chat completion, greedy unless it says otherwise."""
        options = {"messages": [{"role": "user", "content": content}], "max_tokens": 24}
        options |= {"temperature": 0} | settings
        return self.client.chat.completions.create(model=self.model, **options)

    def streamed(self, content: Any = "hi", **settings: Any) -> list[Any]:
        with self.chat(content, stream=True, **settings) as chunks:
            return list(chunks)


def inputs_of(models: Pair, question: str, **media_inputs: Any) -> Any:
    return inputs.ask(models.target, question, **media_inputs)

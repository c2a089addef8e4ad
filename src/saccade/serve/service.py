"""What a server is: its settings and its state, and the engine that answers once it is loaded."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from saccade.drafting.parallel import process
from saccade.drafting.recipe import Recipe, as_chains
from saccade.drafting.schedule import parallel
from saccade.engine.scheduler import Scheduler
from saccade.inputs import Loaded, load_pair
from saccade.inputs.loading import use_threads
from saccade.inputs.media.guard import Guard
from saccade.methods import resolve
from saccade.model.kept import Kept
from saccade.serve.errors import ApiError
from saccade.serve.metrics import Metrics
from saccade.serve.queue import RequestQueue
from saccade.serve.reading import RequestReader
from saccade.serve.settings import Settings

T = TypeVar("T")

READERS = 32  # threads that read media and words; a client that goes may leave one for a while


class Threads:
    """A thread for each piece of work, up to a number at once; the rest waits its turn.

    Who is cancelled while waiting does not wait for the thread. They are daemons: none keeps the
    process from ending.
    """

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)

    async def run(self, act: Callable[[], T]) -> T:
        """What ``act`` gives or raises, from a thread."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        found: Future[T] = Future()
        found.set_running_or_notify_cancel()  # who waits may go, the work goes on

        def work() -> None:
            try:
                found.set_result(act())
            except BaseException as error:
                found.set_exception(error)
            with suppress(RuntimeError):  # the loop has been closed: nobody waits
                loop.call_soon_threadsafe(self._free.release)

        threading.Thread(target=work, name="reader", daemon=True).start()
        return await asyncio.wrap_future(found)


@dataclass(frozen=True)
class Engine:
    """What answers, once it has been loaded."""

    queue: RequestQueue
    reader: RequestReader
    decode: Callable[[Sequence[int]], str]
    close: Callable[[], None] = lambda: None
    kept: Kept = field(default_factory=lambda: Kept(0))

    def stop(self) -> None:
        """Ends its processes and its thread; who still waits is told."""
        self.close()
        self.queue.stop()


@dataclass
class Service:
    """A server's settings and state: it has an engine as soon as there is one."""

    settings: Settings
    engine: Engine | None = None
    draining: bool = False
    failure: Exception | None = None  # why there will never be an engine
    metrics: Metrics = field(default_factory=Metrics)
    born: int = field(default_factory=lambda: int(time.time()))
    threads: Threads = field(default_factory=lambda: Threads(READERS))

    def ready(self) -> Engine:
        """The engine. Raises ApiError while there is none for newcomers."""
        if self.draining:
            raise ApiError(503, "the server is shutting down: ask another one")
        if self.failure is not None:
            raise ApiError(503, "the models could not be loaded: the server's log says why")
        if self.engine is None:
            raise ApiError(503, "the models are being loaded: try again soon")
        if not self.engine.queue.alive:
            raise ApiError(503, "the engine has stopped: the server must be started again")
        return self.engine

    @property
    def busy(self) -> bool:
        return self.engine is not None and self.engine.queue.slots > 0

    def numbers(self) -> bytes:
        """The metrics as they are now, in Prometheus' form."""
        if self.engine is not None:
            self.metrics.running.set(self.engine.queue.running)
            self.metrics.waiting.set(self.engine.queue.waiting)
            self.metrics.kept.set(self.engine.kept.bytes)
        return self.metrics.text()


def build(settings: Settings) -> tuple[Service, Callable[[], Engine]]:
    """The server, without models yet, and what loads them: both for `app`.

    Raises MethodError for a method there is not; what starts the models raises the rest.
    """
    recipe = chosen(settings)
    if recipe.schedule is parallel:
        process.prepare()  # the draft's process starts while the models load

    def start() -> Engine:
        use_threads(settings.threads)  # the engine's thread takes over the number
        loaded = load_pair(settings.target, settings.draft, **dict(settings.load))
        return engine(settings, recipe, *loaded)

    return Service(settings), start


def chosen(settings: Settings) -> Recipe:
    """The method. Raises MethodError where there is none, or none of it that is exact."""
    recipe = resolve(settings.method)
    return as_chains(recipe) if settings.exact else recipe


def engine(settings: Settings, recipe: Recipe, target: Loaded, draft: Loaded | None) -> Engine:
    """What answers, with these models."""
    guard = Guard(children=2)
    kept = Kept(settings.prefix_cache)
    # a prompt that is read in other pieces is rounded otherwise, which `exact` rules out
    keys = kept if settings.prefix_cache and not settings.exact else None
    models = [None if each is None else each.backbone.keeping(keys) for each in (target, draft)]
    assert models[0] is not None
    requests = Scheduler(models[0], recipe, models[1], exact=settings.exact)
    return Engine(
        RequestQueue(requests, rows=settings.rows, queue=settings.queue),
        RequestReader(target, draft, settings, guard, kept),
        target.decode,
        guard.close,
        kept,
    )

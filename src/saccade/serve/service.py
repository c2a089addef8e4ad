"""A server's settings and state, and the engine that answers once its models are loaded.

The HTTP routes (``routes``) hold the :class:`Service` from the start, so that they can answer while
the models are being loaded.
"""

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
from saccade.engine.scheduler import Scheduler
from saccade.inputs import Loaded, load_pair
from saccade.inputs.loading import use_threads
from saccade.inputs.media.decoder_pool import DecoderPool
from saccade.methods import resolve
from saccade.model.prefix_cache import PrefixCache
from saccade.serve.api_errors import ApiError
from saccade.serve.metrics import Metrics
from saccade.serve.queue import RequestQueue
from saccade.serve.request_reader import RequestReader
from saccade.serve.server_settings import ServerSettings

T = TypeVar("T")

# How many threads may read requests' media and text at once. A thread whose client has gone may
# stay busy for a while, and counts until it ends.
MAX_READER_THREADS = 32
MEDIA_DECODERS = 2  # Processes that decode media.


class BoundedThreads:
    """Runs each piece of work in a thread of its own, at most ``max_threads`` of them at once.

    A caller that is cancelled while it waits goes on at once, while its thread still runs to its
    end and counts as one of ``max_threads``. The threads are daemons, so that none keeps the
    process from ending.
    """

    def __init__(self, max_threads: int) -> None:
        self._free = asyncio.Semaphore(max_threads)

    async def run(self, act: Callable[[], T]) -> T:
        """Runs ``act`` in a thread, and returns its result or raises its error."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        result: Future[T] = Future()
        # From now on the future counts as running and cannot be cancelled. So ``work`` can set its
        # result without an error even if the caller has been cancelled meanwhile.
        result.set_running_or_notify_cancel()

        def work() -> None:
            try:
                result.set_result(act())
            except BaseException as error:
                result.set_exception(error)
            with suppress(RuntimeError):  # It is raised once the event loop has been closed.
                loop.call_soon_threadsafe(self._free.release)

        try:
            threading.Thread(target=work, name="reader", daemon=True).start()
        except BaseException:  # The system has no more threads.
            self._free.release()
            raise
        return await asyncio.wrap_future(result)


@dataclass(frozen=True)
class Engine:
    """The parts that answer requests, once the models are loaded."""

    queue: RequestQueue  # Runs the models in a thread of its own.
    reader: RequestReader  # Turns a request's text and media into the models' inputs.
    decode: Callable[[Sequence[int]], str]  # Returns the text of token ids.
    close: Callable[[], None] = lambda: None  # Ends the processes that decode media.
    # Media and prompts of earlier requests.
    prefix_cache: PrefixCache = field(default_factory=lambda: PrefixCache(0))

    def stop(self) -> None:
        """Ends the processes that decode media and the thread that runs the models.

        Requests that have not ended get an error.
        """
        self.close()
        self.queue.stop()


@dataclass
class Service:
    """A server's settings and state."""

    settings: ServerSettings
    engine: Engine | None = None  # None until the models are loaded.
    is_draining: bool = False  # Whether it shuts down: it takes no new requests.
    failure: Exception | None = None  # Why the models could not be loaded.
    metrics: Metrics = field(default_factory=Metrics)
    started_at: int = field(default_factory=lambda: int(time.time()))  # Seconds since 1970.
    reader_threads: BoundedThreads = field(
        default_factory=lambda: BoundedThreads(MAX_READER_THREADS)
    )

    def require_engine(self) -> Engine:
        """Returns the engine. Raises ApiError while the server takes no new requests."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down: ask another one")
        if self.failure is not None:
            raise ApiError(503, "the models could not be loaded: the server's log says why")
        if self.engine is None:
            raise ApiError(503, "the models are being loaded: try again soon")
        if not self.engine.queue.is_alive:
            raise ApiError(503, "the engine has stopped: the server must be started again")
        return self.engine

    @property
    def is_busy(self) -> bool:
        """Whether any request is being answered."""
        return self.engine is not None and self.engine.queue.slots_in_use > 0

    def metrics_text(self) -> bytes:
        """Returns the current metrics in Prometheus' text format."""
        if self.engine is not None:
            self.metrics.running.set(self.engine.queue.running_count)
            self.metrics.waiting.set(self.engine.queue.waiting_count)
            self.metrics.cache_bytes.set(self.engine.prefix_cache.bytes)
        return self.metrics.text()


def build_service(settings: ServerSettings) -> tuple[Service, Callable[[], Engine]]:
    """Returns the service, still without models, and the function that loads them and returns the
    engine.

    `routes.make_app` takes both. Raises the errors of :func:`resolve_recipe`; the returned function
    raises what goes wrong in loading.
    """
    recipe = resolve_recipe(settings)
    if recipe.drafts_beside_target:
        process.prepare()  # So that the draft's process starts while the models load.

    def start() -> Engine:
        # torch keeps this number per thread. ``RequestQueue`` sets the same one in its own thread.
        use_threads(settings.threads)
        loaded = load_pair(settings.target, settings.draft, **dict(settings.load))
        return make_engine(settings, recipe, *loaded)

    return Service(settings), start


def resolve_recipe(settings: ServerSettings) -> Recipe:
    """Returns the recipe of the method. With ``exact`` its drafts are chains.

    Raises MethodError for an unknown method, and with ``exact`` for one that cannot do without
    trees.
    """
    recipe = resolve(settings.method)
    return as_chains(recipe) if settings.exact else recipe


def make_engine(
    settings: ServerSettings, recipe: Recipe, target: Loaded, draft: Loaded | None
) -> Engine:
    """Returns an engine that answers with these models, by a method's recipe."""
    pool = DecoderPool(processes=MEDIA_DECODERS)
    prefix_cache = PrefixCache(settings.prefix_cache_bytes)
    # A prompt whose beginning comes from the cache is prefilled in other chunks, and so rounded
    # differently. Therefore, with ``exact``, the models keep no keys there. The reader still keeps
    # decoded media there, whose values do not depend on chunks.
    model_cache = prefix_cache if settings.prefix_cache_bytes and not settings.exact else None
    target_model = target.backbone.with_prefix_cache(model_cache)
    draft_model = None if draft is None else draft.backbone.with_prefix_cache(model_cache)
    scheduler = Scheduler(target_model, recipe, draft_model, exact=settings.exact)
    return Engine(
        RequestQueue(scheduler, max_running=settings.max_running, max_waiting=settings.max_waiting),
        RequestReader(target, draft, settings, pool, prefix_cache),
        target.decode,
        pool.close,
        prefix_cache,
    )

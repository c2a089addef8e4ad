"""One engine thread, the requests it works on, and a bounded queue of those that wait.

A request has a slot from the moment it is let in until it has ended: at most ``rows`` are worked
on at once, as far as memory goes, and ``queue`` more may wait, be it for their media to be read.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from saccade.core.errors import SaccadeError
from saccade.core.result import Result
from saccade.engine.request import Request
from saccade.engine.scheduler import Event as EngineEvent
from saccade.engine.scheduler import Scheduler
from saccade.serve.answer import Likely, likelihoods
from saccade.serve.errors import ApiError

log = logging.getLogger(__name__)

WAIT = (1, 60)  # seconds a client may be told to come again after


def busy(seconds: int) -> ApiError:
    """No slot is free; ``seconds`` is when one may be."""
    said = f"all places are taken: try again in {seconds} s"
    return ApiError(429, said, headers={"Retry-After": str(seconds)})


@dataclass(frozen=True)
class NewTokens:
    """What one round added."""

    tokens: tuple[int, ...]
    likely: tuple[Likely, ...] = ()


Event = NewTokens | Result | Exception


@dataclass(eq=False)
class QueuedRequest:
    """One answer to work on. What happens to it is told on the event loop, in order."""

    asked: Request
    end: float  # on the clock of time.monotonic
    top: int | None = None  # how many likeliest tokens to tell; None tells nothing of likelihoods
    index: int = 0  # among the answers of one call, which are told of in one queue
    events: asyncio.Queue[tuple[int, Event]] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    number: int | None = None  # in the engine's scheduler
    cancelled: bool = False  # nobody wants it any more; its rows are free within a round

    def tell(self, event: Event) -> None:
        """From any thread."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, (self.index, event))
        except RuntimeError:  # the loop has been closed: nobody listens
            log.debug("nobody listens any more")


class RequestQueue:
    """Lets requests in, keeps the engine thread busy with them, and tells them what happens."""

    def __init__(self, engine: Scheduler, *, rows: int, queue: int) -> None:
        self.rows, self.queue = rows, queue
        self._engine = engine
        self._slots = 0
        self._spell = 1.0  # seconds a request takes, by those seen so far
        self._arrived: deque[QueuedRequest] = deque()
        self._waiting: deque[QueuedRequest] = deque()  # the engine thread's own, like all below
        self._working: dict[int, QueuedRequest] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    # -- for the event loop --------------------------------------------------------------------

    def reserve(self, slots: int) -> None:
        """Takes slots. Raises ApiError where they are not to be had."""
        with self._changed:
            if self._slots + slots > self.rows + self.queue:
                ahead = max(1, self._slots + slots - self.rows)
                spell = self._spell * ahead / self.rows
                raise busy(min(max(math.ceil(spell), WAIT[0]), WAIT[1]))
            self._slots += slots

    def release(self, slots: int, seconds: float | None = None) -> None:
        """Gives slots back; ``seconds`` is how long an answer took."""
        with self._changed:
            self._slots -= slots
            if seconds is not None:
                self._spell += (seconds - self._spell) / 4

    def submit(self, requests: Sequence[QueuedRequest]) -> None:
        """Hands requests in; they are told. Raises ApiError once the thread has ended."""
        with self._changed:
            if self._stopping:
                raise ApiError(503, "the engine has stopped")
            self._arrived += requests
            self._changed.notify()

    @property
    def running(self) -> int:
        """Answers whose rows are worked on."""
        return len(self._working)

    @property
    def waiting(self) -> int:
        """Those with a slot whose rows are not worked on, media that are read included."""
        return max(0, self._slots - len(self._working))

    @property
    def slots(self) -> int:
        """Taken slots, of ``rows + queue``."""
        return self._slots

    @property
    def alive(self) -> bool:
        """Whether it still takes requests."""
        return self._thread.is_alive() and not self._stopping

    def close(self) -> None:
        """Ends the thread after the round it is in; whoever is left is told."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def stop(self, seconds: float = 10.0) -> None:
        """Closes, and waits until the thread has ended."""
        self.close()
        self._thread.join(seconds)

    # -- the engine thread ---------------------------------------------------------------------

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # each thread has a number of its own
        try:
            while self._next():
                self._send_off()
                self._let_in()
                for news in self._engine.step():
                    self._pass_on(news)
        except BaseException:
            log.exception("the engine thread broke")
            self._end(ApiError(503, "the engine has stopped: the server must be started again"))
        else:
            self._end(ApiError(503, "the server is shutting down: ask another one"))

    def _next(self) -> bool:
        """Waits until there is something to do; whether there is."""
        with self._changed:
            while not (self._stopping or self._arrived or self._waiting or self._working):
                self._changed.wait()
            self._waiting += self._arrived
            self._arrived.clear()
            return not self._stopping

    def _let_in(self) -> None:
        """Those who fit, in the order they came."""
        while self._waiting and len(self._working) < self.rows:
            request = self._waiting[0]
            if self._working and not self._engine.fits(request.asked):
                return
            self._waiting.popleft()
            try:
                request.number = self._engine.join(request.asked)
            except Exception as error:
                request.tell(error)
            else:
                self._working[request.number] = request

    def _pass_on(self, news: EngineEvent) -> None:
        request = self._working.get(news.number)
        if request is None:
            return
        if news.round is None:  # the last of it: its row is free when its client hears of it
            del self._working[news.number]
        else:
            top = request.top
            likely = () if top is None else tuple(likelihoods(news.round, top))
            request.tell(NewTokens(news.round.tokens, likely))
        if news.result is not None:
            request.tell(news.result)
        if news.error is not None:
            if not isinstance(news.error, SaccadeError):
                log.error("a request failed", exc_info=news.error)
            request.tell(news.error)

    def _send_off(self) -> None:
        """Those whom nobody wants any more, and those whose time is up."""
        now = time.monotonic()
        for request in (*self._working.values(), *self._waiting):
            if not request.cancelled and request.end >= now:
                continue
            request.tell(ApiError(504, "the answer took too long"))
            if request.number is None:
                self._waiting.remove(request)
            else:
                del self._working[request.number]
                self._engine.leave(request.number)

    def _end(self, why: ApiError) -> None:
        with self._changed:
            self._stopping = True
            told = [*self._arrived, *self._waiting, *self._working.values()]
        for request in told:
            request.tell(why)
        try:
            for number in list(self._working):
                self._engine.leave(number)
        except Exception:  # an engine that broke may not let go either
            log.debug("the engine did not let go", exc_info=True)
        self._working.clear()

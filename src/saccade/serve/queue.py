"""One engine thread, the requests that it runs, and a bounded queue of those that wait.

A request has a slot from its admission until it has ended. At most ``max_running`` requests decode
at once, fewer where memory is short. Up to ``max_waiting`` more have a slot and wait: first until
their media are read, then until a request that decodes has ended.
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
from saccade.serve.api_errors import ApiError
from saccade.serve.response_fields import TokenLogprobs, token_logprobs

log = logging.getLogger(__name__)

MIN_RETRY_SECONDS = 1  # The shortest and longest Retry-After that a refused client gets.
MAX_RETRY_SECONDS = 60
DURATION_WEIGHT = 1 / 4  # The weight of the latest answer in the average time of an answer.


def busy_error(seconds: int) -> ApiError:
    """Returns the error for a client when too few slots are free.

    ``seconds`` is in how many seconds enough may be free.
    """
    message = f"all slots are taken: try again in {seconds} s"
    return ApiError(429, message, headers={"Retry-After": str(seconds)})


@dataclass(frozen=True)
class NewTokens:
    """The tokens that one round added, with log-probabilities where the client wants them."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


Event = NewTokens | Result | Exception


@dataclass(eq=False)
class QueuedRequest:
    """One answer to generate. Its events arrive on the event loop, in order."""

    request: Request
    deadline: float  # On the clock of time.monotonic.
    # How many likeliest tokens to report at each place. None reports no log-probabilities.
    top_logprobs: int | None = None
    index: int = 0  # Among the answers to one HTTP request, which share a queue of events.
    events: asyncio.Queue[tuple[int, Event]] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    number: int | None = None  # Its number in the engine's scheduler, once it has joined.
    # Whether its client has gone. The engine thread then ends it before the next round.
    is_cancelled: bool = False

    def send(self, event: Event) -> None:
        """Puts an event into the queue of events; any thread may call."""
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, (self.index, event))
        except RuntimeError:
            log.debug("The event loop has been closed, so nobody reads this event.")


class RequestQueue:
    """Admits requests, runs them on the engine thread, and sends them their events."""

    def __init__(self, engine: Scheduler, *, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self._engine = engine
        self._slots = 0
        self._mean_seconds = 1.0  # The average time of the latest answers.
        self._arrived: deque[QueuedRequest] = deque()  # Submitted, and not seen by the thread yet.
        # Only the engine thread changes these two, so it reads them without the lock.
        self._waiting: deque[QueuedRequest] = deque()
        self._running: dict[int, QueuedRequest] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._torch_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- for the event loop --------------------------------------------------------------------

    def reserve(self, slots: int) -> None:
        """Takes slots. Raises ApiError where too few are free."""
        with self._changed:
            if self._slots + slots > self.max_running + self.max_waiting:
                # This many answers have to end before these could run. About ``max_running`` of
                # them end in every ``_mean_seconds``.
                ahead = max(1, self._slots + slots - self.max_running)
                seconds = math.ceil(self._mean_seconds * ahead / self.max_running)
                raise busy_error(min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS))
            self._slots += slots

    def release(self, slots: int, seconds: float | None = None) -> None:
        """Gives slots back; ``seconds`` is how long a finished answer took."""
        with self._changed:
            self._slots -= slots
            if seconds is not None:
                self._mean_seconds += DURATION_WEIGHT * (seconds - self._mean_seconds)

    def submit(self, requests: Sequence[QueuedRequest]) -> None:
        """Hands requests to the engine thread. Raises ApiError once that thread is stopping."""
        with self._changed:
            if self._stopping:
                raise ApiError(503, "the engine has stopped")
            self._arrived += requests
            self._changed.notify()

    @property
    def running_count(self) -> int:
        """How many answers are being decoded by the engine."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """How many answers have a slot and are not decoded yet, also while their media are read."""
        return max(0, self._slots - len(self._running))

    @property
    def slots_in_use(self) -> int:
        """How many of the ``max_running + max_waiting`` slots are in use."""
        return self._slots

    @property
    def is_alive(self) -> bool:
        """Whether the queue still accepts requests."""
        return self._thread.is_alive() and not self._stopping

    def close(self) -> None:
        """Ends the thread after its current round; requests that are left get an error."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def stop(self, seconds: float = 10.0) -> None:
        """Closes, and waits up to ``seconds`` until the thread has ended."""
        self.close()
        self._thread.join(seconds)

    # -- the engine thread ---------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._torch_threads)  # PyTorch keeps this number per thread.
        try:
            while self._wait_for_work():
                self._remove_cancelled_and_late()
                self._admit()
                for event in self._engine.step():
                    self._dispatch(event)
        except BaseException:
            log.exception("The engine thread has failed.")
            self._fail_all(
                ApiError(503, "the engine has stopped: the server must be started again")
            )
        else:
            self._fail_all(ApiError(503, "the server is shutting down: ask another one"))

    def _wait_for_work(self) -> bool:
        """Waits until there is work to do; returns False when the thread is to end."""
        with self._changed:
            while not (self._stopping or self._arrived or self._waiting or self._running):
                self._changed.wait()
            self._waiting += self._arrived
            self._arrived.clear()
            return not self._stopping

    def _admit(self) -> None:
        """Starts waiting requests in the order in which they came, as long as they fit into memory.

        Where no request runs, no memory will be freed either. The first one is then started anyway,
        and gets the error if memory does not suffice.
        """
        while self._waiting and len(self._running) < self.max_running:
            request = self._waiting[0]
            if self._running and not self._engine.fits(request.request):
                return
            self._waiting.popleft()
            try:
                request.number = self._engine.join(request.request)
            except Exception as error:
                request.send(error)
            else:
                self._running[request.number] = request

    def _dispatch(self, event: EngineEvent) -> None:
        """Sends an event of the engine to the request that it is about."""
        request = self._running.get(event.number)
        if request is None:
            return
        if event.round is None:
            # This is the request's last event. Its place among the running ones must be free before
            # its client receives the result.
            del self._running[event.number]
        else:
            top = request.top_logprobs
            logprobs = () if top is None else tuple(token_logprobs(event.round, top))
            request.send(NewTokens(event.round.emitted, logprobs))
        if event.result is not None:
            request.send(event.result)
        if event.error is not None:
            if not isinstance(event.error, SaccadeError):
                log.error("A request failed.", exc_info=event.error)
            request.send(event.error)

    def _remove_cancelled_and_late(self) -> None:
        """Removes requests that were cancelled and those whose deadline has passed."""
        now = time.monotonic()
        for request in (*self._running.values(), *self._waiting):
            if not request.is_cancelled and request.deadline >= now:
                continue
            # Only a late request's client reads this error. A cancelled one's has gone.
            request.send(ApiError(504, "the answer took too long"))
            if request.number is None:
                self._waiting.remove(request)
            else:
                del self._running[request.number]
                self._engine.leave(request.number)

    def _fail_all(self, error: ApiError) -> None:
        """Sends an error to every request that is left, and removes them from the engine."""
        with self._changed:
            self._stopping = True
            remaining = [*self._arrived, *self._waiting, *self._running.values()]
        for request in remaining:
            request.send(error)
        try:
            for number in list(self._running):
                self._engine.leave(number)
        except Exception:
            log.debug("The failed engine could not remove its requests either.", exc_info=True)
        self._running.clear()

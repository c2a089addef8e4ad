"""One engine thread, the requests it works on, and a bounded line of those who wait.

A request has a place from the moment it is let in until it has ended: at most ``rows`` are worked
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
from saccade.core.result import Result, Round
from saccade.engine.request import Request
from saccade.engine.scheduler import Event, Scheduler
from saccade.serve.answer import Likely, likelihoods

log = logging.getLogger(__name__)

WAIT = (1, 60)  # seconds a client may be told to come again after


class Busy(Exception):
    """No place is free; ``seconds`` is when one may be."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"all places are taken: try again in {seconds} s")
        self.seconds = seconds


class Late(Exception):
    """The answer took longer than the server gives one."""


class Gone(Exception):
    """The engine has stopped."""


@dataclass(frozen=True)
class Piece:
    """What one round added."""

    tokens: tuple[int, ...]
    likely: tuple[Likely, ...] = ()


Told = Piece | Result | Exception


@dataclass(eq=False)
class Ticket:
    """A request at the desk. What happens to it is told on the event loop, in order."""

    asked: Request
    end: float  # on the clock of time.monotonic
    top: int | None = None  # how many likeliest tokens to tell; None tells nothing of likelihoods
    index: int = 0  # among the answers of one call, which are told of in one queue
    told: asyncio.Queue[tuple[int, Told]] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    number: int | None = None  # in the pool

    def tell(self, what: Told) -> None:
        """From any thread."""
        try:
            self.loop.call_soon_threadsafe(self.told.put_nowait, (self.index, what))
        except RuntimeError:  # the loop has been closed: nobody listens
            log.debug("nobody listens any more")


class Desk:
    """Lets requests in, keeps the engine thread busy with them, and tells them what happens."""

    def __init__(self, pool: Scheduler, *, rows: int, queue: int) -> None:
        self.rows, self.queue = rows, queue
        self._pool = pool
        self._places = 0
        self._spell = 1.0  # seconds a request takes, by those seen so far
        self._arrived: deque[Ticket] = deque()
        self._left: deque[Ticket] = deque()
        self._waiting: deque[Ticket] = deque()  # the engine thread's own, like all below
        self._working: dict[int, Ticket] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    # -- for the event loop --------------------------------------------------------------------

    def take(self, places: int) -> None:
        """Takes places. Raises Busy where they are not to be had."""
        with self._changed:
            if self._places + places > self.rows + self.queue:
                ahead = max(1, self._places + places - self.rows)
                spell = self._spell * ahead / self.rows
                raise Busy(min(max(math.ceil(spell), WAIT[0]), WAIT[1]))
            self._places += places

    def give(self, places: int, seconds: float | None = None) -> None:
        """Gives places back; ``seconds`` is how long an answer took."""
        with self._changed:
            self._places -= places
            if seconds is not None:
                self._spell += (seconds - self._spell) / 4

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Hands tickets in; they hear of their answers. Raises Gone once the thread has ended."""
        with self._changed:
            if self._stopping:
                raise Gone("the engine has stopped")
            self._arrived += tickets
            self._changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """NoDraft wants this answer any more; its rows are free within a round."""
        with self._changed:
            self._left.append(ticket)
            self._changed.notify()

    @property
    def running(self) -> int:
        """Answers whose rows are worked on."""
        return len(self._working)

    @property
    def waiting(self) -> int:
        """Those with a place whose rows are not worked on, media that are read included."""
        return max(0, self._places - len(self._working))

    @property
    def places(self) -> int:
        """Taken places, of ``rows + queue``."""
        return self._places

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
                self._let_in()
                for news in self._pool.step():
                    self._pass_on(news)
                self._send_off()
        except BaseException:
            log.exception("the engine thread broke")
            self._end(Gone("the engine has stopped: the server must be started again"))
        else:
            self._end(Gone("the server is shutting down: ask another one"))

    def _next(self) -> bool:
        """Waits until there is something to do; whether there is."""
        with self._changed:
            while not (self._arrived or self._left or self._waiting or self._working):
                if self._stopping:
                    return False
                self._changed.wait()
            if self._stopping:
                return False
            self._waiting += self._arrived
            self._arrived.clear()
            left = set(self._left)
            self._left.clear()
        if left:
            self._waiting = deque(ticket for ticket in self._waiting if ticket not in left)
            for ticket in left & set(self._working.values()):
                self._drop(ticket)
        return True

    def _let_in(self) -> None:
        """Those who fit, in the order they came."""
        while self._waiting and len(self._working) < self.rows:
            ticket = self._waiting[0]
            if self._working and not self._pool.fits(ticket.asked):
                return
            self._waiting.popleft()
            try:
                ticket.number = self._pool.join(ticket.asked)
            except Exception as error:
                ticket.tell(error)
            else:
                self._working[ticket.number] = ticket

    def _pass_on(self, news: Event) -> None:
        ticket = self._working.get(news.number)
        if ticket is None:
            return
        if news.round is not None:
            ticket.tell(_piece(news.round, ticket.top))
        if news.result is not None:
            ticket.tell(news.result)
        if news.error is not None:
            if not isinstance(news.error, SaccadeError):
                log.error("a request failed", exc_info=news.error)
            ticket.tell(news.error)
        if news.round is None:
            del self._working[news.number]

    def _send_off(self) -> None:
        """Those whose time is up."""
        now = time.monotonic()
        for ticket in [t for t in (*self._working.values(), *self._waiting) if t.end < now]:
            ticket.tell(Late("the answer took too long"))
            self._drop(ticket)

    def _drop(self, ticket: Ticket) -> None:
        if ticket.number is None:
            self._waiting.remove(ticket)
            return
        self._working.pop(ticket.number, None)
        self._pool.leave(ticket.number)

    def _end(self, why: Gone) -> None:
        with self._changed:
            self._stopping = True
            told = [*self._arrived, *self._waiting, *self._working.values()]
        for ticket in told:
            ticket.tell(why)
        try:
            for number in list(self._working):
                self._pool.leave(number)
        except Exception:  # a pool that broke may not let go either
            log.debug("the pool did not let go", exc_info=True)
        self._working.clear()


def _piece(round: Round, top: int | None) -> Piece:
    likely = () if top is None else tuple(likelihoods(round, top))
    return Piece(round.tokens, likely)

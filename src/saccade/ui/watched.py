"""Work in a thread of its own that somebody watches: only the latest counts, and it can be stopped.

A page's events run in whichever thread is free, while a model works best in one; and a browser that
went away should not keep a machine busy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

PATIENCE = 10.0  # seconds without anybody asking, after which the work is stopped

T = TypeVar("T")
Work = Callable[[Callable[[], bool]], Iterator[T]]
"""Given a function that says whether to stop, yields what there is to show."""


class Watched(Iterator[T], Generic[T]):
    """What ``work`` yields, the latest only, while it goes on. What it raises is raised here.

    ``stop`` asks it to end; so do a watcher that closes and one that no longer asks.
    """

    def __init__(self, work: Work[T], patience: float = PATIENCE) -> None:
        self._work, self._patience = work, patience
        self._news = threading.Condition()
        self._waiting: list[T] = []  # one at most
        self._error: BaseException | None = None
        self._halt = threading.Event()
        self._asked = time.monotonic()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="saccade-ui", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        with self._news:
            self._asked = time.monotonic()
            while not self._waiting and not self._ended:
                self._news.wait(self._patience / 4)
                self._asked = time.monotonic()
            if self._waiting:
                return self._waiting.pop()
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def halted(self) -> bool:
        """Whether nobody wants more of it."""
        return self._halt.is_set() or time.monotonic() - self._asked > self._patience

    def stop(self) -> None:
        """Asks it to end; it may yield once more."""
        self._halt.set()

    def join(self, seconds: float | None = None) -> bool:
        """Waits for the thread; whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._work(self.halted):
                with self._news:
                    self._waiting = [item]
                    self._news.notify_all()
        except BaseException as caught:  # for the watcher's thread, whatever it is
            error = caught
        with self._news:
            self._ended, self._error = True, error
            self._news.notify_all()


@dataclass
class CurrentRun(Generic[T]):
    """Who is at work, and for which browser tab: one at a time."""

    tab: str = ""
    work: Watched[T] | None = None

    def start(self, tab: str, work: Work[T]) -> Watched[T]:
        """Whoever was at work is stopped and waited for first."""
        if self.work is not None:
            self.work.stop()
            self.work.join()
        self.tab, self.work = tab, Watched(work)
        return self.work

    def stop(self, tab: str) -> None:
        if self.work is not None and self.tab == tab:
            self.work.stop()

"""Clocks for timing parts of an answer.

They wait until a GPU has finished the work that was sent to it, and they can be stopped for work
that is not to be counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Phase = Callable[[str], None]
"""A callback that gets the name of a phase as it begins."""


def ignore_phase(phase: str) -> None:
    """A ``Phase`` that does nothing."""


class _Stopped(threading.local):
    """How this thread's clock has been stopped."""

    seconds = 0.0  # the sum of all stops that have ended
    start = 0.0  # when it was stopped last, by ``time.perf_counter``
    depth = 0  # how many ``stopped_clock`` blocks are open, one within the other


_stopped = _Stopped()


def now() -> float:
    """Returns the seconds on this thread's clock, which stands still in :func:`stopped_clock`."""
    return (_stopped.start if _stopped.depth else time.perf_counter()) - _stopped.seconds


def stopped_seconds() -> float:
    """Returns how many seconds this thread's clock has stood still so far. A stop that has not
    ended is not counted."""
    return _stopped.seconds


@contextmanager
def stopped_clock() -> Iterator[None]:
    """Stops every :class:`Clock` of this thread during the block.

    It is for work that serves all later answers, such as the capture of a CUDA graph, although one
    answer has to wait for it.
    """
    if not _stopped.depth:
        _stopped.start = time.perf_counter()
    _stopped.depth += 1
    try:
        yield
    finally:
        _stopped.depth -= 1
        if not _stopped.depth:
            _stopped.seconds += time.perf_counter() - _stopped.start


class Clock:
    """A stopwatch that waits for the device before it reads the time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return now()

    def lap(self) -> float:
        """Returns the seconds since the last lap, or since the clock was made."""
        before = self._last
        self._last = self._now()
        return self._last - before

    def elapsed(self) -> float:
        """Returns the seconds since the clock was made."""
        return self._now() - self._start

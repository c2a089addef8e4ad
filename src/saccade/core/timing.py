"""Seconds on the wall clock, read when the device is done with what it was given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Phase = Callable[[str], None]
"""Told the name of what begins and may take a while."""


def untold(phase: str) -> None:
    """To nobody."""


class _Stopped(threading.local):
    """How long this thread's clock has stood still."""

    seconds = 0.0
    depth = 0


_stopped = _Stopped()


def now() -> float:
    """Seconds on this thread's clock, which stands still in :func:`stopped_clock`."""
    return time.perf_counter() - _stopped.seconds


def stopped_seconds() -> float:
    """How long this thread's clock has stood still so far."""
    return _stopped.seconds


@contextmanager
def stopped_clock() -> Iterator[None]:
    """What is done in the block is in no lap of any :class:`Clock` of this thread.

    For work that is no answer's own, though one has to wait for it: what is captured once serves
    all later answers.
    """
    began = time.perf_counter()
    _stopped.depth += 1
    try:
        yield
    finally:
        _stopped.depth -= 1
        if not _stopped.depth:
            _stopped.seconds += time.perf_counter() - began


class Clock:
    """Laps since it was made; waits for the device before it reads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return now()

    def lap(self) -> float:
        before, self._last = self._last, self._now()
        return self._last - before

    def since(self) -> float:
        return self._now() - self._start

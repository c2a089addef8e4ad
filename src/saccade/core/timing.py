"""Seconds on the wall clock, read when the device is done with what it was given."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Phase = Callable[[str], None]
"""Told the name of what begins and may take a while."""


def untold(phase: str) -> None:
    """To nobody."""


class Clock:
    """Laps since it was made; waits for the device before it reads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> float:
        before, self._last = self._last, self._now()
        return self._last - before

    def since(self) -> float:
        return self._now() - self._start

"""Claims about the clock that may be stopped."""

from __future__ import annotations

import time

import pytest
import torch

from saccade.core import timing


def test_a_stopped_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the seconds of a block, and of blocks within it, are in no lap, and the clock never
    goes back. Fails if it runs on inside the block and jumps back at its end."""
    seconds = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: seconds)
    clock, before = timing.Clock(torch.device("cpu")), timing.stopped_seconds()
    seconds += 1
    with timing.stopped_clock():
        seconds += 10
        assert clock.lap() == 1
        with timing.stopped_clock():
            seconds += 10
        assert clock.lap() == 0
    seconds += 2
    assert clock.lap() == 2 and clock.elapsed() == 3
    assert timing.stopped_seconds() - before == 20

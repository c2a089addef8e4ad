"""Whether timings were taken in peace: what other programs did on this machine meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import psutil
import torch

SHARE = 0.1  # of all cores: what others may use beyond those that we leave free
APART = 1.25  # so many times as long as the quickest may the same work take


class Watch:
    """Counts the processor time of other programs, from when it is made."""

    def __init__(self) -> None:
        self._others, self._clock = _others(), time.monotonic()

    def cores(self) -> float:
        """How many cores they kept busy since, on average."""
        seconds = max(time.monotonic() - self._clock, 1e-3)
        return max(0.0, _others() - self._others) / seconds

    def said(self, plain: Sequence[float] = ()) -> str | None:
        """:func:`disturbed`, on this machine and by PyTorch's threads."""
        own, there = torch.get_num_threads(), psutil.cpu_count() or 1
        return disturbed(self.cores(), own, there, plain)


def disturbed(others: float, own: int, there: int, plain: Sequence[float] = ()) -> str | None:
    """A sentence where timings say more about other programs than about ours, else None.

    Args:
        others: the cores that other programs kept busy.
        own: the threads we computed by.
        there: the cores there are.
        plain: seconds of the same plain decoding, several times.
    """
    found = []
    if others > max(0, there - own) + SHARE * there:
        found.append(f"other programs kept {others:.1f} of {there} cores busy")
    if plain and max(plain) > APART * min(plain):
        found.append(f"plain decoding took {min(plain):.2g} to {max(plain):.2g} s")
    if not found:
        return None
    said = " and ".join(found)
    return f"{said} meanwhile, so these times and ratios may be far off: ask a quiet machine again"


def _others() -> float:
    """Processor seconds of all programs but this one and those it started."""
    spent = psutil.cpu_times()._asdict()
    kept = {name: spent.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice")}
    us = psutil.Process()
    own = sum(us.cpu_times()[:4])  # with children that have ended
    for child in us.children(recursive=True):
        with suppress(psutil.Error):
            own += sum(child.cpu_times()[:4])
    return float(sum(spent.values()) - sum(kept.values()) - own)

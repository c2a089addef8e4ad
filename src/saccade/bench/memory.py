"""How much memory a run takes at most, above what was there before it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """``with Peak(device) as peak: ...``, then ``peak.bytes``; None where nothing measures it.

    On a GPU what torch allocated, on Linux the resident size: coarse, and 0 where memory freed
    earlier was used again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        self.bytes: int | None = None

    def __enter__(self) -> Peak:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            try:
                CLEAR.write_text("5")  # the high-water mark starts anew
                self._before = _resident("VmRSS")
            except OSError:
                self._before = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is None:
            return
        if self._device.type == "cuda":
            high = torch.cuda.max_memory_allocated(self._device)
        else:
            high = _resident("VmHWM")
        self.bytes = max(0, high - self._before)


def _resident(name: str) -> int:
    """A size of this process, in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name}")

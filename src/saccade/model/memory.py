"""How much memory there is, whether keys and values fit into it, and what a run took."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from saccade.core.errors import ModelError

GIB = 2**30
CGROUP = Path("/sys/fs/cgroup/memory.max")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SPARE = 0.05  # of what there is, for what is not counted: activations, the allocator's gaps


class Peak:
    """How much memory was taken at most since this was made, above what was held then.

    On GPUs what torch allocated, over all of ``devices``; else, on Linux, the resident size of this
    process: coarse, 0 where memory freed earlier was used again, and shared with whatever else the
    process does meanwhile. One at a time: a new one starts the high-water mark anew.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        for device in self._gpus:
            torch.cuda.reset_peak_memory_stats(device)
        self._before: int | None = None
        with suppress(OSError):
            if not self._gpus:
                CLEAR.write_text("5")  # the high-water mark starts anew
            self._before = self._held(torch.cuda.memory_allocated, "VmRSS")

    def bytes(self) -> int | None:
        """None where nothing measures it."""
        if self._before is None:
            return None
        with suppress(OSError):  # no descriptor is left to read it by
            return max(0, self._held(torch.cuda.max_memory_allocated, "VmHWM") - self._before)
        return None

    def _held(self, on: Callable[[torch.device], int], name: str) -> int:
        """Bytes on GPUs; without any, a size of this process by its name."""
        return sum(map(on, self._gpus)) if self._gpus else _resident(name)


def _resident(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name}")


def available(device: torch.device) -> int:
    """Bytes free on a device; on a CPU, within this container's limit."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + spare
    try:
        free = int(psutil.virtual_memory().available)
    except OSError:  # No descriptor is left to read it by: as much as the machine has in all.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(CGROUP.read_text())
    except (OSError, ValueError):  # no limit
        return free
    return min(free, max(0, limit - psutil.Process().memory_info().rss))


def keep_freed() -> None:
    """From now on freed tensors of up to 31 MiB stay with this process for the next ones.

    The C library (glibc) hands large blocks back to the system, which takes them anew page by page
    for every product, until it has seen blocks of such a size freed.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def return_unused(device: torch.device) -> None:
    """Gives what torch has reserved on a GPU and nobody uses back to it, for tensors of other sizes
    and for other processes. It waits for the GPU, so it is for after rare moves of much memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def has_room(tokens: int, each: int, device: torch.device, unused: int = 0) -> bool:
    """Whether keys and values, ``each`` bytes a token, fit beside what is there; ``unused`` bytes
    of what is taken are theirs to use."""
    return tokens * each <= available(device) * (1 - SPARE) + unused


def too_long(tokens: int, each: int, device: torch.device) -> ModelError:
    """What to raise: what a prompt needs, what there is, how long one would fit."""
    there = available(device)
    return ModelError(
        f"{tokens} tokens of prompt and answer need {gib(tokens * each)} for keys and values, and "
        f"{device.type} has {gib(there)} free: about {int(there * (1 - SPARE)) // each} would fit; "
        "take fewer frames (--num-frames) or a smaller --dtype"
    )


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:.1f} MiB"

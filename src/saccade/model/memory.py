"""How much memory a device has free, whether keys and values fit into it, and what a run used."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from saccade.core.errors import ModelError

GIB = 2**30
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
PROCESS_STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # Written to CLEAR_REFS, it restarts the process's peak size (see proc(5)).
SPARE_SHARE = 0.05  # Free memory left for what is not counted: activations, the allocator's gaps.


class PeakMemory:
    """Measures the most memory used since it was made, above what was in use then.

    On GPUs it is what torch allocated: the sum of each device's own peak. Elsewhere it is how much
    the resident size of this process grew, on Linux only. That growth is coarse. It includes
    whatever else the process does meanwhile. It is 0 if the process needs no more memory from the
    system, because what it freed before and still has is enough. Use one at a time, because each
    new one restarts the peak.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        for device in self._gpus:
            torch.cuda.reset_peak_memory_stats(device)
        self._bytes_before: int | None = None
        with suppress(OSError):
            if not self._gpus:
                CLEAR_REFS.write_text(RESET_PEAK)
            self._bytes_before = self._used_bytes(torch.cuda.memory_allocated, "VmRSS")

    def bytes(self) -> int | None:
        """Returns the growth in bytes, or None where nothing measures it."""
        if self._bytes_before is None:
            return None
        with suppress(OSError):  # The process may have no file descriptor left to read it with.
            peak_bytes = self._used_bytes(torch.cuda.max_memory_allocated, "VmHWM")
            return max(0, peak_bytes - self._bytes_before)
        return None

    def _used_bytes(self, gpu_bytes: Callable[[torch.device], int], status_name: str) -> int:
        """Returns the bytes used on the GPUs; without any, the named size of this process."""
        if self._gpus:
            return sum(gpu_bytes(device) for device in self._gpus)
        return _process_bytes(status_name)


def _process_bytes(status_name: str) -> int:
    """Returns a size of this process, by its name in ``/proc/self/status``."""
    for line in PROCESS_STATUS.read_text().splitlines():
        if line.startswith(status_name):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {status_name}")


def available_bytes(device: torch.device) -> int:
    """Returns the bytes that are free on a device; on a CPU, within this container's limit."""
    if device.type == "cuda":
        reserved_and_free = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved_and_free
    try:
        free = int(psutil.virtual_memory().available)
    except OSError:
        # psutil has no file descriptor left to read it. All of the machine's memory is assumed.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(CGROUP_LIMIT.read_text())
    except (OSError, ValueError):  # The container has no limit.
        return free
    # The container's use includes this process's own. Where the container's use cannot be read, it
    # is given as 0, so this process's own use is taken.
    used = max(psutil.Process().memory_info().rss, _bytes_used_in_container())
    return min(free, max(0, limit - used))


def _bytes_used_in_container() -> int:
    """Returns the bytes that all processes of this container use, without the pages of files, which
    the system drops when memory is needed; 0 where that cannot be read."""
    try:
        used = int(CGROUP_LIMIT.with_name("memory.current").read_text())
        lines = CGROUP_LIMIT.with_name("memory.stat").read_text().splitlines()
        counts = {name: int(count) for name, _, count in (line.partition(" ") for line in lines)}
    except (OSError, ValueError):
        return 0
    # "file" includes shared memory ("shmem"), which the system does not drop.
    return used - max(0, counts.get("file", 0) - counts.get("shmem", 0))


def reuse_freed_memory() -> None:
    """Makes this process reuse the memory of freed tensors of up to 31 MiB from now on.

    Until a block of that size has been freed once, the C library (glibc) returns each freed block
    to the system, and every matrix product has to fetch its memory again, page by page. It always
    returns blocks of more than 32 MiB, so a size just below that is freed here.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def return_unused_memory(device: torch.device) -> None:
    """Returns memory that torch reserved on a GPU and does not use, so that tensors of other sizes
    and other processes can have it.

    It waits for the GPU, so call it only after rare moves of much memory.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def has_room(
    tokens: int,
    bytes_per_token: int,
    device: torch.device,
    unused_bytes: int = 0,
    state_bytes: int = 0,
) -> bool:
    """Returns whether keys and values of so many tokens fit into a device's free memory.

    ``unused_bytes`` are already allocated for keys and values and still unused. ``state_bytes`` are
    needed in addition, whatever the number of tokens.
    """
    free_bytes = available_bytes(device) * (1 - SPARE_SHARE) + unused_bytes
    return tokens * bytes_per_token + state_bytes <= free_bytes


def too_long_error(
    tokens: int, bytes_per_token: int, device: torch.device, state_bytes: int = 0
) -> ModelError:
    """Returns the error for a prompt that does not fit: the memory it needs, the memory there is,
    and how long a prompt would fit."""
    free_bytes = available_bytes(device)
    needed = format_bytes(tokens * bytes_per_token + state_bytes)
    fitting = max(0, int(free_bytes * (1 - SPARE_SHARE)) - state_bytes) // max(1, bytes_per_token)
    kinds = "keys, values and states" if state_bytes else "keys and values"
    return ModelError(
        f"{tokens} tokens of prompt and answer need {needed} for {kinds}, and {device.type} has "
        f"{format_bytes(free_bytes)} free: about {fitting} would fit; "
        "take fewer frames (--num-frames) or a smaller --dtype"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def format_bytes(count: float) -> str:
    """Returns a number of bytes for people to read, in GiB or MiB."""
    return f"{count / GIB:.1f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:.1f} MiB"

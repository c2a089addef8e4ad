"""The processes that Saccade started, whose processor time is its own and not that of others.

The operating system adds a child's time to its parent's only when the child has ended.
"""

from __future__ import annotations

from contextlib import suppress
from subprocess import Popen
from weakref import WeakSet

import psutil

_processes: WeakSet[Popen[bytes]] = WeakSet()


def count_as_own(process: Popen[bytes]) -> None:
    """Counts the processor time of a process as this one's own, for as long as it runs."""
    _processes.add(process)


def running_seconds() -> float:
    """Returns the processor seconds that such processes have used, of those that still run."""
    seconds = 0.0
    for process in [*_processes]:
        if process.returncode is None:
            with suppress(psutil.Error):
                seconds += sum(psutil.Process(process.pid).cpu_times()[:4])
    return seconds

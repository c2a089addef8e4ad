"""Notices that other programs keep cores busy, and decodes with fewer threads while they do.

The threads of a matrix product wait for each other at its end. If another program keeps a core
busy, the thread on that core finishes late in every product. The other threads spin while they
wait, which slows the late one further. An answer that takes .3 seconds with one thread has taken 20
seconds with two.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from saccade.core import own_processes

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25  # What other programs use is measured at most this often.
STALE_SECONDS = 30.0  # An average over a longer time says nothing about now.
TOLERATED_CORES = 0.25  # Others may use this much of a core before it counts as taken.


def own_cpus() -> list[int]:
    """Returns the processors that this process may run on."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # Not every system has it.
        return list(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class CpuSample:
    """How many processor seconds have been used on this process's cores up to one moment."""

    moment: float  # in seconds, by time.monotonic()
    all_programs: float  # processor seconds of all programs
    own: float  # processor seconds of this process and of those that Saccade started

    @classmethod
    def now(cls) -> CpuSample:
        """Returns a sample of this moment."""
        times_by_core = psutil.cpu_times(percpu=True)
        seconds = 0.0
        for number in own_cpus():
            if number < len(times_by_core):
                cpu = times_by_core[number]._asdict()
                # User time includes that of guests, which would otherwise be counted twice.
                not_counted = ("idle", "iowait", "guest", "guest_nice")
                seconds += sum(value for name, value in cpu.items() if name not in not_counted)
        times = os.times()
        process_seconds = times.user + times.system + times.children_user + times.children_system
        return cls(time.monotonic(), seconds, process_seconds + own_processes.running_seconds())

    def cores_of_others(self, earlier: CpuSample) -> float:
        """Returns how many cores other programs have used since an earlier sample, on average."""
        passed = max(self.moment - earlier.moment, 1e-3)
        return (
            max(0.0, (self.all_programs - earlier.all_programs) - (self.own - earlier.own)) / passed
        )


def threads_beside(others: float, threads: int, cores: int) -> int:
    """Returns how many threads to use while other programs keep ``others`` of ``cores`` cores busy.

    That is one for each free core, but at least one and at most ``threads``. For example, if others
    use 1.2 of 4 cores, it is 3, because their 0.2 of a second core is below ``TOLERATED_CORES``.
    """
    return max(1, min(threads, int(cores - others + TOLERATED_CORES)))


class FreeCores:
    """Says with how many threads to compute now; one object serves a process.

    ``sample`` returns what has been used, and is replaced in tests.
    """

    def __init__(self, sample: Callable[[], CpuSample] = CpuSample.now) -> None:
        self._take_sample = sample
        self._sample = sample()
        self._cores = len(own_cpus())
        self._cores_of_others = 0.0  # Cores that other programs have kept busy lately.
        self._has_warned = False
        self.threads_are_fixed = False
        """Whether the user has chosen the number of threads, which then stays."""

    def threads(self, most: int) -> int:
        """Returns how many of ``most`` threads to use. Looks at the machine at most every
        ``CHECK_SECONDS``."""
        if most == 1 or self.threads_are_fixed:
            return most
        if time.monotonic() - self._sample.moment >= CHECK_SECONDS:
            self._measure_others()
        threads = threads_beside(self._cores_of_others, most, self._cores)
        if threads < most and not self._has_warned:
            self._has_warned = True
            log.warning(
                f"other programs keep {self._cores_of_others:.1f} of {self._cores} cores busy: "
                f"answers take longer, and use {threads} of {most} threads until it is quiet"
            )
        return threads

    def _measure_others(self) -> None:
        """Measures how many cores other programs have used since the last sample.

        If that sample is too old, all cores count as free until the next one.
        """
        earlier = self._sample
        self._sample = self._take_sample()
        is_stale = self._sample.moment - earlier.moment > STALE_SECONDS
        self._cores_of_others = 0.0 if is_stale else self._sample.cores_of_others(earlier)

    @contextmanager
    def limit_threads(self) -> Iterator[None]:
        """Makes PyTorch use no more threads than there are free cores, until the block ends."""
        before = torch.get_num_threads()
        threads = self.threads(before)
        if threads == before:
            yield
            return
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


free_cores = FreeCores()

"""Measures how much ``saccade describe`` suffers where other programs keep two cores busy.

The command decides how much to draft by forwards that it times on the machine. So other programs
may not only slow it down but also change its tau. ``python -m lab busy`` shows the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

BUSY_LOOPS = 2
# Runs of the command in each case. The first one has an empty cache, so it times forwards.
RUNS = 2
# A machine passes if neither ``BusyMachine.slowdown`` nor ``tau_change`` is above its limit.
MAX_SLOWDOWN = 3.0
MAX_TAU_CHANGE = 0.2
TIME_LIMIT_SECONDS = 100.0  # Of one run of the command.


@dataclass(frozen=True)
class DescribeRun:
    """One run of the command: its wall seconds, starting Python included, and its tau."""

    seconds: float
    tau: float


@dataclass(frozen=True)
class BusyMachine:
    """The runs of the command alone, and those beside busy loops, in order."""

    alone: tuple[DescribeRun, ...]
    beside: tuple[DescribeRun, ...]

    @property
    def slowdown(self) -> float:
        """The seconds of the slowest run beside the loops, over those of the slowest run alone."""
        longest = max(run.seconds for run in self.beside)
        return longest / max(run.seconds for run in self.alone)

    @property
    def tau_change(self) -> float:
        """How far tau beside the loops is from the last run's alone, as a share of the latter.

        Of the runs beside the loops, the one with the largest distance counts.
        """
        tau = self.alone[-1].tau
        return max(abs(run.tau / tau - 1) for run in self.beside)

    @property
    def passes(self) -> bool:
        return self.slowdown <= MAX_SLOWDOWN and self.tau_change <= MAX_TAU_CHANGE


def measure_busy_machine() -> BusyMachine:
    """Runs the command alone and beside busy loops, each time with an empty cache at first."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        _run_saccade(["shapes", "make", "--out", str(folder / "clip.mp4")], folder / "alone")
        alone = _describe(folder / "clip.mp4", folder / "alone")
        with busy_loops():
            beside = _describe(folder / "clip.mp4", folder / "beside")
    return BusyMachine(alone, beside)


@contextmanager
def busy_loops() -> Iterator[None]:
    """Keeps ``BUSY_LOOPS`` cores busy within the block."""
    # A loop ends by itself where this process is killed and cannot end it.
    loop_code = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    command = [sys.executable, "-c", loop_code]
    loops = [subprocess.Popen(command) for _ in range(BUSY_LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _describe(clip: Path, cache: Path) -> tuple[DescribeRun, ...]:
    """Runs the command ``RUNS`` times on a clip, with one cache for all of these runs."""
    runs = []
    for _ in range(RUNS):
        start = time.monotonic()
        answer = json.loads(_run_saccade(["describe", str(clip), "--json"], cache))
        runs.append(DescribeRun(time.monotonic() - start, answer["tau"]))
    return tuple(runs)


def _run_saccade(arguments: list[str], cache: Path) -> str:
    """Returns what the command prints. The number of threads is the one it chooses itself."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    inherited = {name: value for name, value in os.environ.items() if name not in threads}
    done = subprocess.run(
        [sys.executable, "-m", "saccade", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIME_LIMIT_SECONDS,
        env={**inherited, "SACCADE_CACHE": str(cache)},
    )
    return done.stdout

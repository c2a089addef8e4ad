"""Warns where timings were disturbed by other programs on this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saccade.core.free_cores import CpuSample, own_cpus

# The share of this process's cores that others may use beside those that our threads leave free.
TOLERATED_SHARE = 0.1
TOLERATED_RATIO = 1.25  # The slowest run of the same work may take so many times the fastest.


class DisturbanceWatch:
    """Measures the processor time that other programs use of this process's cores, from when the
    watch is made."""

    def __init__(self) -> None:
        self._start = CpuSample.now()

    def busy_cores(self) -> float:
        """Returns how many of these cores other programs have used since the watch was made, on
        average."""
        return CpuSample.now().cores_of_others(self._start)

    def warning(self, plain: Sequence[float] = ()) -> str | None:
        """Returns :func:`disturbance_warning` for this process's cores and PyTorch's threads."""
        threads = torch.get_num_threads()
        return disturbance_warning(self.busy_cores(), threads, len(own_cpus()), plain)


def disturbance_warning(
    busy_cores: float, threads: int, cores: int, plain: Sequence[float] = ()
) -> str | None:
    """Returns a sentence where timings say more about other programs than about ours, else None.

    Args:
        busy_cores: how many of the ``cores`` other programs used, on average.
        threads: how many threads we computed with.
        cores: how many cores this process may run on.
        plain: the seconds that each of several runs of the same plain decoding took.
    """
    causes = []
    if busy_cores > max(0, cores - threads) + TOLERATED_SHARE * cores:
        causes.append(f"other programs kept {busy_cores:.1f} of {cores} cores busy")
    if plain and max(plain) > TOLERATED_RATIO * min(plain):
        causes.append(f"plain decoding took {min(plain):.2g} to {max(plain):.2g} s")
    if not causes:
        return None
    return (
        f"{' and '.join(causes)} meanwhile, so these times and ratios may be far off: measure "
        "again on a quiet machine"
    )

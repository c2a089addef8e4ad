"""Sets how long threads that wait for each other spin, before torch and its OpenMP are imported."""

from __future__ import annotations

import os

# Settings of OpenMP by which waiting threads soon sleep. GNU's counts turns of a loop: 0.05 to 0.1
# milliseconds, where it would be 100 times as long. Intel's and LLVM's take milliseconds.
SHORT_SPINNING = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
WAIT_POLICY = "OMP_WAIT_POLICY"  # Whoever sets this decides.


def limit_spinning() -> None:
    """Lets threads that wait for each other soon sleep. It has an effect before torch is imported,
    in this process and in those that it starts; what the user has set stays."""
    if WAIT_POLICY not in os.environ:
        for name, value in SHORT_SPINNING.items():
            os.environ.setdefault(name, value)

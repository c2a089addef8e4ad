"""Random numbers that depend on their keys alone, never on the order in which they are drawn.

So an answer to a seed is the same however requests share forwards, and however fast the machine is.
"""

from __future__ import annotations

import numpy as np

# Who uses noise: a draft, the test of a drafted token, the target for a token of its own.
ROLES = {"draft": 1, "accept": 2, "own": 3}


def uniform(
    seed: int, request: int, role: str, position: int, sibling: int, began: int = 0
) -> float:
    """Returns a number in [0, 1) that depends on its keys alone (Philox counter)."""
    key = np.array([seed % 2**64, request], dtype=np.uint64)
    counter = np.array([ROLES[role], position, sibling, began], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())

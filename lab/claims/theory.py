"""Computes what SAGE's theorems state, so that they can be tested on numbers.

A theorem that fails on one example is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def confidence(law: Sequence[float], k: int) -> float:
    """Returns SAGE's alpha (Eq. 7-9) of a distribution, from its k largest probabilities."""
    top = np.sort(np.asarray(law, dtype=float))[::-1][:k]
    top = top[top > 0] / top.sum()
    return 1 + float((top * np.log(top)).sum()) / math.log(k)


def lemma_bound(alpha: float, k: int) -> float:
    """Returns the lower bound of p_1 by Lemma 4.3 (Eq. 13)."""
    return 1 / k + alpha * (k - 1) / k


def acceptance_threshold(k: int, epsilon: float) -> float:
    """Returns the confidence above which Theorem 4.4 (Eq. 14) guarantees acceptance."""
    return (k - 2 + 4 * epsilon * k) / (2 * (k - 1))


def expected_accepted(p: float, decay: float, depth: int) -> float:
    """Returns the expected accepted tokens of a chain by Theorem 4.6 (Eq. 15)."""
    return sum(p**level * decay ** (level * (level - 1) / 2) for level in range(1, depth + 1))


def simulated_accepted(p: float, decay: float, depth: int) -> float:
    """Returns the same number from the distribution of the accepted tokens: sum of l P(l)."""
    reached, expected = 1.0, 0.0
    for level in range(1, depth + 1):
        reached *= p * decay ** (level - 1)
        following = p * decay**level if level < depth else 0.0
        expected += level * reached * (1 - following)
    return expected


def best_argument(speed: Callable[[int], float], most: int = 400) -> int:
    """Returns the argument from 1 to ``most`` - 1 at which ``speed`` is highest."""
    return max(range(1, most), key=speed)


def depth_formula(p: float, ratio: float) -> int:
    """Returns the optimal depth by Theorem 4.7 (Eq. 16), for c_t / c_d = ``ratio``."""
    return math.ceil(math.log(ratio) / math.log(1 / p) - 1)


def chain_speed(p: float, ratio: float, depth: int) -> float:
    """Returns tokens per round over its cost by Eq. 33, up to a factor.

    Costs are c_d = 1 and c_t = ``ratio``.
    """
    return (expected_accepted(p, 1.0, depth) + 1) / (depth + ratio)


def width_formula(first: float, cost: float, beta: float) -> float:
    """Returns the optimal width by Theorem 4.8 (Eq. 17)."""
    return (first / cost) ** (1 / (1 + beta))


def width_speed(
    first: float, cost: float, beta: float, width: float, *, is_capped: bool = False
) -> float:
    """Returns tokens per round over its cost by Eq. 36-37, for a first level of this width.

    The target's cost c_t is 1. The paper bounds the expected acceptance by the sum of the
    candidates' probabilities and sets it to that sum. ``is_capped`` keeps it at 1 at most, which
    one level cannot exceed.
    """
    accepted = sum(first / i**beta for i in range(1, int(width) + 1))
    return ((min(1.0, accepted) if is_capped else accepted) + 1) / (cost * width + 1)


def best_width(first: float, cost: float, beta: float, *, is_capped: bool = False) -> int:
    """Returns the width at which Eq. 37 is highest."""
    return best_argument(
        lambda width: width_speed(first, cost, beta, width, is_capped=is_capped), 200
    )

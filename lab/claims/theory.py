"""SAGE's theory, put to the test on numbers: a statement that fails on an example has failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def confidence(law: Sequence[float], k: int) -> float:
    """SAGE's alpha (Eq. 7-9) of a law whose k largest are these."""
    top = np.sort(np.asarray(law, dtype=float))[::-1][:k]
    top = top[top > 0] / top.sum()
    return 1 + float((top * np.log(top)).sum()) / math.log(k)


def lemma_bound(alpha: float, k: int) -> float:
    """Lemma 4.3 (Eq. 13): what p_1 is said to be at least."""
    return 1 / k + alpha * (k - 1) / k


def acceptance_threshold(k: int, epsilon: float) -> float:
    """Theorem 4.4 (Eq. 14): the confidence above which acceptance is said to be guaranteed."""
    return (k - 2 + 4 * epsilon * k) / (2 * (k - 1))


def expected_accepted(p: float, decay: float, depth: int) -> float:
    """Theorem 4.6 (Eq. 15): expected accepted tokens of a chain."""
    return sum(p**level * decay ** (level * (level - 1) / 2) for level in range(1, depth + 1))


def simulated_accepted(p: float, decay: float, depth: int) -> float:
    """The same from the law of the number accepted: sum of l P(accepted = l)."""
    alive, found = 1.0, 0.0
    for level in range(1, depth + 1):
        alive *= p * decay ** (level - 1)
        following = p * decay**level if level < depth else 0.0
        found += level * alive * (1 - following)
    return found


def best(speed: Callable[[int], float], most: int = 400) -> int:
    """The argument from 1 that is fastest."""
    return max(range(1, most), key=speed)


def depth_formula(p: float, ratio: float) -> int:
    """Theorem 4.7 (Eq. 16): the optimal depth for c_t / c_d = ratio."""
    return math.ceil(math.log(ratio) / math.log(1 / p) - 1)


def chain_speed(p: float, ratio: float, depth: int) -> float:
    """Eq. 33, up to a factor: tokens a round over its cost, c_d = 1 and c_t = ratio."""
    return (expected_accepted(p, 1.0, depth) + 1) / (depth + ratio)


def width_formula(first: float, cost: float, beta: float) -> float:
    """Theorem 4.8 (Eq. 17)."""
    return (first / cost) ** (1 / (1 + beta))


def width_speed(first: float, cost: float, beta: float, width: int) -> float:
    """Eq. 37 with c_t = 1: tokens a round of a first level this wide, over its cost."""
    accepted = sum(first / i**beta for i in range(1, width + 1))
    return (min(1.0, accepted) + 1) / (cost * width + 1)

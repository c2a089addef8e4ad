"""Computes what SAGE's theorems state, so that ``lab.claims.sage`` can test them on numbers.

A theorem speaks of every case, so one example on which it fails refutes it. The theorems decide how
deep and how wide a draft's tree should be. Their symbols: p_1 is the largest probability of a law,
alpha the confidence of the draft's law (``confidence``), q_1 the chance that the draft's likeliest
candidate is accepted, and c_d and c_t the costs of one forward of the draft and of the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def confidence(law: Sequence[float], k: int) -> float:
    """Returns SAGE's alpha (Eq. 7-9) of a law: 1 - H / log k, where H is the entropy of its k
    largest probabilities after they are scaled to sum to 1."""
    top = np.sort(np.asarray(law, dtype=float))[::-1][:k]
    top = top[top > 0] / top.sum()
    return 1 + float((top * np.log(top)).sum()) / math.log(k)


def lemma_bound(alpha: float, k: int) -> float:
    """Returns the lower bound of p_1 by Lemma 4.3 (Eq. 13)."""
    return 1 / k + alpha * (k - 1) / k


def acceptance_threshold(k: int, epsilon: float) -> float:
    """Returns the confidence above which Theorem 4.4 (Eq. 14) guarantees acceptance.

    ``epsilon`` is how far the target's probability of a token may be from the draft's
    (Assumption 4.2).
    """
    return (k - 2 + 4 * epsilon * k) / (2 * (k - 1))


def expected_accepted(p: float, decay: float, depth: int) -> float:
    """Returns the expected accepted tokens of a chain by Theorem 4.6 (Eq. 15).

    The first token is accepted with probability ``p``. Each later one, if all before it were
    accepted, has ``decay`` times the probability of the one before it.
    """
    return sum(p**level * decay ** (level * (level - 1) / 2) for level in range(1, depth + 1))


def simulated_accepted(p: float, decay: float, depth: int) -> float:
    """Returns what ``expected_accepted`` should return, by the definition of an expectation.

    It is the sum of l P(l), where P(l) is the probability that exactly l tokens are accepted.
    Nothing is drawn at random.
    """
    at_least, expected = 1.0, 0.0
    for level in range(1, depth + 1):
        at_least *= p * decay ** (level - 1)  # The chance that ``level`` tokens are accepted.
        next_accepted = p * decay**level if level < depth else 0.0
        expected += level * at_least * (1 - next_accepted)
    return expected


def best_argument(speed: Callable[[int], float], most: int = 400) -> int:
    """Returns the argument from 1 to ``most`` - 1 at which ``speed`` is highest."""
    return max(range(1, most), key=speed)


def depth_formula(p: float, ratio: float) -> int:
    """Returns the optimal depth by Theorem 4.7 (Eq. 16), for c_t / c_d = ``ratio``.

    ``p`` is the chance that a token is accepted, the same at each level.
    """
    return math.ceil(math.log(ratio) / math.log(1 / p) - 1)


def chain_speed(p: float, ratio: float, depth: int) -> float:
    """Returns tokens per round over its cost by Eq. 33, up to a factor.

    Costs are c_d = 1 and c_t = ``ratio``.
    """
    return (expected_accepted(p, 1.0, depth) + 1) / (depth + ratio)


def width_formula(first: float, cost: float, beta: float) -> float:
    """Returns the optimal width by Theorem 4.8 (Eq. 17): q_1 is ``first``, c_d is ``cost``.

    By the paper, the i-th candidate of a level is accepted with probability q_1 / i^beta.
    """
    return (first / cost) ** (1 / (1 + beta))


def width_speed(
    first: float, cost: float, beta: float, width: float, *, is_capped: bool = False
) -> float:
    """Returns tokens per round over its cost by Eq. 36-37, for a first level of this width.

    The target's cost c_t is 1. As the expected number of accepted tokens the paper takes the sum of
    the candidates' probabilities, which may exceed 1. But one level has at most one accepted token,
    so ``is_capped`` limits the sum to 1.
    """
    accepted = sum(first / i**beta for i in range(1, int(width) + 1))
    if is_capped:
        accepted = min(1.0, accepted)
    return (accepted + 1) / (cost * width + 1)


def best_width(first: float, cost: float, beta: float, *, is_capped: bool = False) -> int:
    """Returns the width from 1 to 199 at which Eq. 37 is highest, for a target's cost of 1."""
    return best_argument(
        lambda width: width_speed(first, cost, beta, width, is_capped=is_capped), 200
    )

"""Figures of a run: acceptance, speed, their intervals, and what the papers' formulas predict.

Pure functions over recorded answers. ``tau`` is tokens emitted per target forward, the target's own
token included; the papers count in three units:

    emitted    accepted and the target's own, a forward: TABED's block efficiency
    accepted   drafted tokens that stood, a forward: SpecVLM's and SAGE's tau, the MAT of HIPPO's
               baselines
    MAT        accepted from one refusal to the next: HIPPO's own, which drafts past a full round
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import mean, median

import numpy as np

from saccade.bench.records import Answer

RESAMPLES = 1000
Interval = tuple[float, float, float]
"""(the figure, 2.5 % and 97.5 % of its bootstrap over samples)."""


def tau(answers: Sequence[Answer]) -> float | None:
    """Tokens per target forward, over all rounds."""
    rounds = sum(answer.rounds for answer in answers)
    if not rounds:
        return None
    return sum(sum(answer.accepted) + answer.own for answer in answers) / rounds


def accepted(answers: Sequence[Answer]) -> float | None:
    """Drafted tokens accepted per target forward, over all rounds; the target's own left out."""
    taken = [length for answer in answers for length in answer.accepted]
    return mean(taken) if taken else None


def mean_accepted(answers: Sequence[Answer]) -> float | None:
    """MAT as HIPPO counts it: accepted tokens from one refusal to the next, rounds that were
    accepted in full running on into the following one. Never below ``accepted``."""
    runs = [length for answer in answers for length in _between_refusals(answer)]
    return mean(runs) if runs else None


def _between_refusals(answer: Answer) -> list[int]:
    found, so_far = [], 0
    for accepted, drafted in zip(answer.accepted, answer.drafted, strict=True):
        so_far += accepted
        if accepted < drafted or not drafted:
            found.append(so_far)
            so_far = 0
    return [*found, so_far] if so_far else found


def acceptance(answers: Sequence[Answer]) -> float | None:
    """Accepted over drafted tokens (all nodes of a tree)."""
    drafted = sum(sum(answer.nodes) for answer in answers)
    return sum(sum(answer.accepted) for answer in answers) / drafted if drafted else None


def by_position(answers: Sequence[Answer]) -> list[float]:
    """For each place in a draft: how often it was accepted where the draft went that deep."""
    reached: Counter[int] = Counter()
    passed: Counter[int] = Counter()
    for answer in answers:
        for accepted, drafted in zip(answer.accepted, answer.drafted, strict=True):
            reached.update(range(drafted))
            passed.update(range(accepted))
    return [passed[place] / reached[place] for place in range(len(reached))]


def histogram(answers: Sequence[Answer]) -> list[float]:
    """The share of rounds with 0, 1, 2, ... accepted tokens."""
    counted = Counter(accepted for answer in answers for accepted in answer.accepted)
    rounds = sum(counted.values())
    return [counted[length] / rounds for length in range(max(counted, default=-1) + 1)]


def per_token(answer: Answer) -> float:
    """Seconds of decoding a token."""
    return answer.decode / answer.counted


def rate(answers: Sequence[Answer]) -> float | None:
    """Tokens a second, the median over samples."""
    rates = [1 / per_token(answer) for answer in answers if answer.decode > 0]
    return median(rates) if rates else None


def speedups(
    answers: Sequence[Answer], baseline: Sequence[Answer], *, whole: bool = False
) -> list[float]:
    """Each answer's speed over plain decoding of the same question, in the same run."""
    plain = {(answer.item, answer.turn): answer for answer in baseline}
    found = []
    for own in answers:
        other = plain.get((own.item, own.turn))
        if other is None or own.error or other.error:
            continue
        if whole:
            found.append((other.total / len(other.ids)) / (own.total / len(own.ids)))
        elif own.decode > 0:
            found.append(per_token(other) / per_token(own))
    return found


def interval(
    values: Sequence[float],
    figure: Callable[..., np.ndarray] = np.median,
    *,
    seed: int = 0,
) -> Interval | None:
    """A figure of the values with its bootstrap interval; None without values."""
    table = np.asarray(values, dtype=float)
    return bootstrap(len(table), lambda drawn: figure(table[drawn], axis=-1), seed=seed)


def bootstrap(
    count: int, figure: Callable[[np.ndarray], np.ndarray], *, seed: int = 0
) -> Interval | None:
    """A figure of so many samples, given the numbers of those drawn along the last axis."""
    if not count:
        return None
    drawn = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    low, high = np.quantile(figure(drawn), (0.025, 0.975))
    return float(figure(np.arange(count))), float(low), float(high)


def tau_interval(answers: Sequence[Answer]) -> Interval | None:
    """``tau`` with the bootstrap over samples (not over rounds, which hang together)."""
    pairs = [(sum(a.accepted) + a.own, a.rounds) for a in answers if a.rounds]
    emitted, rounds = np.asarray(pairs, dtype=float).reshape(-1, 2).T
    return bootstrap(len(pairs), lambda at: emitted[at].sum(-1) / rounds[at].sum(-1))


def number(found: float | None, digits: int = 2) -> str:
    """A figure as tables have it; nothing where there is none."""
    return "" if found is None else f"{found:.{digits}f}"


# -- what the papers' formulas say --------------------------------------------------------------


def predicted_speedup(answers: Sequence[Answer], baseline: Sequence[Answer]) -> float | None:
    """TABED's Eq. 1: tau / (gamma T_q / T_p + 1), with tau, gamma, T_q and T_p of this run.

    T_q is the seconds of a draft step (a level of a tree), T_p those of a token of ``ar``.
    """
    emitted, steps = tau(answers), sum(sum(answer.drafted) for answer in answers)
    if emitted is None or not steps or not baseline:
        return None
    gamma = steps / sum(answer.rounds for answer in answers)
    ratio = (sum(answer.draft for answer in answers) / steps) / mean(map(per_token, baseline))
    return emitted / (gamma * ratio + 1)


def predicted_io(answers: Sequence[Answer]) -> float | None:
    """Sparse-to-Dense, Sec. 3.3: keys read per token, as a share of what plain decoding reads.

    (gamma (K + m_t) + m_v + m_t) / (alpha gamma) over (m_v + m_t), gamma and alpha of this run.
    """
    steps = sum(sum(answer.drafted) for answer in answers)
    taken = sum(sum(answer.accepted) for answer in answers)
    seen = [answer for answer in answers if answer.draft_visual_tokens is not None]
    if not steps or not taken or not seen:
        return None
    gamma = steps / sum(answer.rounds for answer in answers)
    alpha = taken / steps
    visual = mean(answer.visual_tokens for answer in seen)
    text = mean(answer.prompt_tokens - answer.visual_tokens for answer in seen)
    kept = mean(answer.draft_visual_tokens or 0 for answer in seen)
    read = (gamma * (kept + text) + visual + text) / (alpha * gamma)
    return read / (visual + text)

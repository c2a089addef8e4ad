"""Measures of a run: acceptance, speed, their intervals, and what the papers' formulas predict.

These are pure functions of recorded answers. Of each round an answer records how many tokens were
``accepted``, how deep the draft was (``drafted``) and how many tokens it had (``nodes``); a chain
has as many as it is deep. ``own`` is the number of rounds that ended in a token of the target's
own. ``tau`` is tokens emitted per target forward, the target's own token included. The papers count
in three units:

    emitted    accepted tokens and the target's own, per forward: TABED's block efficiency
    accepted   accepted draft tokens per forward: the tau of SpecVLM and SAGE, and the MAT of
               HIPPO's baselines
    MAT        accepted tokens from one rejection to the next: the MAT of HIPPO itself, whose draft
               goes on after a round that was accepted in full
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import mean, median

import numpy as np

from saccade.bench.records import Answer

RESAMPLES = 1000  # A bootstrap draws the samples anew this many times.
Interval = tuple[float, float, float]
"""A value with the 2.5 % and 97.5 % quantiles of its bootstrap over samples."""


def tau(answers: Sequence[Answer]) -> float | None:
    """Returns tokens per target forward over all rounds, the target's own token included; None
    without rounds."""
    rounds = sum(answer.rounds for answer in answers)
    if not rounds:
        return None
    return sum(sum(answer.accepted) + answer.own for answer in answers) / rounds


def accepted_per_forward(answers: Sequence[Answer]) -> float | None:
    """Returns accepted draft tokens per target forward over all rounds."""
    lengths = [length for answer in answers for length in answer.accepted]
    return mean(lengths) if lengths else None


def accepted_between_rejections(answers: Sequence[Answer]) -> float | None:
    """Returns HIPPO's MAT: accepted tokens from one rejection to the next.

    The tokens of a round that was accepted in full are added to the next round's, so this is never
    below ``accepted_per_forward``. A round without a draft counts as one that ends in a rejection.
    Rounds that accepted 3 of 3, 1 of 3 and 2 of 3 tokens make two runs, of 4 and 2 tokens.
    """
    runs = [length for answer in answers for length in _runs_between_rejections(answer)]
    return mean(runs) if runs else None


def _runs_between_rejections(answer: Answer) -> list[int]:
    """Returns how many tokens were accepted in each run of rounds up to a rejection."""
    runs: list[int] = []
    open_run = 0
    for accepted, drafted in zip(answer.accepted, answer.drafted, strict=True):
        open_run += accepted
        if accepted < drafted or not drafted:
            runs.append(open_run)
            open_run = 0
    return [*runs, open_run] if open_run else runs


def acceptance_rate(answers: Sequence[Answer]) -> float | None:
    """Returns accepted over drafted tokens; None where nothing was drafted. All nodes of a tree
    count as drafted."""
    drafted = sum(sum(answer.nodes) for answer in answers)
    return sum(sum(answer.accepted) for answer in answers) / drafted if drafted else None


def acceptance_by_position(answers: Sequence[Answer]) -> list[float]:
    """Returns the share of accepted tokens at each position of a draft, the first position first.

    Each share is of the drafts that have a token at this position. In a tree the position is the
    depth.
    """
    reached: Counter[int] = Counter()
    accepted_at: Counter[int] = Counter()
    for answer in answers:
        for accepted, drafted in zip(answer.accepted, answer.drafted, strict=True):
            reached.update(range(drafted))
            accepted_at.update(range(accepted))
    return [accepted_at[position] / reached[position] for position in range(len(reached))]


def accepted_histogram(answers: Sequence[Answer]) -> list[float]:
    """Returns the shares of rounds with 0, 1, 2, ... accepted tokens."""
    counts = Counter(accepted for answer in answers for accepted in answer.accepted)
    rounds = sum(counts.values())
    return [counts[length] / rounds for length in range(max(counts, default=-1) + 1)]


def has_decoded(answer: Answer) -> bool:
    """Returns whether an answer has a speed of decoding. An answer of a single token has none,
    because that token comes with the prefill."""
    return answer.decode > 0 and len(answer.ids) > 1


def seconds_per_token(answer: Answer) -> float:
    """Returns seconds of decoding per token.

    ``counted`` is how many tokens these seconds produced. Of our own answers they are all tokens
    but the first, which comes with the prefill.
    """
    return answer.decode / answer.counted


def tokens_per_second(answers: Sequence[Answer]) -> float | None:
    """Returns tokens per second of decoding, the median over samples; None where none decoded."""
    rates = [1 / seconds_per_token(answer) for answer in answers if has_decoded(answer)]
    return median(rates) if rates else None


def speedups(
    answers: Sequence[Answer], baseline: Sequence[Answer], *, whole: bool = False
) -> list[float]:
    """Returns each answer's speedup over ``baseline``: plain decoding of the same question in the
    same run.

    It is the ratio of seconds per token. The seconds are those of decoding alone, or with ``whole``
    those of the whole answer, from inputs to the last token. Left out are answers without a
    baseline, those where either of the two has an error, and, for decoding alone, those where
    either has no speed (:func:`has_decoded`).
    """
    plain = {(answer.item, answer.turn): answer for answer in baseline}
    ratios = []
    for answer in answers:
        plain_answer = plain.get((answer.item, answer.turn))
        if plain_answer is None or answer.error or plain_answer.error:
            continue
        if whole:
            plain_seconds = plain_answer.total / max(1, len(plain_answer.ids))
            ratios.append(plain_seconds / (answer.total / max(1, len(answer.ids))))
        elif has_decoded(answer) and has_decoded(plain_answer):
            ratios.append(seconds_per_token(plain_answer) / seconds_per_token(answer))
    return ratios


def interval(
    values: Sequence[float],
    statistic: Callable[..., np.ndarray] = np.median,
    *,
    seed: int = 0,
) -> Interval | None:
    """Returns a statistic of the values with its bootstrap interval; None without values.

    ``statistic`` reduces an array along an ``axis``, as NumPy's functions do.
    """
    samples = np.asarray(values, dtype=float)
    return bootstrap(len(samples), lambda indices: statistic(samples[indices], axis=-1), seed=seed)


def bootstrap(
    count: int, statistic: Callable[[np.ndarray], np.ndarray], *, seed: int = 0
) -> Interval | None:
    """Returns a statistic of ``count`` samples with its bootstrap interval; None without samples.

    ``statistic`` takes indices of samples, of shape [draws, samples] or [samples], and returns the
    statistic of each row.
    """
    if not count:
        return None
    indices = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    low, high = np.quantile(statistic(indices), (0.025, 0.975))
    return float(statistic(np.arange(count))), float(low), float(high)


def tau_interval(answers: Sequence[Answer]) -> Interval | None:
    """Returns ``tau`` with its bootstrap interval over answers.

    Answers are drawn and not rounds, because the rounds of one answer are not independent.
    """
    pairs = [(sum(a.accepted) + a.own, a.rounds) for a in answers if a.rounds]
    emitted, rounds = np.asarray(pairs, dtype=float).reshape(-1, 2).T
    return bootstrap(len(pairs), lambda indices: emitted[indices].sum(-1) / rounds[indices].sum(-1))


def format_number(value: float | None, digits: int = 2) -> str:
    """Returns a number as tables write it: with ``digits`` digits after the point; empty for
    None."""
    return "" if value is None else f"{value:.{digits}f}"


# -- what the papers' formulas say --------------------------------------------------------------


def predicted_speedup(answers: Sequence[Answer], baseline: Sequence[Answer]) -> float | None:
    """Returns the speedup that TABED's Eq. 1 predicts: tau / (gamma T_q / T_p + 1).

    All quantities are this run's own. Gamma is the mean depth of a draft, T_q the seconds of a
    draft step (a level of a tree), and T_p the seconds of a token of ``ar``.
    """
    emitted = tau(answers)
    steps = sum(sum(answer.drafted) for answer in answers)
    plain_seconds = [seconds_per_token(answer) for answer in baseline if has_decoded(answer)]
    if emitted is None or not steps or not plain_seconds:
        return None
    gamma = steps / sum(answer.rounds for answer in answers)
    step_seconds = sum(answer.draft for answer in answers) / steps
    ratio = step_seconds / mean(plain_seconds)
    return emitted / (gamma * ratio + 1)


def predicted_key_reads(answers: Sequence[Answer]) -> float | None:
    """Returns keys read per token as a share of plain decoding's (Sparse-to-Dense, Sec. 3.3).

    That is (gamma (K + m_t) + m_v + m_t) / (alpha gamma (m_v + m_t)). Gamma is the mean depth of
    this run's drafts, and alpha the accepted tokens per level of a draft, which for chains is the
    acceptance rate. K is the visual keys that the draft reads, and m_v and m_t are the visual and
    the text tokens of the prompt. Returns None where nothing was drafted or accepted, or where it
    is unknown how many visual tokens the draft read.
    """
    steps = sum(sum(answer.drafted) for answer in answers)
    accepted = sum(sum(answer.accepted) for answer in answers)
    with_visual_counts = [answer for answer in answers if answer.draft_visual_tokens is not None]
    if not steps or not accepted or not with_visual_counts:
        return None
    gamma = steps / sum(answer.rounds for answer in answers)
    alpha = accepted / steps
    visual = mean(answer.visual_tokens for answer in with_visual_counts)
    text = mean(answer.prompt_tokens - answer.visual_tokens for answer in with_visual_counts)
    kept_visual = mean(answer.draft_visual_tokens or 0 for answer in with_visual_counts)
    reads = (gamma * (kept_visual + text) + visual + text) / (alpha * gamma)
    return reads / (visual + text)

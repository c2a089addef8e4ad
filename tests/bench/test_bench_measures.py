"""Claims about the figures of a run, each worked out by hand on rounds written out."""

from __future__ import annotations

import numpy as np
import pytest
from written_out import answer

from saccade.bench import measures
from saccade.bench.records import Answer

# three rounds that drafted 5 each: all accepted, then 2, then none
SOME = answer("a", "sd", (5, 2, 0), (5, 5, 5))
# the last round was accepted in full and cut before the target's own token
FULL = answer("b", "sd", (1, 5), (5, 5), own=1)
PLAIN = answer("a", "ar", (0, 0, 0, 0), (0, 0, 0, 0))


def test_tau_counts_accepted_and_own() -> None:
    """Claim: tau is emitted tokens over target forwards, pooled over all rounds.

    Fails if the target's own tokens are left out, counted in a round without one, or if answers
    are averaged instead of rounds.
    """
    assert measures.tau([SOME]) == pytest.approx((7 + 3) / 3)
    assert measures.tau([FULL]) == pytest.approx((6 + 1) / 2)
    assert measures.tau([SOME, FULL]) == pytest.approx(17 / 5)  # not (10/3 + 7/2) / 2
    assert measures.tau([PLAIN]) == 1.0
    assert measures.tau([]) is None and measures.tau([answer("a", "hf")]) is None


@pytest.mark.parametrize(
    ("accepted", "drafted", "runs"),
    [
        ((5, 2, 0), (5, 5, 5), [7, 0]),  # 5 runs on into 2, a refusal; then a refusal at once
        ((5, 5, 5, 1), (5, 5, 5, 5), [16]),
        ((1, 5), (5, 5), [1, 5]),  # ends in full acceptance: the run that is open counts
        ((5,), (5,), [5]),
        ((3, 1), (3, 4), [4]),  # drafts of other lengths: each round by its own
        ((0, 0, 0), (0, 0, 0), [0, 0, 0]),  # plain decoding: nothing drafted, nothing runs on
    ],
)
def test_mean_accepted_runs_on_over_full_rounds(
    accepted: tuple[int, ...], drafted: tuple[int, ...], runs: list[int]
) -> None:
    """Claim: MAT is the mean over runs from one refusal to the next, full rounds joined.

    Fails if a full round ends a run, if the last open run is lost, or if plain decoding's rounds
    count as full. Control: the mean a round is smaller wherever a round was full.
    """
    one = answer("a", "sd", accepted, drafted)
    mean = measures.accepted_between_rejections([one])
    assert mean is not None and mean == pytest.approx(sum(runs) / len(runs))
    by_round = sum(accepted) / len(accepted)
    assert mean >= by_round and (mean > by_round) == (len(runs) < len(accepted))


def test_mean_accepted_ends_with_the_answer() -> None:
    """Claim: a run never goes on from one answer into the next.

    Fails if rounds of all answers are strung together: (5) and (2) would make one run of 7.
    """
    ends, begins = answer("a", "sd", (5,), (5,)), answer("b", "sd", (2,), (5,))
    assert measures.accepted_between_rejections([ends, begins]) == pytest.approx((5 + 2) / 2)
    assert measures.accepted_between_rejections([]) is None


def test_acceptance_counts_all_nodes() -> None:
    """Claim: acceptance is accepted over drafted tokens, every node of a tree.

    Fails if the deepest path stands for the tree.
    """
    tree = answer("a", "sage", (2, 1), (3, 3), nodes=(7, 5))
    assert measures.acceptance_rate([tree]) == pytest.approx(3 / 12)
    assert measures.acceptance_rate([SOME, FULL]) == pytest.approx(13 / 25)
    assert measures.acceptance_rate([PLAIN]) is None


def test_by_position_and_histogram() -> None:
    """Claim: a place counts only rounds that drafted as deep; the histogram is of all rounds.

    Fails if a short draft counts as a refusal at the places it never had.
    """
    short = answer("a", "sd", (2, 1, 0), (2, 4, 1))
    # place 0: reached by 3, passed by 2; place 1: by 2 and 1; places 2 and 3: by 1 and 0
    assert measures.acceptance_by_position([short]) == pytest.approx([2 / 3, 1 / 2, 0, 0])
    assert measures.accepted_histogram([short, SOME]) == pytest.approx(
        [2 / 6, 1 / 6, 2 / 6, 0, 0, 1 / 6]
    )
    assert measures.acceptance_by_position([PLAIN]) == [] and measures.accepted_histogram([]) == []
    assert measures.accepted_histogram([PLAIN]) == [1.0]


def test_rate_is_per_counted_token() -> None:
    """Claim: tokens a second are those that came of decoding, the median over answers.

    Fails if ids are counted (10 here) or the mean is taken.
    """
    timed = [answer("a", decode=2.0, counted=8), answer("b", decode=1.0, counted=9)]
    timed.append(answer("c", decode=1.0, counted=90))
    assert measures.tokens_per_second(timed) == pytest.approx(9.0)
    assert measures.tokens_per_second([answer(decode=0.0)]) is None
    one_token = answer(decode=1e-6, ids=(1,))  # It came with the prefill.
    assert measures.tokens_per_second([one_token]) is None
    assert measures.speedups([one_token], [one_token]) == []


def test_speedups_pair_by_item_and_turn() -> None:
    """Claim: each answer is held against plain decoding of the same item and turn.

    Fails if pairs go by place in the list, turns are mixed, or failed answers are counted.
    """
    plain = [
        answer("a", "ar", decode=8.0, counted=8, total=10.0),
        answer("a", "ar", turn=1, decode=16.0, counted=8, total=20.0),
        answer("b", "ar", decode=4.0, counted=4, total=8.0, error="ran out"),
    ]
    own = [
        answer("a", turn=1, decode=4.0, counted=8, total=8.0),  # 2 / 0.5 = 4
        answer("a", decode=4.0, counted=2, total=4.0, ids=(1, 2)),  # 1 / 2 = 0.5
        answer("b", decode=1.0, counted=4, total=1.0),  # plain decoding failed
        answer("c", decode=1.0, counted=4, total=1.0),  # plain decoding never ran
    ]
    assert measures.speedups(own, plain) == pytest.approx([4.0, 0.5])
    # whole: seconds per id: (20/10) / (8/10) and (10/10) / (4/2)
    assert measures.speedups(own, plain, whole=True) == pytest.approx([2.5, 0.5])
    failed = answer("a", error="crash", decode=1.0, counted=1, total=1.0)
    assert measures.speedups([failed], plain) == []
    assert measures.speedups(plain[:2], plain) == [1.0, 1.0]


def test_interval_of_values() -> None:
    """Claim: the bootstrap is reproducible, holds its figure and shrinks with more samples.

    Fails if the noise is drawn anew each time, or if resamples are not as many as the values.
    """
    values = list(np.random.default_rng(3).normal(2.0, 0.5, 10))
    interval, many = measures.interval(values), measures.interval(values * 16)
    assert interval is not None and many is not None
    assert interval == measures.interval(values)
    assert interval[0] == pytest.approx(np.median(values))
    assert interval[1] < interval[0] < interval[2]
    assert many[0] == pytest.approx(interval[0])
    assert many[2] - many[1] < (interval[2] - interval[1]) / 2
    assert measures.interval([3.0]) == (3.0, 3.0, 3.0)
    assert measures.interval([]) is None
    means = measures.interval(values, np.mean)
    assert means is not None and means[0] == pytest.approx(np.mean(values))
    assert measures.interval(values, np.mean, seed=1) != means


def test_interval_of_tau() -> None:
    """Claim: tau's interval resamples answers, holds tau and has no width for one answer.

    Fails if rounds are resampled: one answer of unlike rounds would then have a width.
    """
    answers: list[Answer] = [
        answer(str(number), "sd", (number % 6, 5, 1), (5, 5, 5)) for number in range(12)
    ]
    interval, many = measures.tau_interval(answers), measures.tau_interval(answers * 16)
    assert interval is not None and many is not None
    assert interval == measures.tau_interval(answers)
    assert interval[0] == pytest.approx(measures.tau(answers))
    assert interval[1] < interval[0] < interval[2]
    assert many[2] - many[1] < (interval[2] - interval[1]) / 2
    alone = measures.tau_interval([SOME])
    assert alone == pytest.approx((10 / 3, 10 / 3, 10 / 3))
    assert measures.tau_interval([answer("a", "hf")]) is None


def test_predicted_speedup_is_tabeds() -> None:
    """Claim: Eq. 1 of TABED, tau / (gamma T_q / T_p + 1), from the run's own numbers.

    Fails if T_q is a round's drafting instead of a step's, or T_p a whole answer's seconds.
    """
    # tau 10/3; gamma 15/3 = 5; T_q = 3 s / 15 steps = 0.2; T_p = mean(4/2, 8/8) = 1.5
    own = answer("a", "sd", (5, 2, 0), (5, 5, 5), draft=3.0)
    plain = [answer("a", "ar", decode=4.0, counted=2), answer("b", "ar", decode=8.0, counted=8)]
    expected = (10 / 3) / (5 * 0.2 / 1.5 + 1)
    assert measures.predicted_speedup([own], plain) == pytest.approx(expected)
    assert expected == pytest.approx(2.0)
    assert measures.predicted_speedup([PLAIN], plain) is None
    assert measures.predicted_speedup([own], []) is None


def test_predicted_io_is_stds() -> None:
    """Claim: Sparse-to-Dense, Sec. 3.3: (gamma (K + m_t) + m_v + m_t) / (alpha gamma), as a share.

    Fails if m_t counts the visual tokens too, or alpha is taken per round.
    """
    # gamma 5, alpha 7/15; m_v 1000, m_t 100, K 60
    own = answer(
        *("a", "std", (5, 2, 0), (5, 5, 5)),
        prompt_tokens=1100,
        visual_tokens=1000,
        draft_visual_tokens=60,
    )
    read = (5 * (60 + 100) + 1000 + 100) / (7 / 15 * 5)
    assert measures.predicted_key_reads([own]) == pytest.approx(read / 1100)
    assert read == pytest.approx(1900 * 3 / 7)
    assert measures.predicted_key_reads([SOME]) is None  # nobody knows what its draft saw
    assert measures.predicted_key_reads([PLAIN]) is None

"""Judges claims about a draft model's views and shapes again, on weights that others trained.

The claims page judges every claim on the embedded pair first, and shows these verdicts in its last
column. The answers are those in ``real-drafts.json``, which ``python -m lab text`` makes: over
documents, which take the place of the papers' videos, and to questions without one. The draft is
the target with rounded weights. It costs what the target does, so no claim about seconds is judged
here. A row is one method's stored answer, and ``row["taken"]`` has the accepted tokens of each
round. Some of these functions also judge answers about clips, in ``seeing.json``, which
``lab.claims.seeing`` sets as the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from lab.claims import sage, sparse_to_dense, specvlm
from lab.claims.claim import ACCEPTED, ACCEPTED_RATIO, StoredResults, json_suites
from lab.claims.rule import (
    HIGHER_RATIO,
    MORE,
    MOST,
    SAME,
    Claimed,
    Comparison,
    Finding,
    Suites,
    Unit,
    alone,
    of_intervals,
    paired,
    printed,
)
from lab.claims.rule import judge as judge_by_rule
from lab.studies.experiment import interval_over_clips
from lab.studies.sage import MIN_TOKENS, autocorrelations, white_noise_band
from lab.studies.text import CODE, SHARES, SUMS, Row, accepted_by_document, rows_by_task

DOCUMENTS = "documents"
SPECVLM, RANDOM, WHOLE_DOCUMENT = "specvlm/keep=0.1", "sd-tree/view=random/keep={:g}", "sd-tree"
LIVE_TREE = "sage/shape=sage-live/rule=formal"
# The length in tokens up to which ``judge_answer_length`` compares answers.
LAST_LENGTH = 64
LAYERSKIP = "layerskip"
Judge = Callable[[StoredResults], Finding]
Pair = tuple[str, str, str]


class AnswerClaim(NamedTuple):
    """A claim that the mean of one number of each answer lies in a range."""

    unit: Unit
    # Computes the number from an answer; None where the claim says nothing of the answer.
    value: Callable[[Row], float | None]
    claimed: Claimed


# The claims of SpecVLM that have this form.
STEADY_ACCEPTANCE = AnswerClaim(
    specvlm.FIRST_ROUNDS, lambda row: specvlm.first_rounds_ratio(tuple(row["taken"])), SAME
)
FIRST_ROUND = AnswerClaim(
    ACCEPTED.unit, lambda row: specvlm.first_round_gain(tuple(row["taken"])), MORE
)
SHARE_WRITTEN = AnswerClaim(
    specvlm.SHARE_OF_TOKENS,
    lambda row: sum(row["taken"]) / (sum(row["taken"]) + len(row["taken"])),
    MOST,
)


def _rows(results: StoredResults, kind: str, where: str) -> Sequence[Row]:
    """Returns the stored rows of one list of the file about one kind of question.

    The list "measured" has an answer a row, and "looked" the entropies along an answer.
    """
    return rows_by_task(results.rows(results.draft_model_file, kind, "text"))[where]


def _suites(
    results: StoredResults, unit: Unit, items: int, methods: Sequence[str], where: str = DOCUMENTS
) -> Suites:
    return json_suites(results, results.draft_model_file, unit, items, methods, where)


def _compare(
    results: StoredResults,
    unit: Unit,
    pairs: Sequence[Pair],
    claimed: Claimed,
    where: Sequence[str] = (DOCUMENTS,),
    first: int | None = None,
) -> Finding:
    """Judges accepted tokens of methods against each other, on the same questions.

    A pair is (label, method, method that it is compared with). ``where`` has the kinds of
    questions. If ``first`` is given, only rounds that begin within so many tokens of an answer
    count.
    """
    comparisons = [
        paired(
            label,
            place,
            unit,
            accepted_by_document(_rows(results, "measured", place), own, first),
            accepted_by_document(_rows(results, "measured", place), other, first),
        )
        for label, own, other in pairs
        for place in where
    ]
    methods = [name for _, *both in pairs for name in both]
    suites = _suites(results, unit, comparisons[0].items, methods)
    every_place = Suites(
        suites.source, tuple(where), suites.visual_tokens, suites.items, suites.outdated
    )
    return judge_by_rule(every_place, unit, claimed, comparisons)


def _measure(results: StoredResults, method: str, claim: AnswerClaim) -> Finding:
    """Judges a claim about one number of each answer, by a method's answers about documents."""
    unit, value, claimed = claim
    rows = [row for row in _rows(results, "measured", DOCUMENTS) if row["method"] == method]
    numbers = [number for row in rows if (number := value(row)) is not None]
    comparison = alone(method, DOCUMENTS, unit, numbers)
    suites = _suites(results, unit, len(numbers), [method])
    return judge_by_rule(suites, unit, claimed, [comparison])


def judge_gain_over_random(results: StoredResults) -> Finding:
    return _compare(results, ACCEPTED.unit, [("less random", SPECVLM, RANDOM.format(0.1))], MORE)


def judge_accuracy_kept(results: StoredResults) -> Finding:
    pairs = [("a tenth over everything", SPECVLM, WHOLE_DOCUMENT)]
    return _compare(results, specvlm.REMAINING, pairs, printed(0.9))


def judge_pruning_at_random(results: StoredResults, keep: float) -> Finding:
    """Judges what a random share ``keep`` of the document leaves of the accepted tokens.

    Where it is a half or more, the claim is that they stay the same, and below that they fall.
    """
    method = RANDOM.format(keep) if keep else f"{WHOLE_DOCUMENT}/view=none"
    claimed = SAME if keep >= 0.5 else printed(0, SAME.low)
    pairs = [(f"{keep:g} kept", method, WHOLE_DOCUMENT)]
    return _compare(results, specvlm.REMAINING, pairs, claimed)


def judge_every_ratio(results: StoredResults) -> Finding:
    pairs = [(f"{keep:g} kept", f"specvlm/keep={keep:g}", RANDOM.format(keep)) for keep in SHARES]
    return _compare(results, ACCEPTED.unit, pairs, MORE)


def judge_both_stages(results: StoredResults) -> Finding:
    parts = {"without stage I": "uniform", "without stage II": "attention"}
    pairs = [(label, SPECVLM, f"{SPECVLM}/view={view}") for label, view in parts.items()]
    return _compare(results, ACCEPTED.unit, pairs, MORE)


def judge_steady_acceptance(results: StoredResults) -> Finding:
    return _measure(results, SPECVLM, STEADY_ACCEPTANCE)


def judge_first_round(results: StoredResults) -> Finding:
    return _measure(results, SPECVLM, FIRST_ROUND)


def judge_trees(results: StoredResults) -> Finding:
    pairs = [("whole", WHOLE_DOCUMENT, "sd"), ("a tenth", SPECVLM, f"{SPECVLM}/shape=chain-5")]
    return _compare(results, ACCEPTED.unit, pairs, MORE)


def judge_layer_skipping(results: StoredResults) -> Finding:
    claim = AnswerClaim(
        sparse_to_dense.RATE, lambda row: row["accepted"], printed(0.037, 0.1, "value")
    )
    return _measure(results, LAYERSKIP, claim)


def judge_share_written(results: StoredResults) -> Finding:
    return _measure(results, SPECVLM, SHARE_WRITTEN)


def judge_entropy_correlation(results: StoredResults) -> Finding:
    unit = sage.AUTOCORRELATION
    comparisons: list[Comparison] = []
    answer_counts = []
    for where in (SUMS, CODE, DOCUMENTS):
        traces = [row["entropies"] for row in _rows(results, "looked", where)]
        traces = [trace for trace in traces if len(trace) >= MIN_TOKENS]
        by_answer = [autocorrelations(trace) for trace in traces]  # Each has a value for each lag.
        by_lag = [interval_over_clips(values) for values in zip(*by_answer, strict=True)]
        noise_by_lag = white_noise_band([len(trace) for trace in traces])
        answer_counts.append(len(traces))
        comparisons += [
            of_intervals(f"lag {lag}", where, unit, interval, float(noise), len(traces))
            for lag, (interval, noise) in enumerate(zip(by_lag, noise_by_lag, strict=True), start=1)
        ]
    suites = Suites(
        results.draft_model_file,
        (SUMS, CODE, DOCUMENTS),
        "0",
        min(answer_counts),
        results.why_outdated(results.draft_model_file, unit),
    )
    return judge_by_rule(suites, unit, MORE, comparisons)


def judge_answer_length(results: StoredResults) -> Finding:
    pairs = [(f"at {LAST_LENGTH} tokens", "sage", SPECVLM)]
    return _compare(results, sage.GAP, pairs, HIGHER_RATIO, first=LAST_LENGTH)


def judge_pruning(results: StoredResults) -> Finding:
    return _compare(results, sage.KEPT_RATIO, [("a tenth kept", "sage", "sage/keep=1")], SAME)


def judge_planning_ahead(results: StoredResults) -> Finding:
    pairs = [("formal", "sage/rule=formal", LIVE_TREE)]
    return _compare(results, ACCEPTED_RATIO.unit, pairs, SAME)


def judge_acceptance(results: StoredResults) -> Finding:
    pairs = [("less SpecVLM", "sage", SPECVLM)]
    return _compare(results, ACCEPTED.unit, pairs, MORE)


def judge_text_alone(results: StoredResults) -> Finding:
    pairs = [("less native SD", "sd/shape=sage", "sd")]
    return _compare(results, ACCEPTED.unit, pairs, MORE, where=(SUMS, CODE))


# The function that judges a claim on the embedded pair -> the one that judges it with this draft.
JUDGES: Mapping[Judge, Judge] = {
    specvlm.judge_gain_over_random: judge_gain_over_random,
    specvlm.judge_accuracy_kept: judge_accuracy_kept,
    specvlm.judge_little_pruning: partial(judge_pruning_at_random, keep=0.5),
    specvlm.judge_much_pruning: partial(judge_pruning_at_random, keep=0.1),
    specvlm.judge_no_video: partial(judge_pruning_at_random, keep=0),
    specvlm.judge_every_ratio: judge_every_ratio,
    specvlm.judge_both_stages: judge_both_stages,
    specvlm.judge_steady_acceptance: judge_steady_acceptance,
    specvlm.judge_first_round: judge_first_round,
    specvlm.judge_trees: judge_trees,
    specvlm.judge_examples: judge_share_written,
    sparse_to_dense.judge_layer_skipping: judge_layer_skipping,
    sage.judge_entropy_correlation: judge_entropy_correlation,
    sage.judge_answer_length: judge_answer_length,
    sage.judge_pruning: judge_pruning,
    sage.judge_planning_ahead: judge_planning_ahead,
    sage.judge_acceptance: judge_acceptance,
    sage.judge_text_alone: judge_text_alone,
}

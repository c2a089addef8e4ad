"""Judges claims again on a pretrained target with a pretrained draft model, Qwen2.5-Coder.

The rule is that of all claims (``lab.claims.rule``), and the verdicts stand in a column of the
claims page. The pair's answers are in ``real-pair-h100.json``, which ``python -m lab real-pair``
makes: to questions about code, to questions of prose, and to tasks about long documents. A view
chooses what part of a document the draft sees. The questions about code and prose come without a
document, so claims about views are judged over documents alone. Every method must have answered the
same documents, so the command needs ``--few-documents`` as large as ``--document-limit``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lab.claims import draft_model, real, sage, sparse_to_dense, specvlm
from lab.claims.claim import ACCEPTED, ACCEPTED_RATIO, Claim, StoredResults
from lab.claims.rule import (
    HIGHER_RATIO,
    MORE,
    Claimed,
    Finding,
    Suites,
    Unit,
    alone,
    paired,
    printed,
)
from lab.claims.rule import judge as judge_by_rule
from lab.studies.text import accepted_by_document

FILE = "real-pair-h100.json"
DOCUMENTS = ("document",)
QUESTIONS = ("code", "prose")
KEEP = 0.25  # The share of a document's tokens that a self-draft attends to.
STD = f"std/keep={KEEP}"
STREAMING = f"streaming/keep={KEEP}"
Row = Mapping[str, Any]
Judge = Callable[[StoredResults], Finding]
Values = Callable[[Sequence[Row], str], Mapping[str, float]]
"""(rows, a method) -> one number of each of the method's answers, by the question's name."""


def _rows(results: StoredResults, suite: str) -> Sequence[Row]:
    """Returns the rows of one suite of questions: "code", "prose" or "document".

    A row's field "document" has the question's name, which begins with the suite's: "code: 3".
    """
    rows: Sequence[Row] = results.rows(FILE, "measured", "real-pair")
    return [row for row in rows if row["document"].startswith(f"{suite}: ")]


def _suites(
    results: StoredResults, names: Sequence[str], unit: Unit, methods: Sequence[str]
) -> Suites:
    """Returns these suites of questions as those by which ``methods`` are compared.

    ``items`` counts the questions that any method answered, in the suite with the fewest.
    """
    items = min(len({row["document"] for row in _rows(results, name)}) for name in names)
    outdated = results.why_outdated(FILE, unit, methods)
    return Suites(FILE, tuple(names), visual_tokens="0", items=items, outdated=outdated)


def _compare(
    results: StoredResults,
    unit: Unit,
    pairs: Sequence[tuple[str, str, str]],
    claimed: Claimed,
    values: Values,
    names: Sequence[str] = DOCUMENTS,
    not_run: str = "",
) -> Finding:
    """Judges methods against each other, on the same questions of each suite in ``names``.

    A pair is (what the page calls the comparison, a method, the method that it is compared with).
    """
    comparisons = [
        paired(label, name, unit, values(rows, own), values(rows, other))
        for name in names
        for rows in [_rows(results, name)]
        for label, own, other in pairs
    ]
    methods = [method for _, *both in pairs for method in both]
    suites = _suites(results, names, unit, methods)
    return judge_by_rule(suites, unit, claimed, comparisons, not_run=not_run)


def _compare_speed(
    results: StoredResults,
    pairs: Sequence[tuple[str, str, str]],
    claimed: Claimed = HIGHER_RATIO,
    not_run: str = "",
) -> Finding:
    return _compare(results, real.SPEED, pairs, claimed, _decoding_speeds, not_run=not_run)


def _compare_accepted(
    results: StoredResults,
    pairs: Sequence[tuple[str, str, str]],
    names: Sequence[str] = DOCUMENTS,
) -> Finding:
    return _compare(results, ACCEPTED.unit, pairs, MORE, accepted_by_document, names)


def _measure(results: StoredResults, method: str, claim: draft_model.AnswerClaim) -> Finding:
    """Judges one number of each document's answer by a method."""
    (name,) = DOCUMENTS
    unit, value, claimed = claim
    rows = [row for row in _rows(results, name) if row["method"] == method]
    numbers = [number for row in rows if (number := value(row)) is not None]
    comparison = alone(method, name, unit, numbers)
    return judge_by_rule(_suites(results, DOCUMENTS, unit, [method]), unit, claimed, [comparison])


def _decoding_speeds(rows: Sequence[Row], method: str) -> Mapping[str, float]:
    return {row["document"]: real.decoding_speed(row) for row in rows if row["method"] == method}


def _acceptance_rates(rows: Sequence[Row], method: str) -> Mapping[str, float]:
    return {row["document"]: row["accepted"] for row in rows if row["method"] == method}


def judge_standard_speedup(results: StoredResults) -> Finding:
    return _compare_speed(results, [("SpecVLM", "specvlm", "ar")], printed(2.00))


def judge_pruning_speedup(results: StoredResults) -> Finding:
    pairs = [("SpecVLM over SD-Tree", "specvlm", "sd-tree")]
    return _compare_speed(results, pairs, not_run="SD-Rand")


def judge_accuracy_kept(results: StoredResults) -> Finding:
    pairs = [("SpecVLM over SD-Tree", "specvlm", "sd-tree")]
    return _compare(results, ACCEPTED_RATIO.unit, pairs, printed(0.9), accepted_by_document)


def judge_trees(results: StoredResults) -> Finding:
    pairs = [("tree less chain", "sd-tree", "sd")]
    return _compare_accepted(results, pairs, (*QUESTIONS, *DOCUMENTS))


def judge_steady_acceptance(results: StoredResults) -> Finding:
    return _measure(results, "specvlm", draft_model.STEADY_ACCEPTANCE)


def judge_first_round(results: StoredResults) -> Finding:
    return _measure(results, "specvlm", draft_model.FIRST_ROUND)


def judge_share_written(results: StoredResults) -> Finding:
    return _measure(results, "specvlm", draft_model.SHARE_WRITTEN)


def judge_std_speedup(results: StoredResults) -> Finding:
    return _compare_speed(results, [("STD", STD, "ar")], printed(1.59))


def judge_std_fastest(results: StoredResults) -> Finding:
    pairs = [("STD over streaming", STD, STREAMING)]
    return _compare_speed(results, pairs, not_run="LayerSkip")


def judge_std_acceptance(results: StoredResults) -> Finding:
    pairs = [("STD less streaming", STD, STREAMING)]
    return _compare(results, real.RATE, pairs, MORE, _acceptance_rates, not_run="LayerSkip")


def judge_sage_acceptance(results: StoredResults) -> Finding:
    return _compare_accepted(results, [("SAGE less SpecVLM", "sage", "specvlm")])


def judge_sage_speed(results: StoredResults) -> Finding:
    others = ("specvlm", "sd-tree", "sd")
    return _compare_speed(results, [(f"SAGE over {other}", "sage", other) for other in others])


def judge_sage_text_alone(results: StoredResults) -> Finding:
    return _compare_accepted(results, [("less native SD", "sage", "sd")], QUESTIONS)


# The function that judges a claim on the embedded pair -> the one that judges it on this pair.
JUDGES: Mapping[Judge, Judge] = {
    specvlm.judge_standard_speedup: judge_standard_speedup,
    specvlm.judge_pruning_speedup: judge_pruning_speedup,
    specvlm.judge_accuracy_kept: judge_accuracy_kept,
    specvlm.judge_trees: judge_trees,
    specvlm.judge_steady_acceptance: judge_steady_acceptance,
    specvlm.judge_first_round: judge_first_round,
    specvlm.judge_examples: judge_share_written,
    sparse_to_dense.judge_speedup: judge_std_speedup,
    sparse_to_dense.judge_fastest: judge_std_fastest,
    sparse_to_dense.judge_acceptance: judge_std_acceptance,
    sage.judge_acceptance: judge_sage_acceptance,
    sage.judge_speed: judge_sage_speed,
    sage.judge_text_alone: judge_sage_text_alone,
}


def cell(claim: Claim, results: StoredResults) -> str:
    """Returns a claim's verdict on this pair for the page, or nothing where none judges it."""
    judge = JUDGES.get(claim.judge)
    return "" if judge is None else f"*pair:* {real.cell_text(judge(results))}"

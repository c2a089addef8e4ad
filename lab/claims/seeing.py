"""Judges claims again on a pretrained language model that was trained to see drawn clips.

The rule is that of all claims (``lab.claims.rule``), and the verdicts stand in a column of the
claims page. The answers about clips are in ``seeing.json``, which ``python -m lab seeing judge``
makes. Its rows have the fields of those about documents (``real.json``), with a clip's name as
"document". So most claims are judged by the functions of ``lab.claims.real``, which are given this
file in place of that one (``StoredResults.on``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lab.claims import hippo, real, sage, sparse_to_dense, specvlm
from lab.claims.claim import TAU_DIFFERENCE, Claim, StoredResults, json_suites
from lab.claims.rule import MORE, Finding, Unit, paired
from lab.claims.rule import judge as judge_by_rule

FILE = "seeing.json"
HOLISTIC = "specvlm/keep=0.1/view=holistic"  # SpecVLM's tree over the tenth that HIPPO chooses.
# The name of a view that chooses without the target's attention -> SpecVLM's tree over it.
UNGUIDED = {
    "random": "sd-tree/view=random/keep=0.1",
    "uniform": "specvlm/keep=0.1/view=uniform",
}
CLIPS = "clips"
Judge = Callable[[StoredResults], Finding]


def _stored_rows(results: StoredResults, kind: str) -> Any:
    return results.rows(FILE, kind, "seeing judge")


def _compare(results: StoredResults, unit: Unit, pairs: list[tuple[str, str, str]]) -> Finding:
    """Judges whether each pair's first method has a higher tau than its second.

    The two taus of a clip are compared, and the mean over clips decides. A pair is (what the page
    calls the comparison, the first method, the second method). ``unit`` says whether a comparison
    is a difference or a ratio.
    """
    taus: dict[str, dict[Any, float]] = {}  # By method, and then by the clip's name.
    for row in _stored_rows(results, "measured"):
        taus.setdefault(row["method"], {})[row["document"]] = row["tau"]
    comparisons = [
        paired(label, CLIPS, unit, taus[own], taus[other]) for label, own, other in pairs
    ]
    methods = [name for _, *both in pairs for name in both]
    suites = json_suites(results, FILE, unit, comparisons[0].items, methods, CLIPS)
    return judge_by_rule(suites, unit, MORE, comparisons)


def judge_criteria(results: StoredResults) -> Finding:
    """Judges whether the tree has a higher tau over HIPPO's choice than over each unguided view."""
    pairs = [(f"less {name}", HOLISTIC, method) for name, method in UNGUIDED.items()]
    return _compare(results, TAU_DIFFERENCE, pairs)


def judge_acceptance(results: StoredResults) -> Finding:
    """Judges whether SAGE has a higher tau than SpecVLM."""
    return _compare(results, TAU_DIFFERENCE, [("less SpecVLM", "sage", "specvlm/keep=0.1")])


# Claims that the functions of ``lab.claims.real`` judge on clips too. Each claim is named here by
# the function that judges it on the embedded pair.
_JUDGED_AS_DOCUMENTS: tuple[Judge, ...] = (
    specvlm.judge_long_tail,
    specvlm.judge_windows,
    specvlm.judge_gain_over_random,
    specvlm.judge_accuracy_kept,
    specvlm.judge_little_pruning,
    specvlm.judge_much_pruning,
    specvlm.judge_no_video,
    specvlm.judge_every_ratio,
    specvlm.judge_steady_acceptance,
    specvlm.judge_first_round,
    specvlm.judge_trees,
    specvlm.judge_examples,
    sparse_to_dense.judge_agreement,
    sparse_to_dense.judge_acceptance,
    sparse_to_dense.judge_fewer_keys,
    sage.judge_answer_length,
)
# The function that judges a claim on the embedded pair -> the one that judges it on clips.
JUDGES: Mapping[Judge, Judge] = {
    **{judge: real.JUDGES[judge] for judge in _JUDGED_AS_DOCUMENTS},
    hippo.judge_criteria: judge_criteria,
    sage.judge_acceptance: judge_acceptance,
}


def cell(claim: Claim, results: StoredResults) -> str:
    """Returns a claim's verdict on clips for the page, or "" where no function judges it.

    Raises OptionError where the run on clips is not stored.
    """
    judge = JUDGES.get(claim.judge)
    if judge is None:
        return ""
    # If the file is missing, this raises the error that names the command for clips. The functions
    # of ``lab.claims.real`` would name the command for documents.
    _stored_rows(results, "measured")
    return f"*clips:* {real.cell_text(judge(results.on(FILE)))}"

"""Judges claims again on a pretrained language model that was trained to see.

Its clips are in ``seeing.json``, which ``python -m lab seeing judge`` makes. Most claims are judged
by the functions that judge documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.claims import hippo, real, sage, sparse_to_dense, specvlm
from lab.claims.claim import (
    Claim,
    Finding,
    StoredResults,
    grade_ordering,
    interval_text,
    mean_difference,
)
from saccade.core.errors import OptionError

FILE = "seeing.json"
UNGUIDED_VIEWS = "random", "uniform"  # Views that choose without the target's attention.
HOLISTIC = "specvlm/keep=0.1/view=holistic"


def _stored_rows(results: StoredResults, kind: str) -> Any:
    path = Path(results.folder, FILE)
    if not path.is_file():
        raise OptionError(f"{path} is missing: python -m lab seeing judge makes it")
    return json.loads(path.read_text())[kind]


def _tau_by_clip(results: StoredResults, method: str) -> list[float]:
    rows = [row for row in _stored_rows(results, "measured") if row["method"] == method]
    return [row["tau"] for row in sorted(rows, key=lambda row: row["document"])]


def judge_criteria(results: StoredResults) -> Finding:
    names = {each: f"specvlm/keep=0.1/view={each}" for each in UNGUIDED_VIEWS}
    names["random"] = "sd-tree/view=random/keep=0.1"
    gains = {
        each: mean_difference(_tau_by_clip(results, HOLISTIC), _tau_by_clip(results, name))
        for each, name in names.items()
    }
    words = ", ".join(f"{each} {interval_text(gain)}" for each, gain in gains.items())
    return Finding(
        grade_ordering([*gains.values()]),
        f"tau of the holistic choice less others' at a tenth: {words}",
    )


def judge_acceptance(results: StoredResults) -> Finding:
    gain = mean_difference(_tau_by_clip(results, "sage"), _tau_by_clip(results, "specvlm/keep=0.1"))
    return Finding(
        grade_ordering([gain]), f"accepted tokens of SAGE less SpecVLM's: {interval_text(gain)}"
    )


# Claims that are judged as documents are, by the functions that judge them on the embedded pair.
_JUDGED_AS_DOCUMENTS = (
    *(
        specvlm.judge_long_tail,
        specvlm.judge_windows,
        sparse_to_dense.judge_agreement,
        sparse_to_dense.judge_acceptance,
    ),
    *(
        sparse_to_dense.judge_fewer_keys,
        specvlm.judge_gain_over_random,
        specvlm.judge_random_pruning,
        specvlm.judge_every_ratio,
    ),
    *(specvlm.judge_steady_acceptance, specvlm.judge_trees, sage.judge_answer_length),
)
# The function that judges a claim on the embedded pair -> the one that judges it on clips.
JUDGES: Mapping[Callable[[StoredResults], Finding], Callable[[StoredResults], Finding]] = {
    **{judge: real.JUDGES[judge] for judge in _JUDGED_AS_DOCUMENTS},
    hippo.judge_criteria: judge_criteria,
    sage.judge_acceptance: judge_acceptance,
}


def cell(claim: Claim, results: StoredResults) -> str:
    """Returns a claim's verdict on clips for the page, or nothing where no function judges it.

    Raises OptionError where the run on clips is not stored.
    """
    judge = JUDGES.get(claim.judge)
    if judge is None:
        return ""
    _stored_rows(results, "measured")  # This raises the error that names the command.
    finding = judge(replace(results, self_draft_file=FILE, draft_model_file=FILE))
    return f"On clips **{finding.verdict}**: {finding.number.replace('document', 'clip')}"

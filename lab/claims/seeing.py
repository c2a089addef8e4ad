"""Claims judged again by a pretrained language model that learnt to see: over the clips of
``seeing.json``, which ``python -m lab seeing judge`` makes, by what judges documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.claims import hippo, real, sage, sparse_to_dense, specvlm
from lab.claims.evidence import Claim, Evidence, Finding, less, ordered, said
from saccade.core.errors import OptionError

FILE = "seeing.json"
UNASKED = "random", "uniform"  # choices that do not ask the target
HOLISTIC = "specvlm/keep=0.1/view=holistic"


def _found(e: Evidence, kind: str) -> Any:
    path = Path(e.folder, FILE)
    if not path.is_file():
        raise OptionError(f"{path} is missing: python -m lab seeing judge makes it")
    return json.loads(path.read_text())[kind]


def _tau(e: Evidence, method: str) -> list[float]:
    rows = [row for row in _found(e, "measured") if row["method"] == method]
    return [row["tau"] for row in sorted(rows, key=lambda row: row["document"])]


def criteria(e: Evidence) -> Finding:
    names = {each: f"specvlm/keep=0.1/view={each}" for each in UNASKED}
    names["random"] = "sd-tree/view=random/keep=0.1"
    gains = {each: less(_tau(e, HOLISTIC), _tau(e, name)) for each, name in names.items()}
    words = ", ".join(f"{each} {said(gain)}" for each, gain in gains.items())
    return Finding(
        ordered([*gains.values()]), f"tau of the holistic choice less others' at a tenth: {words}"
    )


def accepts_more(e: Evidence) -> Finding:
    gain = less(_tau(e, "sage"), _tau(e, "specvlm/keep=0.1"))
    return Finding(ordered([gain]), f"accepted tokens of SAGE less SpecVLM's: {said(gain)}")


# by the function that judges the claim on the embedded pair
_AGAIN = (
    *(specvlm.long_tail, specvlm.windows, sparse_to_dense.agrees, sparse_to_dense.accepts),
    *(sparse_to_dense.fewer_keys, specvlm.over_random, specvlm.insensitive, specvlm.against_random),
    *(specvlm.steady, specvlm.trees, sage.longer),
)
JUDGES: Mapping[Callable[[Evidence], Finding], Callable[[Evidence], Finding]] = {
    **{judge: real.JUDGES[judge] for judge in _AGAIN},
    hippo.criteria: criteria,
    sage.accepts_more: accepts_more,
}


def cell(claim: Claim, evidence: Evidence) -> str:
    """What the page says of a claim beside the column of documents; empty where nothing."""
    judge = JUDGES.get(claim.judge)
    if judge is None:
        return ""
    _found(evidence, "measured")  # or what makes it
    found = judge(replace(evidence, alone=FILE, drafted=FILE))
    return f"On clips **{found.verdict}**: {found.number.replace('document', 'clip')}"

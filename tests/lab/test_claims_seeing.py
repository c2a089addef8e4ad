"""Verdicts on clips, in the claims' last column: from rows written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import claims
from lab.claims import hippo, sage, seeing, specvlm, tabed
from lab.claims.claim import Claim, StoredResults
from saccade.core.errors import OptionError


def claim(judge) -> Claim:
    return next(c for own in claims.CLAIMS.values() for c in own if c.judge is judge)


def written(folder: Path, tau: dict[str, float]) -> StoredResults:
    measured = [
        {"document": f"clip {n}", "method": method, "tau": value + n, "taken": [round(value)] * 3}
        for method, value in tau.items()
        for n in range(6)  # clips differ, the difference of two methods does not
    ]
    (folder / "seeing.json").write_text(json.dumps({"measured": measured}))
    return StoredResults(folder)


def test_a_choice_is_above_those_that_do_not_ask(tmp_path):
    """Claim: HIPPO's choice is judged against each other on the same clips, and wins over all, over
    some or over none of them."""
    others = [
        "sd-tree/view=random/keep=0.1",
        *(f"specvlm/keep=0.1/view={v}" for v in ("uniform",)),
    ]
    for own, verdict in ((4.0, "holds"), (2.5, "partly"), (1.0, "does not hold")):
        tau = {seeing.HOLISTIC: own, **dict(zip(others, (2.0, 3.0), strict=True))}
        told = seeing.cell(claim(hippo.judge_criteria), written(tmp_path, tau))
        assert told.startswith(f"On clips **{verdict}**: ")


def test_acceptance_is_judged_as_over_documents(tmp_path):
    """Claim: what judges documents judges clips, which are called so."""
    names = seeing.real.draft_model.SPECVLM, seeing.real.draft_model.RANDOM.format(0.1)
    e = written(tmp_path, dict(zip(names, (4.0, 3.0), strict=True)))
    assert seeing.cell(claim(specvlm.judge_gain_over_random), e).startswith("On clips **holds**: ")
    tau = {"sage": 3.0, "specvlm/keep=0.1": 4.0}
    told = seeing.cell(claim(sage.judge_acceptance), written(tmp_path, tau))
    assert told.startswith("On clips **does not hold**: ")


def test_what_it_judges_are_claims_of_the_page(tmp_path):
    """Claim: every judge stands beside a claim of the page; others have nothing, and without the
    run the command that makes it is named."""
    known = {each.judge for own in claims.CLAIMS.values() for each in own}
    assert set(seeing.JUDGES) <= known
    assert seeing.cell(tabed.CLAIMS[0], StoredResults(tmp_path)) == ""
    with pytest.raises(OptionError, match="lab seeing judge"):
        seeing.cell(claim(specvlm.judge_gain_over_random), StoredResults(tmp_path))

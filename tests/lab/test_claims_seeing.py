"""Verdicts on clips, in the claims' last column: from rows written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import claims
from lab.claims import draft_model, hippo, sage, seeing, specvlm, tabed
from lab.claims.claim import Claim, StoredResults
from saccade.core.errors import OptionError


def claim(judge) -> Claim:
    return next(c for own in claims.CLAIMS.values() for c in own if c.judge is judge)


def write(folder: Path, tau: dict[str, float]) -> StoredResults:
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
    for own, verdict in ((4.0, "holds"), (2.5, "partly"), (1.0, "does not hold")):
        others = dict(zip(seeing.UNGUIDED.values(), (2.0, 3.0), strict=True))
        results = write(tmp_path, {seeing.HOLISTIC: own, **others})
        text = seeing.cell(claim(hippo.judge_criteria), results)
        assert text.startswith(f"*clips:* **{verdict}** ")


def test_acceptance_is_judged_as_over_documents(tmp_path):
    """Claim: what judges documents judges clips."""
    results = write(tmp_path, {draft_model.SPECVLM: 4.0, draft_model.RANDOM.format(0.1): 3.0})
    text = seeing.cell(claim(specvlm.judge_gain_over_random), results)
    assert text.startswith("*clips:* **holds** 1.00 ")
    results = write(tmp_path, {"sage": 3.0, "specvlm/keep=0.1": 4.0})
    text = seeing.cell(claim(sage.judge_acceptance), results)
    assert text.startswith("*clips:* **does not hold** ")


def test_what_it_judges_are_claims_of_the_page(tmp_path):
    """Claim: every judge stands beside a claim of the page; others have nothing, and without the
    run the command that makes it is named."""
    known = {each.judge for own in claims.CLAIMS.values() for each in own}
    assert set(seeing.JUDGES) <= known
    assert seeing.cell(tabed.CLAIMS[0], StoredResults(tmp_path)) == ""
    with pytest.raises(OptionError, match="lab seeing judge"):
        seeing.cell(claim(specvlm.judge_gain_over_random), StoredResults(tmp_path))

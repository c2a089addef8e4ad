"""Verdicts on real weights about views and shapes of a draft model, from rows written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import claims
from lab.claims import draft_model, real
from lab.claims.claim import StoredResults
from lab.studies.text import CODE, SUMS
from saccade.core.errors import OptionError

COUNT = 6


def write(
    folder: Path, accepted: dict[str, float], where: str = "page", **more: list
) -> StoredResults:
    """Every document accepts so much of a method, another by 1 more than the one before it."""
    measured = [
        {
            "document": f"{where} {number}",
            "method": method,
            "taken": [value + number] * 12,
            "tau": value + 1,
            "accepted": 0.05,
            "drafted": 9.0,
        }
        for method, value in accepted.items()
        for number in range(COUNT)
    ]
    (folder / "real-drafts.json").write_text(json.dumps({"measured": measured, **more}))
    return StoredResults(folder)


def test_gains_are_of_the_same_document(tmp_path):
    """Claim: what is accepted more on each document holds though documents differ by more; what is
    accepted less does not hold, and of two such partly."""
    pairs = {"sd-tree": 3.5, "sd": 3.0, "specvlm/keep=0.1": 2.0}
    results = write(tmp_path, {**pairs, "specvlm/keep=0.1/shape=chain-5": 1.5})
    assert draft_model.judge_trees(results).verdict == "holds"
    assert "a tenth 0.50" in draft_model.judge_trees(results).number
    results = write(tmp_path, {**pairs, "specvlm/keep=0.1/shape=chain-5": 2.5})
    assert draft_model.judge_trees(results).verdict == "partly"
    results = write(tmp_path, {"specvlm/keep=0.1": 2.0, "sd-tree/view=random/keep=0.1": 2.2})
    assert draft_model.judge_gain_over_random(results).verdict == "does not hold"


def test_pruning_at_random(tmp_path):
    """Claim: half is little where acceptance stays within 5 %, a tenth and nothing are much where
    it falls below that; what is one is never the other."""
    whole, half = {"sd-tree": 40.0}, {"sd-tree/view=random/keep=0.5": 40.5}
    results = write(tmp_path, {**whole, **half, "sd-tree/view=none": 10.0})
    assert draft_model.judge_pruning_at_random(results, 0.5).verdict == "holds"
    assert draft_model.judge_pruning_at_random(results, 0).verdict == "holds"
    results = write(tmp_path, {**whole, "sd-tree/view=random/keep=0.1": 40.0})
    assert draft_model.judge_pruning_at_random(results, 0.1).verdict == "does not hold"


def test_answers_by_their_length(tmp_path):
    """Claim: only the rounds that begin within so many tokens are judged."""
    results = write(tmp_path, {"sage": 1.0, "specvlm/keep=0.1": 2.0})
    assert draft_model.judge_answer_length(results).verdict == "does not hold"
    path = tmp_path / "real-drafts.json"
    contents = json.loads(path.read_text())
    for row in contents["measured"]:
        if row["method"] == "sage":
            row["taken"] = [9] * 8 + [0] * 90
    path.write_text(json.dumps(contents))
    assert draft_model.judge_answer_length(results).verdict == "holds"


def test_half_the_layers_are_accepted_as_printed(tmp_path):
    """Claim: 5 % of drafted tokens is within what the paper prints."""
    results = write(tmp_path, {"layerskip": 1.0})
    assert draft_model.judge_layer_skipping(results).verdict == "holds"


def test_what_the_draft_writes(tmp_path):
    """Claim: where every answer's forwards accept over one token the draft writes most, where some
    accept none nothing is shown."""
    for accepted, verdict in ((1.5, "holds"), (0.0, "not shown")):
        results = write(tmp_path, {draft_model.SPECVLM: accepted})
        assert draft_model.judge_share_written(results).verdict == verdict


def test_entropy_that_goes_to_and_fro_does_not_hang_together(tmp_path):
    """Claim: entropies that rise slowly hang together at the first lags, those that alternate do
    not; each kind of question is judged by its own."""
    slow, quick = [number / 60 for number in range(60)], [number % 2 for number in range(60)]
    looked = [
        {"document": f"{where} {number}", "entropies": own}
        for where, own in ((SUMS, slow), (CODE, quick), ("page", slow))
        for number in range(COUNT)
    ]
    finding = draft_model.judge_entropy_correlation(write(tmp_path, {}, looked=looked))
    assert finding.verdict == "partly"
    first = {each.suite: each.interval[0] for each in finding.comparisons if each.label == "lag 1"}
    assert first[SUMS] > 0.5 and first[CODE] < -0.5


def test_text_alone_is_judged_by_both_kinds_of_question(tmp_path):
    """Claim: SAGE's Table 4 holds where SAGE is ahead of native drafting on sums and on
    functions."""
    results = write(tmp_path, {"sd/shape=sage": 2.0, "sd": 1.0}, SUMS)
    rows = json.loads((tmp_path / "real-drafts.json").read_text())["measured"]
    rows += [{**row, "document": row["document"].replace(SUMS, CODE)} for row in rows]
    (tmp_path / "real-drafts.json").write_text(json.dumps({"measured": rows}))
    assert draft_model.judge_text_alone(results).verdict == "holds"


def test_every_judge_stands_beside_a_claim_and_names_its_command(tmp_path):
    """Claim: no judge is without a claim, and without its file the command is named."""
    known = {claim.judge for own in claims.CLAIMS.values() for claim in own}
    assert set(draft_model.JUDGES) <= known and draft_model.JUDGES.items() <= real.JUDGES.items()
    with pytest.raises(OptionError, match="python -m lab text"):
        draft_model.judge_text_alone(StoredResults(tmp_path))

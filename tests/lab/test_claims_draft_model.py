"""Verdicts on real weights about views and shapes of a draft model, from rows written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import claims
from lab.claims import draft_model, real, sage, sparse_to_dense
from lab.claims.claim import StoredResults
from lab.studies.text import CODE, METHODS_OVER_DOCUMENTS, SHARES, SUMS
from saccade.core.errors import OptionError

COUNT = 6


def written(
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
    evidence = written(tmp_path, {**pairs, "specvlm/keep=0.1/shape=chain-5": 1.5})
    assert draft_model.judge_trees(evidence).verdict == "holds"
    assert "0.50 [0.50, 0.50] (a tenth)" in draft_model.judge_trees(evidence).number
    evidence = written(tmp_path, {**pairs, "specvlm/keep=0.1/shape=chain-5": 2.5})
    assert draft_model.judge_trees(evidence).verdict == "partly"
    evidence = written(tmp_path, {"specvlm/keep=0.1": 2.0, "sd-tree/view=random/keep=0.1": 2.2})
    assert draft_model.judge_gain_over_random(evidence).verdict == "does not hold"


def test_pruning_at_random(tmp_path):
    """Claim: little lost at a half and much at a tenth is what was claimed; more lost at a half,
    and still more beyond, is half of it; where most is lost at a half, nothing of it holds."""
    whole, none = {"sd-tree": 4.0}, {"sd-tree/view=none": 0.5}
    for half, verdict in ((4.0, "holds"), (3.2, "partly"), (1.6, "does not hold")):
        taken = {0.5: half, 0.25: 1.0, 0.1: 0.5, 0.05: 0.5}
        random = {f"sd-tree/view=random/keep={keep:g}": taken[keep] for keep in SHARES}
        assert (
            draft_model.judge_random_pruning(written(tmp_path, whole | random | none)).verdict
            == verdict
        )


def test_a_pruned_draft_that_accepts_alike_holds_in_part(tmp_path):
    """Claim: acceptance that stays to a tenth is half the claim, since no seconds are judged."""
    shares = {method: 4.0 for method in METHODS_OVER_DOCUMENTS if method.startswith("sage")}
    assert draft_model.judge_pruning(written(tmp_path, shares)).verdict == "partly"
    assert (
        draft_model.judge_pruning(written(tmp_path, shares | {"sage": 1.0})).verdict
        == "does not hold"
    )


def test_answers_by_their_length(tmp_path):
    """Claim: the first so many tokens are judged by the rounds that began in them."""
    evidence = written(tmp_path, {"sage": 1.0, "specvlm/keep=0.1": 1.0})
    assert draft_model.judge_answer_length(evidence).verdict == "does not hold"
    path = tmp_path / "real-drafts.json"
    found = json.loads(path.read_text())
    for row in found["measured"]:
        if row["method"] == "sage":
            row["taken"] = [1] * 8 + [7] * 12
    path.write_text(json.dumps(found))
    told = draft_model.judge_answer_length(evidence)
    assert told.verdict == "partly" and "SAGE 1.00 over the first 16" in told.number


def test_half_the_layers_by_the_weights_they_read(tmp_path):
    """Claim: a chain of nine halves and a whole that emits two tokens is slower than two wholes."""
    evidence = written(tmp_path, {"layerskip": 1.0})
    assert draft_model.judge_layer_skipping(evidence).number == (
        "accepts 5.0%; by the weights read 0.36x plain decoding"
    )
    assert draft_model.judge_layer_skipping(evidence).verdict == "holds"
    assert (
        sparse_to_dense.grade_layer_skipping(0.009, 0.2) == "partly"
    )  # slower, but by accepting less than said
    assert sparse_to_dense.grade_layer_skipping(0.07, 1.2) == "does not hold"


def test_what_the_draft_writes(tmp_path):
    """Claim: where every answer's forwards accept over one token the draft writes most, where some
    accept none it is not told apart."""
    assert (
        draft_model.judge_share_written(written(tmp_path, {draft_model.SPECVLM: 1.5})).verdict
        == "holds"
    )
    assert (
        draft_model.judge_share_written(written(tmp_path, {draft_model.SPECVLM: 0.0})).verdict
        == "partly"
    )


def test_entropy_that_goes_to_and_fro_does_not_hang_together(tmp_path):
    """Claim: entropies that rise slowly hang together at the first lags, those that alternate do
    not; each kind of question is judged by its own."""
    slow, quick = [number / 60 for number in range(60)], [number % 2 for number in range(60)]
    looked = [
        {"document": f"{where} {number}", "entropies": own}
        for where, own in ((SUMS, slow), (CODE, quick), ("page", slow))
        for number in range(COUNT)
    ]
    told = draft_model.judge_entropy_correlation(written(tmp_path, {}, looked=looked))
    assert told.verdict == "partly" and f"{CODE} (6): lag 1 -1.00" in told.number
    assert f"{SUMS} (6): lag 1 1.00" in told.number


def test_text_alone_is_judged_by_both_kinds_of_question(tmp_path):
    """Claim: SAGE's Table 4 holds where SAGE is ahead of native drafting on sums and on functions;
    the embedded pair is not asked."""
    evidence = written(tmp_path, {"sd/shape=sage": 2.0, "sd": 1.0}, SUMS)
    found = json.loads((tmp_path / "real-drafts.json").read_text())["measured"]
    found += [{**row, "document": row["document"].replace(SUMS, CODE)} for row in found]
    (tmp_path / "real-drafts.json").write_text(json.dumps({"measured": found}))
    assert (
        draft_model.judge_text_alone(evidence).verdict == "holds"
        and sage.judge_text_alone(evidence).number == ""
    )


def test_every_judge_stands_beside_a_claim_and_names_its_command(tmp_path):
    known = {claim.judge for own in claims.CLAIMS.values() for claim in own}
    assert set(draft_model.JUDGES) <= known and draft_model.JUDGES.items() <= real.JUDGES.items()
    with pytest.raises(OptionError, match="python -m lab text"):
        draft_model.judge_text_alone(StoredResults(tmp_path))

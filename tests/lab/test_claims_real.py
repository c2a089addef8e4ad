"""The second column of the claims page: verdicts on real weights, from rows written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import claims
from lab.claims import real, sparse_to_dense
from lab.claims.claim import StoredResults
from saccade.core.errors import OptionError

STORED = StoredResults(Path(__file__).parents[2] / "docs" / "results")
JUDGED = "SpecVLM", "Sparse-to-Dense", "SAGE"


def rows(tau: dict[str, float], accepted: dict[str, float]) -> list[dict]:
    return [
        {
            "document": str(number),
            "method": method,
            "tau": value + number,  # documents differ, the difference of two methods does not
            "accepted": accepted.get(method, 0.5),
            "prompt_tokens": 1000,
            "kept": 100,
        }
        for method, value in tau.items()
        for number in range(6)
    ]


def written(folder: Path, **found: list) -> StoredResults:
    (folder / "real.json").write_text(json.dumps(found))
    return StoredResults(folder)


def test_orderings_are_of_the_same_documents(tmp_path):
    """Claim: attention above a window holds where each document gains, and a loss does not hold."""
    for shares, verdict in (((0.8, 0.7), "holds"), ((0.7, 0.8), "does not hold")):
        sets = dict(zip((real._SHARED_SET, "streaming: sinks and the last"), shares, strict=True))
        looked = [
            {"chosen": name, "keep": keep, "agrees": share - number / 100}
            for name, share in sets.items()
            for keep in real.KEEPS
            for number in range(6)  # documents differ, the difference of two sets does not
        ]
        evidence = written(tmp_path, measured=[], looked=looked)
        assert real.judge_windows(evidence).verdict == verdict
    assert real.judge_windows(evidence).number.endswith("-0.10 [-0.10, -0.10] at 0.25")


def test_speed_is_of_the_timed_run(tmp_path):
    """Claim: Sparse-to-Dense's speedup is judged by the run in which documents shared nothing."""
    seconds = {"ar": 4.0, "std/keep=0.1": 8.0, "std/keep=0.25": 2.0}
    timed = [
        {"method": method, "decode_seconds": took, "prompt_tokens": 7539}
        for method, took in seconds.items()
    ]
    (tmp_path / "real-8k.json").write_text(json.dumps({"measured": timed}))
    told = real.judge_speedup(StoredResults(tmp_path))
    assert told.verdict == "partly"
    assert told.number == "0.50x at 0.1, 2.00x at 0.25, one document of 7,539 tokens"


def test_seconds_are_of_documents_one_by_one(tmp_path):
    """Claim: a faster std is half of what is claimed, a slower one nothing; seconds follow the keys
    where they fall as the keys do; of shared forwards nothing is said, but why."""
    judged = real.judge_fastest, real.judge_time_by_keys
    # nine steps over 190 of 1,000 keys and one over all: 2,710 keys for two tokens, 1.355 of plain
    one = dict(prompt_tokens=1000, tokens=21, tau=2.0, drafted=9.0)
    seconds = {"ar": 2.0, "std/keep=0.1": 2.71, "streaming/keep=0.1": 3.0}
    seconds |= {"std/keep=0.25": 6.0, "streaming/keep=0.25": 3.0}
    measured = [
        {**one, "method": method, "kept": 225 if "25" in method else 90, "decode_seconds": took}
        for method, took in seconds.items()
        for _ in range(6)
    ]
    path = tmp_path / "real.json"
    path.write_text(json.dumps({"measured": measured, "together": 1}))
    found = [judge(StoredResults(tmp_path)) for judge in judged]
    assert [each.verdict for each in found if each] == ["partly", "partly"]
    assert found[1] is not None and found[1].number.endswith("1.0 at 0.1, 1.5 at 0.25")
    path.write_text(json.dumps({"measured": measured, "together": 5}))
    assert [judge(StoredResults(tmp_path)) for judge in judged] == [None, None]
    claim = next(c for c in sparse_to_dense.CLAIMS if c.judge is sparse_to_dense.judge_fastest)
    assert real.cell(claim, StoredResults(tmp_path)) == real.UNJUDGED[claim.judge]


def test_acceptance_and_keys(tmp_path):
    """Claim: std is accepted most where it is at both shares; fewer keys are read where alpha is
    above the share kept and a ninth."""
    accepted = {"std/keep=0.1": 0.6, "std/keep=0.25": 0.15, "streaming/keep=0.25": 0.2}
    tau = dict.fromkeys([f"{m}/keep={k}" for m in ("std", "streaming") for k in real.KEEPS], 1.0)
    evidence = written(tmp_path, measured=rows(tau, accepted), looked=[])
    assert real.judge_acceptance(evidence).verdict == "partly"
    assert real.judge_fewer_keys(evidence).verdict == "partly"  # .6 and .15 against .1 + 1/9


def test_looks(tmp_path):
    """Claim: a tenth with nine tenths of the mass is a long tail, one with a tenth is none; the
    next token is the same where it is 95 % of the time."""
    names = ("oracle, shared by all heads", "oracle: each head's top now", real._STATIC_SET)
    for mass, verdict in ((0.9, "holds"), (0.1, "does not hold")):
        looked = [
            {"document": "a", "chosen": name, "keep": keep, "mass": mass, "agrees": 0.96}
            for name in names
            for keep in real.KEEPS
        ]
        evidence = written(tmp_path, measured=[], looked=looked)
        assert real.judge_long_tail(evidence).verdict == verdict
        assert real.judge_agreement(evidence).verdict == "holds"


def test_what_it_judges_are_claims_of_the_page():
    """Claim: every judge, and every reason why there is none, stands beside a claim of the page; of
    SpecVLM, Sparse-to-Dense and SAGE each claim has one or the other, and other papers' neither."""
    known = {claim.judge for own in claims.CLAIMS.values() for claim in own}
    assert {*real.JUDGES, *real.UNJUDGED} <= known
    assert all(real.cell(c, STORED) for paper in JUDGED for c in claims.CLAIMS[paper])
    others = [c for paper in set(claims.CLAIMS) - set(JUDGED) for c in claims.CLAIMS[paper]]
    assert not any(real.cell(c, StoredResults(Path("nowhere"))) for c in others)
    judged = next(c for c in sparse_to_dense.CLAIMS if c.judge in real.JUDGES)
    with pytest.raises(OptionError, match="saccade bench real"):
        real.cell(judged, StoredResults(Path("nowhere")))

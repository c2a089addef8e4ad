"""The last column of the claims page: verdicts on real weights, from rows written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import claims
from lab.claims import real, sparse_to_dense
from lab.claims.claim import StoredResults
from saccade.core.errors import OptionError

STORED = StoredResults(Path(__file__).parents[2] / "docs" / "results")
COUNT = 6


def write(folder: Path, file: str = "real.json", **sections: list) -> StoredResults:
    (folder / file).write_text(json.dumps(sections))
    return StoredResults(folder)


def looks(chosen: str, keep: float, **values: float) -> list[dict]:
    """Every document has its own values, and the difference of two sets is the same in each."""
    return [
        {
            "document": str(number),
            "chosen": chosen,
            "keep": keep,
            **{name: value - number / 100 for name, value in values.items()},
        }
        for number in range(COUNT)
    ]


def test_orderings_are_of_the_same_documents(tmp_path):
    """Claim: attention above a window holds where each document gains, and a loss does not hold."""
    for shares, verdict in (((0.8, 0.7), "holds"), ((0.7, 0.8), "does not hold")):
        looked = [
            row
            for name, share in zip((real.SHARED_SET, real.WINDOW_SET), shares, strict=True)
            for keep in real.KEEPS
            for row in looks(name, keep, agrees=share)
        ]
        finding = real.judge_windows(write(tmp_path, measured=[], looked=looked))
        assert finding.verdict == verdict
    assert finding.number.endswith("at 0.25 -0.10")


def test_one_document_decides_nothing(tmp_path):
    """Claim: a speedup measured on a single document is not shown, however large it is."""
    seconds = {"ar": 4.0, "std/keep=0.1": 1.0, "std/keep=0.25": 1.0}
    timed = [
        {"document": "a", "method": method, "decode_seconds": took, "tokens": 64}
        for method, took in seconds.items()
    ]
    results = write(tmp_path, real.LONG_FILE, measured=timed)
    assert real.judge_speedup(results).verdict == "not shown"


def test_seconds_follow_keys_read(tmp_path):
    """Claim: nine steps over 190 of 1,000 keys and one over all are 2,710 keys for two tokens,
    1.355 of plain decoding's: as many times its seconds holds, and more does not."""
    one = {"prompt_tokens": 1000, "tokens": 21, "tau": 2.0, "drafted": 9.0}
    for slowdown, verdict in ((1.0, "holds"), (1.5, "does not hold")):
        seconds = {"ar": 2.0, "std/keep=0.1": 2.71 * slowdown, "std/keep=0.25": 3.925 * slowdown}
        measured = [
            {
                **one,
                "document": str(number),
                "method": method,
                "kept": 225 if "25" in method else 90,
                "decode_seconds": took,
            }
            for method, took in seconds.items()
            for number in range(COUNT)
        ]
        finding = real.judge_time_by_keys(write(tmp_path, measured=measured))
        assert finding.verdict == verdict, finding.number


def test_acceptance_and_keys(tmp_path):
    """Claim: std is accepted most where it is at both shares; fewer keys are read where alpha is
    above the share kept and one over an answer's own gamma, be it nine or one."""
    accepted = {"std/keep=0.1": 0.6, "std/keep=0.25": 0.15}
    accepted |= {"streaming/keep=0.1": 0.5, "streaming/keep=0.25": 0.2}
    measured = [
        {
            "document": str(number),
            "method": method,
            "accepted": value + number / 1000,
            "prompt_tokens": 1000,
            "kept": 100,
            "drafted": 9.0,
        }
        for method, value in accepted.items()
        for number in range(COUNT)
    ]
    short_drafts = [{**row, "drafted": 1.0} for row in measured]
    results = write(tmp_path, measured=short_drafts, looked=[])
    assert real.judge_fewer_keys(results).verdict == "does not hold"
    results = write(tmp_path, measured=measured, looked=[])
    assert real.judge_acceptance(results).verdict == "partly"
    assert real.judge_fewer_keys(results).verdict == "partly"  # .6 and .15 against .1 + 1/9


def test_looks(tmp_path):
    """Claim: a tenth with nine tenths of the mass is a long tail, one with a tenth is none. Next
    tokens that stay are shown and decide nothing, because the paper names no K."""
    names = ("oracle, shared by all heads", real.CURRENT_SET, real.STATIC_SET)
    for mass, verdict in ((0.9, "holds"), (0.2, "does not hold")):
        looked = [
            row
            for name in names
            for keep in real.KEEPS
            for row in looks(name, keep, mass=mass, agrees=0.99)
        ]
        results = write(tmp_path, measured=[], looked=looked)
        assert real.judge_long_tail(results).verdict == verdict
        assert real.judge_agreement(results).verdict == "not testable here"


def test_what_it_judges_are_claims_of_the_page():
    """Claim: every judge stands beside a claim of the page, other claims have an empty cell, and
    without the file the command that makes it is named."""
    known = {claim.judge for own in claims.CLAIMS.values() for claim in own}
    assert {*real.JUDGES} <= known
    others = [c for own in claims.CLAIMS.values() for c in own if c.judge not in real.JUDGES]
    assert not any(real.cell(c, StoredResults(Path("nowhere"))) for c in others)
    judged = next(c for c in sparse_to_dense.CLAIMS if c.judge in real.JUDGES)
    with pytest.raises(OptionError, match="python -m lab real"):
        real.cell(judged, StoredResults(Path("nowhere")))

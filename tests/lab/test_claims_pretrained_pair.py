"""Verdicts on the pretrained pair, in the claims' last column: from rows written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import claims
from lab.claims import pretrained_pair, sage, sparse_to_dense, specvlm, tabed
from lab.claims.claim import Claim, StoredResults
from saccade.core.errors import OptionError


def claim(judge) -> Claim:
    return next(c for own in claims.CLAIMS.values() for c in own if c.judge is judge)


def write(folder: Path, rows: dict[tuple[str, str], dict]) -> StoredResults:
    """Stores six answers by each (suite, method), all with the row's numbers."""
    measured = [
        {"document": f"{suite}: {n}", "method": method, "tokens": 11, **row}
        for (suite, method), row in rows.items()
        for n in range(6)
    ]
    (folder / pretrained_pair.FILE).write_text(json.dumps({"measured": measured}))
    return StoredResults(folder)


def test_speed_is_compared_by_seconds_of_decoding(tmp_path):
    """Claim: a method twice as fast as plain decoding over documents holds, and questions about
    code, on which views change nothing, are not counted."""
    for seconds, verdict in ((0.4, "holds"), (1.0, "does not hold")):
        results = write(
            tmp_path,
            {
                ("document", "specvlm"): {"decode_seconds": seconds},
                ("document", "ar"): {"decode_seconds": 1.0},
                ("code", "specvlm"): {"decode_seconds": 1.0},
                ("code", "ar"): {"decode_seconds": 1.0},
            },
        )
        text = pretrained_pair.cell(claim(specvlm.judge_standard_speedup), results)
        assert text.startswith(f"*pair:* **{verdict}** ")


def test_trees_are_judged_over_every_kind_of_prompt(tmp_path):
    """Claim: trees that accept more in code and prose, and less in documents, hold partly."""
    kinds = {"code": [3, 3], "prose": [3, 3], "document": [1, 1]}
    rows = {(kind, "sd-tree"): {"taken": taken} for kind, taken in kinds.items()}
    rows |= {(kind, "sd"): {"taken": [2, 2]} for kind in kinds}
    text = pretrained_pair.cell(claim(specvlm.judge_trees), write(tmp_path, rows))
    assert text.startswith("*pair:* **partly** ")


def test_acceptance_of_text_is_judged_over_questions_alone(tmp_path):
    rows = {("code", "sage"): {"taken": [3]}, ("code", "sd"): {"taken": [2]}}
    rows |= {("prose", method): row for (_, method), row in rows.items()}
    rows |= {("document", "sage"): {"taken": [0]}, ("document", "sd"): {"taken": [2]}}
    text = pretrained_pair.cell(claim(sage.judge_text_alone), write(tmp_path, rows))
    assert text.startswith("*pair:* **holds** ")


def test_what_it_judges_are_claims_of_the_page(tmp_path):
    """Claim: every judge stands beside a claim of the page; others have nothing, and without the
    run the command that makes it is named."""
    known = {each.judge for own in claims.CLAIMS.values() for each in own}
    assert set(pretrained_pair.JUDGES) <= known
    assert pretrained_pair.cell(tabed.CLAIMS[0], StoredResults(tmp_path)) == ""
    with pytest.raises(OptionError, match="lab real-pair"):
        pretrained_pair.cell(claim(sparse_to_dense.judge_speedup), StoredResults(tmp_path))

"""Claims about ``python -m lab head-trial``: what its table counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Call

from lab.studies import head_trial
from saccade.core.result import RoundRecord
from saccade.inputs import load

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.extra
def test_a_row_is_counted_from_rounds() -> None:
    """Claim: tau counts the target's own tokens and no opening round, a tree counts its levels, and
    the ratio is tau over the bytes of one target forward and of those levels. Fails if a tree's
    nodes count as steps, or if a draft's steps cost nothing."""
    opening = RoundRecord((), (), (), 7, "recovered", 0, 0, opening=True)
    tree = RoundRecord((1, 2, 3), (-1, -1, 0), (1, 3), 4, "bonus", 0, 0)
    refused = RoundRecord((5,), (-1,), (), 6, "recovered", 0, 0)
    draft = head_trial.Draft("head", load("shapes").backbone, ("head",), 10, step_bytes=50)
    row = head_trial.summarize(
        [opening, tree, refused], 100, draft, "head", "captions", answers=1, equal_answers=1
    )
    assert (row.tau, row.steps) == (2.0, 1.5)
    assert row.ratio == pytest.approx(2 * 100 / (100 + 1.5 * 50))


def test_other_sizes_are_refused_before_any_training(call: Call, tmp_path: Path) -> None:
    """Claim: a size that no clips have is refused in a sentence that names those there are."""
    code, _, error = call("head-trial", tmp_path / "head", "--visual-tokens", 65)
    assert code == 2 and "64, 256" in error
    assert not (tmp_path / "head").exists()

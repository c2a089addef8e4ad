"""Claims about ``python -m lab methods``."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.hardware.methods import compare_on_clip
from saccade.inputs import Pair, load_pair


@pytest.mark.extra
def test_methods_that_the_pair_cannot_run_are_left_out(pair: Path) -> None:
    """Claim: a method that needs a head, which the embedded pair has not, has no row, and the
    others have theirs. Fails if it ends the whole comparison."""
    models = Pair(*load_pair("shapes", "shapes-draft"))
    facts = compare_on_clip(models, 20_000_002, ["sd", "head"], repeat=1, tokens=4)
    assert list(facts["methods"]) == ["ar", "sd"]
    assert all(row["identical_to_ar"] for row in facts["methods"].values())

"""Claims about ``python -m lab cost`` as a command."""

from __future__ import annotations

import json

import pytest
from commands import Call

from lab.hardware import profile

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "BARE_CYCLES", 2)


@pytest.mark.extra
def test_cost_imposes_the_given_acceptance(call: Call) -> None:
    """Claim: at two accepted tokens a round tau is 3, whatever the models say."""
    words = ("--methods", "sd/shape=chain-3", "--accepted", 2, "--suite", "shapes-qa")
    words = ("cost", *words, "--repeat", 1, "--max-new-tokens", 13, "--json")
    code, printed, error = call(*words)
    assert code == 0, error
    plain, own = json.loads(printed)["methods"]
    assert (plain["method"], plain["tau"]) == ("ar", 1)
    assert (own["method"], own["tau"], own["gamma"], own["rows"]) == ("sd/shape=chain-3", 3, 3, 4)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--methods", "hippo"), "hippo"),
        (("--methods", "magic"), "magic"),
        (("--rates", "0.9,high"), "high"),
    ],
)
def test_refused_in_a_sentence(call: Call, words: tuple[str, ...], named: str) -> None:
    """Claim: what has no profile, or is no method or rate, is one sentence that names it."""
    code, printed, error = call("cost", *words)
    assert code == 2 and printed == "" and "Traceback" not in error
    assert named in error and len(error.strip().splitlines()) == 1

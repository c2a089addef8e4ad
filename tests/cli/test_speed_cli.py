"""Claims about ``saccade bench speed | profile | cost`` as commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.bench import profile

Call = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "CYCLES", 2)


def test_speed_as_json(call: Call, tmp_path: Path) -> None:
    """Claim: every ratio of the parts asked for with its goal, who differed, and the machine; the
    same in the file; the exit code is 0 whether goals are met or not."""
    path = tmp_path / "speed.json"
    words = ("--only", "useless", "--clips", 1, "--repeat", 1, "--json", "--out", path)
    code, printed, said = call("bench", "speed", *words)
    assert code == 0, said
    found = json.loads(printed)
    assert json.loads(path.read_text()) == found
    assert found["environment"]["threads"] == 1 and found["target"] == "shapes"
    assert [ratio["goal"] for ratio in found["ratios"]] == [0.98, 0.95, 0.98, 0.95]
    for ratio in found["ratios"]:
        assert set(ratio) == {"part", "name", "value", "goal", "met", "interval", "detail"}
        assert ratio["met"] is (ratio["value"] >= ratio["goal"]) and ratio["interval"] is None
    for part in found["parts"]:
        assert part["identical"] is True and part["differing"] == [] and part["errors"] == {}
        assert part["clips"] == ["shapes-caption-256-60000000"]
        assert set(part["methods"]) == {"ar", "auto"} and part["methods"]["ar"]["tau"] == 1
        assert part["methods"]["auto"]["fallback"] is None


def test_an_unknown_part_is_refused(call: Call) -> None:
    """Claim: one sentence that names it and what there is, before anything is loaded."""
    code, printed, said = call("bench", "speed", "--only", "sideways")
    assert code == 2 and printed == "" and len(said.strip().splitlines()) == 1
    assert "sideways" in said and "decode-2k" in said


def test_a_file_that_cannot_be_is_refused_at_once(call: Call, tmp_path: Path) -> None:
    """Claim: no folder, no run. Fails if half an hour is measured and lost."""
    code, printed, said = call("bench", "speed", "--out", tmp_path / "no" / "speed.json")
    assert code == 2 and printed == "" and "no folder" in said


def test_a_profile(call: Call) -> None:
    """Claim: a line a method, plain decoding first; as JSON the figures it is made of."""
    words = ("--suite", "shapes-qa", "--limit", 1, "--repeat", 1, "--max-new-tokens", 8)
    words = ("bench", "profile", "--methods", "sd/shape=chain-2", *words)
    code, printed, said = call(*words)
    assert code == 0, said
    head, plain, own, *_ = printed.splitlines()
    assert head.split()[0] == "method" and head.split()[-1] == "share"
    assert plain.startswith("ar ") and plain.rstrip().endswith("100%")
    assert own.startswith("sd/shape=chain-2 ")
    code, printed, said = call(*words, "--json")
    assert code == 0, said
    found = json.loads(printed)
    assert [each["method"] for each in found["methods"]] == ["ar", "sd/shape=chain-2"]
    assert found["environment"]["threads"] == 1 and found["suite"] == "shapes-qa"


def test_cost_imposes_what_it_is_told(call: Call) -> None:
    """Claim: at two accepted tokens a round tau is 3, whatever the models say."""
    words = ("--methods", "sd/shape=chain-3", "--accepted", 2, "--suite", "shapes-qa")
    words = ("bench", "cost", *words, "--repeat", 1, "--max-new-tokens", 12, "--json")
    code, printed, said = call(*words)
    assert code == 0, said
    plain, own = json.loads(printed)["methods"]
    assert (plain["method"], plain["tau"]) == ("ar", 1)
    assert (own["method"], own["tau"], own["gamma"], own["rows"]) == ("sd/shape=chain-3", 3, 3, 4)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("profile", "--methods", "hippo"), "hippo"),
        (("profile", "--methods", "magic"), "magic"),
        (("cost", "--methods", "hippo"), "hippo"),
        (("cost", "--rates", "0.9,high"), "high"),
    ],
)
def test_refused_in_a_sentence(call: Call, words: tuple[str, ...], named: str) -> None:
    """Claim: what has no profile, or is no method or rate, is one sentence that names it."""
    code, printed, said = call("bench", *words)
    assert code == 2 and printed == "" and "Traceback" not in said
    assert named in said and len(said.strip().splitlines()) == 1

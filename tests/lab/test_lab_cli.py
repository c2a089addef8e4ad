"""Claims about the commands of ``python -m lab``: speed, and the pages made of stored runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from commands import Call

from lab import chart
from saccade.bench import records, report

RESULTS = Path(__file__).parents[2] / "docs" / "results"

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.slow
def test_speed_as_json(call: Call, tmp_path: Path) -> None:
    """Claim: every ratio of the parts asked for with its goal, who differed, and the machine; the
    same in the file; the exit code is 0 whether goals are met or not."""
    path = tmp_path / "speed.json"
    words = ("--only", "useless", "--clips", 1, "--repeat", 1, "--json", "--out", path)
    code, printed, error = call("speed", *words)
    assert code == 0, error
    results = json.loads(printed)
    assert json.loads(path.read_text()) == results
    assert results["environment"]["threads"] == 1 and results["target"] == "shapes"
    assert [ratio["goal"] for ratio in results["ratios"]] == [0.98, 0.95, 0.98, 0.95]
    for ratio in results["ratios"]:
        assert set(ratio) == {"part", "name", "value", "goal", "met", "interval", "detail"}
        assert ratio["met"] is (ratio["value"] >= ratio["goal"]) and ratio["interval"] is None
    for part in results["parts"]:
        assert part["identical"] is True and part["differing"] == [] and part["errors"] == {}
        assert part["clips"] == ["shapes-caption-256-60000000"]
        assert set(part["methods"]) == {"ar", "auto"} and part["methods"]["ar"]["tau"] == 1
        assert part["methods"]["auto"]["fallback"] is None


def test_an_unknown_part_is_refused(call: Call) -> None:
    """Claim: one sentence that names it and what there is, before anything is loaded."""
    code, printed, error = call("speed", "--only", "sideways")
    assert code == 2 and printed == "" and len(error.strip().splitlines()) == 1
    assert "sideways" in error and "decode-2k" in error


def test_a_file_that_cannot_be_is_refused_at_once(call: Call, tmp_path: Path) -> None:
    """Claim: no folder, no run. Fails if half an hour is measured and lost."""
    code, printed, error = call("speed", "--out", tmp_path / "no" / "speed.json")
    assert code == 2 and printed == "" and "no folder" in error


def test_an_unknown_stage_is_refused(call: Call) -> None:
    """Claim: one sentence that names it, before anything is trained."""
    code, printed, error = call("train", "--stages", "nap")
    assert code == 2 and printed == "" and "nap" in error and len(error.strip().splitlines()) == 1


def test_a_report_ends_with_the_papers_tables(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: the report is the wheel's own and, below it, the tables of the papers."""
    monkeypatch.setattr(report.figures, "draw_figures", lambda *given: [])
    shutil.copy(RESULTS / "bench-2k" / "results.jsonl.gz", tmp_path)
    code, printed, error = call("report", tmp_path)
    assert code == 0 and "report.md" in printed, error
    own = report.report_markdown(*records.read_run(tmp_path))
    page = (tmp_path / "report.md").read_text()
    assert page.startswith(own) and "papers' layouts" not in own
    assert page[len(own) :].lstrip().startswith("## In the papers' layouts")


@pytest.mark.slow
def test_the_page_of_numbers_is_written_anew(call: Call, tmp_path: Path) -> None:
    """Claim: the command puts the tables of the stored runs into a page whose tables are empty, and
    every chart beside it. Fails if it keeps a number that is there."""
    stored = (RESULTS.parent / "numbers.md").read_text()
    page = tmp_path / "numbers.md"
    page.write_text(
        re.sub(r"(writes \w+(?:-\w+)? from here -->).*?(<!-- to)", r"\1\n\2", stored, flags=re.S)
    )
    assert "| `ar` |" not in page.read_text()
    code, printed, error = call("numbers", "--results", RESULTS, "--page", page)
    assert code == 0 and "numbers.md" in printed, error
    assert page.read_text() == stored
    assert {path.name for path in tmp_path.glob("*.svg")} == {*chart.RUNS}

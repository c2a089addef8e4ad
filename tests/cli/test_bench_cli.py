"""Claims about ``saccade bench``: what it leaves, what it does not repeat, what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saccade.bench import runner
from saccade.core.errors import OptionError
from saccade.world import suites

Call = Callable[..., tuple[int, str, str]]
METHODS = "ar,specvlm,hf"

pytestmark = pytest.mark.usefixtures("unchecked")


def rows(folder: Path) -> list[dict[str, Any]]:
    every = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    return [line for line in every if "done" not in line]


@pytest.mark.extra
def test_a_run_its_report_and_a_second_run(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a run leaves results.jsonl and report.md; again, it runs nothing twice.

    Fails if a finished run is begun anew, or `bench report` needs more than the results.
    """
    out = tmp_path / "run"
    words = ["bench", "--limit", 1, "--methods", METHODS, "--max-new-tokens", 8, "--out", out]
    code, printed, messages = call(*words)
    assert code == 0, messages
    assert "report.md" in printed and "Traceback" not in messages
    about, *answers = rows(out)
    assert [each["method"] for each in answers] == METHODS.split(",")
    assert all(each["identical"] and len(each["ids"]) == 8 for each in answers)
    assert about["plan"]["suites"] == ["shapes-caption"] and about["plan"]["max_new_tokens"] == 8
    report = (out / "report.md").read_text()
    assert all(re.search(rf"^\| `{name}` \|", report, re.M) for name in METHODS.split(","))

    def never(*given: Any) -> Any:
        raise AssertionError("run twice")

    monkeypatch.setattr(runner._ItemRun, "answer", never)
    before = (out / "results.jsonl").read_bytes()
    (out / "report.md").unlink()
    assert call(*words)[0] == 0
    assert (out / "results.jsonl").read_bytes() == before
    assert (out / "report.md").read_text() == report

    (out / "report.md").unlink()
    code, printed, _ = call("bench", "report", out)
    assert code == 0 and "report.md" in printed
    assert (out / "report.md").read_text() == report

    code, printed, messages = call(*words[:-4], "--max-new-tokens", 9, "--out", out)
    assert code == 2 and "another plan" in messages and printed == ""
    assert (out / "results.jsonl").read_bytes() == before


def test_suites_are_listed(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: `--suite list` names every suite of the shapes world, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    code, printed, _ = call("bench", "--suite", "list")
    assert code == 0 and set(suites.suites()) <= set(printed.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.representatives(6)
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--suite", "nowhere"], "nowhere"),
        (["--suite", ","], "name a suite"),
        (["--shard", "0/2"], "0/2"),
        (["--shard", "3/2"], "3/2"),
        (["--shard", "x"], "i/n"),
        (["--shard", "1/"], "i/n"),
        (["--shard", "²/2"], "i/n"),  # a digit to Python, but no number
        (["--methods", "ar,magic"], "magic"),
        (["--methods", "sd/shape=blob"], "blob"),
        (["--methods", "draft/view=blob"], "blob"),
        (["--exact"], "shape=chain-N"),  # the methods by default draft trees
    ],
)
def test_refused_in_a_sentence(call: Call, tmp_path: Path, words: list[str], named: str) -> None:
    """Claim: what cannot be is refused in one sentence that names it, and nothing is written.

    Fails with a traceback, or if the folder is made before the plan is looked at.
    """
    code, printed, messages = call("bench", *words, "--limit", 1, "--out", tmp_path / "run")
    assert code == 2, messages
    assert printed == "" and "Traceback" not in messages
    assert len(messages.strip().splitlines()) == 1, messages
    assert named in messages
    assert not list(tmp_path.iterdir())


def test_no_run_to_report(call: Call, tmp_path: Path) -> None:
    """Claim: a folder without a run is refused in a sentence that says how to make one."""
    code, printed, messages = call("bench", "report", tmp_path / "none")
    assert code == 2 and printed == "" and "saccade bench --out" in messages
    assert not list(tmp_path.iterdir())


def test_a_suite_named_twice_is_one() -> None:
    """Claim: `--suite all,shapes-qa` runs shapes-qa once.

    Fails if its items are answered and counted twice.
    """
    from saccade.cli import bench

    names = [suite.name for suite in bench.named_suites("all,shapes-qa", None)]
    assert len(names) == len(set(names))


def test_an_empty_shard_is_no_error(call: Call, tmp_path: Path) -> None:
    """Claim: a shard that gets no items ends well: four machines may share three items.

    Fails if the report asks for results that there cannot be.
    """
    words = ["--methods", "ar", "--limit", 1, "--shard", "2/2", "--out", tmp_path / "run"]
    code, _, messages = call("bench", *words)
    assert code == 0, messages
    assert len(rows(tmp_path / "run")) == 1 and (tmp_path / "run" / "report.md").exists()


def test_options_that_decide_what_a_model_answers_are_part_of_the_plan(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a run is not resumed with other weights, positions or captions, and the defaults leave
    the plan as it is."""
    plans: list[runner.Benchmark] = []

    def stop(plan: runner.Benchmark, *given: Any, **more: Any) -> Any:
        plans.append(plan)
        raise OptionError("this is enough")

    monkeypatch.setattr(runner, "run_benchmark", stop)
    for number, options in enumerate(([], ["--positions", "library", "--captioner", "shapes"])):
        assert call("bench", "--methods", "ar", "--out", tmp_path / str(number), *options)[0] == 2
    assert plans[0].model_options == ()
    assert dict(plans[1].model_options) == {"positions": "library", "captioner": "shapes"}

"""Claims about ``python -m lab accept``, shrunken and on a CPU: what is wrong is seen, what is
found is written at once, and the time is kept."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from beside import fork
from commands import Call

from lab.acceptance import report as reports
from lab.acceptance import sections
from lab.acceptance.models import Models
from lab.acceptance.report import Report
from lab.acceptance.sections import SMALL, Acceptance
from saccade.bench.peers import TimedRun
from saccade.inputs.footprint import footprint
from saccade.methods import METHODS

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(autouse=True)
def _young(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a command is counted from here, not from the start of the tests."""
    began = time.time()
    monkeypatch.setattr(reports, "process_start", lambda: began)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _accept(call: Call, path: Path, *words: object) -> tuple[int, list[dict[str, Any]]]:
    code, printed, error = call("accept", "--small", "--device", "cpu", "--out", path, *words)
    assert printed.splitlines() == path.read_text().splitlines(), error
    return code, _lines(path)


@pytest.mark.slow
def test_a_shrunken_acceptance_passes(call: Call, tmp_path: Path) -> None:
    """Claim: every section runs on a CPU, finds nothing wrong, and says what only a GPU can; what
    is printed is what is in the file. Fails if a section does not run without a GPU."""
    some = (
        "facts,exact answers,steps,kernels,believed costs,prefill,whole answers,compiled peer,"
        "step variants"
    )
    code, lines = _accept(call, tmp_path / "a.jsonl", "--sections", some)
    assert code == 0 and lines[-1]["all_wrong"] == []
    assert {line["section"] for line in lines} == {*some.split(","), "end"}
    steps = [line for line in lines if line["section"] == "steps" and "rows" in line]
    assert {line["rows"] for line in steps if line["model"] == "target"} == set(SMALL.rows)
    assert len({line["context"] for line in steps if line["model"] == "target"}) == 3
    whole = [line for line in lines if "tokens_per_second" in line]
    assert {line["context"] for line in whole} == set(SMALL.contexts)
    assert {"transformers", "transformers, static cache", "ar"} <= {w["method"] for w in whole}
    drafted = next(line for line in whole if line["method"].startswith("sd/"))
    assert drafted["rounds"] < drafted["tokens"] // 2, "acceptance was not imposed"


@pytest.mark.slow
def test_methods_are_compared_with_generate(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a method passes with the ids of `generate` and is wrong with any others, and then the
    exit status is 1. Fails if answers are compared with nothing."""
    words = "--sections", "right answers", "--methods", "ar,sd"
    code, lines = _accept(call, tmp_path / "a.jsonl", *words)
    assert code == 0
    assert [line["same"] for line in lines if "method" in line] == [True, True]
    own = sections.hf

    def other(*args: Any) -> TimedRun:
        ran = own(*args)
        return TimedRun(
            (*ran.ids[:-1], ran.ids[-1] ^ 1),
            ran.decode_seconds,
            ran.total_seconds,
            ran.decoded_tokens,
        )

    monkeypatch.setattr(sections, "hf", other)
    code, lines = _accept(call, tmp_path / "b.jsonl", *words)
    assert code == 1
    assert "right answers: ar differs from generate in float32" in lines[-1]["all_wrong"]


@pytest.mark.extra
def test_wrong_steps_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: captured logits that are a tenth off, and ones that stand still, are wrong."""
    own = sections._score_chain

    def run(change: Any) -> list[str]:
        def spoilt(session: Any, context: int, rows: int, turn: int) -> torch.Tensor:
            logits = own(session, context, rows, turn)
            return logits if session.cuda_graphs is None else change(logits)

        monkeypatch.setattr(sections, "_score_chain", spoilt)
        report = Report(tmp_path / "a.jsonl", 300, torch.device("cpu"), judges_time=False)
        sizes = sections.Sizes((64,), (1,), 4, 4, 64)
        Acceptance(report, Models(torch.device("cpu"), True), sizes).run(["steps"])
        return report.failures

    assert run(lambda logits: logits) == []
    assert any("apart" in each for each in run(lambda logits: logits * 1.1))
    assert any("do not follow" in each for each in run(lambda logits: torch.ones_like(logits)))


def test_an_error_ends_its_section_alone(tmp_path: Path) -> None:
    """Claim: an error in a section is a wrong line that names it, and the next one runs."""
    report = Report(tmp_path / "a.jsonl", 300, torch.device("cpu"))

    def breaks() -> None:
        raise ValueError("it broke")

    report.run("one", 0.5, breaks)
    report.run("two", 1.0, lambda: report.note(fine=True))
    assert len(report.failures) == 1 and "ValueError" in report.failures[0]
    assert "it broke" in report.failures[0]
    assert _lines(report.path)[-1] == report.lines[-1] and report.lines[-1]["fine"]


def test_a_rival_that_fails_is_no_failure(tmp_path: Path) -> None:
    """Claim: an error in a section that only times what others made is a line that says why it was
    skipped, and the acceptance passes. Control: in any other section it is wrong."""

    def breaks() -> None:
        raise RuntimeError("no compiler")

    for rivals, failures in ((frozenset({"one"}), 0), (frozenset(), 1)):
        report = Report(tmp_path / "a.jsonl", 300, torch.device("cpu"), rivals=rivals)
        report.run("one", 1.0, breaks)
        assert len(report.failures) == failures
        line = report.lines[-1]
        assert "no compiler" in line["why" if rivals else "wrong"]


@pytest.mark.extra
def test_steps_are_compared_with_their_rivals(tmp_path: Path) -> None:
    """Claim: the acceptance times a step with torch's attention and with compiled layers, at two
    numbers of rows, on a part of the target's layers. Fails if a rival is left out."""
    report = Report(tmp_path / "a.jsonl", 300, torch.device("cpu"), judges_time=False)
    sizes = sections.Sizes((32, 64), (1,), 4, 4, 64)
    Acceptance(report, Models(torch.device("cpu"), True), sizes).run(["step variants"])
    lines = [line for line in report.lines if "variant" in line]
    assert [(line["variant"], line["rows"]) for line in lines] == [
        (kind, rows) for rows in sections.COMPILED_ROWS for kind in ("torch", "compiled")
    ]
    assert all(line["ms"] > 0 and line["apart"] < 1e-4 for line in lines)
    assert report.failures == [] and not any(line["is_compiled"] for line in lines)


def test_what_there_is_no_time_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a section begins no case that the longest so far says would outlast its share, names
    each that it skips, and leaves the next sections theirs. Fails if one section eats the time."""
    report = Report(tmp_path / "a.jsonl", 110 + reports.GRACE_SECONDS, torch.device("cpu"))
    now = [0.0]
    monkeypatch.setattr(report, "elapsed", lambda: now[0], raising=False)
    done = []

    def work(seconds: float) -> None:
        for case in report.cases(range(6)):
            done.append(case)
            now[0] += seconds

    now[0] = 10.0  # what importing took
    report.run("slow", 0.5, lambda: work(20))
    assert done == [0, 1] and report.lines[-1]["skipped"] == ["2", "3", "4", "5"]
    done.clear()
    report.run("quick", 1.0, lambda: work(2))
    assert done == [*range(6)]
    now[0] = 119.5
    report.run("late", 1.0, lambda: work(1))
    assert report.lines[-1]["skipped"] == ["late"]


def _overrun(path: str, rivals: frozenset[str] = frozenset()) -> None:
    report = Report(
        Path(path),
        reports.GRACE_SECONDS / 2 + 0.4,
        torch.device("cpu"),
        rivals=rivals,
        start_time=time.time(),
    )
    with report.time_limit():
        report.section = "endless"
        time.sleep(60)


def test_a_section_without_end_is_cut_off(tmp_path: Path) -> None:
    """Claim: when the time is gone the process ends with status 1, and its last lines say in the
    middle of what. Fails if a machine that is lent for minutes waits for hours."""
    path = tmp_path / "a.jsonl"
    process = fork(_overrun, str(path))
    process.join(30)
    assert process.exitcode == 1
    lines = _lines(path)
    assert lines[-2]["section"] == "endless" and lines[-1]["wrong_count"] == 1


def test_a_rival_without_end_is_cut_off(tmp_path: Path) -> None:
    """Claim: where the time is gone while a rival is compiled, the last lines say so and the status
    is 0. Fails if a slow compiler makes an acceptance fail."""
    path = tmp_path / "a.jsonl"
    process = fork(_overrun, str(path), frozenset({"endless"}))
    process.join(30)
    assert process.exitcode == 0
    lines = _lines(path)
    assert lines[-2]["skipped"] == ["endless"] and lines[-1]["wrong_count"] == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--device", "cpu"), "--small"),
        (("--device", "cuda"), "no GPU"),
        (("--small", "--sections", "steps,nonsense"), "nonsense"),
        (("--small", "--methods", "nonsense"), "nonsense"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    call: Call, tmp_path: Path, words: tuple[str, ...], reason: str
) -> None:
    """Claim: a missing GPU, an unknown section or method is refused in a sentence, with status 2 or
    1, before any model is made."""
    code, printed, error = call("accept", "--out", tmp_path / "a.jsonl", *words)
    assert code in (1, 2) and reason in error and not printed


def test_the_large_pair_has_the_published_shapes() -> None:
    """Claim: the pair that is timed is a whole 7B, its vision tower included, and a draft of half a
    billion weights. Fails if a shrunken model is timed as a 7B."""
    models = Models(torch.device("meta"))
    target, draft = footprint(models.target_config()), footprint(models.draft_config())
    assert target.parameters == pytest.approx(8.29e9, rel=0.01)
    assert models.target_config().vision_config.depth == 32
    assert draft.weights_per_token == pytest.approx(0.494e9, rel=0.01)
    assert (draft.layers, target.layers) == (24, 28)


def test_methods_in_processes_come_last() -> None:
    """Claim: every method is tried, and those that start a process after all others."""
    device = torch.device("cpu")
    acceptance = Acceptance(Report(Path("unused"), 1, device), Models(device, True), SMALL)
    assert set(acceptance.methods) == set(METHODS)
    parallel = [name.startswith(("hippo", "pearl")) for name in acceptance.methods]
    assert parallel == sorted(parallel)

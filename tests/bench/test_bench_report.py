"""Claims about report.md: its tables, read back, hold what the measures say of the answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from written_out import answer, tables

from saccade.bench import measures, records, report, text_scores
from saccade.bench.measures import Interval
from saccade.bench.records import Answer
from saccade.core.errors import OptionError

ABOUT: dict[str, Any] = {
    "plan": {"target": "the-target", "draft": "the-draft", "dtype": "float32"},
    "fingerprint": "f",
    "environment": {
        **{"gpu": None, "processor": "an abacus", "threads": 1},
        **{"torch": "2", "transformers": "5"},
    },
}
SEEN: dict[str, Any] = {"prompt_tokens": 1100, "visual_tokens": 1000, "draft_visual_tokens": 60}
PARTS = ("vision", "prefill", "guide", "draft_prefill", "draft", "verify")


def made() -> list[Answer]:
    """Three items by four methods of which one failed and one fell back."""
    answers: list[Answer] = []
    for number, item in enumerate("abc"):
        fields: dict[str, Any] = {
            **{"task": "caption", "answers": ("a red box moves",), "identical": True},
            **{
                "vision": 0.1 + number,
                "prefill": 0.2,
                "guide": 0.3 + number,
                "draft_prefill": 0.25,
                "first": 0.7,
            },
        }
        zero = (0,) * 4
        slow = {"decode": 8.0 + number, "total": 10.0 + number, "counted": 3, "verify": 7.5}
        mine = {"decode": 2.0 + number, "total": 4.0 + number, "counted": 9, **SEEN}
        taken = (5, number, 2 * number)
        sage = dict(nodes=(9, 9, 9), draft=0.5, verify=1.0, peak=2**20 * (3 + number))
        answers += [
            answer(item, "ar", zero, zero, text="a red box moves", **fields, **slow, **SEEN),
            answer(item, "sage", taken, (5, 5, 5), text="a box", **fields, **mine, **sage),
            answer(item, "hf", text="red box", **{**fields, **slow, "verify": 0.0, "total": 20.0}),
            answer(item, "hf-lookup", error="ValueError: no match"),
        ]
    answers[1] = replace(answers[1], identical=False)
    answers[5] = replace(answers[5], fallback="RuntimeError: the draft is out")
    return answers


ANSWERS = made()


def of(method: str) -> list[Answer]:
    return [each for each in ANSWERS if each.method == method and not each.error]


def numbers(cell: str) -> list[float]:
    return [float(each) for each in re.findall(r"-?\d+(?:\.\d+)?", cell)]


def flat(figure: Interval | float | None) -> list[float]:
    if figure is None:
        return []
    return list(figure) if isinstance(figure, tuple) else [figure]


def table(column: str) -> dict[str, dict[str, str]]:
    """The one table that has this column."""
    every = tables(report.report_markdown(ABOUT, ANSWERS))
    (rows,) = [each for each in every if column in next(iter(each.values()))]
    return rows


def middle(own: list[Answer], whole: bool) -> Interval | None:
    return measures.interval(measures.speedups(own, of("ar"), whole=whole))


SPEED: dict[str, Callable[[list[Answer]], Interval | float | None]] = {
    "n": lambda own: float(len(own)),
    "same": lambda own: float(sum(each.identical is True for each in own)),
    "tau": measures.tau_interval,
    "accepted": measures.accepted_per_forward,
    "MAT": measures.accepted_between_rejections,
    "accept": measures.acceptance_rate,
    "decode x": lambda own: middle(own, False),
    "whole x": lambda own: middle(own, True),
}


def test_the_speed_table() -> None:
    """Claim: every cell is the measure of the method's answers, intervals with both ends.

    Fails if a column holds another's figure, rows are swapped or errors are counted as answers.
    """
    rows = table("decode x")
    assert list(rows) == ["ar", "sage", "hf", "hf-lookup"]
    for method in ("ar", "sage", "hf"):
        own = of(method)
        for column, figure in SPEED.items():
            cell = numbers(rows[method][column])
            assert cell == pytest.approx(flat(figure(own)), abs=0.0051), (method, column)
        assert numbers(rows[method]["tok/s"]) == [round(measures.tokens_per_second(own) or 0)]
        assert numbers(rows[method]["first token s"]) == [0.7]
        scores = [text_scores.score("caption", each.text, each.answers) for each in own]
        expected = [sum(each[name] for each in scores) / 3 for name in ("rouge_l", "meteor")]
        assert numbers(rows[method]["answers"]) == pytest.approx(expected, abs=0.0051)


def test_a_few_cells_by_hand() -> None:
    """Claim: the cells are what a reader would work out from the rounds.

    Fails where a measure and this table are wrong together.
    """
    rows = table("decode x")
    # sage: accepted 5 + 0 + 0, 5 + 1 + 2, 5 + 2 + 4 and nine tokens of the target's own
    assert rows["sage"]["tau"].startswith(f"{(24 + 9) / 9:.2f} [")
    assert rows["sage"]["accept"] == f"{24 / 81:.2f}"
    assert rows["sage"]["accepted"] == f"{24 / 9:.2f}"
    # runs: 5 0 | 6 2 | 7 4
    assert rows["sage"]["MAT"] == f"{24 / 6:.2f}"
    # per token (8/3)/(2/9), (9/3)/(3/9), (10/3)/(4/9): the middle one
    assert rows["sage"]["decode x"].startswith("9.00 [")
    assert rows["sage"]["same"] == "2" and rows["ar"]["same"] == rows["hf"]["same"] == "3"
    assert rows["ar"]["decode x"] == "1.00 [1.00, 1.00]"
    assert rows["ar"]["tau"] == "1.00 [1.00, 1.00]" and rows["ar"]["accept"] == ""


def test_peers_have_no_tau() -> None:
    """Claim: of a peer nothing is said that it does not tell: no tau, no MAT, no stages.

    Fails if nothing shows as a number.
    """
    row = table("decode x")["hf"]
    assert row["tau"] == row["MAT"] == row["accept"] == ""
    assert row["decode x"] and row["whole x"]
    assert set(table("vision")) == {"ar", "sage"}
    assert set(table("Eq. 1")) == {"sage"}


def test_the_stages() -> None:
    """Claim: each stage is the mean over answers, and what is left of decoding is the rest."""
    rows = table("vision")
    for method in ("ar", "sage"):
        own = of(method)
        for part in PARTS:
            mean = sum(getattr(each, part) for each in own) / 3
            assert numbers(rows[method][part.replace("_", " ")]) == pytest.approx(
                [mean], abs=0.00051
            )
        rest = sum(each.decode - each.draft - each.verify for each in own) / 3
        assert numbers(rows[method]["rest"]) == pytest.approx([rest], abs=0.00051)
    assert rows["sage"]["peak MiB"] == "5" and rows["ar"]["peak MiB"] == ""


def test_captions_are_distinguished() -> None:
    """Claim: of a method that reads captions a line says what they took and how much of it nobody
    waited for, and the rest is in its *guide*; of one without, nothing."""
    with_captions = [
        replace(each, caption=0.5, caption_hidden=0.125) if each.method == "sage" else each
        for each in ANSWERS
    ]
    text = report.report_markdown(ABOUT, with_captions)
    (line,) = (line for line in text.splitlines() if line.startswith("Captions of"))
    assert line.startswith("Captions of `sage`: 0.500 s, of which 0.125 beside")
    assert "Captions of" not in report.report_markdown(ABOUT, ANSWERS)
    own = [each for each in with_captions if each.method == "sage"]
    guide = records.STAGES["guide"]
    assert [guide(a) - guide(b) for a, b in zip(own, of("sage"), strict=True)] == pytest.approx(
        [0.375] * 3
    )


def test_the_formulas() -> None:
    """Claim: what the papers' formulas expect is the measures', beside what was measured."""
    row, own, plain = table("Eq. 1")["sage"], of("sage"), of("ar")
    expected = [measures.predicted_speedup(own, plain)]
    assert numbers(row["Eq. 1"]) == pytest.approx(expected, abs=0.0051)
    assert numbers(row["I/O"]) == pytest.approx([measures.predicted_key_reads(own)], abs=0.0051)
    assert row["measured x"] == table("decode x")["sage"]["decode x"]
    places, shares = row["accepted at 1, 2, 3, ..."], row["rounds with 0, 1, 2, ..."]
    assert numbers(places) == pytest.approx(measures.acceptance_by_position(own), abs=0.0051)
    assert numbers(shares) == pytest.approx(measures.accepted_histogram(own), abs=0.0051)


def test_failures_are_listed() -> None:
    """Claim: a method that failed or fell back is named once with its reason.

    Fails if a failure is only a missing number. Control: without failures nothing is listed.
    """
    printed = report.report_markdown(ABOUT, ANSWERS)
    listed = [line for line in printed.splitlines() if line.startswith("- ")]
    assert listed == [
        "- `hf-lookup`: ValueError: no match",
        "- `sage`: RuntimeError: the draft is out",
    ]
    row = table("decode x")["hf-lookup"]
    assert row["n"] == row["same"] == "0" and row["tau"] == row["decode x"] == row["answers"] == ""
    well = [each for each in ANSWERS if each.method in ("ar", "hf")]
    assert "\n- " not in report.report_markdown(ABOUT, well)
    for name in ("the-target", "the-draft", "float32", "an abacus", "3 items, 1000 visual"):
        assert name in printed


def test_suites_apart(tmp_path: Path) -> None:
    """Claim: each suite has its own tables; ``write`` leaves report.md beside the results.

    Fails if answers of one suite are held against another's plain decoding.
    """
    others = [replace(each, suite="other", decode=2 * each.decode) for each in of("ar")]
    others += [replace(each, suite="other") for each in of("sage")]
    records.append_answers(tmp_path, ABOUT, [*ANSWERS, *others])
    printed = report.write_report(tmp_path).read_text()
    assert (tmp_path / "report.md").read_text() == printed
    assert re.findall(r"^## (.*)", printed, re.M) == ["handmade", "other"]
    first, second = [each for each in tables(printed) if "tau" in next(iter(each.values()))]
    assert first["sage"]["decode x"].startswith("9.00 [")
    assert second["sage"]["decode x"].startswith("18.00 [") and "hf" not in second


def test_no_results_no_report(tmp_path: Path) -> None:
    """Claim: without results there is a sentence and no file."""
    with pytest.raises(OptionError, match="holds no results"):
        report.write_report(tmp_path)
    assert not list(tmp_path.iterdir())

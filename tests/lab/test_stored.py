"""What the documents print is what the stored runs hold: reports, figures, numbers."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from lab import chart, layouts, numbers, studies
from lab.hardware import methods as all_methods
from saccade.bench import measures, records, report
from saccade.bench.records import Answer

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
OTHERS = ("hf", "draft")  # what is no method of ours: other libraries', and the draft by itself
stored = cache(records.read_finished_run)
RUNS = sorted(path.parent for path in RESULTS.glob("*/results.jsonl.gz"))


def test_there_are_runs():
    """Claim: the runs the pages speak of are stored."""
    assert {"bench-ensembles", *AUTO} <= {run.name for run in RUNS}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_stored_report_is_its_runs(run):
    """Claim: report.md is made of the results beside it, and its pictures are there. Fails if a run
    is replaced and its report is not."""
    about, answers = stored(run)
    drawn: dict[str, list[str]] = {}
    for suite, name in re.findall(r"!\[((\S+)-\w+\.png)\]", (run / "report.md").read_text()):
        drawn.setdefault(name, []).append(suite)
        assert (run / suite).is_file()
    assert (run / "report.md").read_text() == report.report_markdown(
        about, answers, drawn, layouts.papers_section(answers)
    )


@pytest.mark.parametrize("run", ["compare", "compare-torch"])
def test_the_table_of_clips_is_the_stored_comparison(run):
    """Claim: each row of that table is what ``saccade compare`` printed of the clip, whose answers
    were plain decoding's. Fails on any number typed by hand."""
    page = (RESULTS / "speed.md").read_text()
    for seed, found in json.loads((RESULTS / f"{run}.json").read_text()).items():
        assert _clip_line(seed, found["methods"]) in page, seed
        assert all(row["identical_to_ar"] for row in found["methods"].values())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_stored_answer_is_plain_decodings(run):
    """Claim: no method of ours ever wrote another token than plain decoding (where answers were
    sampled nobody claims that), and none gave up. Fifty items a suite, fewer
    in the runs made for the claims alone. Fails on a single
    difference."""
    about, answers = stored(run)
    ours = [a for a in answers if not a.method.startswith(OTHERS)]
    same = None if "temperature" in about["plan"] else True
    assert all(a.identical is same and a.error is None and a.fallback is None for a in ours)
    for suite in {a.suite for a in ours}:
        items = len({a.item for a in ours if a.suite == suite})
        assert items == 50 or run.name.startswith("papers-")


def test_all_methods_say_the_same_in_two_runs():
    """Claim: docs/results/methods.md has the table of the stored run of all methods; each method's
    ids are plain decoding's on every clip, and on the first clip those of the stored comparison of
    that clip, in as many rounds (but where drafts go by the clock). Fails on any number typed by
    hand, a token more, or runs of two models."""
    page = (RESULTS / "methods.md").read_text()
    facts = json.loads((RESULTS / "methods.json").read_text())
    assert all_methods.page_section(facts) in page
    clips = facts["clips"]
    assert [clip["seed"] for clip in clips] == [*all_methods.SEEDS]
    assert all(row["identical_to_ar"] for clip in clips for row in clip["methods"].values())
    other = json.loads((RESULTS / "compare-2048.json").read_text())["methods"]
    assert clips[0]["token_ids"] == other["ar"]["token_ids"]
    both = other.keys() & clips[0]["methods"].keys() - {"auto"}
    rounds = {name: clips[0]["methods"][name]["rounds"] for name in both}
    assert len(both) > 7 and rounds == {name: other[name]["rounds"] for name in both}


def test_the_page_of_numbers_is_its_command_made_again():
    """Claim: docs/numbers.md is what ``python -m lab numbers`` makes of the stored runs. Fails
    on any number typed by hand, and if a run is replaced and the page is not."""
    page = (ROOT / "docs" / "numbers.md").read_text()
    assert numbers.page_with(page, numbers.tables_by_name(RESULTS)) == page


def test_control_a_typed_number_is_seen():
    """Control: a page with another digit in a table is not what the command makes, and a page that
    lost the place of a table is refused."""
    page = (ROOT / "docs" / "numbers.md").read_text()
    tables = {
        "real": "\n".join(numbers.real_weights(json.loads((RESULTS / "real.json").read_text())))
    }
    typed = page.replace("| `ar` | 1.00", "| `ar` | 1.01")
    assert typed != page == numbers.page_with(typed, tables)
    with pytest.raises(ValueError, match="'real'"):
        numbers.page_with("", tables)


@pytest.mark.parametrize("name", chart.RUNS)
def test_each_chart_is_its_stored_run(name):
    """Claim: each chart holds each method's speed of its stored run, and draws. Fails if the run is
    replaced and the chart is not."""
    found = chart.read_bars(RESULTS / chart.RUNS[name])
    words = re.findall(r"<text[^>]*>([^<]*)</text>", (ROOT / "docs" / name).read_text())
    speeds = [
        f"{whole[0]:.2f}" for suite in found.values() for both in suite.values() for whole in both
    ]
    assert [word for word in words if re.fullmatch(r"\d\.\d\d", word)] == speeds
    assert isinstance(chart.draw_bars(found), Figure)


def test_the_speed_pages_table_over_suites_is_the_stored_runs():
    """Claim: how `auto` stands to plain decoding, to `generate` and to the best fixed method over
    each suite is what the stored runs say. Fails on any number typed by hand."""
    page = (RESULTS / "speed.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| `shapes-")]
    assert lines == [
        _suite_line(stored(RESULTS / run)[1], suite)
        for run, suites in AUTO.items()
        for suite in suites
    ]


@pytest.mark.parametrize("processor", ["", "-intel", "-zen3"])
def test_the_speed_pages_ratios_and_load_are_the_stored_runs(processor):
    """Claim: every ratio with its interval, goal and verdict, and what requests at once get, on
    each processor, are what the stored runs say. Fails on any number typed by hand, or in another
    processor's table."""
    text = (RESULTS / "speed.md").read_text()
    amd, *others = re.split(r"\n## The same (?:on|without) ", text)
    intel, zen3 = (each.partition("\n## ") for each in others)
    page = {"": amd + zen3[2], "-intel": intel[0], "-zen3": zen3[0]}[processor]
    for ratio in json.loads((RESULTS / f"speed{processor}.json").read_text())["ratios"]:
        low, high = ratio["interval"]
        goal = "" if ratio["goal"] is None else str(ratio["goal"])
        verdict = {None: "", True: "met", False: "**missed**"}[ratio["met"]]
        told = f"**{ratio['value']:.2f}** | {low:.2f} to {high:.2f} | {goal} | {verdict} |"
        assert f"| {ratio['part']} | {ratio['name']} | {told}" in page
    load: dict[int, dict[str, Any]] = {}
    for each in json.loads((RESULTS / f"pool{processor}.json").read_text()):
        load.setdefault(each["rows"], {})[each["method"]] = each
        assert each["same"]
    for rows, by in load.items():
        ours, plain = by["auto"], by["ar"]
        rates = [each["tokens_per_second"] for each in (plain, ours)]
        first = [f"{each['first_token']:.3f}" for each in (plain, ours)]
        later = [", ".join(f"{1e3 * s:.1f}" for s in each["between"]) for each in (plain, ours)]
        assert (
            f"| {rows} | {rates[0]:.0f} | {rates[1]:.0f} | **{rates[1] / rates[0]:.2f}** | "
            f"{first[0]} s | {first[1]} | {later[0]} | {later[1]} |"
        ) in page


def test_the_speed_pages_table_of_sampled_answers_is_the_stored_run():
    """Claim: what drafting gives where answers are sampled is what the stored run says. Fails on
    any number typed by hand."""
    page = (RESULTS / "speed.md").read_text()
    _, answers = stored(RESULTS / "bench-sampled")
    by = {name: [a for a in answers if a.method == name] for name in SAMPLED}
    for name, own in by.items():
        cells = (
            _interval(own, by["ar"]),
            _interval(own, by["ar"], whole=True),
            _interval(own, by["hf"]),
        )
        assert f"| `{name}` | {' | '.join(cells)} |" in page


SAMPLED = ("ar", "sd", "sd/shape=fit", "auto", "hf")
AUTO = {
    "bench-256": [f"shapes-{task}" for task in ("caption", "events", "qa", "chat", "diff", "ood")],
    "bench-2k": ["shapes-caption-2k"],
    "bench-intel": [f"shapes-{task}" for task in ("caption", "qa", "diff", "caption-2k")],
    "bench-zen3": [f"shapes-{task}" for task in ("caption", "qa", "diff", "caption-2k")],
}


def _suite_line(answers: list[Answer], suite: str) -> str:
    """A method's seconds are summed over all answers for its place among the fixed ones."""
    by: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.suite == suite:
            by.setdefault(answer.method, []).append(answer)
    ratios = (
        _interval(by["auto"], by["ar"]),
        _interval(by["auto"], by["ar"], whole=True),
        _interval(by["auto"], by["hf"]),
    )
    ours = (name for name in by if not name.startswith(OTHERS))
    spent = {name: sum(a.decode for a in by[name]) for name in ours}
    mine = spent.pop("auto")
    best = min(spent, key=lambda name: spent[name])
    return f"| `{suite}` | {' | '.join(ratios)} | {spent[best] / mine:.2f} | `{best}` |"


def _clip_line(seed: str, methods: dict[str, Any]) -> str:
    auto, hf = methods["auto"], methods["hf"]
    rate = {name: row["speedup_decode"] for name, row in methods.items()}
    best = max((name for name in rate if name not in ("auto", "ar", "hf")), key=lambda m: rate[m])
    ratios = (
        rate["auto"],
        auto["speedup_end_to_end"],
        rate["auto"] / hf["speedup_decode"],
        rate["auto"] / rate[best],
    )
    cells = " | ".join(f"{each:.2f}" for each in ratios)
    return f"| {seed} | {auto['tokens']} | {cells} | `{best}` |"


def _interval(own: list[Answer], other: list[Answer], whole: bool = False) -> str:
    found = measures.interval(measures.speedups(own, other, whole=whole))
    assert found is not None
    return "{:.2f} [{:.2f}, {:.2f}]".format(*found)


def test_every_figure_is_stored_and_draws():
    """Claim: each study's numbers and picture are in docs/results/figures, draw today, were made
    at the study's own size, and the page shows them all."""
    folder = RESULTS / "figures"
    for name in studies.PAPER_FIGURES:
        data, study = studies.load_numbers(folder / f"{name}.json", name), studies.study_named(name)
        assert isinstance(study.draw(data), Figure)
        assert (folder / f"{name}.png").is_file()
        assert (data["clips"], data["size"], data["tokens"]) == (
            study.clips,
            study.size,
            study.tokens,
        ), name
    assert (folder / "README.md").read_text() == studies.figures_page(folder)

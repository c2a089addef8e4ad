"""What the documents print is what the stored runs hold: reports, figures, numbers."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from matplotlib.figure import Figure

from evidence import chart, layouts, studies
from evidence.claims import evidence as claims
from evidence.claims.specvlm import CAPTIONS, OFFICIAL, OWN
from evidence.hardware import methods as all_methods
from evidence.studies.specvlm import CALIBRATED
from saccade.bench import measures, records, report
from saccade.bench.records import Answer

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
OTHERS = ("hf", "draft")  # what is no method of ours: other libraries', and the draft by itself
stored = cache(records.read_finished_run)
RUNS = sorted(path.parent for path in RESULTS.glob("*/results.jsonl.gz"))
COLUMNS = {
    "descriptions, 256": ("bench-256", "shapes-caption"),
    "descriptions, 2,048": ("bench-2k", "shapes-caption-2k"),
    "unheard wording, 256": ("bench-256", "shapes-ood"),
    "two turns, 256": ("bench-256", "shapes-chat"),
    "short answers, 256": ("bench-256", "shapes-qa"),
}


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
        about, answers, drawn, layouts.section(answers)
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


def test_the_table_of_one_clip_is_the_stored_run():
    """Claim: each row of docs/numbers.md's first table is what the stored comparison says. Fails on
    any number typed by hand."""
    page = (ROOT / "docs" / "numbers.md").read_text()
    methods = json.loads((RESULTS / "compare-2048.json").read_text())["methods"]
    for name, row in methods.items():
        line = next(each for each in page.splitlines() if each.startswith(f"| `{name}` |"))
        cells = [cell.strip(" *") for cell in line.split("|")[2:-1]]
        if row.get("error"):
            assert cells == ["crashes", *[""] * 6]
            continue
        figures = (
            row["tau"],
            *(row[f"{part}_seconds"] for part in ("prefill", "decode")),
            *(row[f"speedup_{part}"] for part in ("decode", "end_to_end")),
        )
        wanted = ["" if value is None else f"{value:.2f}" for value in figures]
        wanted.insert(3, f"{row['tokens_per_second']:.0f}")
        assert cells == ["yes" if row["identical_to_ar"] else "no", *wanted], name


def test_all_methods_say_the_same_in_two_runs():
    """Claim: docs/numbers.md has the table of the stored run of all methods; each method's ids are
    plain decoding's on every clip, and on the first clip those of the first table's run, in as many
    rounds (but where drafts go by the clock). Fails on any number typed by hand, a token more, or
    runs of two models."""
    page = (ROOT / "docs" / "numbers.md").read_text()
    facts = json.loads((RESULTS / "methods.json").read_text())
    assert all_methods.told(facts) in page
    clips = facts["clips"]
    assert [clip["seed"] for clip in clips] == [*all_methods.SEEDS]
    assert all(row["identical_to_ar"] for clip in clips for row in clip["methods"].values())
    other = json.loads((RESULTS / "compare-2048.json").read_text())["methods"]
    assert clips[0]["token_ids"] == other["ar"]["token_ids"]
    both = other.keys() & clips[0]["methods"].keys() - {"auto"}
    rounds = {name: clips[0]["methods"][name]["rounds"] for name in both}
    assert len(both) > 7 and rounds == {name: other[name]["rounds"] for name in both}


def test_the_chart_is_the_stored_run():
    """Claim: the README's chart holds each method's speed of the stored run, and drawing it again
    shows the same words and numbers. Fails if the run is replaced and the chart is not."""
    found = chart.bars(RESULTS)
    picture = (ROOT / "docs" / "speed.svg").read_text()
    words = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    numbers = [
        f"{whole[0]:.2f}" for suite in found.values() for both in suite.values() for whole in both
    ]
    assert [word for word in words if re.fullmatch(r"\d\.\d\d", word)] == numbers
    assert isinstance(chart.draw(found), Figure)
    readme = (ROOT / "README.md").read_text()
    said = re.search(r"descriptions (\S+) decoding and (\S+) in all, .* (\S+) and (\S+)\"", readme)
    auto = [f"{each[0]:.1f}" for suite in found.values() for each in suite["auto"]]
    assert said is not None and list(said.groups()) == auto


def test_the_table_over_suites_is_the_stored_runs():
    """Claim: each cell of docs/numbers.md's table over suites is the median decode speedup with its
    interval, and that of whole answers, of the stored run. Fails on any number typed by hand."""
    text = (ROOT / "docs" / "numbers.md").read_text()
    head, rows = text.split("| decode × (whole ×) | ")[1].split(" |\n", 1)
    assert head.split(" | ") == list(COLUMNS)
    answers = {name: stored(RESULTS / name)[1] for name, _ in COLUMNS.values()}
    table = [line for line in rows.split("\n\n")[0].splitlines() if line.startswith("| `")]
    assert len(table) > 5
    for line in table:
        method, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        for cell, (run, suite) in zip(cells, COLUMNS.values(), strict=True):
            assert cell.rstrip("|").strip() == _cell(answers[run], suite, method.strip("`"))
    ours = [a for own in answers.values() for a in own if not a.method.startswith(OTHERS)]
    assert f"All {len(ours):,} answers of our methods in these two runs" in text
    short = [a for a in answers["bench-256"] if a.suite == "shapes-qa" and not a.error]
    names = {a.method for a in short if not a.method.startswith("draft")}
    most = max(_whole(short, name) for name in names)
    assert f"no method's whole answers are more than {most:.2f}× as fast" in text


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
    answers = stored(RESULTS / "bench-2k")[1]
    long = {a.item for a in answers if a.method == "ar" and len(a.ids) >= 128}
    kept = {
        m: [a for a in answers if a.method == m and a.item in long] for m in ("auto", "ar", "hf")
    }
    own, peer = (_interval(kept["auto"], kept[other]) for other in ("ar", "hf"))
    assert (
        f"Of the {len(long)} descriptions at 2,048 tokens that have 128 tokens and more: " in page
    )
    assert f"`auto` {own} times `ar`, {peer} times `hf`." in page
    short = [a for a in stored(RESULTS / "bench-256")[1] if a.suite == "shapes-qa"]
    auto, sd = ([a for a in short if a.method == name] for name in ("auto", "sd"))
    sums = sum(a.decode for a in sd) / sum(a.decode for a in auto)
    sizes = sorted(len(a.ids) for a in auto)
    told = (
        f"Against `sd` the {len(auto)} short answers ({sizes[0]} to {sizes[-1]} tokens, "
        f"{median(sizes):.0f} in the middle) are decoded {_interval(auto, sd)} times as fast by "
        f"medians and {sums:.3f} by sums"
    )
    assert told in page, told


def test_the_speed_page_counts_the_clips_above_their_goals():
    """Claim: of the clips of 2,048 tokens with long answers that the stored run asks about, the
    page says how many are above each goal by themselves, and what all of them come to."""
    by: dict[str, dict[str, Any]] = {}
    for answer in stored(RESULTS / "bench-2k")[1]:
        by.setdefault(answer.method, {})[answer.item] = answer
    long = [item for item, answer in by["ar"].items() if len(answer.ids) >= 96]

    def against(others: set[str], field: str) -> list[float]:
        """By clip, the best of these over ``auto``."""
        best = [min(getattr(by[other][item], field) for other in others) for item in long]
        return [a / getattr(by["auto"][i], field) for i, a in zip(long, best, strict=True)]

    own, peer = against({"ar"}, "decode"), against({"hf"}, "decode")
    whole = against({"ar"}, "total")
    ours = {name for name in by if not name.startswith(OTHERS)}
    best = against(ours - {"ar", "auto"}, "decode")
    plain, auto = (sum(by[method][item].decode for item in long) for method in ("ar", "auto"))
    told = (
        f"Of the {len(long)} descriptions at 2,048 tokens that have 96 tokens and more, "
        f"{sum(r >= 3.5 for r in own)} are decoded at least 3.5 times as fast as by `ar` "
        f"(the least {min(own):.2f}, the median {median(own):.2f}, {plain / auto:.2f} by sums), "
        f"{sum(r >= 7 for r in peer)} at least 7 times as fast as by `hf` "
        f"(the least {min(peer):.1f}); {sum(r >= 1.7 for r in whole)} whole answers come 1.7 times "
        f"as soon (the least {min(whole):.2f}, the median {median(whole):.2f}); and against the "
        f"quickest fixed method of each clip {sum(r >= 0.98 for r in best)} are at .98 "
        f"(the least {min(best):.2f}, the median {median(best):.2f})."
    )
    assert told in (RESULTS / "speed.md").read_text(), told


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


@pytest.mark.parametrize(
    ("run", "count"), [("first-token", 12), ("first-token-zen3", 4), ("first-token-zen5", 12)]
)
def test_the_first_tokens_beside_peers_are_the_stored_run(run, count):
    """Claim: the medians that docs/results/peers.md gives of first tokens are those of the stored
    turns, every row's as many. Fails on any number typed by hand."""
    rows = "Saccade, `ar`", "Saccade, `auto`", "vLLM, compiled", "transformers, `generate`"
    turns: dict[str, list[float]] = {row: [] for row in rows}
    for turn in json.loads((RESULTS / f"{run}.json").read_text())["runs"]:
        turns[turn["row"]].append(turn["first"])
    assert {len(own) for own in turns.values()} == {count}
    ours, auto, compiled, generate = (f"{median(own):.3f}".lstrip("0") for own in turns.values())
    told = f"`ar` {ours} s, `auto` {auto}, vLLM compiled {compiled}, `generate` {generate}."
    assert told in (RESULTS / "peers.md").read_text()


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


def test_hippos_page_says_what_early_starts_cost_as_stored():
    """Claim: the seconds of docs/methods/hippo.md are those of the stored figure, and at 256 tokens
    alone, of a draft that reads everything, the intervals of waiting and of an early start reach
    each other. Fails on numbers of another run, or a sentence that the figure does not bear."""
    rows = studies.read(RESULTS / "figures" / "hippo-early.json", "hippo-early")["rows"]
    kinds = "waits", "superset", "all"
    found = {
        size: [rows[f"{size} visual tokens"][f"HIPPO, {kind}"] for kind in kinds]
        for size in (256, 2048, 8192)
    }
    short, middle, long = ([f"{each[0]:.2f}" for each in found[size]] for size in found)
    said = [claims.said(each) for each in found[256]]
    page = " ".join((ROOT / "docs" / "methods" / "hippo.md").read_text().split())
    assert "{} s against {} (`superset`) and {} (`all`) at 2,048".format(*middle) in page
    assert "{} against {} and {} at 8,192".format(*long) in page
    assert "{} against {} and {}: reading everything is within the interval".format(*said) in page
    assert short[0] < short[2] < short[1]
    for size, (waits, *early) in found.items():
        apart = [round(waits[2], 2) < round(each[1], 2) for each in early]
        assert apart == [True, size != 256]


def test_specvlms_page_says_what_is_stored():
    """Claim: every number under "What we found" of docs/methods/specvlm.md is of the stored figures
    and of papers-2k. Fails on numbers of another run, or of another lambda."""
    e = claims.Evidence(RESULTS)
    page = (ROOT / "docs" / "methods" / "specvlm.md").read_text()
    page = " ".join(page.split("## What we found")[1].split("## Run it")[0].split())

    def at(figure: str, place: float) -> list[str]:
        """Tau of each line of a figure's first panel there."""
        data = e.figure(figure)
        panel = next(iter(data["panels"].values()))
        return [f"{line[data['at'].index(place)][0]:.2f}" for line in panel.values()]

    def more(figure: str, one: str, other: str) -> list[str]:
        """Tau of one way less another's, a draft after the other."""
        each = e.figure(figure)["clips_tau"].values()
        return [claims.said(claims.less(taus[one], taus[other])) for taus in each]

    def speed(method: str) -> str:
        return claims.said(e.speed(*CAPTIONS, method))

    own, chosen = f"{CALIBRATED}/keep=0.1", f"{CALIBRATED}/keep=0.10"
    seen = [at("specvlm-sensitivity", pruned)[0] for pruned in (0.0, 0.9, 0.98, 1.0)]
    windows = e.figure("specvlm-windows")["rows"]
    ways = {name: next(iter(each.values()))[0] for name, each in windows.items()}
    official, ours = (
        measures.accepted_per_forward(e.answers(*CAPTIONS, m)) for m in (OFFICIAL, CALIBRATED)
    )
    random = more("specvlm-criteria", "random/keep=0.10", chosen)
    even = more("specvlm-criteria", "uniform/keep=0.10", chosen)
    lost = more("specvlm-stages", own, "attention/keep=0.1")
    gained = more("specvlm-stages", "uniform/keep=0.1", own)
    best = e.figure("specvlm-lambda")["best"]
    assert min(ways, key=lambda name: ways[name]) == "window-end"
    for sentence in (
        f"lambda comes out at {best}",
        "tau {} and {} of its two drafts".format(*at("specvlm-lambda", best)),
        "{} and {} at .5".format(*at("specvlm-lambda", 0.5)),
        f"{random[0]} fewer tokens a forward at a tenth",
        f"{random[1]} by one trained on pruned video",
        "than an even sample {} and {} fewer".format(*even),
        "tau falls by {} and {}, without stage I it rises by {} and {}".format(*lost, *gained),
        "{} with everything, {} with a tenth, {} with two tokens in a hundred, {} with".format(
            *seen
        ),
        f"worst ({ways['window-end']:.2f}, its middle {ways['window-middle']:.2f}; "
        f"attention {ways['attention']:.2f}",
        f"{official:.2f} tokens a round against {ours:.2f} of ours",
        f"{speed(OFFICIAL)} times as fast as plain decoding against {speed(CALIBRATED)}",
        f"{speed(f'{CALIBRATED}/shape=chain-5')} times as fast in a chain of 5",
        f"{speed(f'{CALIBRATED}/shape=fit')} with `shape=fit`",
        f"not pay here**: {speed(OWN)}.",
    ):
        assert sentence in page, sentence


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


def _whole(answers: list[Answer], method: str) -> float:
    own, plain = ([a for a in answers if a.method == name] for name in (method, "ar"))
    found = measures.interval(measures.speedups(own, plain, whole=True))
    assert found is not None
    return found[0]


def _cell(answers: list[Answer], suite: str, method: str) -> str:
    own, plain = (
        [a for a in answers if a.suite == suite and a.method == name and not a.error]
        for name in (method, "ar")
    )
    if not own:
        return ""
    return f"{_interval(own, plain)} ({_whole([*own, *plain], method):.2f})"


def test_every_figure_is_stored_and_draws():
    """Claim: each study's numbers and picture are in docs/results/figures, draw today, were made
    at the study's own size, and the page shows them all."""
    folder = RESULTS / "figures"
    for name in studies.OWN:
        data, study = studies.read(folder / f"{name}.json", name), studies.named(name)
        assert isinstance(study.draw(data), Figure)
        assert (folder / f"{name}.png").is_file()
        assert (data["clips"], data["size"], data["tokens"]) == (
            study.clips,
            study.size,
            study.tokens,
        ), name
    assert (folder / "README.md").read_text() == studies.index(folder)

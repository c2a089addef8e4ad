"""Every page that a command makes is what the command makes of the stored runs today.

``make pages-check`` runs this file, and ``make check`` with it. A page that fails was edited by
hand, or a run or a command changed and the page was not made again.

Modules are imported where they are used: the default tests collect this file and run none of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
RUNS = sorted(path.parent for path in RESULTS.glob("*/results.jsonl.gz"))


def _stored(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _methods(page: str) -> str:
    from lab.commands import pages
    from lab.hardware.vllm_comparison import replace_table
    from saccade.methods import names

    return replace_table(page, pages.methods_tables(names.listing()), pages.BEGIN)


def _options(page: str) -> str:
    from lab import options_table
    from lab.hardware.vllm_comparison import replace_table

    return replace_table(page, options_table.options_table(), options_table.BEGIN)


def _numbers(page: str) -> str:
    from lab import numbers

    return numbers.page_with(page, numbers.tables_by_name(RESULTS))


def _speed(page: str) -> str:
    from lab import speed_page

    return speed_page.page(RESULTS)


def _claims(page: str) -> str:
    from lab import claims
    from lab.claims.claim import StoredResults

    return claims.page(StoredResults(RESULTS))


def _scaling(page: str) -> str:
    from lab import scaling

    return page if scaling.page() in page else scaling.page()


def _pairs(page: str) -> str:
    from lab.hardware.pairs import table

    pairs = table(8192, 0.1)
    return page if pairs in page else pairs


def _vllm(page: str) -> str:
    from lab.hardware import vllm_comparison

    return vllm_comparison.replace_table(page, vllm_comparison.table(_stored("vllm.json")["runs"]))


def _peers(page: str) -> str:
    from lab.peers import turns

    return turns.page_with_table(page, _stored("peers.json"))


def _all_methods(page: str) -> str:
    from lab.hardware import methods
    from lab.studies.ablations import page_with_table

    return page_with_table(page, methods.page_section(_stored("methods.json")), methods.MARKS)


def _renewed_views(page: str) -> str:
    from lab.hardware import following
    from lab.studies import ablations

    rows = json.loads((DOCS / "methods" / "fresh.json").read_text())["measured"]
    costs = following.page_section(_stored("following.json"))
    with_costs = ablations.page_with_table(page, costs, following.MARKS)
    return ablations.page_with_table(with_costs, ablations.results_table(rows))


def _real_weights(name: str) -> Callable[[str], str]:
    def made(page: str) -> str:
        from lab.real.pair import pair_section
        from lab.real.results_page import make_page

        own = make_page(_stored(f"{name}.json"))
        pair_rows = RESULTS / f"{name}-pair.json"
        if not pair_rows.is_file():
            return own
        return own + "\n" + pair_section(_stored(pair_rows.name))

    return made


def _real_pair(name: str) -> Callable[[str], str]:
    def made(page: str) -> str:
        from lab.real.pair import pair_section

        return pair_section(_stored(f"{name}.json"))

    return made


def _real_drafts(page: str) -> str:
    from lab.studies import text

    return text.page(_stored("real-drafts.json"))


def _seeing(page: str) -> str:
    from lab.studies import seeing_page

    return seeing_page.page(_stored("seeing.json"))


def _figures(page: str) -> str:
    from lab import studies

    return studies.figures_page(RESULTS / "figures")


def _gpu_budgets(page: str) -> str:
    from budgets import page_of

    return page_of(_stored("gpu-budgets.json"))


PAGES: dict[str, Callable[[str], str]] = {
    "methods/README.md": _methods,
    "options.md": _options,
    "numbers.md": _numbers,
    "results/pairs.md": _pairs,
    "vllm.md": _vllm,
    "results/claims.md": _claims,
    "results/speed.md": _speed,
    "results/scaling.md": _scaling,
    "results/peers.md": _peers,
    "results/methods.md": _all_methods,
    "results/fresh.md": _renewed_views,
    "results/real.md": _real_weights("real"),
    "results/real-8k.md": _real_weights("real-8k"),
    "results/real-pair-intel.md": _real_pair("real-pair-intel"),
    "results/real-pair-h100.md": _real_pair("real-pair-h100"),
    "results/real-drafts.md": _real_drafts,
    "results/seeing.md": _seeing,
    "results/figures/README.md": _figures,
    "results/gpu-budgets.md": _gpu_budgets,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_command_makes(name):
    """Claim: a page that is made again from what is stored is the page that is there.

    Fails on a number typed by hand, and on a run that was replaced without its page.
    """
    page = (DOCS / name).read_text()
    assert PAGES[name](page) == page


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_report_is_what_its_run_says(run):
    """Claim: report.md is made of the results beside it, and its pictures are there."""
    from lab import layouts
    from saccade.bench import records, report

    about, answers = records.read_run(run)
    drawn: dict[str, list[str]] = {}
    for picture, name in re.findall(r"!\[((\S+)-\w+\.png)\]", (run / "report.md").read_text()):
        drawn.setdefault(name, []).append(picture)
        assert (run / picture).is_file()
    made = report.report_markdown(about, answers, drawn, layouts.papers_section(answers))
    assert (run / "report.md").read_text() == made


def test_charts_have_the_numbers_of_their_runs():
    """Claim: each chart shows each method's speed of its stored run, and can be drawn today."""
    from matplotlib.figure import Figure

    from lab import chart

    for name, run in chart.RUNS.items():
        bars = chart.read_bars(RESULTS / run)
        words = re.findall(r"<text[^>]*>([^<]*)</text>", (DOCS / name).read_text())
        both = [whole for suite in bars.values() for both in suite.values() for whole in both]
        speeds = [f"{whole[0]:.2f}" for whole in both]
        assert [word for word in words if re.fullmatch(r"\d\.\d\d", word)] == speeds, name
        assert isinstance(chart.draw_bars(bars), Figure)


def test_control_a_number_typed_by_hand_is_noticed():
    """Control: a page with another digit in a table is not what the command makes, and a page that
    has no place for a table is refused."""
    from lab import numbers

    page = (DOCS / "numbers.md").read_text()
    typed = page.replace("| `ar` | 1.00", "| `ar` | 1.01")
    assert typed != page == _numbers(typed)
    with pytest.raises(ValueError):
        numbers.page_with("", numbers.tables_by_name(RESULTS))


# -- what is stored ----------------------------------------------------------------------------

OTHERS = ("hf", "draft")  # Other libraries' methods, and the draft by itself.


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_stored_answer_is_plain_decodings(run):
    """Claim: no method of ours wrote another token than plain decoding, except where answers were
    sampled, and none fell back."""
    from saccade.bench import records

    about, answers = records.read_run(run)
    ours = [answer for answer in answers if not answer.method.startswith(OTHERS)]
    same = None if "temperature" in about["plan"] else True
    assert ours and all(
        a.identical is same and a.error is None and a.fallback is None for a in ours
    )


def test_stored_answers_of_other_runs_are_plain_decodings():
    """Claim: so did every method in the comparisons, on real weights and inside vLLM."""
    clips = _stored("methods.json")["clips"]
    rows = [row for clip in clips for row in clip["methods"].values()]
    for name in ("compare.json", "compare-torch.json"):
        rows += [row for clip in _stored(name).values() for row in clip["methods"].values()]
    assert rows and all(row["identical_to_ar"] for row in rows)
    measured = [row for name in ("real", "real-8k") for row in _stored(f"{name}.json")["measured"]]
    seen = _stored("seeing.json")
    measured += [*seen["measured"], *seen["raced"]]
    assert measured and all(row["same"] for row in measured)
    assert all(run["equal"] for run in _stored("vllm.json")["runs"])


def test_two_stored_runs_agree():
    """Claim: on the clip that two runs share, methods wrote the same ids in as many rounds (but
    `auto`, whose drafts depend on measured costs). Fails if two models were measured."""
    clip = _stored("methods.json")["clips"][0]
    other = _stored("compare-2048.json")["methods"]
    assert clip["token_ids"] == other["ar"]["token_ids"]
    both = other.keys() & clip["methods"].keys() - {"auto"}
    rounds = {name: clip["methods"][name]["rounds"] for name in both}
    assert both and rounds == {name: other[name]["rounds"] for name in both}


def test_every_figure_draws_from_its_stored_numbers():
    """Claim: each study's numbers and picture are stored and were made at the study's own size, and
    each picture of a method's page draws from the numbers beside it."""
    from matplotlib.figure import Figure

    from lab import studies

    folder = RESULTS / "figures"
    for name in studies.PAPER_FIGURES:
        data, study = studies.load_numbers(folder / f"{name}.json", name), studies.study_named(name)
        assert isinstance(study.draw(data), Figure)
        assert (folder / f"{name}.png").is_file()
        size = (data["clips"], data["size"], data["tokens"])
        assert size == (study.clips, study.size, study.tokens), name
    for path in sorted((DOCS / "methods").glob("*.json")):
        if path.stem in studies.STUDIES:
            drawn = studies.study_named(path.stem).draw(studies.load_numbers(path, path.stem))
            assert isinstance(drawn, Figure) and drawn.axes

"""The claims page: it is computed from the stored runs, and its theory from arithmetic."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lab import claims, studies
from lab.__main__ import app
from lab.claims import hippo, runs, sage, sparse_to_dense, tabed, theory
from lab.claims.claim import ACCEPTED, StoredResults
from lab.claims.rule import ARITHMETIC, MORE, MOST, NO_RUN, Finding, SuitesMissing, paired
from lab.claims.specvlm import SHARE_OF_TOKENS as SHARE
from lab.claims.specvlm import TREE
from saccade.bench import records
from saccade.bench.comparison import BASELINE
from saccade.core.errors import OptionError
from saccade.methods import resolve
from saccade.world.suites import suites

RESULTS = Path(__file__).parents[2] / "docs" / "results"
STORED = StoredResults(RESULTS)
EVERY = [claim for own in claims.CLAIMS.values() for claim in own]


def test_control_a_verdict_that_changed_is_seen(monkeypatch):
    """Control: where a run would turn a verdict, the page is refused, naming the claim: its
    explanation was written for another."""
    (theorem,) = (claim for claim in sage.CLAIMS if claim.place == "Theorem 4.8")
    turned = replace(theorem, expected="holds")
    monkeypatch.setitem(claims.CLAIMS, "SAGE", (turned,))  # type: ignore[arg-type]
    with pytest.raises(claims.StaleClaim, match=r"SAGE, Theorem 4\.8: does not hold, not holds"):
        claims.page(STORED)


def test_every_command_of_the_page_exists():
    """Claim: a command beside a verdict names a stored run, or a known figure; a claim without one
    is arithmetic, or its premise is missing."""
    for claim in EVERY:
        name, *rest = claim.command.removeprefix("lab ").split()[:2] or [""]
        if name == "run":
            assert runs.bench_arguments(rest[0], RESULTS), claim
        elif name == "figure":
            assert rest[0] in studies.STUDIES, claim
        else:
            assert not claim.command, claim


@pytest.mark.parametrize("paper", claims.CLAIMS)
def test_every_row_says_what_it_rests_on(paper):
    """Claim: every row has its unit and source, and, unless it is arithmetic or nothing can run it,
    its visual tokens, suites and items, whether numbers decided or not; a number has its interval.
    Fails if a row that is outdated leaves out what it is over."""
    for claim in claims.CLAIMS[paper]:
        finding = claim.judge(STORED)
        assert finding.unit and finding.source, claim
        if finding.source not in (ARITHMETIC.source, NO_RUN.source):
            assert finding.visual_tokens and finding.suites and finding.items, claim
        if finding.comparisons and finding.source != ARITHMETIC.source:
            assert re.search(r"\[-?\d", finding.number) or _is_constant(finding), claim


def _is_constant(finding: Finding) -> bool:
    """Whether every item of every comparison has the same value, so that there is no interval."""
    return all(each.interval[1] == each.interval[2] for each in finding.comparisons)


def test_a_short_answer_may_lack_a_measure():
    """Claim: an answer of one round has no later rounds to compare its first with, and is left out;
    so is a ratio to nothing. Fails if a run of short questions stops the whole page."""
    no_even = {"a tree": (TREE, lambda answer: 1.0 if len(answer.ids) % 2 else None)}
    finding = STORED.measure("specvlm-8k", SHARE, no_even, MOST)
    odd = [
        sum(len(answer.ids) % 2 for answer in STORED.answers("specvlm-8k", suite, TREE))
        for suite in STORED.suites("specvlm-8k")
    ]
    assert [each.items for each in finding.comparisons] == odd and 0 < min(odd) < 12
    ratio = paired("a", "s", replace(SHARE, compared_by="ratio"), {1: 2.0, 2: 3.0}, {1: 1.0, 2: 0})
    assert ratio.interval[0] == 2 and ratio.items == 1


def test_repeats_of_a_run_are_averaged(tmp_path):
    """Claim: where a run is stored with several seeds, a question's value is its mean over them.
    Fails if repeats count as further items, which would narrow every interval."""
    for name in ("bench", "bench-seed-1", "bench-seed-2"):
        shutil.copytree(RESULTS / "bench-sampled", tmp_path / name)
    once, thrice = (
        StoredResults(folder).compare(run, ACCEPTED, [("a", "sd", BASELINE)], MORE)
        for folder, run in ((RESULTS, "bench-sampled"), (tmp_path, "bench"))
    )
    assert StoredResults(tmp_path).repeats("bench") == ["bench", "bench-seed-1", "bench-seed-2"]
    assert [each.items for each in thrice.comparisons] == [50]
    assert once.comparisons[0].interval == pytest.approx(thrice.comparisons[0].interval)


def test_a_claim_is_judged_over_every_suite_of_its_run():
    """Claim: what a run has is what is compared. Fails if a claim on sage-2k leaves out the
    lists or the new wording."""
    finding = STORED.compare("sage-2k", ACCEPTED, [("a", "sd-tree", "sd")], MORE)
    assert [each.suite for each in finding.comparisons] == STORED.suites("sage-2k")


def test_a_claim_is_judged_over_every_panel_of_its_figure():
    """Claim: of a figure all rows or drafts have to be named. Fails if a claim can leave out the
    draft that speaks against it."""
    (lines,) = STORED.figure("specvlm-sensitivity")["panels"].values()
    assert STORED.figure_suites("specvlm-sensitivity", ACCEPTED.unit, tuple(lines))
    with pytest.raises(SuitesMissing, match="are not all that figure specvlm-sensitivity has"):
        STORED.figure_suites("specvlm-sensitivity", ACCEPTED.unit, tuple(lines)[:1])


def test_second_turns_are_judged_without_the_first():
    """Claim: of twelve conversations of two turns each, second turns are twelve values a suite."""
    finding = tabed.judge_close_to_best_later(STORED)
    assert {each.items for each in finding.comparisons} == {12}
    assert len(finding.comparisons) == len(STORED.suites("papers-second"))


def test_in_one_unit_hippo_accepts_fewer():
    """Claim: by the round and from refusal to refusal, every interval of HIPPO less a rival is
    below 0, and none is above it as the paper has the method. Fails if the two sides of the
    comparison are counted in different ways."""
    for judge in (hippo.judge_acceptance, hippo.judge_acceptance_until_refusal):
        for each in judge(STORED).comparisons:
            assert each.interval[1] <= 0, each
            assert each.interval[2] < 0 or each.label.startswith("to the letter"), each


def test_a_stored_run_is_made_again_as_it_was():
    """Claim: the arguments of a stored run are those of its own plan; an unknown name says what is
    known."""
    about, _ = records.read_run(RESULTS / "papers-second")
    arguments = runs.bench_arguments("papers-second", RESULTS)
    assert arguments[arguments.index("--methods") + 1] == ",".join(about["plan"]["methods"])
    assert arguments[arguments.index("--draft") + 1] == "shapes-draft-naive"
    assert arguments[arguments.index("--limit") + 1] == "12"
    with pytest.raises(
        OptionError, match="no run is called papers-9k; these lie in .*papers-second"
    ):
        runs.bench_arguments("papers-9k", RESULTS)


def test_the_runs_of_the_claims_can_be_run_again():
    """Claim: every method and suite of a run that decides is known today."""
    for name in {
        claim.command.split()[2] for claim in EVERY if claim.command.startswith("lab run")
    }:
        plan = records.read_run(RESULTS / name)[0]["plan"]
        assert all(resolve(method) for method in plan["methods"]), name
        assert set(plan["suites"]) <= set(suites()), name


def test_repeats_that_are_missing_are_named(tmp_path):
    """Claim: an average over three runs is never one of fewer."""
    shutil.copytree(RESULTS / "std-2k", tmp_path / "std-2k")
    with pytest.raises(OptionError, match="std-2k alone: lab run std-2k --seed N"):
        sparse_to_dense.judge_repeats(StoredResults(tmp_path))


def test_questions_of_one_batch_are_one_item():
    """Claim: eight answers that share their seconds count once: no interval is of copies."""
    finding = sparse_to_dense.judge_batches(STORED)
    assert {each.items for each in finding.comparisons} == {1}
    assert finding.verdict == "not shown"


def test_the_page_says_where_its_runs_were_made():
    """Claim: every run or figure that decides is listed with its processor, and what decides by
    seconds ran on one kind of processor with the same threads."""
    page = (RESULTS / "claims.md").read_text()
    table = page.split("## Where the runs were made")[1].split("##")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[4:-1]]
    sources = [name for row in rows for name in row[4].split(", ")]
    deciding = {claim.judge(STORED).source for claim in EVERY}
    assert deciding - {ARITHMETIC.source, NO_RUN.source} == set(sources)
    assert len({(row[0], row[1]) for row in rows if row[3] == "seconds"}) == 1


def test_a_run_can_be_shown_without_running_it():
    """Claim: --show prints the benchmark's command and runs nothing."""
    result = CliRunner().invoke(app, ["run", "sage-2k", "--show", "--results", str(RESULTS)])
    assert result.exit_code == 0
    assert "saccade bench --threads 2 --limit 12 --suite shapes-caption-2k," in result.output
    assert result.output.rstrip().endswith("--out runs/sage-2k")


def test_a_trial_and_a_repeat_have_places_of_their_own(tmp_path):
    """Claim: --limit and --seed change the items and the seed, and never the folder that the page
    reads. Fails if a trial of one item could be taken for the run."""
    preview = CliRunner().invoke(app, ["run", "std-2k", "--show", "--limit", "1"])
    assert "--limit 1 " in preview.output and preview.output.rstrip().endswith("runs/trial-std-2k")
    preview = CliRunner().invoke(app, ["run", "std-2k", "--show", "--seed", "2"])
    assert "--seed 2" in preview.output and preview.output.rstrip().endswith("runs/std-2k-seed-2")
    arguments = ["run", "std-2k", "--limit", "1", "--results", tmp_path, "--out"]
    refused = CliRunner().invoke(app, [*map(str, arguments), str(tmp_path / "std-2k")])
    assert isinstance(refused.exception, OptionError)


def test_every_paper_has_its_claims():
    """Claim: five papers, each with more than five claims."""
    assert list(claims.CLAIMS) == ["SpecVLM", "Sparse-to-Dense", "TABED", "SAGE", "HIPPO"]
    assert all(len(own) > 5 for own in claims.CLAIMS.values())


def test_what_is_missing_is_named():
    """Claim: without its results a claim raises one sentence that names the missing file."""
    with pytest.raises(OptionError, match=r"holds no results\.jsonl"):
        StoredResults(Path("nowhere")).answers("bench-2k", "s", "ar")
    with pytest.raises(OptionError, match="python -m lab figure specvlm-tail makes it"):
        StoredResults(Path("nowhere")).figure("specvlm-tail")


# -- theory ------------------------------------------------------------------------------------


def entropy(law: list[float]) -> float:
    return -sum(p * math.log(p) for p in law if p > 0)


@pytest.mark.parametrize("law", ([0.5, 0.5], [0.7, 0.2, 0.1], [0.1] * 10, [1.0]))
def test_confidence_is_the_papers(law):
    """Claim: alpha is 1 - H / log k, 0 for ten equal tokens and 1 for a single one."""
    assert theory.confidence(law, 10) == pytest.approx(1 - entropy(law) / math.log(10))


def test_the_lemma_fails_where_papers_md_says():
    """Claim: p = (.5, .5, 0, ...) with k = 10 has alpha .699 and a bound of .729 above p_1."""
    alpha = theory.confidence([0.5, 0.5], 10)
    assert alpha == pytest.approx(0.699, abs=5e-4)
    assert theory.lemma_bound(alpha, 10) == pytest.approx(0.729, abs=5e-4)


def test_control_the_lemma_holds_at_its_ends():
    """Control: for a single token and for ten equal ones the bound is p_1 itself."""
    assert theory.lemma_bound(theory.confidence([1.0], 10), 10) == pytest.approx(1)
    assert theory.lemma_bound(theory.confidence([0.1] * 10, 10), 10) == pytest.approx(0.1)


def test_the_counterexample_of_the_guarantee_is_one():
    """Claim: its two laws are at most epsilon apart, and their arg-maxes differ."""
    draft, target = np.array([0.52, 0.48]), np.array([0.47, 0.53])
    assert abs(draft - target).sum() / 2 <= 0.05 + 1e-12
    assert draft.argmax() != target.argmax()
    assert theory.confidence(list(draft), 10) > theory.acceptance_threshold(10, 0.05)
    assert theory.acceptance_threshold(10, 0.05) == pytest.approx(5 / 9)


def test_expected_accepted_by_simulation():
    """Claim: Theorem 4.6's sum is what drawing acceptances gives."""
    draw = np.random.default_rng(0).random((40_000, 6)) < 0.8 * 0.9 ** np.arange(6)
    run = np.cumprod(draw, axis=1).sum(1)
    assert theory.expected_accepted(0.8, 0.9, 6) == pytest.approx(run.mean(), abs=0.03)


def test_the_best_depth_is_the_best():
    """Claim: no depth beats the one found, by rates written out."""
    for p, ratio in ((0.5, 10.0), (0.9, 30.0)):
        optimum = theory.best_argument(lambda d, p=p, ratio=ratio: theory.chain_speed(p, ratio, d))

        def rate(depth: int, p: float = p, ratio: float = ratio) -> float:
            return (1 + sum(p**i for i in range(1, depth + 1))) / (ratio + depth)

        assert all(rate(optimum) >= rate(depth) for depth in range(1, 100))
        assert optimum < theory.depth_formula(p, ratio)


def test_width_by_the_printed_equations_has_no_cap():
    """Claim: Eq. 36-37 as printed make the best width rise with q_1, and what ten candidates gain
    over one too; with acceptance capped at 1 both turn. Fails if the cap is ours again."""
    printed, capped = (
        [theory.best_width(q, 0.05, 0.5, is_capped=cap) for q in (0.2, 0.4, 0.8)]
        for cap in (False, True)
    )
    assert printed == sorted(printed) and capped == sorted(capped, reverse=True)
    accepted = sum(0.8 / math.sqrt(i) for i in range(1, 11))
    assert accepted > 1
    assert theory.width_speed(0.8, 0.05, 0.5, 10) == pytest.approx((accepted + 1) / 1.5)
    assert theory.width_speed(0.8, 0.05, 0.5, 10, is_capped=True) == pytest.approx(2 / 1.5)
    gains = {
        cap: [
            theory.width_speed(q, 0.05, 0.5, 10, is_capped=cap)
            / theory.width_speed(q, 0.05, 0.5, 1, is_capped=cap)
            for q in (0.2, 0.8)
        ]
        for cap in (False, True)
    }
    assert gains[False][0] < gains[False][1] and gains[True][0] > gains[True][1]

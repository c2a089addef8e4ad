"""The claims page: it is computed from the stored runs, and its theory from arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab import claims, studies
from lab.claims import sage, theory
from lab.claims.claim import Claim, Finding, StoredResults, grade_ordering, mean_difference
from saccade.core.errors import OptionError

RESULTS = Path(__file__).parents[2] / "docs" / "results"
EVERY = [claim for own in claims.CLAIMS.values() for claim in own]


def test_control_a_verdict_that_changed_is_seen(monkeypatch):
    """Control: where a run would turn a verdict, the page is refused, naming the claim: its
    explanation was written for another."""
    turned = replace(sage.CLAIMS[-1], expected="holds")
    monkeypatch.setitem(claims.CLAIMS, "SAGE", (turned,))  # type: ignore[arg-type]
    with pytest.raises(claims.StaleClaim, match=r"SAGE, Theorem 4\.8: does not hold, not holds"):
        claims.page(StoredResults(RESULTS))


def test_every_claim_says_why_and_by_what():
    """Claim: each has a reason, and a source that exists: a stored run or a known figure."""
    for claim in EVERY:
        assert claim.why.endswith("."), claim
        for source in filter(None, claim.source.split(", ")):
            name = source.removeprefix("figure ")
            if source.startswith("figure "):
                assert name in studies.STUDIES
                assert (RESULTS / "figures" / f"{name}.json").is_file()
            else:
                assert (RESULTS / name / "results.jsonl.gz").is_file()


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


def test_an_ordering_needs_its_whole_interval():
    """Claim: all intervals above 0 hold, some partly, none not; a tie does not hold."""
    above, tie, below = (1.0, 0.5, 1.5), (0.1, -0.2, 0.4), (-1.0, -1.5, -0.5)
    assert grade_ordering([above, above]) == "holds"
    assert grade_ordering([above, tie]) == grade_ordering([below, above]) == "partly"
    assert grade_ordering([tie]) == grade_ordering([below, tie]) == "does not hold"


def test_differences_are_on_the_same_clips():
    """Claim: what is compared is paired: a constant gain has a point interval, however much clips
    differ. Fails if the two lists are resampled apart."""
    base = list(np.random.default_rng(0).normal(5, 3, 40))
    assert mean_difference([b + 0.25 for b in base], base) == pytest.approx((0.25, 0.25, 0.25))


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
        found = theory.best_argument(lambda d, p=p, ratio=ratio: theory.chain_speed(p, ratio, d))

        def rate(depth: int, p: float = p, ratio: float = ratio) -> float:
            return (1 + sum(p**i for i in range(1, depth + 1))) / (ratio + depth)

        assert all(rate(found) >= rate(depth) for depth in range(1, 100))
        assert found < theory.depth_formula(p, ratio)


def test_a_finding_is_frozen():
    """Claim: nothing can change a verdict after it was computed."""
    finding = Finding("holds", "1")
    with pytest.raises(AttributeError):
        finding.verdict = "partly"  # type: ignore[misc]
    assert isinstance(EVERY[0], Claim)

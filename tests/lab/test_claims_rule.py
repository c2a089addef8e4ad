"""The one rule by which every claim is judged: laws that no claim can get around."""

from __future__ import annotations

import ast
import inspect
import random
from pathlib import Path

import pytest

from lab.claims import (
    draft_model,
    hippo,
    outdated,
    real,
    rule,
    sage,
    seeing,
    sparse_to_dense,
    specvlm,
    tabed,
)
from lab.claims.rule import (
    HIGHER_RATIO,
    MIN_ITEMS,
    MORE,
    NOT_LESS,
    SAME,
    Claimed,
    Comparison,
    Finding,
    Premise,
    Suites,
    SuitesMissing,
    Unit,
    UnitsDiffer,
    alone,
    judge,
    of_intervals,
    paired,
    printed,
)
from saccade.core.errors import OptionError

TOKENS = Unit("tokens", "difference")
SPEED = Unit("speed", "ratio", is_time=True)
TWO = Suites("a run", ("captions", "questions"), "2,048", 12)
ONE = Suites("a run", ("captions",), "2,048", 12)
JUDGING_MODULES = (specvlm, sparse_to_dense, tabed, sage, hippo, real, draft_model, seeing)


def comparison(low: float, high: float, suite: str = "captions", items: int = 12) -> Comparison:
    return Comparison("own less other", suite, TOKENS, ((low + high) / 2, low, high), items)


def verdict(*comparisons: Comparison, suites: Suites = ONE, claimed: Claimed = MORE) -> str:
    return judge(suites, TOKENS, claimed, comparisons).verdict


def test_an_interval_that_includes_the_threshold_never_holds():
    """Claim: over random intervals, *holds* is given exactly where every interval lies whole within
    the range, and *does not hold* exactly where every one lies whole outside. Fails if the middle
    alone decides."""
    draw = random.Random(0)
    seen = set()
    for _ in range(2000):
        intervals = []
        for suite in TWO.names:
            low = draw.uniform(-1, 1)
            intervals.append(comparison(low, low + draw.uniform(0, 0.6), suite))
        outcome = verdict(*intervals, suites=TWO)
        seen.add(outcome)
        lows = [each.interval[1] for each in intervals]
        highs = [each.interval[2] for each in intervals]
        assert (outcome == "holds") == all(low > 0 for low in lows)
        assert (outcome == "does not hold") == all(high < 0 for high in highs)
        assert (outcome == "partly") == (
            any(low > 0 for low in lows) and not all(low > 0 for low in lows)
        )
    assert seen == {"holds", "partly", "not shown", "does not hold"}


def test_the_threshold_itself_is_not_above_it():
    """Claim: an interval that ends at the threshold decides nothing on either side."""
    assert verdict(comparison(0, 1)) == "not shown"
    assert verdict(comparison(-1, 0)) == "not shown"
    assert verdict(comparison(0, 0)) == "not shown"


def test_a_claim_over_fewer_suites_raises():
    """Claim: a suite of the run that is left out, one that it does not have, one counted twice and
    a label without comparisons are all refused. Fails if a claim can choose its suites."""
    for names in (["captions"], ["captions", "questions", "more"], ["captions", "captions"], []):
        with pytest.raises(SuitesMissing):
            judge(TWO, TOKENS, MORE, [comparison(1, 2, name) for name in names])
    other = Comparison("another pair", "captions", TOKENS, (1, 1, 1), 12)
    both = [comparison(1, 2, name) for name in TWO.names]
    with pytest.raises(SuitesMissing, match="another pair is compared over captions, and a run"):
        judge(TWO, TOKENS, MORE, [*both, other])


def test_two_units_raise():
    """Claim: comparisons in different units, and a range that is not the unit's, are refused."""
    by_refusal = Unit("tokens from refusal to refusal", "difference")
    other = Comparison("b", "captions", by_refusal, (1, 1, 1), 12)
    with pytest.raises(UnitsDiffer, match="b counts tokens from refusal to refusal"):
        judge(ONE, TOKENS, MORE, [comparison(1, 2), other])
    with pytest.raises(UnitsDiffer, match="a range of a ratio does not judge tokens"):
        judge(ONE, TOKENS, HIGHER_RATIO, [comparison(1, 2)])


def test_pairs_are_of_the_same_items():
    """Claim: a constant gain has a point interval however much items differ, and two sides with
    different items are refused. Fails if the two sides are resampled apart."""
    base = {item: 5.0 * item for item in range(1, 41)}
    gained = {item: value + 0.25 for item, value in base.items()}
    assert paired("a", "s", TOKENS, gained, base).interval == pytest.approx((0.25,) * 3)
    doubled = {item: 2 * value for item, value in base.items()}
    assert paired("a", "s", SPEED, doubled, base).interval == pytest.approx((2.0,) * 3)
    with pytest.raises(OptionError, match="different items"):
        paired("a", "s", TOKENS, gained, {1: 1.0})


def test_few_items_decide_nothing():
    """Claim: below six items no interval decides, however narrow it is."""
    assert verdict(comparison(1, 2, items=MIN_ITEMS)) == "holds"
    assert verdict(comparison(1, 2, items=MIN_ITEMS - 1)) == "not shown"
    assert verdict(comparison(-2, -1, items=MIN_ITEMS - 1)) == "not shown"


def test_one_in_forty_is_chance():
    """Claim: of forty intervals a single one above 0 is no *partly*, and two are."""
    suites = Suites("a run", tuple(map(str, range(40))), "", 12)
    for above, expected in ((1, "not shown"), (2, "partly")):
        intervals = [
            comparison(1, 2, name) if number < above else comparison(-1, 1, name)
            for number, name in enumerate(suites.names)
        ]
        assert verdict(*intervals, suites=suites) == expected


def test_a_missing_premise_tests_nothing():
    """Claim: without its premise a claim is not testable whatever the numbers, which are shown."""
    for low in (1, -2):
        premise = Premise("a suite where M fails", is_met=False)
        finding = judge(ONE, TOKENS, MORE, [comparison(low, low + 1)], premise)
        assert finding.verdict == "not testable here"
        assert finding.number.startswith("missing: a suite where M fails. ")
    met = judge(ONE, TOKENS, MORE, [comparison(1, 2)], Premise("it", is_met=True))
    assert met.verdict == "holds"


def test_an_outdated_run_shows_no_number():
    """Claim: nothing of an outdated run is judged or shown, only the reason."""
    old = Suites("a run", ("captions",), "2,048", 12, outdated="older than the engine")
    finding = judge(old, TOKENS, MORE, [comparison(1, 2)])
    assert (finding.verdict, finding.number) == ("to be run again", "older than the engine")


def test_stored_means_never_claim_more_than_pairs():
    """Claim: where only two means with intervals are stored, what holds by them has two intervals
    apart, and pairs of the same values would hold as well."""
    draw = random.Random(1)
    for _ in range(200):
        shift = draw.uniform(-1, 2)
        other = [draw.gauss(5, 1) for _ in range(20)]
        own = [value + shift + draw.gauss(0, 0.1) for value in other]
        means = [alone("x", "captions", TOKENS, side).interval for side in (own, other)]
        wide = of_intervals("own less other", "captions", TOKENS, *means, items=20)
        pairs = paired(
            "own less other", "captions", TOKENS, dict(enumerate(own)), dict(enumerate(other))
        )
        if wide.is_within(MORE):
            assert pairs.is_within(MORE) and means[0][1] > means[1][2]


def test_the_same_is_within_five_per_cent_everywhere():
    """Claim: the ranges besides printed numbers are 0, 1, a half and 5 % on both sides."""
    assert (SAME.low, SAME.high) == (0.95, 1.05)
    assert (MORE.low, HIGHER_RATIO.low, rule.MOST.low) == (0, 1, 0.5)
    assert rule.SMALL_SHARE.high == rule.LARGE_SHARE.low == 0.05
    assert printed(2.0) == Claimed(2.0, float("inf"), "ratio")


def test_only_the_rule_makes_findings():
    """Claim: no module that judges claims builds a Finding itself, so every verdict is the rule's.
    Fails if a claim writes its own verdict."""
    for module in JUDGING_MODULES:
        tree = ast.parse(Path(inspect.getfile(module)).read_text())
        called = {node.func.id for node in ast.walk(tree) if _is_call_of_name(node)}
        assert "Finding" not in called, module.__name__


def _is_call_of_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_control_a_finding_built_by_hand_is_seen():
    """Control: the test above would see one."""
    (statement,) = ast.parse('Finding("holds", "1")').body
    assert isinstance(statement, ast.Expr) and _is_call_of_name(statement.value)
    with pytest.raises(AttributeError):
        Finding("holds", "1").verdict = "partly"  # type: ignore[misc]


def test_a_run_made_again_is_no_longer_outdated(monkeypatch):
    """Claim: a run is outdated by its content: the same name with other content decides again, and
    what concerns seconds or one method leaves the rest alone."""
    for each in outdated.OUTDATED:
        for name, digest in each.digests.items():
            methods = each.methods or ("sd",)
            assert outdated.reason(name, digest, True, methods)
            assert not outdated.reason(name, "another", True, methods)
    slow = outdated.Outdated("slow", {"run": "a"}, only_seconds=True)
    wide = outdated.Outdated("wide", {"run": "a"}, only_seconds=False, methods=("sage",))
    monkeypatch.setattr(outdated, "OUTDATED", (slow, wide))
    assert outdated.reason("run", "a", True, ["hippo/early=wait"]) == "slow"
    assert not outdated.reason("run", "a", False, ["hippo/early=wait"])
    assert outdated.reason("run", "a", False, ["sd/shape=sage"]) == "wide"
    assert not outdated.reason("run", "b", True, ["sd/shape=sage"])


def test_a_rival_that_was_not_run_leaves_no_claim_whole():
    """Claim: what holds against the rivals that were run holds partly, and the number names the one
    that was not. What does not hold against one of them does not hold."""
    for low, high, expected in ((0.1, 0.5, "partly"), (-0.5, -0.1, "does not hold")):
        finding = judge(ONE, TOKENS, MORE, [comparison(low, high)], not_run="LayerSkip")
        assert finding.verdict == expected and "LayerSkip was not run" in finding.number


def test_close_to_the_best_has_no_bound_above():
    """Claim: a method that is better than the one it is compared with is close to the best."""
    cases = ((1.02, 1.4, "holds"), (0.96, 1.01, "holds"), (0.9, 1.2, "not shown"))
    for low, high, expected in cases:
        ratio = Comparison("own over M", "captions", SPEED, ((low + high) / 2, low, high), 12)
        assert judge(ONE, SPEED, NOT_LESS, [ratio]).verdict == expected


def test_only_answers_that_can_fade_tell_whether_they_do():
    """Claim: an answer of ten rounds or fewer has no ratio of its first ten rounds to all."""
    assert specvlm.first_rounds_ratio((3,) * 10) is None
    assert specvlm.first_rounds_ratio((0,) * 12) is None
    assert specvlm.first_rounds_ratio((2,) * 10 + (0,) * 10) == 2

"""Claims about how long drafts get inside an engine, by what rounds cost and how drafts fare."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from saccade.core.errors import MethodError, OptionError
from saccade.core.round_estimates import (
    MIN_MEASURED_ROUNDS,
    SECONDS_DECAY,
    Acceptance,
    CostLine,
    FadingMean,
    Pause,
)
from saccade.vllm.draft_length import (
    MAX_RETRY_ROUNDS,
    PRIOR,
    RETRY_AFTER_ROUNDS,
    DraftPlan,
    RoundCosts,
    size_bucket,
    update_acceptance,
)
from saccade.vllm.draft_options import DraftOptions, read_options
from saccade.vllm.proposer import Proposer
from saccade.vllm.request_drafts import DraftRequest, Drafts, LookupDrafts, ProposedTokens


class World(Drafts):
    """A clock, a target that takes seconds by rows, and a draft right with a fixed chance."""

    def __init__(self, row: float, level: float, right: float) -> None:
        self.now, self.row, self.level, self.right = 0.0, row, level, right
        self.luck = np.random.default_rng(0)
        self.lengths: list[int] = []
        self.kept: set[str] = set()
        self.started: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.kept

    def start(self, request: DraftRequest) -> bool:
        self.started.append(request.name)
        self.kept.add(request.name)
        return True

    def draft(self, batch, plan):
        length = 0
        while length < plan.length and (
            not length or self.right ** (length + 1) > plan.min_probability
        ):
            length += 1
        self.now += self.level * length
        self.lengths.append(length)
        return {each.name: ProposedTokens((1,) * length, (self.right,) * length) for each in batch}

    def forget_all_except(self, names) -> None:
        self.kept &= set(names)

    def run(self, requests: int, rounds: int) -> tuple[float, list[int]]:
        """Tokens a second of the second half, and how long each of its drafts was."""
        proposer = Proposer(self, 8, clock=lambda: self.now)
        drafts: dict[str, ProposedTokens] = {}
        tokens, began, lengths = 0, 0.0, []
        for number in range(rounds):
            rows = sum(1 + len(draft.tokens) for draft in drafts.values()) or requests
            self.now += 1.0 + self.row * rows
            draft_requests = []
            for name in map(str, range(requests)):
                drafted = len(drafts.get(name, ProposedTokens()).tokens)
                wrong = self.luck.random(drafted) > self.right
                right = int(wrong.argmax()) if wrong.any() else drafted
                new = [1] * right + ([2] if right < drafted else [3])
                draft_requests.append(DraftRequest(name, np.array([0, *new]), 1, new, lambda: None))
                tokens += len(new) if number >= rounds // 2 else 0
            if number == rounds // 2:
                began = self.now
            drafts = proposer.propose(draft_requests, decoding_only=number > 0)
            if number >= rounds // 2:
                lengths.append(max(len(draft.tokens) for draft in drafts.values()))
        return tokens / (self.now - began), lengths


def test_a_good_draft_alone_is_drafted_far():
    """Claim: where rows are nearly free and drafts nearly always right, drafts come to their full
    length, and tokens come at more than four times the rate of none."""
    rate, lengths = World(row=0.001, level=0.02, right=0.97).run(1, 400)
    assert rate > 4.0 and np.mean(lengths) > 6


def test_where_rows_cost_as_much_as_forwards_nothing_is_drafted():
    """Claim: with rows that cost in proportion (a machine that is full) drafting ends, and at most
    3 % is lost on trying; a fixed length would lose half."""
    plain = 32 / (1 + 32.0)
    rate, lengths = World(row=1.0, level=0.1, right=0.6).run(32, 600)
    assert np.mean([length > 0 for length in lengths]) < 0.03
    assert rate > 0.97 * plain
    tokens = sum(0.6**n for n in range(9))
    assert 32 * tokens / (1 + 32 * 9 + 0.8) < 0.5 * plain


def test_a_hopeless_draft_is_dropped():
    """Claim: a draft that is never right costs less than 2 % in the long run."""
    rate, _ = World(row=0.001, level=0.3, right=0.0).run(1, 800)
    assert rate > 0.98 / 1.001


def test_a_draft_is_tried_again_ever_more_seldom():
    """Claim: between two tries of a hopeless draft the rounds double, up to a bound."""
    world = World(row=0.001, level=0.3, right=0.0)
    world.run(1, 700)
    assert len(world.lengths) < 30 and MAX_RETRY_ROUNDS == 512


def test_a_draft_that_pays_again_is_soon_tried_again():
    """Claim: once drafting has paid, the next wait before it is tried is the first one, and not
    twice the last. Fails if one bad stretch makes every later try rarer for good."""
    costs = RoundCosts(8, pause=Pause(64))
    for _ in range(64):
        costs = costs.after_plain_round()
    tried = costs.after_drafting(8, 1.0)
    assert tried.pause.length == 128
    assert tried.after_drafting(8, 1.0).pause.length == RETRY_AFTER_ROUNDS


def test_a_planned_draft_that_found_nothing_is_no_pause():
    """Claim: rounds in which prompt lookup found no match are no rounds of a pause. Fails if the
    next draft, which is expected to pay, is taken for a retry, so that a bad one costs a longer
    pause."""
    costs = RoundCosts(8)
    for _ in range(2 * RETRY_AFTER_ROUNDS):
        costs = costs.after_drafting(0, 0.0)
    assert costs.rounds == 2 * RETRY_AFTER_ROUNDS
    assert costs.after_drafting(3, 1.0).pause == Pause(RETRY_AFTER_ROUNDS)


@pytest.mark.parametrize("right", [0.5, 0.8])
def test_the_middle_is_found(right):
    """Claim: with costs between the extremes the rate is at least 90 % of that of the best fixed
    length, found by trying all of them."""
    row, level = 0.05, 0.1
    best = max(
        sum(right**n for n in range(k + 1)) / (1 + row * (1 + k) + level * k) for k in range(9)
    )
    rate, _ = World(row, level, right).run(1, 1200)
    assert rate > 0.9 * best


def test_a_line_finds_its_slope_and_forgives_a_pause():
    """Claim: seconds over counts are fitted exactly where they lie on a line; one pause of 1000
    times as long moves the line by less than one ordinary value."""
    tilted = CostLine()
    for rows, seconds in ((6, 5.0), (3, 0.01), (1, 0.01), (6, 0.01)):
        tilted = tilted.fold(rows, seconds)
    assert tilted.at(1) == 0.0  # The first round compiled kernels.
    assert tilted.fold(1, 0.01).y > SECONDS_DECAY * tilted.y  # A real second is not counted as 0.
    line = CostLine()
    for x in (1, 9, 5, 1, 9, 5):
        line = line.fold(x, 2 + 0.5 * x)
    assert line.weight > MIN_MEASURED_ROUNDS
    assert line.slope == pytest.approx(0.5) and line.at(3) == pytest.approx(3.5)
    assert line.fold(5, 4500.0).at(5) < 9
    assert CostLine().at(4) == 0.0 and CostLine().fold(3, 1.0).slope == 0.0


def test_a_verdict_counts_up_to_the_first_refusal():
    """Claim: what stood after a refused token says nothing of the draft."""
    nothing = Acceptance(FadingMean(0, 1e-9), FadingMean(0, 1e-9))
    acceptance = update_acceptance(nothing, (1, 2, 3), (0.5, 0.5, 0.5), (1, 9))
    assert acceptance.rate == pytest.approx(0.5, abs=0.01)
    assert acceptance.chance(0.4) == pytest.approx(0.4, abs=0.01)
    assert update_acceptance(PRIOR, (), (), (1, 2)) == PRIOR


def test_rounds_of_different_sizes_are_learnt_apart():
    """Claim: what 32 requests cost says nothing of one alone."""
    assert [size_bucket(n) for n in (1, 2, 3, 8, 9, 32)] == [1, 2, 4, 8, 16, 32]
    assert RoundCosts(8).plan(1, PRIOR).length == 8
    known = replace(RoundCosts(8), target=CostLine(9.0, 9.0, 9.0, 10.0, 9.0))
    assert known.plan(1, PRIOR).length == 8  # the draft's seconds are not known yet


def test_prompts_are_read_when_a_draft_is_first_wanted():
    """Claim: a request that nothing is drafted for costs the draft no prefill; one that cannot be
    started is asked once."""
    world = World(0, 0, 1)
    proposer = Proposer(world, 8, clock=lambda: 0.0)
    proposer._plan = lambda pace, requests: DraftPlan(0)  # type: ignore[method-assign]
    request = DraftRequest("a", np.array([0, 1]), 1, [1], lambda: None)
    proposer.propose([request], decoding_only=True)
    assert not world.started
    del proposer._plan
    world.start = lambda each: world.started.append(each.name)  # type: ignore[assignment]
    for _ in range(3):
        assert proposer.propose([request], decoding_only=True) == {"a": ProposedTokens()}
    assert world.started == ["a"]
    proposer.forget_all_except([])
    proposer.propose([request], decoding_only=True)
    assert world.started == ["a", "a"]


def test_lookup_never_proposes_a_placeholder():
    """Claim: what followed the same words is proposed up to the first placeholder."""
    drafts = LookupDrafts([99])
    request = DraftRequest("a", np.array([5, 6, 7, 99, 8, 5, 6]), 5, [6], lambda: None)
    assert drafts.draft([request], DraftPlan(4))["a"].tokens == (7,)
    assert drafts.draft([request], DraftPlan(1))["a"].tokens == (7,)
    free = LookupDrafts([])
    assert free.draft([request], DraftPlan(4))["a"].tokens == (7, 99, 8, 5)
    assert "a" in drafts and drafts.start(request)


def test_options_are_read_from_config_and_environment():
    """Claim: the config wins over the environment, other variables are no concern, and every
    value that means nothing is refused by its name."""
    environment = {"SACCADE_VLLM_DRAFT": "a", "SACCADE_VLLM_KEEP": "0.3", "SACCADE_CACHE": "/x"}
    options = read_options({"draft": "b", "length": 4}, environment, 8)
    assert options == DraftOptions("b", keep=0.3, length=4)
    assert read_options({"draft": "b", "length": "auto"}, {}, 8).length is None
    unset = {"keep": None, "length": None, "view": None, "memory": None}
    assert read_options({"draft": "b", **unset}, {}, 8) == DraftOptions("b")
    # What is null in the config is not set there, so the environment's value holds.
    assert read_options({"draft": None, "keep": None}, environment, 8) == DraftOptions(
        "a", keep=0.3
    )
    for settings, why in (
        ({}, "no draft is named"),
        ({"draft": "b", "veiw": "full"}, "unknown option 'veiw'"),
        ({"draft": "b", "keep": 1.5}, "keep=1.5"),
        ({"draft": "b", "keep": True}, "keep=True"),
        ({"draft": "b", "memory": "lots"}, "memory=lots"),
        ({"draft": "b", "length": 9}, "up to num_speculative_tokens=8"),
        ({"draft": "b", "length": "0"}, "length=0"),
        ("lookup", "'lookup', and not an object"),
        (None, "None, and not an object"),
    ):
        with pytest.raises(OptionError, match=why):
            read_options(settings, {}, 8)
    with pytest.raises(MethodError, match="unknown view 'nowhere'"):
        DraftOptions("b", view="nowhere").resolve_view()
    for view in ("affordable", "text"):
        with pytest.raises(OptionError, match=f"view={view} does not work inside vLLM"):
            DraftOptions("b", view=view).resolve_view()
    assert DraftOptions("b", keep=0.25).resolve_view().keep == 0.25

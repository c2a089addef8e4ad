"""Claims about expected speed, the fitted shape, and measured costs."""

from __future__ import annotations

import itertools
import json
import random
import time
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch
from helpers import TableSession, backbone, noisy, qwen25

import saccade
from saccade.core.costs import Costs
from saccade.core.result import Round, Verdict
from saccade.core.round_estimates import FadingMean, expected_chain
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, Tree, chain
from saccade.drafting import recipe
from saccade.drafting.shapes import cost_measurement
from saccade.drafting.shapes import fit as fitting
from saccade.drafting.shapes.fit import Fit, FitState, expected_tree
from saccade.methods import resolve
from saccade.methods.specvlm import TREE
from saccade.model.kernels.few_bits import rounding_named

TEXT = {"input_ids": torch.arange(1, 9)[None], "attention_mask": torch.ones(1, 8, dtype=torch.long)}
COSTS = Costs((1, 2, 4, 8), (10.0, 11.0, 13.0, 21.0), draft=0.5)


@pytest.fixture(autouse=True)
def _nothing_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins like a new process."""
    monkeypatch.setattr(cost_measurement, "_IN_USE", {})


def test_expected_chain_is_the_geometric_sum_of_the_paper():
    """Claim: E = (1 - a^(g+1)) / (1 - a) (Leviathan et al., Eq. 1), and a simulation agrees.

    20,000 chains: a standard error below 0.02, so an off-by-one (1 token) is 50 of them away.
    """
    for rate, length in itertools.product((0.0, 0.5, 0.9), (1, 5, 12)):
        closed = (1 - rate ** (length + 1)) / (1 - rate)
        assert abs(expected_chain(rate, length) - closed) < 1e-12
    rng, total = random.Random(0), 0
    for _ in range(20_000):
        count = 1
        while count < 6 and rng.random() < 0.8:
            count += 1
        total += count
    assert abs(total / 20_000 - expected_chain(0.8, 5)) < 0.06


def test_expected_tree_of_a_chain_is_the_chains():
    """Claim: a tree of first ranks is a chain; branches never hurt; rate 1 gives depth + 1."""
    spine = tuple((0,) * depth for depth in range(1, 6))
    for rate in (0.2, 0.7, 1.0):
        assert abs(expected_tree(rate, spine) - expected_chain(rate, 5)) < 1e-9
        assert expected_tree(rate, TREE) >= expected_tree(rate, spine) - 1e-9
    assert expected_tree(1.0, TREE) == pytest.approx(6.0)
    assert expected_tree(0.5, ()) == 1.0


def test_costs_are_linear_between_and_beyond_the_measured_points():
    """Claim: exact at the points, straight between, the last slope beyond."""
    assert [COSTS.verify(rows) for rows in (1, 2, 3, 4, 6, 8, 10)] == [10, 11, 12, 13, 17, 21, 25]


def test_fit_chooses_what_a_search_over_everything_chooses():
    """Claim: no chain length or tree has a higher expected rate than the one chosen."""
    for rate in (0.05, 0.3, 0.6, 0.85, 0.97):
        for draft in (0.05, 2.0, 20.0):
            costs = Costs(COSTS.rows, COSTS.target, draft)
            fit = Fit((TREE,), costs)
            speeds = {
                n: expected_chain(rate, n) / (n * draft + costs.verify(n + 1))
                for n in range(1, fitting.MAX_CHAIN_LENGTH + 1)
            }
            speeds[TREE] = expected_tree(rate, TREE) / (5 * draft + costs.verify(26))
            assert fit.choose(FitState(FadingMean(rate * 8, 8.0))) == max(speeds, key=speeds.get)


def test_a_better_draft_earns_longer_chains():
    """Claim: the chosen length does not fall as acceptance rises, and both ends differ."""
    fit = Fit((), COSTS)
    lengths = [fit.choose(FitState(FadingMean(rate, 1.0))) for rate in (0.1, 0.4, 0.7, 0.9, 0.99)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def _round(
    accepted: int,
    kind: Literal["recovered", "bonus"] | None,
    drafted: int = 4,
    seconds: float = 0.0,
    sample: bool = False,
) -> Round:
    own = None if kind is None else 1
    verdict = Verdict(tuple(range(accepted)), (0,) * accepted, own, kind)
    unread = TableSession({(): torch.zeros(2)}, [Sampling(sample=sample)]).score({0: Tree()})[0]
    return Round(0, chain([0] * drafted), verdict, None, unread, None, 0.0, seconds)


def test_fit_folds_the_rate_towards_what_it_sees_and_forgets():
    """Claim: always accepted moves the rate up, always refused down to 0, whatever came before."""
    fit = Fit((), COSTS)
    state = fit.start()
    assert state.accepted.mean == pytest.approx(fitting.PRIOR_ACCEPTANCE)
    for _ in range(400):
        state = fit.fold(state, _round(4, "bonus"))
    assert state.accepted.mean > 0.99
    for _ in range(400):
        state = fit.fold(state, _round(0, "recovered"))
    assert state.accepted.mean < 0.01
    for _ in range(400):
        state = fit.fold(state, _round(3, "recovered"))
    assert state.accepted.mean == pytest.approx(0.75, abs=0.01)


def test_a_round_cut_by_a_stop_is_no_refusal():
    """Claim: a verdict without a token of its own counts as accepted only."""
    fit = Fit((), COSTS)
    total, weight = fit.fold(FitState(FadingMean(0.0, 0.0)), _round(2, None)).accepted
    assert (total, weight) == (2.0, 2.0)


def test_the_rate_is_of_first_tokens_also_after_trees():
    """Claim: a further sibling that is accepted counts as a refusal of the first one.

    Fails if every accepted node of a tree counts, which makes chains look better than they are.
    """
    done = _round(0, "recovered")
    tree = Tree((1, 2, 3, 4, 5), (ROOT, ROOT, 1, 1, 2), (None,) * 5)
    fit, empty = Fit((), COSTS), FitState(FadingMean(0.0, 0.0))
    for path, kind, expected in [
        ((1, 2, 4), "bonus", (2.0, 3.0)),
        ((1, 3), "bonus", (0.0, 2.0)),
        ((1,), "recovered", (0.0, 2.0)),
        ((), "recovered", (0.0, 1.0)),
    ]:
        verdict = Verdict(path, tuple(tree.tokens[node] for node in path), 9, kind)
        assert fit.fold(empty, replace(done, tree=tree, verdict=verdict)).accepted == expected


STEP = Costs((1, 5, 6, 13), (10.0, 11.0, 22.0, 24.0), 0.5)  # measured in a busy moment, and
FLAT = Costs((1, 13), (10.0, 13.0), 0.5)  # what forwards cost in truth


def _answer(believed: Costs, true: Costs, rounds: int, sample: bool = False) -> list[int]:
    """The lengths chosen where nine of ten are accepted and forwards cost what is true."""
    fit, chosen = Fit((), believed), []
    state = fit.start()
    for _ in range(rounds):
        state = state._replace(accepted=FadingMean(0.9, 1.0))
        length = fit.choose(state)
        done = _round(length, "bonus", length, true.verify(length + 1), sample)
        state = fit.fold(state, done)
        chosen.append(length)
    return chosen


def test_costs_of_a_busy_moment_fade_within_an_answer():
    """Claim: where a step was measured that is not there, longer chains are soon tried and kept; a
    step that is there is found again each time, at a round in ten at most. Fails if costs are
    believed once and for all. When sampling nothing timed enters: the same lengths as ever."""
    short = Fit((), STEP).choose(FitState(FadingMean(0.9, 1.0)))
    assert short == 4
    flat_lengths = _answer(STEP, FLAT, 60)
    assert min(flat_lengths[-20:]) >= 2 * short
    step_lengths = _answer(STEP, STEP, 200)
    assert 1 <= sum(length > 4 for length in step_lengths) <= 20
    by_costs = _answer(STEP, FLAT, 60, sample=True)
    assert by_costs == _answer(STEP, STEP, 60, sample=True)


def test_a_slow_hour_makes_more_rows_dearer_too():
    """Claim: a round of twice the seconds doubles what as many and more rows are believed to cost,
    within two rounds to a third; fewer rows are not believed to take longer than it."""
    fit = Fit((), FLAT)
    state = fit.start()
    for _ in range(3):
        state = fit.fold(state, _round(4, "bonus", 4, 2 * FLAT.verify(5)))
    assert state.ratios[5] > 1.8
    believed = [ratio * FLAT.verify(rows) for rows, ratio in enumerate(state.ratios) if rows]
    assert believed == sorted(believed)


def test_shared_costs_are_a_part_of_the_whole():
    """Claim: the parts of all who share a forward make up the forward, and what one more row costs
    weighs more against the first the more there are. Fails if a crowd is taken for one."""
    costs = Costs((1, 2, 26), (10.0, 10.4, 20.0), 1.0, extra_request_seconds=(0.5, 0.2))
    assert costs.per_request(1) == costs
    for requests in (2, 8, 32):
        part = costs.per_request(requests)
        for rows in costs.rows:
            whole = costs.verify(requests * rows) + (requests - 1) * 0.5
            assert part.verify(rows) * requests == pytest.approx(whole)
        assert part.draft * requests == pytest.approx(1.0 + (requests - 1) * 0.2)
    steep = [
        costs.per_request(n).verify(8) / costs.per_request(n).verify(1) for n in (1, 4, 16, 64)
    ]
    assert steep == sorted(steep) and steep[0] < 1.4 < 3 < steep[-1]


def test_a_round_of_a_new_size_teaches_fit_no_seconds():
    """Claim: the seconds of a round whose forward was the first of its size correct nothing."""
    fit = Fit((), FLAT)
    slow = _round(4, "bonus", 4, 9 * FLAT.verify(5))
    first = fit.fold(fit.start(), replace(slow, first_of_size=True))
    assert first.ratios != fit.fold(fit.start(), slow).ratios
    assert set(first.ratios) == {1.0}


def test_an_unmeasured_fit_says_what_it_needs():
    """Claim: Fit without costs fails by name. Fails if it guesses."""
    with pytest.raises(AssertionError, match="measured costs"):
        Fit().choose(Fit().start())


@pytest.mark.parametrize(
    ("tokens", "size"), [(0, 64), (1, 64), (90, 64), (91, 128), (2064, 2048), (2897, 4096)]
)
def test_bucket_is_the_nearest_power_of_two(tokens, size):
    """Claim: contexts share measurements by power of two, 64 at least."""
    assert cost_measurement.context_bucket(tokens) == size


def test_costs_are_measured_once_and_never_fall_with_rows(tmp_path, monkeypatch):
    """Claim: a second call reads the file, a damaged file means measuring again.

    Fails if the key misses the pair, the file is not written, or noise leaves T(n) falling.
    """
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_measurement, "MIN_REPEATS", 1)
    monkeypatch.setattr(cost_measurement, "ROW_COUNTS", (1, 9, 3))
    target, draft = backbone(qwen25()), backbone(noisy(qwen25))
    first = cost_measurement.measure_costs(target, draft, context=64, draft_context=64)
    assert list(first.target) == sorted(first.target) and first.draft > 0
    (file,) = tmp_path.rglob("costs.json")
    calls = []
    monkeypatch.setattr(
        cost_measurement,
        "_time_forwards",
        lambda m, points, requests=1: calls.append(points) or [1.0] * len(points),
    )
    assert cost_measurement.measure_costs(target, draft, context=64, draft_context=64) == first
    assert not calls
    assert (
        cost_measurement.measure_costs(target, draft, context=128, draft_context=64) != first
        and calls
    )
    assert len(json.loads(file.read_text())) == 2
    file.write_text("{")
    assert cost_measurement.measure_costs(target, draft, context=64, draft_context=64) == first
    file.write_text("{")
    monkeypatch.setattr(cost_measurement, "_IN_USE", {})
    assert cost_measurement.measure_costs(target, draft, context=64, draft_context=64).draft == 1.0


def test_costs_never_change_within_a_process(tmp_path, monkeypatch):
    """Claim: neither a longer answer nor another process's measurement changes the costs that this
    process has used, so that a seed always gives the same answer."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    target, draft = backbone(qwen25()), backbone(noisy(qwen25))
    costs = partial(cost_measurement.measure_costs, target, draft, context=64, draft_context=64)
    timed(monkeypatch, lambda keys, rows: 3.0)
    costs()
    monkeypatch.setattr(cost_measurement, "_IN_USE", {})  # A new process; stored costs are slow.
    monkeypatch.setattr(cost_measurement, "EXPECTED_BYTES_PER_SECOND", {"cpu": 1e3})
    calls = timed(monkeypatch, lambda keys, rows: 1.0)
    unchecked = costs(answer_tokens=96)
    assert unchecked.verify(1) == 3.0 and not calls
    (file,) = tmp_path.rglob("costs.json")
    stored = json.loads(file.read_text())
    (key,) = stored
    stored[key]["target"] = [9.0] * len(stored[key]["target"])
    file.write_text(json.dumps(stored))
    assert costs(answer_tokens=10_000) == unchecked and not calls


@pytest.mark.parametrize(("one", "count"), [(0.005, 11), (0.04, 4), (2.0, 3)])
def test_a_slow_model_is_timed_at_fewer_points(tmp_path, monkeypatch, one, count):
    """Claim: where a forward takes long, fewer numbers of rows are timed, the smallest and a large
    one among them, so that whoever waits for the first answer does so for seconds."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    row_counts = set()

    def times(model, wanted, requests=1):
        row_counts.update(rows for keys, rows in wanted if keys == 128)
        return [one * (1 + rows / 100) for _, rows in wanted]

    monkeypatch.setattr(cost_measurement, "_time_forwards", times)
    costs = cost_measurement.measure_costs(backbone(qwen25()), backbone(qwen25()), context=128)
    assert sorted(row_counts) == list(costs.rows) and len(row_counts) == count
    assert costs.rows[0] == 1 and costs.rows[-1] == 26
    assert costs.verify(13) == pytest.approx(one * 1.13)


def test_waiting_for_a_timing_is_reported(tmp_path, monkeypatch):
    """Claim: a first answer by ``auto`` tells that forwards are timed, before anything else it
    tells; a second one, for which that is remembered, does not, nor does a method without prices.
    """
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    monkeypatch.setattr(
        cost_measurement, "_time_forwards", lambda model, points, requests=1: [1.0] * len(points)
    )
    target, draft, runs = qwen25(), noisy(qwen25), []
    for method in ("sd", "auto", "auto"):
        phases: list[str] = []
        settings: dict = dict(method=method, max_new_tokens=3, do_sample=False)
        saccade.run(target, TEXT, draft=draft, on_phase=phases.append, **settings)
        runs.append(phases)
    assert runs[0] == runs[2] and "costs" not in runs[0] and runs[0][0] == "vision"
    assert [phase for phase in runs[1] if phase != "costs"] == runs[0] and runs[1][0] == "costs"


def test_a_point_is_timed_for_so_long_and_twice_at_least(monkeypatch):
    """Claim: quick forwards are repeated until their time is spent, slow ones twice."""
    for seconds, count in (
        (0.0, cost_measurement.MAX_REPEATS),
        (0.05, cost_measurement.MIN_REPEATS),
    ):
        tries = []
        monkeypatch.setattr(
            cost_measurement,
            "time_step",
            lambda *_, s=seconds, t=tries: (t.append(1), time.sleep(s))[1] or 1.0,
        )
        cost_measurement._time_forwards(backbone(qwen25()), [(64, 1)])
        assert len(tries) == count


@pytest.mark.parametrize(("then", "again"), [(1.0, False), (1.2, False), (1.4, True), (None, True)])
def test_costs_of_a_busy_hour_are_measured_again(tmp_path, monkeypatch, then, again):
    """Claim: a new process looks once whether the machine is much quicker than when the costs were
    measured, and if so measures them again; a slower machine changes nothing. Costs without a
    glance, as older versions wrote them, are measured again."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    target, draft = backbone(qwen25()), backbone(noisy(qwen25))
    glance, calls = (
        [[(cost_measurement.PROBE_KEYS, 1)]] * 2,
        timed(monkeypatch, lambda keys, rows: 1.0),
    )
    for now, expected in ((1.0, again), (3.0, False)):
        cost_measurement.measure_costs(target, draft, context=128)
        (file,) = tmp_path.rglob("costs.json")
        ((key, known),) = json.loads(file.read_text()).items()
        known["probe"] = [then, then]
        if then is None:
            del known["steps"]
        file.write_text(json.dumps({key: known}))
        monkeypatch.setattr(cost_measurement, "_IN_USE", {})
        calls = timed(monkeypatch, lambda keys, rows, now=now: now)
        cost_measurement.measure_costs(target, draft, context=128)
        cost_measurement.measure_costs(target, draft, context=128)
        assert (calls != glance) is (expected or then is None)


def timed(monkeypatch, seconds):
    """What is asked of the clock from now on, as if a forward of (keys, rows) took so long."""
    calls: list[list[tuple[int, int]]] = []

    def times(model, wanted, requests=1):
        calls.append(list(wanted))
        return [seconds(*each) for each in wanted]

    monkeypatch.setattr(cost_measurement, "_time_forwards", times)
    return calls


def test_what_is_used_often_is_timed_at_every_point(tmp_path, monkeypatch):
    """Claim: of a slow model whose costs so many answers asked for, the next process times every
    point, once, with the step it had overlooked; an earlier one does not, nor does the same,
    where a seed is to give one answer. Fails if few points are kept for good."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_measurement, "_IN_USE", {})
    model = backbone(qwen25())
    timed(monkeypatch, lambda keys, rows: 2.0 if rows <= 12 else 3.0)
    first = cost_measurement.measure_costs(model, model, context=128)
    assert first.rows == (1, 8, 26) and first.verify(12) > 2.0
    for _ in range(cost_measurement.ANSWERS_BEFORE_ALL_ROW_COUNTS - 2):
        monkeypatch.setattr(cost_measurement, "_IN_USE", {})
        assert cost_measurement.measure_costs(model, model, context=128) == first
    assert cost_measurement.measure_costs(model, model, context=128) == first  # the last of them
    assert (
        cost_measurement.measure_costs(model, model, context=128) == first
    )  # in the same process as before
    monkeypatch.setattr(cost_measurement, "_IN_USE", {})
    every = cost_measurement.measure_costs(model, model, context=128)
    assert every.rows == tuple(sorted(cost_measurement.ROW_COUNTS)) and every.verify(12) == 2.0
    monkeypatch.setattr(cost_measurement, "_IN_USE", {})
    calls = timed(monkeypatch, lambda keys, rows: 2.0)
    assert cost_measurement.measure_costs(model, model, context=128) == every
    assert calls == [[(cost_measurement.PROBE_KEYS, 1)]] * 2


def test_a_first_measurement_takes_few_forwards(tmp_path, monkeypatch):
    """Claim: whoever waits for the first answer of a slow model that drafts for itself, how much it
    is shown settled with it, waits for a dozen forwards and two over all keys for each of three
    numbers of rows; a step over any share lies between those over few keys and over all."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_measurement, "_IN_USE", {})
    run: list[tuple[int, int]] = []

    def step(session, keys, rows):
        run.append((keys, rows * len(session.requests)))
        return 1.0 + keys / 2048 + rows / 100

    monkeypatch.setattr(cost_measurement, "time_step", step)
    monkeypatch.setattr(cost_measurement, "TIMING_SECONDS", 0.0)
    model = backbone(qwen25())
    plan = recipe.plan(resolve("auto/drafter=self"), model, None, 512)
    assert len(run) == 12 and sum(keys == 512 for keys, _ in run) == 6
    assert plan.shape.costs.draft == pytest.approx(1.01 + 256 / 2048)  # a half is shown
    assert [
        cost_measurement.measure_costs(model, model, context=512, draft_context=n).draft
        for n in (64, 16)
    ] == [pytest.approx(1.01 + 64 / 2048)] * 2
    assert len(run) == 12


def test_the_share_a_draft_can_afford(tmp_path, monkeypatch):
    """Claim: the largest share whose step is at most a tenth slower than the quickest, and whose
    prefill is at most a tenth of the target's; measured once. Fails if either bound is left out."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    target, draft = backbone(qwen25()), backbone(qwen25(9, layers=1))
    assert cost_measurement._count_weights(target) > cost_measurement._count_weights(draft)
    for context, slower, ratio, share in (
        (1000, 1.18, 10, 0.5),
        (2000, 1.0, 10, 1.0),
        (3000, 1.0, 3, 0.25),
        (4000, 9.0, 10, 0.05),
    ):

        def line(keys, rows, n=context, s=slower):
            return 1 + (s - 1) * (keys - cost_measurement.PROBE_KEYS) / (
                n - cost_measurement.PROBE_KEYS
            )

        calls = timed(monkeypatch, line)
        monkeypatch.setattr(
            cost_measurement, "_count_weights", lambda m, r=ratio: r if m is target else 1
        )

        def share_of(reads_target_keys, n=context):
            return cost_measurement.affordable_share(
                target, draft, n, reads_target_keys=reads_target_keys
            )

        assert share_of(False) == share
        measured = len(calls)
        assert share_of(False) == share and len(calls) == measured > 0
        if slower == 1.0:
            assert share_of(True) == 1.0, "a draft that reads the target's keys needs no prefill"


def test_bare_forwards_are_taken_in_turns_and_the_quickest_counts(monkeypatch):
    """Claim: a busy moment spoils one try of each and no figure. Fails on a mean, or on blocks."""
    order = []

    def step(session, context, rows):
        order.append(rows)
        return 100.0 if len(order) % 5 == 0 else float(rows)

    monkeypatch.setattr(cost_measurement, "time_step", step)
    assert cost_measurement._time_forwards(backbone(qwen25()), [(64, 1), (64, 2), (64, 3)]) == [
        1.0,
        2.0,
        3.0,
    ]
    assert order[:6] == [1, 2, 3, 1, 2, 3]


def test_a_first_answer_waits_a_few_hundredths_of_its_time_at_most(tmp_path, monkeypatch):
    """Claim: of a model whose forwards take long, nothing is timed for an answer of usual length,
    nor whether stored costs still hold; costs are estimated, and stay the same in this process. A
    long enough answer may wait, and so may one of a quick model. Fails if whoever asks first waits
    for half a minute of timings."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_measurement, "_IN_USE", {})
    monkeypatch.setattr(cost_measurement, "_ESTIMATED", set())
    calls = timed(monkeypatch, lambda keys, rows: 1.0)
    target, draft = backbone(qwen25()), backbone(noisy(qwen25))
    usual, very_long = 96, 10_000
    cost_measurement.measure_costs(target, draft, context=64, answer_tokens=usual)
    assert calls  # This model is quick.
    monkeypatch.setattr(cost_measurement, "EXPECTED_BYTES_PER_SECOND", {"cpu": 1e3})
    calls = timed(monkeypatch, lambda keys, rows: 1.0)
    settle = lambda tokens: cost_measurement.measure_costs(  # noqa: E731
        target, draft, context=128, draft_context=128, answer_tokens=tokens
    )
    first = settle(usual)
    assert not calls and first.verify(8) > first.verify(1) >= first.draft > 0
    assert settle(very_long) == first and not calls
    rounded = cost_measurement.measure_costs(
        target,
        draft.rounded(rounding_named("int4")),
        context=128,
        draft_context=128,
        answer_tokens=usual,
    )
    assert rounded.draft < 0.5 * first.draft and not calls  # It reads fewer bytes.
    cost_measurement.affordable_share(
        target, draft, 128, answer_tokens=usual, reads_target_keys=False
    )
    assert not calls
    cost_measurement.measure_costs(target, draft, context=256, answer_tokens=very_long)
    assert calls


def test_what_rounds_have_taught_outlives_an_answer_but_no_draw_depends_on_it(
    tmp_path, monkeypatch
):
    """Claim: a greedy answer begins by the costs that the answers before it have corrected, those
    of its pair and context; where tokens are drawn, by the measured ones. Fails if a clock of
    earlier rounds reaches a draw."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    target, draft = backbone(qwen25()), backbone(noisy(qwen25))
    own = cost_measurement.CorrectedCosts(target, draft, 256, 64)
    assert own.load() is None
    costs = Costs((1, 8), (1.0, 1.5), 0.3, extra_request_seconds=(0.1, 0.2), acceptance=0.6)
    own.save(costs)
    assert own.load() == costs
    assert cost_measurement.CorrectedCosts(target, draft, 512, 64).load() is None
    assert cost_measurement.CorrectedCosts(target, target, 256, 64).load() is None
    recipe_ = resolve("auto/keep=0.25")
    for samples, corrected in ((False, True), (True, False)):
        answer = recipe.AnswerOutlook(96, samples)
        planned = recipe.plan(recipe_, target, draft, 256, answer=answer)
        assert (planned.shape.costs == costs) is corrected


def test_a_greedy_answer_remembers_its_costs(tmp_path, monkeypatch):
    """Claim: after a greedy answer in which drafts were judged the pair's corrected costs are
    stored, through the whole engine; after a sampled one nothing is."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    saved: list[Costs] = []
    monkeypatch.setattr(
        cost_measurement.CorrectedCosts, "save", lambda self, costs: saved.append(costs)
    )
    monkeypatch.setattr(
        cost_measurement, "measure_costs", lambda *a, **k: Costs((1, 64), (1.0, 1.1), 0.02)
    )
    monkeypatch.setattr(cost_measurement, "affordable_share", lambda *a, **k: 0.5)
    for sample in (True, False):
        settings: dict = dict(max_new_tokens=24, do_sample=sample, eos_token_id=None)
        saccade.run(qwen25(), TEXT, draft=noisy(qwen25), method="auto", seed=1, **settings)
        assert bool(saved) is not sample
    assert saved[0].acceptance is not None and saved[0].draft > 0

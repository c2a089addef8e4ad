"""Sparse-to-Dense's figures: recorded seconds by hand, sparse attention token by token."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import few

from lab import draw, studies
from lab.studies import std
from lab.studies.experiment import Experiment
from saccade.bench.records import Answer
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, Tree
from saccade.methods import resolve
from saccade.model.session import Session

pytestmark = pytest.mark.usefixtures("pair", "unchecked")

SPARSE = ["std/keep=0.02", "streaming/keep=0.1"]


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return Experiment(clips=2, size=64, tokens=24)


# -- Sec. 2: agreement -------------------------------------------------------------------------


def step_by_step(experiment: Experiment, number: int, method: str) -> list[bool]:
    """A fresh prefill and a fresh draft for every token, the text before it committed singly."""
    _, inputs = experiment.inputs(number)
    ids = experiment.run("ar", number).ids
    model = experiment.target.backbone
    guesses = []
    for place in range(1, len(ids)):
        target = Session(model, [Sampling()])
        (guide,) = target.prefill(model.prompts(inputs), record=True)
        draft = Session(model, [Sampling()], banned=list(model.placeholders))
        draft.fork([guide], [resolve(method).view(guide, guide.prompt)])
        for token in ids[:place]:
            target.commit({0: [token]})
            target.score({0: Tree()})
            draft.commit({0: [token]})
        guesses.append(draft.score({0: Tree()})[0].law(ROOT) == ids[place])
    return guesses


@pytest.mark.extra
def test_guesses_are_those_of_a_draft_that_goes_step_by_step(experiment: Experiment) -> None:
    """Claim: many views at once, over an answer whose keys are there from the start, guess what
    each guesses alone, one token at a time. Control: they are not all right, nor all alike.

    Fails if a draft reads the keys of tokens to come, or another view's keys.
    """
    short = replace(experiment, tokens=8, _last_clip=None)
    guesses = std.correct_guesses(short, 0, SPARSE)
    assert guesses == [step_by_step(short, 0, method) for method in SPARSE]
    assert not all(map(all, guesses)) and guesses[0] != guesses[1]


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", few(["std/keep=0.02", "streaming/keep=0.1"], 1))
def test_real_rounds_accept_what_is_guessed(experiment: Experiment, method: str) -> None:
    """Claim: a run that drafts one token a round accepts it exactly where the guess is right.

    Fails if the draft of the study sees more or fewer exact keys than that of the method.
    """
    for number in range(experiment.clips):
        (guesses,) = std.correct_guesses(experiment, number, [method])
        at = 0
        for round in experiment.run(f"{method}/shape=chain-1", number).forwards:
            assert bool(round.accepted) == guesses[at]
            at += len(round.emitted)
        assert at == len(guesses)


@pytest.mark.extra
def test_all_keys_guess_everything(experiment: Experiment) -> None:
    """Claim: with every key kept the sparse draft is the target. Fails if a key is missing."""
    (guesses,) = std.correct_guesses(experiment, 0, ["std/keep=1"])
    assert all(guesses) and len(guesses) == len(experiment.run("ar", 0).ids) - 1


@pytest.mark.slow
def test_agreement_is_the_mean_over_clips(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a point is the mean over clips of an answer's share of right guesses, its method's at
    its K; the places are keys a head reads. Fails if methods or shares change places."""
    monkeypatch.setattr(std, "KEY_SHARES", (0.02, 0.2))
    data = std.measure_agreement(experiment)
    assert data["at"] == [1, 13]
    (lines,) = data["panels"].values()
    names = ["streaming/keep=0.2", "std/keep=0.2", "streaming/keep=0.02", "std/keep=0.02"]
    every = [std.correct_guesses(experiment, number, names) for number in range(experiment.clips)]
    for name, *own in zip(names, *every, strict=True):
        method, _, keep = name.partition("/keep=")
        point = lines[method][std.KEY_SHARES.index(float(keep))]
        assert point[0] == pytest.approx(mean(map(mean, own)))
    assert lines["std"] != lines["streaming"]
    assert set(lines["the paper's 95 %"]) == {0.95}


# -- Fig. 1 and Sec. 3.3: recorded seconds -----------------------------------------------------


def answer(method: str, item: int, decode: float, **more: Any) -> Answer:
    return Answer("shapes", str(item), 0, method, ids=(1,) * 9, counted=8, decode=decode, **more)


def recorded(*names: str) -> dict[str, list[Answer]]:
    """Three clips: plain decoding takes 8, 16, 24 s, the i-th method 1/(i + 2) of it and less."""
    answers = {"ar": [answer("ar", n, 8.0 * (n + 1)) for n in range(3)]}
    for i, name in enumerate(names[1:]):
        answers[name] = [
            answer(
                name,
                n,
                8.0 * (n + 1) / (i + 2 + n),
                accepted=(i, 2),
                drafted=(9, 9),
                nodes=(9, 9),
                own=2,
                prompt_tokens=80,
                visual_tokens=64,
                draft_visual_tokens=i + 1,
            )
            for n in range(3)
        ]
    return answers


@pytest.mark.parametrize("study", ["std-gamma", "std-k"])
def test_gains_are_ratios_of_recorded_seconds(
    study: str, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: speed is plain decoding's seconds a token over the method's on the same clip, the
    median over clips; acceptance is accepted over drafted. Fails if clips are paired otherwise."""
    monkeypatch.setattr(Experiment, "run_interleaved", lambda experiment, *names: recorded(*names))
    data = studies.STUDIES[study].measure(experiment)
    accepted, faster = data["panels"].values()
    assert len(accepted["std"]) == len(data["at"]) == (8 if study == "std-gamma" else 6)
    for i, (share, speed) in enumerate(zip(accepted["std"], faster["std"], strict=True)):
        assert share[0] == pytest.approx((i + 2) / 18)
        assert speed[0] == pytest.approx(median((i + 2, i + 3, i + 4)))
        assert i + 2 <= speed[1] <= speed[0] <= speed[2] <= i + 4
    assert set(faster["ar"]) == {1.0}


def test_io_is_the_formula_beside_the_seconds(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: predicted is (gamma (K + m_t) + m_v + m_t) / (alpha gamma) over (m_v + m_t) by hand,
    measured the inverse of the speed. Fails if K or the text is left out of either."""
    monkeypatch.setattr(Experiment, "run_interleaved", lambda experiment, *names: recorded(*names))
    (lines,) = std.measure_key_reads(experiment)["panels"].values()
    predicted, measured, plain = lines.values()
    for i, (keys, seconds) in enumerate(zip(predicted, measured, strict=True)):
        text, visual, keep, gamma, alpha = 16, 64, i + 1, 9, (i + 2) / 18
        by_hand = (gamma * (keep + text) + visual + text) / (alpha * gamma) / (visual + text)
        assert keys[0] == pytest.approx(by_hand)
        assert seconds[0] == pytest.approx(1 / (i + 3))
    assert list(lines) == ["keys read (predicted)", "seconds (measured)", "ar"]
    assert set(plain) == {1.0}


@pytest.mark.slow
def test_a_real_race_draws_gamma(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: on real clips the acceptance at each gamma is that of a run which drafts so many.

    Fails if gamma is not what the run drafts. Control: acceptance falls with gamma here.
    """
    monkeypatch.setattr(std, "GAMMAS", (1, 7))
    data = std.measure_gamma(experiment)
    accepted, faster = data["panels"].values()
    for gamma, point in zip((1, 7), accepted["std"], strict=True):
        shares = []
        for number in range(experiment.clips):
            rounds = experiment.rounds(f"std/shape=chain-{gamma}", number)
            assert max(len(round.tokens) for round in rounds) == gamma
            right = sum(len(round.accepted) for round in rounds)
            shares.append(right / sum(len(round.tokens) for round in rounds))
        assert point[0] == pytest.approx(median(shares))
    assert accepted["std"][0][0] > accepted["std"][1][0]
    assert all(value > 0 for point in faster["std"] for value in point)


def test_every_study_of_sparse_to_dense_is_registered() -> None:
    """Claim: the five are in the command's list; those with seconds say so."""
    assert [name for name in studies.STUDIES if name.startswith("std-")] == list(std.STUDIES)
    timed = [name for name, own in std.STUDIES.items() if own.timed]
    assert timed == ["std-gamma", "std-batch", "std-k", "std-io"]


# -- Table 1: batches --------------------------------------------------------------------------


@pytest.mark.extra
def test_a_batch_is_one_call_and_turns_are_ratios_of_the_same_turn(monkeypatch: Any) -> None:
    """Claim: the clips are asked in one call, by every method in each of three turns, and a turn's
    number is tokens by the second of decoding over plain decoding's of that turn. Fails if a
    batch's seconds are counted once a clip, or the prefill's token counts."""
    small = Experiment(clips=2, size=64, tokens=6)
    calls: list[tuple[str, int]] = []
    seconds = {"ar": 8.0, "std": 4.0, "streaming": 16.0, "layerskip": 8.0}

    def record_call(target: Any, inputs: Any, **how: Any) -> Any:
        calls.append((how["method"], len(inputs["input_ids"])))
        assert how["eos_token_id"] == small.target.backbone.vocab
        timings = SimpleNamespace(decode=seconds[how["method"]] * (1 + len(calls)))
        one = SimpleNamespace(ids=(1,) * how["max_new_tokens"], timings=timings)
        one.fallback_reason = None
        return SimpleNamespace(finish=lambda: [one, SimpleNamespace(**vars(one) | {"ids": (1,)})])

    monkeypatch.setattr(std, "stream", record_call)
    data = std.measure_batch(small)
    assert calls == [(method, 2) for method in seconds] * 3
    for method, own in data["turns"].items():
        place = list(seconds).index(method)
        starts = [2 + 4 * turn for turn in range(3)]
        by_hand = [8.0 * at / (seconds[method] * (at + place)) for at in starts]
        assert own == pytest.approx(by_hand)
        assert data["rows"][method]["speed"][0] == pytest.approx(sorted(by_hand)[1])
    assert len(draw.bars(data).axes) == 1

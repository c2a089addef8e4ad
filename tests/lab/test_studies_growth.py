"""What a token costs as the video grows, and the race every timed figure is run as."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from lab import studies
from lab.hardware.imposed import ImposedAcceptance, impose_acceptance
from lab.studies import experiment as experiments
from lab.studies import growth, random_prefill
from lab.studies.experiment import Experiment
from lab.training import agreement
from saccade.bench.peers import PEERS, TimedRun, peer_run
from saccade.bench.records import Answer
from saccade.core.result import Round
from saccade.methods import resolve

pytestmark = pytest.mark.usefixtures("pair", "unchecked")


@pytest.mark.parametrize("size", agreement.FRAMES)
def test_sizes_are_what_they_are_called(size: int) -> None:
    """Claim: so many frames of that side make so many tokens: two frames of 28 by 28 pixels each.

    Fails if a size is added with the wrong number of frames.
    """
    frames, side = agreement.FRAMES[size]
    assert frames % 2 == 0 == side % 28
    assert frames // 2 * (side // 28) ** 2 == size


@pytest.mark.extra
def test_a_clip_of_the_new_size_has_as_many_tokens() -> None:
    """Claim: 4,096 tokens reach the target where 4,096 are asked for."""
    experiment = Experiment(clips=1)
    _, inputs = experiment.inputs(0, 4096)
    ids = inputs["input_ids"][0].tolist()
    assert sum(ids.count(token) for token in experiment.target.backbone.placeholders) == 4096


# -- the race ----------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every run of a race in order as (method, which inputs, tokens); the models stay at rest."""
    seen: list[tuple[str, int, int]] = []

    def answer(self: Experiment, method: str, clip: Any, inputs: Any, **settings: Any) -> Any:
        seen.append((method, inputs, settings.get("max_new_tokens", self.tokens)))
        return method

    def peer(target: Any, draft: Any, inputs: Any, settings: dict[str, Any]) -> TimedRun:
        assert settings["do_sample"] is False and settings["eos_token_id"] == -1
        seen.append(("hf", inputs, settings["max_new_tokens"]))
        return peer_run(ids=(1, 2, 3, 4), first=2.0, total=8.0)

    monkeypatch.setattr(Experiment, "answer", answer)
    monkeypatch.setattr(
        Experiment, "inputs", lambda experiment, number, size: (None, 100 * size + number)
    )
    monkeypatch.setattr(
        experiments.records, "result_fields", lambda result: {"text": result, "decode": 3.0}
    )
    monkeypatch.setitem(PEERS, "hf", peer)
    return seen


@pytest.mark.extra
def test_methods_take_turns(ran: list[tuple[str, int, int]]) -> None:
    """Claim: first a short run of each, then every clip by every method, each clip begun by the
    next method. Fails if one method has all its clips in a row, or always goes first."""
    Experiment(clips=3, tokens=40).run_interleaved("ar", "hf", size=7, eos_token_id=-1)
    assert [(method, tokens) for method, _, tokens in ran[:2]] == [("ar", 12), ("hf", 12)]
    assert ran[2:] == [
        (method, 700 + number, 40)
        for number, turn in enumerate((("ar", "hf"), ("hf", "ar"), ("ar", "hf")))
        for method in turn
    ]


@pytest.mark.extra
def test_a_race_is_what_was_recorded(ran: list[tuple[str, int, int]]) -> None:
    """Claim: an answer a clip, of that clip, without the short runs; a peer's seconds are those
    after its first token, over the tokens after it. Fails if a peer's prefill counts as decoding.
    """
    race = Experiment(clips=2, tokens=40).run_interleaved("ar", "hf", size=7, eos_token_id=-1)
    for method, own in race.items():
        assert [(one.method, one.item) for one in own] == [(method, "0"), (method, "1")]
    assert [one.text for one in race["ar"]] == ["ar", "ar"]
    assert {(one.decode, one.counted, one.total) for one in race["hf"]} == {(6.0, 3, 8.0)}


@pytest.mark.slow
def test_answers_are_alike_and_do_not_end() -> None:
    """Claim: ignoring the end of text, ours and transformers' own answers are as long as asked for
    and the same. Control: the end of text is among what they wrote."""
    experiment = Experiment(clips=1, size=64, tokens=160)
    race = experiment.run_interleaved("ar", "hf", eos_token_id=experiment.target.backbone.vocab)
    (ours,), (theirs,) = race["ar"], race["hf"]
    assert ours.ids == theirs.ids and len(ours.ids) == 160
    assert set(experiment.target.backbone.model.generation_config.eos_token_id) & {*ours.ids[:-1]}


# -- the figure --------------------------------------------------------------------------------


def test_growth_is_of_the_recorded_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: milliseconds a token are decoding's seconds over the tokens that came of it, medians
    over clips, a line a method, a place a size up to the lab's. Fails if totals are drawn."""
    calls: list[tuple[int, int]] = []

    def race(
        self: Experiment, *names: str, size: int, eos_token_id: int
    ) -> dict[str, list[Answer]]:
        calls.append((size, eos_token_id))
        return {
            name: [
                Answer(
                    "shapes", str(n), 0, name, total=99.0, decode=own * size * 2.0**n, counted=50
                )
                for n in range(self.clips)
            ]
            for own, name in enumerate(names, 1)
        }

    monkeypatch.setattr(Experiment, "run_interleaved", race)
    data = growth.measure_growth(Experiment(clips=3, size=1024))
    assert calls == [(size, 1024) for size in (64, 256, 1024)]  # ids go up to 1,023
    assert data["at"] == [64, 256, 1024]
    (lines,) = data["panels"].values()
    assert list(lines) == list(growth.METHODS)
    for own, line in enumerate(lines.values(), 1):
        for size, (middle, low, high) in zip(data["at"], line, strict=True):
            each = [1000 * own * size * 2.0**n / 50 for n in range(3)]
            assert middle == pytest.approx(median(each))
            assert min(each) - 1e-9 <= low <= middle <= high <= max(each) + 1e-9


@pytest.mark.slow
def test_a_real_race_draws_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: on a real clip every method has its point, and all wrote what plain decoding wrote."""
    races: list[dict[str, list[Answer]]] = []
    real = Experiment.run_interleaved

    def race(self: Experiment, *names: str, **settings: Any) -> dict[str, list[Answer]]:
        races.append(real(self, *names, **settings))
        return races[-1]

    monkeypatch.setattr(Experiment, "run_interleaved", race)
    data = growth.measure_growth(Experiment(clips=1, size=64, tokens=14))
    (lines,) = data["panels"].values()
    assert all(len(line) == 1 and min(line[0]) > 0 for line in lines.values())
    (method_answers,) = races
    assert {own[0].ids for own in method_answers.values()} == {method_answers["ar"][0].ids}
    assert len(method_answers["ar"][0].ids) == 14
    drawn = studies.STUDIES["growth"].draw(data)
    assert [line.get_label() for line in drawn.axes[0].containers] == list(growth.METHODS)


@pytest.mark.slow
def test_growth_over_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: every method and size has its point, the first run of each is not counted, and every
    drafting method drafts: nine of ten tokens stand. Fails if a method reads keys that are not
    there (they are NaN here), or a draft gave up unseen."""
    ran: list[tuple[str, int]] = []
    real = random_prefill.time_decoding

    def decode(target: Any, draft: Any, recipe: Any, prefill: Any, tokens: int) -> float:
        ran.append((recipe.name, len(prefill.prompt) - 64))
        return real(target, draft, recipe, prefill, tokens)

    monkeypatch.setattr(random_prefill, "time_decoding", decode)
    data = growth.measure_growth_on_noise(Experiment(clips=2, size=256, tokens=8))
    assert data["at"] == [256]
    (lines,) = data["panels"].values()
    assert list(lines) == list(growth.METHODS_ON_NOISE)
    assert all(low <= middle <= high for ((middle, low, high),) in lines.values())
    assert ran == [(method, 256) for method in growth.METHODS_ON_NOISE.values()] * 3
    assert growth.SIZES[-1] == studies.STUDIES["growth-filled"].size == 32768


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "specvlm", "std", "hippo/schedule=serial"])
def test_a_random_prefill_takes_an_imposed_acceptance(method: str) -> None:
    """Claim: after a stand-in a draft's tokens stand as imposed: with all of them, rounds are as
    few as its shape allows. Control: with none, one a token."""
    experiment = Experiment(clips=1)
    target, draft = experiment.target.backbone, experiment.draft.backbone
    prefill = random_prefill.make_prefill(target, 200)
    assert prefill.prompt.visual_tokens == 200 and len(prefill.prompt) == 264
    for rate, most in ((1.0, 8), (0.0, 24)):
        rounds: list[Round] = []
        recipe = impose_acceptance(resolve(method), ImposedAcceptance(rates=(rate,)))

        def counted(*given: Any, to: Any = rounds, schedule: Any = recipe.schedule) -> Any:
            for round in schedule(*given):
                to.append(round)
                yield round

        random_prefill.time_decoding(target, draft, replace(recipe, schedule=counted), prefill, 24)
        assert sum(len(round.tokens) for round in rounds) == 24
        assert len(rounds) == 24 if method == "ar" or not rate else len(rounds) <= most

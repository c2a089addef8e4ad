"""TABED's Tables 4 and 5: a clock that stands still but for what is timed; answers told apart."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lab import draw, studies
from lab.studies import Experiment, tabed_appendix
from saccade.bench import records, text_scores
from saccade.core.errors import OptionError
from saccade.inputs import load
from saccade.world.suites import TASKS, suites

RESULTS = Path(__file__).parents[2] / "docs" / "results"
pytestmark = pytest.mark.usefixtures("unchecked")


# -- Table 5 ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experiment(pair) -> Experiment:
    return Experiment(clips=2, size=256, tokens=24)


@pytest.mark.slow
def test_every_reader_is_shown_what_its_name_says(experiment, monkeypatch):
    """Claim: each suite's first items are put to the target with its media, to the target without
    any, and to both drafts with it; each answer is scored against that item's truth by the suite's
    measure. Control: without media the very same answer is given to clips that share a question.

    Fails if media, models, items or measures are exchanged.
    """
    real, calls = tabed_appendix.run, []

    def run(model: Any, inputs: Any, **settings: Any) -> Any:
        result = real(model, inputs, **settings)
        seen = any(key.startswith("pixel") for key in inputs)
        calls.append((model, seen, result.text, settings["max_new_tokens"]))
        return result

    monkeypatch.setattr(tabed_appendix, "run", run)
    data = tabed_appendix.measure_quality(experiment)
    readers = [experiment.target, experiment.target, *experiment.drafts.values()]
    assert [model for model, *_ in calls[:4]] == [each.backbone for each in readers]
    assert [seen for _, seen, *_ in calls] == [True, False, True, True] * 2 * len(TASKS)
    assert {most for *_, most in calls} == {24}
    texts = iter(text for _, _, text, _ in calls)
    wanted: dict[str, list[float]] = {}
    for task in TASKS:
        measure = "accuracy" if task == "shapes-qa" else "rouge_l"
        (row,) = (name for name in data["scores"] if name.startswith(f"{task}\n"))
        assert row.endswith("exact match" if task == "shapes-qa" else "ROUGE-L")
        for item in islice(suites()[task].items(), 2):
            for name in data["scores"][row]:
                right = text_scores.score(item.task, next(texts), item.answers)[measure]
                wanted.setdefault(row + name, []).append(round(right, 4))
        for name, scores in data["scores"][row].items():
            assert scores == wanted[row + name]
            middle, low, high = data["rows"][row][name]
            assert middle == pytest.approx(np.mean(scores)) and low <= middle <= high
    blind = [text for _, seen, text, _ in calls if not seen]
    at = 2 * [*TASKS].index("shapes-ood")  # one question for all
    assert blind[at] == blind[at + 1]
    drawn = draw.bars(data).axes[0]
    assert len(drawn.patches) == len(TASKS) * 4


@pytest.mark.extra
def test_clips_no_suite_has_are_refused(pair):
    """Claim: a size without suites is refused by its number."""
    with pytest.raises(OptionError, match="64"):
        tabed_appendix.measure_quality(Experiment(clips=1, size=64))


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize("method, reader", [("ar", "target"), ("draft", "a draft that trained")])
def test_the_stored_scores_are_those_of_the_stored_run(method, reader):
    """Claim: the stored Table 5 has, item by item, the scores of the answers that bench-256 wrote
    with other code, of the target and of the draft by itself. Fails if either saw anything else."""
    data = studies.load_numbers(RESULTS / "figures" / "tabed-quality.json", "tabed-quality")
    _, answers = records.read_run(RESULTS / "bench-256")
    for row, own in data["scores"].items():
        suite = row.split("\n")[0]
        (scores,) = (own[name] for name in own if name == reader or name.startswith(f"{reader} on"))
        theirs = [a for a in answers if (a.suite, a.method, a.turn) == (suite, method, 0)]
        assert len(scores) == len(theirs) == 50
        measure = "accuracy" if suite == "shapes-qa" else "rouge_l"
        truth = [text_scores.score(a.task, a.text, a.answers)[measure] for a in theirs]
        assert scores == [round(each, 4) for each in truth], suite


# -- Table 4 ------------------------------------------------------------------------------------


def test_turns_rotate_and_the_first_is_not_counted(monkeypatch):
    """Claim: what is told is the median over turns after a first one, each of its own seconds, and
    another begins each turn. Fails if a warm-up counts or one is charged another's time."""
    now, order = [0.0], []
    monkeypatch.setattr(tabed_appendix, "time", SimpleNamespace(process_time=lambda: now[0]))

    def taking(name: str, seconds: float) -> Any:
        def run() -> None:
            turn = order.count(name)
            order.append(name)
            now[0] += 1000.0 if not turn else seconds + turn

        return run

    timings = tabed_appendix._processor_seconds({"a": taking("a", 10.0), "b": taking("b", 20.0)})
    turns = tabed_appendix.TURNS
    middle = 1 + (turns - 1) / 2
    assert timings == {"a": 10.0 + middle, "b": 20.0 + middle}
    assert order == [*"ab", *"ba"] * ((1 + turns) // 2)


@pytest.mark.slow
def test_captions_are_timed_beside_the_first_token(pair, monkeypatch):
    """Claim: a row a number of pictures and one for the clip; each bar is the mean over clips of
    one captioner's seconds over the target's, of the same row. Fails if rows or whose seconds they
    are get mixed up."""
    slow = {"target": 8.0, "captioner": 2.0, "blip": 1.0}

    def in_turns(timed: Any) -> dict[str, float]:
        for each in timed.values():
            each()
        return {name: slow[name] for name in timed}

    monkeypatch.setattr(tabed_appendix, "_processor_seconds", in_turns)
    data = tabed_appendix.measure_captioners(Experiment(clips=2, size=64))
    assert [row.split("\n")[0] for row in data["rows"]] == [
        "1 picture of", "2 pictures of", "5 pictures of", "a video of",
    ]  # fmt: skip
    for row, own in data["rows"].items():
        (embedded, blip) = own.values()
        assert embedded == (0.25, 0.25, 0.25) and blip == (0.125, 0.125, 0.125)
        assert data["clips_seconds"][row] == {name: [each] * 2 for name, each in slow.items()}
    assert "random weights" in list(own)[1] and data["marks"] == {"as long": 1.0}
    assert draw.bars(data).axes[0].patches


@pytest.mark.extra
def test_random_weights_cost_what_they_say(pair):
    """Claim: BLIP's form sees 576 patches, writes exactly the stated tokens whatever it sees, and
    is to the target about what BLIP is to a 7B model (247M: a 28th). Fails if it could end early.
    """
    blip = tabed_appendix.small_blip()
    frames = (np.zeros((56, 56, 3), np.uint8), np.full((448, 896, 3), 200, np.uint8))
    for frame in frames:
        ((caption,),) = dataclasses.replace(blip, frames=[frame])({})
        assert len(caption.split()) in (
            tabed_appendix.CAPTION_TOKENS - 1,
            tabed_appendix.CAPTION_TOKENS,
        )
    vision = blip.model.config.vision_config
    assert (vision.image_size // vision.patch_size) ** 2 == 576
    own, whole = (
        sum(each.numel() for each in model.parameters())
        for model in (blip.model, load("shapes").backbone.model)
    )
    assert 15 < whole / own < 45

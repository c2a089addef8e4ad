"""Claims about imposed acceptance, the draft by itself, the figures of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from helpers import backbone, few, noisy, qwen25, video_input

import saccade
from saccade.bench import alone, figures
from saccade.bench.hardware.synthetic import Decree, imposed
from saccade.bench.records import Answer
from saccade.core.errors import OptionError
from saccade.core.result import Result
from saccade.core.sampling import Sampling
from saccade.inputs import Loaded
from saccade.methods import resolve
from saccade.model.session import Session


def decreed(method: str, decree: Decree, count: int = 240) -> Result:
    return saccade.run(
        backbone(qwen25()),
        video_input(0),
        draft=backbone(noisy(qwen25, 0, 0.1)),
        method=imposed(resolve(method), decree),
        max_new_tokens=count,
        do_sample=False,
    )


def accepted(result: Result) -> list[int]:
    return [len(round.accepted) for round in result.rounds[:-1]]  # the last is cut


@pytest.mark.slow
@pytest.mark.parametrize("method", few(["sd/shape=chain-7", "specvlm", "std"], 1))
@pytest.mark.parametrize("length", [0.0, 2.0, 2.5])
def test_an_imposed_length_is_the_mean_accepted(method: str, length: float) -> None:
    """Claim: an acceptance length is the mean number of accepted tokens a round, whatever the
    models say, and never more than one away. Fails if the models' own verdicts shine through.
    """
    found = accepted(decreed(method, Decree(length=length)))
    assert abs(mean(found) - length) < 0.15
    assert {int(length), int(length + 0.999)} >= set(found)


def test_imposed_rates_hold_place_by_place() -> None:
    """Claim: place i stands with its rate where those before it stood; the last rate goes on.

    Fails if rates are counted from the round's end, or are unconditional.
    """
    decree = Decree(rates=(0.9, 0.5, 0.8))
    found = [decree.standing(0, round, 5) for round in range(20_000)]
    for place, rate in enumerate((0.9, 0.5, 0.8, 0.8, 0.8)):
        reached = [length for length in found if length >= place]
        assert abs(mean(length > place for length in reached) - rate) < 0.02


def test_a_decree_runs_the_real_forwards() -> None:
    """Claim: with acceptance 0 there are as many target forwards as tokens, and every round drafts.

    Fails if an imposed verdict spares the draft or the target its work.
    """
    result = decreed("sd/shape=chain-4", Decree(length=0), 30)
    assert len(result.rounds) == 30 and all(len(round.tokens) == 4 for round in result.rounds)
    assert result.fallback_reason is None


@pytest.mark.parametrize(
    "asked", [{}, {"length": -1.0}, {"rates": (0.5, 1.5)}, {"length": 1.0, "rates": (0.5,)}]
)
def test_a_decree_that_means_nothing_is_refused(asked: dict[str, Any]) -> None:
    """Claim: neither, both, or impossible numbers are one sentence."""
    with pytest.raises(OptionError):
        Decree(**asked)


def test_a_parallel_draft_takes_no_decree() -> None:
    """Claim: what is judged while its draft goes on is refused by name."""
    with pytest.raises(OptionError, match="hippo drafts in parallel"):
        imposed(resolve("hippo"), Decree(length=1))


def answers(method: str, **more: Any) -> list[Answer]:
    one = Answer("suite", "0", 0, method, ids=(1,) * 9, total=2.0, decode=1.0, counted=8)
    return [replace(one, item=str(n), **more) for n in range(4)]


@pytest.mark.parametrize("view", ["full", "uniform/keep=0.5", "none", "specvlm/keep=0.3"])
def test_the_draft_alone_writes_what_it_would_draft(view: str) -> None:
    """Claim: alone under a view, the draft writes the arg-max of its laws over exactly the rows the
    view keeps. Fails if it sees the rest of the video or other positions.
    """
    target = Loaded("t", backbone(qwen25()), None)
    draft = Loaded("d", backbone(noisy(qwen25, 0, 0.3)), None)
    inputs = video_input(3)
    asked = alone.recipe(f"draft/view={view}")
    found = alone.answer(target, draft, inputs, None, asked, tokens=12, ends=())
    (prompt,) = target.backbone.prompts(inputs)
    (guide,) = Session(target.backbone, [Sampling()]).prefill([prompt], record=asked.view.attention)
    kept = asked.view(guide, draft.backbone.prompts(inputs)[0])
    text: list[int] = []
    for _ in range(12):
        fresh = Session(draft.backbone, [Sampling()], banned=list(target.backbone.placeholders))
        fresh.prefill([kept])
        fresh.commit({0: text} if text else {})
        laws = fresh.score({0: saccade.core.tree.Tree()})
        text.append(int(torch.argmax(laws[0].logits(-1))))
    assert found == text


@pytest.mark.parametrize("name", ["draft/view=text", "draft/view=caption"])
def test_views_a_draft_cannot_answer_under_are_refused(name: str) -> None:
    """Claim: a view that writes words in a video's place is refused in one sentence."""
    with pytest.raises(OptionError, match="alone under one view"):
        alone.recipe(name)


def test_a_run_leaves_the_figures_its_methods_allow(tmp_path: Path) -> None:
    """Claim: speed, stages and places are drawn of any draft; acceptance against the share kept
    only of a method run at two shares or more. Fails if a picture is empty or missing.
    """
    drafted: dict[str, Any] = dict(accepted=(3, 1), drafted=(3, 3), nodes=(3, 3), own=2, verify=0.5)
    plain = answers("ar", decode=4.0, accepted=(0,) * 8, drafted=(0,) * 8, nodes=(0,) * 8, own=8)
    some = [*plain, *answers("sd", **drafted), *answers("hf", decode=5.0)]
    made = {path.name for path in figures.write(tmp_path, "suite", some)}
    assert made == {"suite-speed.png", "suite-stages.png", "suite-positions.png"}
    more = [*some, *answers("sd/keep=0.1", **drafted), *answers("sd/keep=0.5", **drafted)]
    assert len(figures.write(tmp_path, "suite", more)) == 4
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())

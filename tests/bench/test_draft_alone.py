"""Claims about the draft by itself and the figures of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import backbone, noisy, qwen25, video_input

import saccade
from saccade.bench import draft_only, figures
from saccade.bench.records import Answer
from saccade.core.errors import OptionError
from saccade.core.sampling import Sampling
from saccade.inputs import Loaded
from saccade.model.session import Session


def answers(method: str, **more: Any) -> list[Answer]:
    one = Answer("suite", "0", 0, method, ids=(1,) * 9, total=2.0, decode=1.0, counted=8)
    return [replace(one, item=str(n), **more) for n in range(4)]


@pytest.mark.representatives(2)
@pytest.mark.parametrize("view", ["full", "uniform/keep=0.5", "none", "specvlm/keep=0.3"])
def test_the_draft_alone_writes_what_it_would_draft(view: str) -> None:
    """Claim: alone under a view, the draft writes the arg-max of its laws over exactly the rows the
    view keeps. Fails if it sees the rest of the video or other positions.
    """
    target = Loaded("t", backbone(qwen25()), None)
    draft = Loaded("d", backbone(noisy(qwen25, 0, 0.3)), None)
    inputs = video_input(3)
    recipe = draft_only.draft_only_recipe(f"draft/view={view}")
    draft_ids = draft_only.draft_answer(
        target, draft, inputs, None, recipe, max_new_tokens=12, end_ids=()
    )
    (prompt,) = target.backbone.prompts(inputs)
    (guide,) = Session(target.backbone, [Sampling()]).prefill(
        [prompt], record=recipe.records_attention
    )
    kept = recipe.view(guide, draft.backbone.prompts(inputs)[0])
    text: list[int] = []
    for _ in range(12):
        fresh = Session(draft.backbone, [Sampling()], banned=list(target.backbone.placeholders))
        fresh.prefill([kept])
        fresh.commit({0: text} if text else {})
        laws = fresh.score({0: saccade.core.tree.Tree()})
        text.append(int(torch.argmax(laws[0].logits(-1))))
    assert draft_ids == text


@pytest.mark.parametrize("name", ["draft/view=text", "draft/view=caption"])
def test_views_a_draft_cannot_answer_under_are_refused(name: str) -> None:
    """Claim: a view that writes words in a video's place is refused in one sentence."""
    with pytest.raises(OptionError, match="by itself under one view"):
        draft_only.draft_only_recipe(name)


@pytest.mark.parametrize(
    "name", ["draft/view=full+random", "draft/drafter=lookup", "draft/shape=chain-3"]
)
def test_a_name_that_chooses_more_than_a_view_is_refused(name: str) -> None:
    """Claim: an ensemble of views, another drafter and a shape are refused before anything runs:
    the draft model answers alone. Fails if they are ignored, and the report carries their names."""
    with pytest.raises(OptionError, match="only one view"):
        draft_only.draft_only_recipe(name)
    assert draft_only.draft_only_recipe("draft/view=uniform/keep=0.1").view.name == "uniform"


@pytest.mark.extra
def test_a_run_leaves_the_figures_its_methods_allow(tmp_path: Path) -> None:
    """Claim: speed, stages and places are drawn of any draft, and places of nothing that drafts
    none. Fails if a picture is empty or missing."""
    drafted: dict[str, Any] = dict(accepted=(3, 1), drafted=(3, 3), nodes=(3, 3), own=2, verify=0.5)
    plain = answers("ar", decode=4.0, accepted=(0,) * 8, drafted=(0,) * 8, nodes=(0,) * 8, own=8)
    some = [*plain, *answers("sd", **drafted), *answers("hf", decode=5.0)]
    made = {path.name for path in figures.draw_figures(tmp_path, "suite", some)}
    assert made == {"suite-speed.png", "suite-stages.png", "suite-positions.png"}
    rest = [each for each in some if each.method != "sd"]
    assert [path.name for path in figures.draw_figures(tmp_path, "rest", rest)] == [
        "rest-speed.png", "rest-stages.png",
    ]  # fmt: skip
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())

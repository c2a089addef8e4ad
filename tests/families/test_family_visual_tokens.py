"""Claims about visual tokens: every placeholder gets its feature, also with DeepStack."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from helpers import dealt
from test_family_grids import cells

import saccade
from saccade.core.errors import SaccadeError

pytestmark = pytest.mark.usefixtures("unchecked")

METHODS = ("ar", "sd", "sd-tree", "specvlm", "specvlm-self", "std", "sage", "lookup")

CASES = (("image", 1), ("video", 2), ("both", 3))


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("method", "family"), dealt(METHODS, zoo.DEEP))
def test_a_family_with_deepstack_answers_like_generate(family, method):
    """Claim: where visual features enter early layers too, every method's answers about pictures,
    videos and both are generate's, 32 tokens long."""
    target, draft = zoo.member(family), zoo.draft_of(family)
    for kind, seed in CASES:
        inputs, theirs = zoo.case(target, kind, seed)
        result = zoo.run(target, draft, inputs, method, len(theirs))
        assert list(result.ids) == theirs, (kind, seed)
        assert result.fallback_reason is None
        assert method == "ar" or any(round.tokens for round in result.rounds)


@pytest.mark.parametrize("family", zoo.DEEP)
def test_control_deepstack_left_out_is_another_answer(family, monkeypatch):
    """Control: without the rows for the early layers an answer must differ, so that the claim
    above is one about them."""
    target = zoo.member(family)
    cases = [zoo.case(target, kind, seed) for kind, seed in CASES]
    # Of this model alone: other tests may have left a forward of its own on it.
    honest = target.backbone.forward
    monkeypatch.setattr(
        target.backbone,
        "forward",
        lambda embeds, positions, step, *deep, **named: honest(embeds, positions, step),
    )
    assert any(
        list(zoo.run(target, target, inputs, "ar", len(theirs)).ids) != theirs
        for inputs, theirs in cases
    )


ODD = [(1, 31, 33), (2, 57, 141), (3, 85, 59), (5, 99, 61), (7, 29, 167), (8, 113, 29)]
FILMING = tuple(name for name in zoo.SEEING if name not in zoo.STILL)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", FILMING)
def test_odd_frames_and_sizes_leave_no_token_over(family):
    """Claim: for odd numbers of frames and sizes that no patch divides, placeholders in the prompt,
    cells of the grid and features are equally many, and a drafted answer is generate's.

    Either the processor itself refuses a size (then there is nothing to compare), or all agree.
    """
    target, draft = zoo.member(family), zoo.draft_of(family)
    compared = 0
    for frames, height, width in ODD:
        media = zoo.Media("what moves?", clips=(zoo.clip(frames, height, width, frames),))
        try:
            inputs = zoo.read(target, media)
        except (SaccadeError, ValueError):
            continue
        prompt = zoo.prompt_of(target, inputs)
        holders = torch.isin(inputs["input_ids"], torch.tensor([*target.backbone.placeholders]))
        assert prompt.grid.tolist() == cells(family, media), (frames, height, width)
        assert int(holders.sum()) == len(prompt.grid) + int(prompt.fixed.sum())
        result = zoo.run(target, draft, inputs, "sd", 12)
        assert list(result.ids) == zoo.hf_greedy(target, inputs, 12), (frames, height, width)
        assert result.fallback_reason is None
        compared += 1
    assert compared >= 4


@pytest.mark.representatives(3)
@pytest.mark.parametrize("family", FILMING)
def test_one_frame_is_a_video_in_every_family(family):
    """Claim: a video of one frame, or a window that holds one, is answered as generate answers it,
    with the same pixels as that frame given twice. Fails if a processor's own least is asked for
    (Qwen3-VL's is two)."""
    target = zoo.member(family)
    one = zoo.clip(1, 64, 96, 3)
    inputs = zoo.read(target, zoo.Media("what moves?", clips=(one,)))
    result = zoo.run(target, zoo.draft_of(family), inputs, "sd", 8)
    assert list(result.ids) == zoo.hf_greedy(target, inputs, 8)
    if family not in zoo.QWEN:
        return  # LLaVA's put each frame in rows of its own.
    twice = replace(one, frames=one.frames.repeat(2, axis=0), timestamps=one.timestamps.repeat(2))
    other = zoo.read(target, zoo.Media("what moves?", clips=(twice,)))
    assert torch.equal(inputs["pixel_values_videos"], other["pixel_values_videos"])
    assert torch.equal(inputs["input_ids"], other["input_ids"])


def test_features_that_do_not_match_the_placeholders_are_an_error():
    """Claim: one placeholder too few is an error before any answer, never a shifted video."""
    target = zoo.member("qwen2.5-vl")
    inputs = zoo.make_inputs(target, "video", 1)
    (holder,) = [i for i, kind in target.backbone.placeholders.items() if kind == "video"]
    at = int((inputs["input_ids"][0] == holder).nonzero()[0])
    short = {
        name: torch.cat([value[:, :at], value[:, at + 1 :]], 1)
        if torch.is_tensor(value) and value.shape == inputs["input_ids"].shape
        else value
        for name, value in inputs.items()
    }
    with pytest.raises((SaccadeError, ValueError, RuntimeError)):
        saccade.run(target.backbone, short, method="ar", max_new_tokens=4)

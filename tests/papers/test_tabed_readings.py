"""TABED's sentences about its drafts: a caption an image, and one batch for all of them.

Its published code captions every image by itself and writes each caption, after "image: ", where
that image stood; the m drafts are rows of one batch (Sec. 5).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import IMAGE, VIDEO, Letters, backbone, frames_input, noisy, onevision, qwen25

import saccade
from saccade.core.prompt import Media, Prompt
from saccade.drafting.views.basic import replace_media
from saccade.model.backbone import Backbone

BUDGET = 12


def prompt_of(media: list[int]) -> Prompt:
    """Text, then each medium of so many rows with a row of text after it."""
    owner = [-1, *(number for i, rows in enumerate(media) for number in (*[i] * rows, -1))]
    visual = torch.tensor([each >= 0 for each in owner])
    rows = torch.arange(len(owner))
    grid = torch.zeros(int(visual.sum()), 4, dtype=torch.long)
    grid[:, 0] = torch.tensor([each for each in owner if each >= 0])
    context = torch.where(visual, torch.tensor(VIDEO), rows + 1000)
    embeds = torch.zeros(len(owner), 2)
    return Prompt(context, embeds, rows[None], visual, ~visual & False, grid, rows, len(owner))


def test_each_picture_has_its_own_caption() -> None:
    """Claim: of three media each becomes its own caption, in order and of its own length; one
    caption stands in the place of each. Fails for one caption of a middle frame for all."""
    prompt = prompt_of([3, 1, 2])
    new_prompt = replace_media(prompt, ((7, 8), (9,), (4, 5, 6)))
    assert new_prompt.reading.ids_to_embed is not None
    assert new_prompt.reading.ids_to_embed.tolist() == [-1, 7, 8, -1, 9, -1, 4, 5, 6, -1]
    assert new_prompt.visual.sum() == 0 and new_prompt.next_position == len(new_prompt) == 10
    same = replace_media(prompt, ((7, 8),)).reading.ids_to_embed
    assert same is not None and same.tolist() == [-1, 7, 8, -1, 7, 8, -1, 7, 8, -1]


@pytest.mark.parametrize("texts", [((7, 8), (9,)), ((7, 8),)])
def test_a_document_is_no_picture(texts: Any) -> None:
    """Claim: captions are counted and placed for videos and images alone, and a document after them
    stays as it is; of a prompt with a document alone nothing is replaced."""
    prompt = replace(prompt_of([3, 1, 4]), media=Media(first_document=2))
    new_prompt = replace_media(prompt, texts)
    second = texts[-1]
    assert new_prompt.reading.ids_to_embed is not None
    expected = [-1, 7, 8, -1, *second, -1, *[-1] * 5]
    assert new_prompt.reading.ids_to_embed.tolist() == expected
    kept = [prompt.full_ids[row] for row in prompt.visual.nonzero()[-4:]]
    assert [new_prompt.full_ids[new_prompt.places[row]] for row in (-5, -4, -3, -2)] == kept
    alone = replace(prompt_of([4]), media=Media(first_document=0))
    assert len(replace_media(alone, ((7, 8),))) == len(alone)


def answer(captions: Any, method: str = "tabed-mtcp", **settings: Any) -> Any:
    return saccade.run(
        backbone(onevision(0)),
        frames_input(0, frames=2),
        draft=backbone(noisy(onevision, 0, 0.1)),
        method=method,
        tokenizer=Letters(),
        captioner=lambda inputs: captions,
        max_new_tokens=BUDGET,
        do_sample=False,
        **settings,
    )


@pytest.mark.parametrize(("captions", "gives_up"), [([["one"]], False), ([["a", "b"]], True)])
def test_as_many_captions_as_media_or_one(captions: Any, gives_up: bool) -> None:
    """Claim: a captioner may give a list a request; one that fits no medium costs speed, the
    reason told with both numbers, and not the answer."""
    result = answer(captions)
    assert result.ids == answer(["one"], "ar").ids
    assert (result.fallback_reason is not None) == gives_up
    if gives_up:
        assert "2 captions for 1 videos and images" in result.fallback_reason


@pytest.mark.parametrize(("method", "views"), [("tabed", 2), ("tabed-mtcp", 4)])
def test_one_forward_of_the_draft_for_all_views(method: str, views: int, monkeypatch: Any) -> None:
    """Claim: every step of an ensemble is one forward of the draft, whatever the number of views:
    as many forwards of a row a view as the same draft makes with one view alone (five a block).
    Fails where views take turns, which would be ``views`` times as many."""
    target, draft = backbone(qwen25(0)), backbone(noisy(qwen25, 0, 0.1))
    calls: list[int] = []
    plain = Backbone.forward

    def counted(self: Backbone, embeds: Any, *given: Any, **more: Any) -> Any:
        if self is draft:
            calls.append(len(embeds))
        return plain(self, embeds, *given, **more)

    monkeypatch.setattr(Backbone, "forward", counted)
    result = saccade.run(
        target,
        frames(),
        draft=draft,
        method=method,
        tokenizer=Letters(),
        captioner=lambda inputs: ["a clip"],
        max_new_tokens=BUDGET,
        do_sample=False,
    )
    drafted = sum(len(round.tokens) for round in result.rounds)
    steps = [rows for rows in calls if rows <= views * 8]  # prefills are longer
    assert result.fallback_reason is None and drafted > 0
    assert len(steps) == drafted, "a forward a drafted token, not one a view"
    assert min(steps) >= views


def frames() -> Any:
    """A prompt of a video, long enough to be told from a step."""
    from helpers import video_input

    inputs = video_input(0, grid=(2, 4, 6), before=40, after=40)
    assert int((inputs["input_ids"] == IMAGE).sum()) == 0
    return inputs

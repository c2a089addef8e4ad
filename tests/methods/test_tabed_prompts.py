"""TABED's views of a prompt: what the draft reads in each of them, rebuilt by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import END as VISION_END
from helpers import (
    IMAGE,
    PATCH,
    TEXT,
    VIDEO,
    Letters,
    frames_input,
    llama,
    no_seconds,
    noisy,
    onevision,
    qwen2,
    qwen25,
    text_input,
    video_input,
)
from helpers import START as VISION_START
from tabed_by_hand import METHODS, check_laws, check_prompts, ensembled, media
from torch import Tensor


def two_videos_and_an_image() -> dict[str, Tensor]:
    """A Qwen prompt with ragged grids and videos that touch."""
    grids = [(2, 4, 6), (1, 6, 6), (1, 4, 4)]
    kinds = [VIDEO, IMAGE, VIDEO]
    generator = torch.Generator().manual_seed(5)
    ids = [7, 8, 9]
    for number, (grid, kind) in enumerate(zip(grids, kinds, strict=True)):
        t, h, w = grid
        ids += [VISION_START, *[kind] * (t * (h // 2) * (w // 2)), VISION_END]
        ids += [20 + number] * (number % 2)
    ids += [30, 31, 32]
    row = torch.tensor([ids])

    def pixels(kind: int) -> Tensor:
        patches = sum(math.prod(g) for g, k in zip(grids, kinds, strict=True) if k == kind)
        return torch.randn(patches, 6 * PATCH**2, generator=generator)

    return {
        "input_ids": row,
        "attention_mask": torch.ones_like(row),
        "mm_token_type_ids": (row == IMAGE).int() + (row == VIDEO).int() * 2,
        "pixel_values_videos": pixels(VIDEO),
        "video_grid_thw": torch.tensor([grids[0], grids[2]]),
        "second_per_grid_ts": torch.tensor([1.0, 0.5]),
        "pixel_values": pixels(IMAGE),
        "image_grid_thw": torch.tensor([grids[1]]),
    }


PROMPTS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "several media": (qwen25, two_videos_and_an_image),
    "seconds": (qwen25, lambda: video_input(2, grid=(3, 6, 10), seconds=2.0)),
    "qwen2_vl": (qwen2, lambda: no_seconds(video_input(1, grid=(3, 6, 8)))),
    "frames and a newline": (onevision, lambda: frames_input(3, frames=3)),
    "no video": (llama, lambda: text_input(2)),
}


@pytest.mark.representatives(3)
@pytest.mark.parametrize("case", list(PROMPTS))
def test_the_prompts_of_the_views(case):
    """Claim: M is the whole prompt; T has one newline for each video or image, C the caption with
    its prefix, at the positions of a plain text; P has the mean of each 2 x 2 cells of a frame.

    By hand: T and C are ids the model reads by its own forward, P a loop over cells. Fails on a
    row too many, a medium forgotten, frames or media pooled together, or a position off.
    """
    make, inputs = PROMPTS[case]
    target, draft = make(0), noisy(make, 0, 0.1)
    (run,) = ensembled("tabed-mtcp", target, draft, [inputs()], count=3)
    check_prompts(run, METHODS["tabed-mtcp"])
    check_laws(run, METHODS["tabed-mtcp"])
    whole, text, caption, small = run.prompts
    seen = len(media(target, inputs()))
    assert (text.visual_tokens, caption.visual_tokens) == (0, 0)
    if seen:
        assert len(text) < len(small) < len(whole) and len(text) < len(caption)
        assert run.result.draft_visual_tokens == whole.visual_tokens


@pytest.mark.parametrize("case", ["frames and a newline", "several media"])
def test_what_is_pooled_after_the_projector_is_another_view(case):
    """Claim: ``pooled-after`` is the mean of the language model's rows where their first one stood.
    Control: where the projector takes rows one by one, it fails what the paper's view passes, by
    rows and by positions; where patches merge there, both views are one."""
    make, inputs = PROMPTS[case]
    method = "tabed-mtcp/view=full+text+caption+{}"
    ours, papers = (
        ensembled(method.format(view), make(0), noisy(make, 0, 0.1), [inputs()], count=3)[0]
        for view in ("pooled-after", "pooled")
    )
    for run in (ours, papers):
        check_prompts(run, METHODS["tabed-mtcp"])
    one, other = ours.prompts[-1], papers.prompts[-1]
    assert one.embeds.shape == other.embeds.shape and one.visual_tokens == other.visual_tokens
    merges = case == "several media"
    assert torch.equal(one.embeds, other.embeds) == merges
    assert torch.equal(one.positions, other.positions) == merges
    apart = (one.embeds - other.embeds).abs().amax(-1) > 1e-2
    assert int(apart.sum()) == (0 if merges else one.visual_tokens)


def test_media_that_touch_are_each_a_newline():
    """Claim: two videos side by side are two newlines, on a family without grids too.

    Fails if a run of placeholders passes for one video.
    """
    one, other = frames_input(0, frames=2), frames_input(1, frames=2)
    ids = torch.cat([one["input_ids"][:, :13], other["input_ids"][:, 4:]], 1)
    pixels = torch.cat([one["pixel_values_videos"], other["pixel_values_videos"]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values_videos": pixels,
    }
    words = int((ids < TEXT).sum())
    assert int((ids == VIDEO).sum()) == 18 and words == 11
    (run,) = ensembled("tabed", onevision(0), noisy(onevision, 0, 0.1), [inputs], count=3)
    assert len(run.prompts[1]) == words + 2


class Marked(Letters):
    """Writes a mark before every text, as Llama's tokenizer does."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1, *super().encode(text)]


def test_a_newline_is_one_token_whatever_the_tokenizer_marks():
    """Claim: a video becomes one token, so that T's prompt is as long as the unexpanded one.

    Fails if what a tokenizer puts before a text on its own lands in the middle of the prompt.
    """
    inputs = video_input(0)
    target, draft = qwen25(0), noisy(qwen25, 0, 0.1)
    (run,) = ensembled("tabed", target, draft, [inputs], count=3, tokenizer=Marked())
    assert len(run.prompts[1]) == int((inputs["input_ids"] != VIDEO).sum()) + 1

"""Claims about drafts and media: placeholders are never drafted, and a text model may draft."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import (
    IMAGE,
    TEXT,
    VIDEO,
    hf_greedy,
    llama,
    qwen25,
    stubbed,
)
from one_video import INPUTS, greedy_ids, run_on_video

from saccade.core.tree import chain

# test_greedy.py runs the same code with shapes and types checked.
pytestmark = pytest.mark.usefixtures("unchecked")


def test_a_text_draft_beside_a_video_target():
    """Claim: a draft without any tower is no error: it drafts from the ids, or drafting is given
    up with a reason, and the answer is the target's.
    """
    result = run_on_video(qwen25(), llama(), "sd/view=none")
    assert result.ids == greedy_ids(24)


@pytest.mark.parametrize("method", ["sd", "sd-tree", "lookup"])
def test_placeholders_of_media_are_never_drafted(method):
    """Claim: a draft whose favourite is the video placeholder proposes it never.

    Its head is bent so that it would at every step; the target's answer stays what it is.
    """
    obsessed = copy.deepcopy(qwen25())
    with torch.no_grad():
        obsessed.lm_head.weight[VIDEO] = 50 * obsessed.lm_head.weight[:TEXT].abs().max(0).values
        obsessed.lm_head.weight[IMAGE] = -obsessed.lm_head.weight[VIDEO]
    favourites = hf_greedy(obsessed, INPUTS, 6)
    assert VIDEO in favourites or IMAGE in favourites
    result = run_on_video(qwen25(), obsessed, method)
    assert result.ids == greedy_ids(24) and result.fallback_reason is None
    assert not {VIDEO, IMAGE} & {token for r in result.rounds for token in r.tokens}


def test_drafted_placeholders_are_refused_like_any_wrong_token():
    """Claim: even proposed, a placeholder is a wrong token, not a crash or a missing feature."""
    result = run_on_video(qwen25(), None, stubbed(lambda *_: chain([VIDEO, IMAGE, VIDEO])))
    assert result.ids == greedy_ids(24) and result.fallback_reason is None

"""Claims about conversations whose turns bring pictures, clips and documents, by family."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
import zoo
from PIL import Image

import saccade
from saccade.core.errors import OptionError
from saccade.core.prompt import DOCUMENT_MASK
from saccade.inputs import Pair
from saccade.model import prefix_cache
from saccade.model.vision_cache import ConversationVision

pytestmark = pytest.mark.usefixtures("unchecked")

COUNT = 8
BOTH_DIRECTIONS = ("gemma3", "gemma4")
PICTURES = ("qwen3-vl", "internvl", "mistral3", "lfm2-vl", "llava-next", *BOTH_DIRECTIONS)


def chatting(family: str, method: str, media: Any) -> saccade.Chat:
    pair = Pair(zoo.member(family), zoo.draft_of(family))
    model = saccade.Model(pair, method)
    return model.chat(media, max_new_tokens=COUNT, do_sample=False)


def picture(seed: int) -> Any:
    """A file of a picture, as its bytes."""
    file = io.BytesIO()
    Image.fromarray(zoo.picture(84, 112, seed)).save(file, "PNG")
    return file.getvalue()


def truth(chat: saccade.Chat, family: str) -> list[int]:
    """What generate answers to the question that was asked last."""
    dialogue = chat._dialogue
    open_dialogue = type(dialogue)(dialogue.turns[:-1], dialogue.clips, dialogue.images)
    inputs, _ = chat._model.pair.converse(open_dialogue)
    model_inputs = {name: each for name, each in inputs.items() if name != DOCUMENT_MASK}
    return zoo.hf_greedy(zoo.member(family), model_inputs, COUNT)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("family", "method"),
    [(family, method) for family in PICTURES for method in ("sd", "specvlm")],
)
def test_every_turn_may_bring_a_picture(family, method):
    """Claim: pictures in later turns, the same one twice and one that is new, and a turn of words
    in between, answer as ``generate`` on the whole conversation, and the beginning is reused: also
    where pictures are read in both directions."""
    with chatting(family, method, picture(1)) as chat:
        for turn, image in enumerate((None, picture(2), None, picture(1), picture(3))):
            result = chat.ask("what is there?", image)
            assert list(result.ids) == truth(chat, family), turn
            assert result.fallback_reason is None
            assert turn == 0 or result.reused_tokens > 0
        assert len(chat.history) == 5


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("family", "method"),
    [(family, method) for family in PICTURES for method in ("sd", "specvlm")],
)
def test_a_conversation_of_words_may_bring_a_picture(family, method):
    """Claim: a first turn of words, then a picture, then words again, answer as ``generate``."""
    with chatting(family, method, None) as chat:
        for turn, image in enumerate((None, picture(1), None, picture(2))):
            result = chat.ask("what is there?", image)
            assert list(result.ids) == truth(chat, family), turn
            assert result.fallback_reason is None


@pytest.mark.representatives(2)
@pytest.mark.parametrize("family", [*PICTURES, "qwen2.5-vl", "molmo2"])
def test_prompts_with_and_without_pictures_share_a_cache(family, monkeypatch):
    """Claim: questions about nothing, a picture and two pictures, which begin with the same words
    of the chat template, answer as ``generate`` in any order through one cache of prompts."""
    monkeypatch.setattr(prefix_cache, "MIN_NEW_ROWS", 1)
    model, draft = zoo.member(family), zoo.draft_of(family)
    cases = {kind: zoo.case(model, kind, count=COUNT) for kind in ("text", "image", "images")}
    for order in permutations(cases):
        target = model.backbone.with_prefix_cache(prefix_cache.PrefixCache(1 << 30))
        for kind in order:
            inputs, answer = cases[kind]
            result = zoo.run(replace(model, backbone=target), draft, inputs, "sd", COUNT)
            assert list(result.ids) == answer, (order, kind)
            assert result.fallback_reason is None


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["sd", "specvlm", "std"])
def test_turns_may_mix_pictures_clips_and_documents(method):
    """Claim: a clip, then a picture and a document, then another clip, then words."""
    family, document = "qwen2.5-vl", "the red circle moves left " * 8
    with chatting(family, method, zoo.clip(4, 56, 84, 1)) as chat:
        for media, documents in (
            (None, []),
            (picture(1), [document]),
            ([zoo.clip(2, 56, 56, 2), picture(2)], []),
            (None, [document]),
            (None, []),
        ):
            result = chat.ask("what is there?", media, documents=documents)
            assert list(result.ids) == truth(chat, family)
            assert result.fallback_reason is None


def test_a_turn_that_is_refused_changes_nothing():
    """Claim: media that cannot be read and documents that are none leave the chat as it was."""
    with chatting("qwen2.5-vl", "sd", picture(1)) as chat:
        chat.ask("what is there?")
        with pytest.raises(saccade.VideoInputError):
            chat.ask("and here?", b"no picture")
        with pytest.raises(OptionError, match="documents"):
            chat.ask("and here?", documents="text")
        stream = chat.stream("and here?", picture(2))
        next(stream)
        stream.close()
        result = chat.ask("and here?")
        assert len(chat.history) == 2
        assert list(result.ids) == truth(chat, "qwen2.5-vl")


def test_outputs_of_towers_are_joined_as_one_call_would_give_them():
    """Claim: where new media run apart from old ones, the prompt's rows are those of one call, also
    the rows that are added to early layers, to rounding."""
    loaded = zoo.member("qwen3-vl")
    inputs = zoo.make_inputs(loaded, "images")
    (whole,) = loaded.backbone.prompts(inputs)
    vision = ConversationVision(runs_media_separately=True)
    for _ in range(2):
        (joined,) = loaded.backbone.prompts(inputs, vision=vision)
        torch.testing.assert_close(joined.embeds, whole.embeds, atol=1e-4, rtol=1e-4)
        assert whole.media.deepstack
        for one, two in zip(joined.media.deepstack, whole.media.deepstack, strict=True):
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)

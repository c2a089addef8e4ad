"""Claims about turns that bring new videos: only what is new is read, and answers stay exact."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conversations import COUNT, further, ids_of, question, talk_of, talking
from helpers import (
    AMOUNT,
    WORDS,
    backbone,
    backbone_of_copy,
    frames_input,
    hf_greedy,
    model_of,
    no_seconds,
    noisy,
    qwen25,
    text_input,
    timed_frames_input,
    video_input,
)

import saccade
from saccade.core.prompt import Inputs
from saccade.model.backbone import Backbone

pytestmark = pytest.mark.usefixtures("unchecked")

PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids")

METHODS = ("ar", "sd", "specvlm", "std", "auto", "specvlm-self", "lookup", "streaming", "tabed")
PARALLEL = ("hippo", "pearl")
MAKERS = {
    "qwen2_5_vl": lambda seed: video_input(seed, (2 + seed % 2, 4, 4)),
    "qwen2_vl": lambda seed: no_seconds(video_input(seed, (2 + seed % 2, 4, 4))),
    "llava_onevision": lambda seed: frames_input(seed),
    "qwen3_5": lambda seed: timed_frames_input(seed),
}
"""For each family, what its processor returns for a question about one video."""


def joined(*parts: Inputs) -> dict[str, Any]:
    """The inputs of one text that has these parts after one another, each with its media."""
    names = {name for part in parts for name in part}
    dims = {name: 1 if name in PER_TOKEN else 0 for name in names}
    return {
        name: torch.cat([part[name] for part in parts if name in part], dim=dims[name])
        for name in names
    }


def text_part(family: str, ids: Sequence[int]) -> dict[str, Any]:
    """Words without media, as a part of a conversation."""
    empty = {name: each[:, :0] for name, each in MAKERS[family](0).items() if name in PER_TOKEN}
    return further(empty, ids)


def target_of(family: str) -> Backbone:
    return backbone(model_of(family)(0))


def conversation_of(family: str, method: str, **settings: Any) -> Any:
    if family in ("qwen2_5_vl", "qwen2_vl", "llava_onevision"):
        return talking(family, method, **settings)
    draft = backbone(noisy(model_of(family), 0, AMOUNT))
    always: dict[str, Any] = {"max_new_tokens": COUNT, "do_sample": False, **WORDS, **settings}
    return saccade.Conversation(target_of(family), draft=draft, method=method, **always)


def truth(family: str, inputs: Inputs, count: int = COUNT) -> tuple[int, ...]:
    """What transformers' generate answers to the whole conversation."""
    return tuple(hf_greedy(model_of(family)(0), inputs, count))


@contextmanager
def vision_rows(model: Any) -> Iterator[list[int]]:
    """The rows of pixels of every call of a convolution, which only vision towers have here."""
    rows: list[int] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
        for model_part in [model.base_model]
        for name, module in model_part.named_modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d)
    ]
    assert hooks
    yield rows
    for hook in hooks:
        hook.remove()


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("qwen2_5_vl", method) for method in METHODS),
        *((family, method) for family in [*MAKERS][1:] for method in METHODS[:5]),
    ],
)
def test_turns_that_bring_videos_answer_as_generate(family, method):
    """Claim: three turns, of which the second and third bring a video of their own and the fourth
    only words, answer as ``generate`` does on the whole conversation, and each reads only what is
    new: all rows up to the new ones count as reused, but for the few after the last known state of
    a hybrid. Fails if a key, position or state of an earlier turn is lost or stale."""
    whole = MAKERS[family](0)
    with conversation_of(family, method) as conversation:
        read = 0
        for turn in (1, 2, 3):
            result = conversation.run(whole)
            assert result.ids == truth(family, whole)
            assert result.fallback_reason is None
            slack = 34 if family == "qwen3_5" else 1
            assert read - slack <= result.reused_tokens <= max(0, read)
            read = len(ids_of(whole)) + len(result.ids)
            whole = joined(further(whole, result.ids), MAKERS[family](turn))
        whole = further(whole, question(5))
        assert conversation.run(whole).ids == truth(family, whole)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["sd", "specvlm", "std"])
def test_pixels_of_earlier_turns_are_not_run_again(method):
    """Claim: in a turn with a new video both vision towers run on that video's patches alone, and
    the draft reads no earlier row. Control: in turn 1 they run on the first video's."""
    target, draft = backbone_of_copy(qwen25()), backbone_of_copy(qwen25(9, layers=1))
    first, second = MAKERS["qwen2_5_vl"](0), MAKERS["qwen2_5_vl"](1)
    settings: dict[str, Any] = dict(method=method, max_new_tokens=COUNT, **WORDS)
    with (
        saccade.Conversation(target, draft=draft, **settings) as conversation,
        vision_rows(target.model) as by_target,
        vision_rows(draft.model) as by_draft,
    ):
        result = conversation.run(first)
        assert by_target == [len(first["pixel_values_videos"])]
        assert by_draft == ([] if method == "std" else by_target)
        del by_target[:], by_draft[:]
        whole = joined(further(first, result.ids), second)
        result = conversation.run(whole)
        assert result.ids == truth("qwen2_5_vl", whole) and result.fallback_reason is None
        assert by_target == [len(second["pixel_values_videos"])]
        assert by_draft == ([] if method == "std" else by_target)


@pytest.mark.parametrize("method", ["sd", "specvlm", "specvlm/view=uniform"])
def test_the_draft_reads_only_what_its_view_keeps_of_the_new_video(method, monkeypatch):
    """Claim: in a later turn the draft prefills the kept rows of the new video and the new text,
    and holds as large a share of the new video as of the old one. What it chose of the old stays.
    """
    forward, rows = Backbone.forward, []
    first, second = (video_input(seed, (4, 8, 8)) for seed in (0, 1))
    draft = backbone(noisy(qwen25, 0, AMOUNT))

    def counted(self: Backbone, embeds: Any, *args: Any, **named: Any) -> Any:
        if self is draft:
            rows.append(len(embeds))
        return forward(self, embeds, *args, **named)

    monkeypatch.setattr(Backbone, "forward", counted)
    with talking("qwen2_5_vl", method) as conversation:
        before = conversation.run(first).draft_visual_tokens
        drafter = talk_of(conversation).drafter._drafter
        chosen = drafter._prefilled_prompts[0].index
        del rows[:]
        result = conversation.run(joined(further(first, range(4)), second))
        assert result.draft_visual_tokens == 2 * before
        assert talk_of(conversation).drafter._drafter is drafter
        now = drafter._prefilled_prompts[0].index
        assert torch.equal(now[: len(chosen)], chosen)
        words = len(ids_of(second)) - 4 * 4 * 4
        assert rows[0] <= words + before + 4 + 1


@pytest.mark.parametrize("method", ["sd", "specvlm/keep=1", "specvlm-self/keep=1"])
def test_a_draft_that_is_the_target_is_accepted_after_new_videos(method):
    """Claim: the draft's cache holds the conversation too: a copy of the target is accepted to the
    end of each round in every turn. Fails if the draft reads a wrong row or position."""
    whole = MAKERS["qwen2_5_vl"](0)
    method = f"{method}/shape=chain-5"
    with talking("qwen2_5_vl", method, amount=0.0, max_new_tokens=13) as conversation:
        for turn in (1, 2, 3):
            result = conversation.run(whole)
            assert [len(r.emitted) for r in result.rounds] == [1, 6, 6]
            whole = joined(further(whole, result.ids), MAKERS["qwen2_5_vl"](turn))


@pytest.mark.parametrize("method", PARALLEL)
def test_a_draft_in_its_own_process_starts_afresh_and_says_so(method):
    """Claim: the target goes on, a new draft reads the whole conversation, and the result's
    warnings say why. Control: a turn of words alone has no such warning."""
    whole = MAKERS["qwen2_5_vl"](0)
    with talking("qwen2_5_vl", method) as conversation:
        answer = conversation.run(whole)
        whole = joined(further(whole, answer.ids), MAKERS["qwen2_5_vl"](1))
        result = conversation.run(whole)
        assert result.ids == truth("qwen2_5_vl", whole) and result.fallback_reason is None
        assert result.reused_tokens > 0
        assert any("from its beginning" in each for each in result.warnings)
        whole = further(whole, [*result.ids, *question(1)])
        result = conversation.run(whole)
        assert result.ids == truth("qwen2_5_vl", whole)
        assert not any("from its beginning" in each for each in result.warnings)
    torch.set_num_threads(1)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["sd", "specvlm", "std", "ar"])
def test_any_walk_through_videos_answers_as_generate(method):
    """Claim: an edit of an earlier turn, a video taken out, the same video twice, another video in
    the place of one: the answer is ``generate``'s on that text, in any order."""
    family, rng = "qwen2_5_vl", random.Random(method)
    videos = [MAKERS[family](seed) for seed in range(3)]
    parts: list[dict[str, Any]] = [videos[0]]
    with talking(family, method, max_new_tokens=6) as conversation:
        for step in ("add", "twice", "edit", "swap", "remove", "add", "first", "add", "edit"):
            if step == "add":
                parts = [*parts, rng.choice(videos)]
            elif step == "twice":
                parts = [*parts, parts[-1]]
            elif step == "swap":
                parts = [*parts[:-1], videos[(rng.randrange(2) + 1) % 3]]
            elif step == "remove":
                parts = [*parts[:1], *parts[2:]]
            elif step == "first":
                parts = parts[1:]
            else:
                parts = [*parts[:-2], text_part(family, question(rng.randrange(99))), *parts[-1:]]
            whole = joined(*parts)
            result = conversation.run(whole)
            assert result.ids == truth(family, whole, 6), step
            assert result.fallback_reason is None
            parts = [*parts, text_part(family, result.ids)]


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", ["sd", "specvlm", "std", "lookup"])
def test_a_conversation_of_words_goes_on_with_a_video(method):
    """Claim: a first turn without media may be followed by one with a video."""
    words = text_part("qwen2_5_vl", ids_of(text_input(0)))
    with talking("qwen2_5_vl", method) as conversation:
        first = conversation.run(words)
        assert first.ids == truth("qwen2_5_vl", words)
        whole = joined(further(words, first.ids), MAKERS["qwen2_5_vl"](1))
        result = conversation.run(whole)
        assert result.ids == truth("qwen2_5_vl", whole)
        assert result.reused_tokens >= len(ids_of(words))


def test_a_new_document_is_pruned_by_the_view():
    """Claim: a document that comes in a later turn counts as visual tokens, of which the draft
    keeps its share. Control: the same words without the mark are all read."""
    first, text = MAKERS["qwen2_5_vl"](0), question(3, 200)
    spans = {}
    for marked in (True, False):
        with talking("qwen2_5_vl", "specvlm/view=uniform/keep=0.1") as conversation:
            result = conversation.run(first)
            start = len(ids_of(first)) + len(result.ids)
            whole = further(first, [*result.ids, *text, *question(4)])
            context = {"context": (start, start + 200)} if marked else {}
            result = conversation.run(whole, **context)
            assert result.ids == truth("qwen2_5_vl", whole)
            assert result.reused_tokens > len(ids_of(first))
            spans[marked] = result.draft_visual_tokens
    assert spans[True] - spans[False] == 20


def test_a_video_taken_out_is_forgotten():
    """Claim: outputs of the vision tower are kept for the media of the latest turn alone."""
    first, second = MAKERS["qwen2_5_vl"](0), MAKERS["qwen2_5_vl"](1)
    with talking("qwen2_5_vl", "sd") as conversation:
        conversation.run(first)
        alone = talk_of(conversation).vision.bytes
        conversation.run(joined(first, second))
        assert talk_of(conversation).vision.bytes > 1.5 * alone
        conversation.run(first)
        assert talk_of(conversation).vision.bytes == alone


def test_a_turn_that_was_never_read_leaves_no_trace():
    """Claim: after a turn with a video that was closed half-way, and one with another video that
    was closed before its first round, the other video's question is answered about that video."""
    first, some, other = (MAKERS["qwen2_5_vl"](seed) for seed in (0, 1, 3))
    other = {**some, "pixel_values_videos": other["pixel_values_videos"]}
    with talking("qwen2_5_vl", "sd") as conversation:
        conversation.run(first)
        stream = conversation.stream(joined(first, some))
        next(stream), next(stream)
        stream.close()
        conversation.stream(joined(first, other)).close()
        whole = joined(first, other)
        assert conversation.run(whole).ids == truth("qwen2_5_vl", whole)
        assert truth("qwen2_5_vl", whole) != truth("qwen2_5_vl", joined(first, some))

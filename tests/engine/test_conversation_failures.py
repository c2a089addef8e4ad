"""Claims about misused conversations and failing drafts: a sentence, or plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from conversations import COUNT, fresh, ids_of, oracle, script, talking
from helpers import (
    TEXT,
    MadeBy,
    StubDraft,
    backbone,
    qwen25,
    stubbed,
    video_input,
)
from torch import Tensor

import saccade
from saccade.core.errors import OptionError, SaccadeError
from saccade.core.tree import Tree, chain
from saccade.methods import METHODS
from saccade.model.session import RequestState

pytestmark = pytest.mark.usefixtures("unchecked")


def test_an_unfinished_answer_refuses_the_next_question():
    """Claim: asking while an answer is under way is one sentence, and harms nothing: once it is
    exhausted the conversation goes on.
    """
    (inputs, first), (more, second), _ = script("qwen2_5_vl")
    with talking("qwen2_5_vl", "sd") as conversation:
        stream = conversation.stream(inputs)
        with pytest.raises(OptionError, match="exhaust its stream or close it"):
            conversation.stream(more)
        next(stream)
        with pytest.raises(OptionError, match="under way"):
            conversation.run(more)
        assert len(list(stream)) > 0 and stream.results[0].ids == first
        result = conversation.run(more)
        assert result.ids == second and result.reused_tokens > 0


def test_reading_ahead_without_media_keeps_the_conversation():
    """Claim: a prompt without media cannot be read ahead, which one sentence says, and the next
    turn goes on with the caches. Fails if the refusal frees them."""
    (inputs, first), (more, second), _ = script("qwen2_5_vl")
    words = {"input_ids": torch.tensor([[TEXT] * 6])}
    with talking("qwen2_5_vl", "sd") as conversation:
        with pytest.raises(OptionError, match="no media"):
            conversation.read_ahead(words)
        assert conversation.run(inputs).ids == first
        with pytest.raises(OptionError, match="no media"):
            conversation.read_ahead(words)
        result = conversation.run(more)
        assert result.ids == second and result.reused_tokens > 0


class RaisesLater:
    """A logits processor that raises an exception when it is called for the third time."""

    def __init__(self, exception: BaseException) -> None:
        self.exception, self.calls = exception, 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise self.exception
        return scores


@pytest.mark.parametrize("exception", [ZeroDivisionError(), MemoryError(), KeyboardInterrupt()])
@pytest.mark.parametrize(("turn", "runs"), [(0, True), (1, True), (1, False)])
def test_an_answer_that_raises_does_not_hold_up_the_next(turn, runs, exception):
    """Claim: after an error or an interruption in the middle of an answer, the same question and
    the next ones are answered as ever. Fails if the answer counts as under way for ever."""
    turns = script("qwen2_5_vl")
    error = SaccadeError if isinstance(exception, MemoryError) else type(exception)
    with talking("qwen2_5_vl", "sd") as conversation:
        for number, (inputs, answer) in enumerate(turns):
            if number == turn:
                processors = [RaisesLater(exception)]
                with pytest.raises(error):
                    if runs:
                        conversation.run(inputs, logits_processor=processors)
                    list(conversation.stream(inputs, logits_processor=processors))
            assert conversation.run(inputs).ids == answer[:COUNT]


def test_a_closed_conversation_starts_afresh():
    """Claim: close frees the caches, also after half an answer; the object may be used again."""
    (inputs, first), (more, second), _ = script("qwen2_5_vl")
    conversation = talking("qwen2_5_vl", "sd")
    next(conversation.stream(inputs))
    conversation.close()
    assert conversation.run(inputs).ids == first
    conversation.close()
    result = conversation.run(more)
    assert result.ids == second and result.reused_tokens == 0
    conversation.close()
    conversation.close()


def test_a_stream_that_is_closed_before_its_first_round_frees_its_draft():
    """Claim: closing frees what was prepared, also where nothing was read yet."""
    (inputs, _), *_ = script("qwen2_5_vl")
    stream = saccade.stream(qwen25(), inputs, draft=backbone(qwen25()), method="sd")
    assert stream.batch is not None
    stream.close()
    assert stream.batch is None and list(stream) == []


def test_settings_that_are_refused_leave_the_conversation_as_it_was():
    """Claim: an OptionError in between costs nothing: the next turn still reuses."""
    (inputs, _), (more, second), _ = script("qwen2_5_vl")
    with talking("qwen2_5_vl", "sd") as conversation:
        conversation.run(inputs)
        with pytest.raises(OptionError, match="max_tokens"):
            conversation.run(more, max_tokens=3)
        result = conversation.run(more)
        assert result.ids == second and result.reused_tokens > 0


def _failing(when: Callable[[int], bool]) -> Any:
    def propose(request: int, text: list[int], round: int) -> Tree:
        if when(round):
            raise RuntimeError("out of luck")
        return chain([1])

    return stubbed(propose)


def test_drafting_that_failed_stays_plain_until_another_video():
    """Claim: a draft that failed in turn 1 is not asked again (its cache may be anything), the
    answers stay the oracle's, and each result says why. Another video has a new draft.
    """
    (inputs, first), (more, second), _ = script("qwen2_5_vl")
    with talking("qwen2_5_vl", _failing(lambda round: round == 2)) as conversation:
        for turn, answer, drafted in ((inputs, first, [1, 1, 0]), (more, second, [0, 0, 0])):
            result = conversation.run(turn)
            assert result.ids == answer
            assert result.fallback_reason == "drafting failed with RuntimeError: out of luck"
            assert [len(r.tokens) for r in result.forwards[:3]] == drafted
        other = video_input(5)
        result = conversation.run(other, max_new_tokens=3)
        assert result.ids == oracle("qwen2_5_vl", other, 3)
        assert result.fallback_reason is None and len(result.forwards[0].tokens) == 1


def test_a_draft_that_cannot_go_on_costs_speed_only():
    """Claim: an error in the draft's ``turn`` is a fallback like any other."""

    def drafter(team: Any) -> StubDraft:
        draft = StubDraft(lambda request, text, round: chain([1]))

        def start_turn(*args: Any) -> None:
            raise ValueError("turn is broken")

        draft.start_turn = start_turn  # type: ignore[method-assign]
        return draft

    recipe = saccade.Recipe(
        "stub", "", MadeBy(drafter), METHODS["sd"].shape, METHODS["sd"].schedule
    )
    (inputs, first), (more, second), _ = script("qwen2_5_vl")
    with talking("qwen2_5_vl", recipe) as conversation:
        assert conversation.run(inputs).fallback_reason is None
        result = conversation.run(more)
        assert result.ids == second
        assert result.fallback_reason == "drafting failed with ValueError: turn is broken"


@pytest.mark.representatives(2)
@pytest.mark.parametrize("other", ["specvlm-self", "lookup", "ar", "sd/shape=chain-2"])
def test_another_method_in_a_later_turn_is_used_or_refused(other):
    """Claim: a result never names a method that did not draft it."""
    (inputs, _), (more, second), _ = script("qwen2_5_vl")
    with talking("qwen2_5_vl", "sd") as conversation:
        conversation.run(inputs)
        try:
            result = conversation.run(more, method=other)
        except SaccadeError:
            return
        assert result.ids == second
        expected = fresh("qwen2_5_vl", other, more)
        assert result.method == other
        assert [r.tokens for r in result.rounds] == [r.tokens for r in expected.rounds]


def test_a_stream_without_keep_frees_what_it_held():
    """Claim: only ``keep`` leaves a talk behind; without it nothing of the caches stays."""
    inputs = script("qwen2_5_vl")[0][0]
    stream = saccade.stream(backbone(qwen25()), inputs, method="ar", max_new_tokens=4)
    kept = saccade.stream(backbone(qwen25()), inputs, method="ar", max_new_tokens=4, keep=True)
    for rounds in (stream, kept):
        assert len(list(rounds)) == 4
    assert stream.batch is None and kept.batch is not None
    held_: Mapping[int, RequestState] = kept.batch.session.requests
    assert held_[0].cache.length >= len(ids_of(inputs))

"""Claims about logits processors of the caller's own: one that remembers its calls answers as in
``generate``, whatever drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import hf_greedy, left_padded, llama, noisy, text_input
from torch import Tensor
from transformers import LogitsProcessorList

import saccade
from saccade.core.errors import OptionError
from saccade.core.sampling import may_remember

COUNT = 40
METHODS = ["ar", "sd", "sd-tree", "sage", "auto", "lookup", "pearl", "sd/shape=sampled-2x1"]

Processor = Callable[[Tensor, Tensor], Tensor]


class EveryThird:
    """Forbids the likeliest token at every third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            return scores.scatter(1, scores.argmax(1, keepdim=True), float("-inf"))
        return scores


class Remembering:
    """Forbids what was likeliest at an earlier call, in a list it writes to in place."""

    def __init__(self) -> None:
        self.best: list[int] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        before = torch.tensor(self.best, dtype=torch.long)
        self.best.append(int(scores.argmax()))
        return scores.index_fill(1, before, float("-inf"))


class NotToBeCopied(EveryThird):
    """As a matcher of another library's may be: its state lies outside Python."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot copy a matcher of C++")


def closure() -> Processor:
    """A function whose state is in a variable around it."""
    calls = 0

    def forbid_now_and_then(ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return EveryThird.__call__(_At(calls - 1), ids, scores)  # type: ignore[arg-type]

    return forbid_now_and_then


class _At:
    def __init__(self, calls: int) -> None:
        self.calls = calls


PROCESSORS: dict[str, Callable[[], Processor]] = {
    "a counter": EveryThird,
    "a list": Remembering,
    "a closure": closure,
    "not to be copied": NotToBeCopied,
}


@pytest.mark.representatives(2)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("method", METHODS)
def test_a_processor_that_remembers_its_calls_answers_as_in_generate(kind, method):
    """Claim: it is called once for each token of the answer, in order, and for no drafted token
    that is not judged. Fails if drafts advance its state."""
    model, inputs = llama(), text_input()
    make = PROCESSORS[kind]
    expected = hf_greedy(model, inputs, COUNT, logits_processor=LogitsProcessorList([make()]))
    assert expected != hf_greedy(model, inputs, COUNT), "the processor has to matter"
    result = saccade.run(
        model,
        inputs,
        draft=noisy(llama, 0, 0.05),
        method=method,
        max_new_tokens=COUNT,
        logits_processor=LogitsProcessorList([make()]),
    )
    assert list(result.ids) == expected
    assert result.fallback_reason is None
    if method != "auto":  # It leaves the draft out, and the warning, where drafting does not pay.
        assert any("logits processor" in each for each in result.warnings) == (method != "ar")


class NoEvenToken:
    """Forbids every even id. It keeps nothing from call to call."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        forbidden = torch.arange(scores.shape[1]) % 2 == 0
        return scores.masked_fill(forbidden, float("-inf"))


@pytest.mark.parametrize("method", ["sd", "sd-tree"])
def test_drafts_follow_a_processor_that_remembers_nothing(method):
    """Claim: with a caller's rule in ``Stateless`` answers are ``generate()``'s, no warning says
    that drafts ignore it, and drafts propose nothing that it forbids. Control: without the wrapper
    they do."""
    model, rule = llama(), NoEvenToken()
    expected = hf_greedy(model, text_input(), COUNT, logits_processor=LogitsProcessorList([rule]))
    even = []
    for processor in (saccade.Stateless(rule), rule):
        result = saccade.run(
            model,
            text_input(),
            draft=noisy(llama, 0, 0.05),
            method=method,
            max_new_tokens=COUNT,
            eos_token_id=[],
            logits_processor=[processor],
        )
        assert list(result.ids) == expected
        is_followed = processor is not rule
        assert any("logits processor" in each for each in result.warnings) is not is_followed
        drafted = [token for round in result.rounds for token in round.tokens]
        even.append(sum(token % 2 == 0 for token in drafted))
    assert even[0] == 0 < even[1]


class Watching(EveryThird):
    """Notes how long the text was at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.lengths.append(ids.shape[1])
        return super().__call__(ids, scores)


def test_a_processor_is_called_once_a_token_and_in_order():
    """Claim: the caller's own object is called, at each length of the text once, until the answer
    ends; the round that ends it may look a few tokens beyond."""
    processor = Watching()
    result = saccade.run(
        llama(),
        text_input(),
        draft=noisy(llama, 0, 0.05),
        method="sd",
        max_new_tokens=COUNT,
        logits_processor=LogitsProcessorList([processor]),
    )
    assert processor.lengths == [*range(12, 12 + processor.calls)]
    assert len(result.ids) <= processor.calls <= len(result.ids) + 6


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["sd", "auto"])
def test_each_request_of_a_batch_has_a_state_of_its_own(method):
    """Claim: two requests in a batch answer as each does alone. Fails if they share one object."""
    model, draft = llama(), noisy(llama, 0, 0.05)
    alone = [text_input(seed, length) for seed, length in ((0, 12), (1, 7))]
    expected = [
        hf_greedy(model, inputs, COUNT, logits_processor=LogitsProcessorList([EveryThird()]))
        for inputs in alone
    ]
    ids = saccade.generate(
        model,
        left_padded(alone),
        draft=draft,
        method=method,
        max_new_tokens=COUNT,
        logits_processor=LogitsProcessorList([EveryThird()]),
    )
    assert ids[:, -COUNT:].tolist() == expected


def test_a_processor_that_cannot_be_copied_is_refused_for_a_batch_alone():
    """Claim: several requests need copies; one that has none is refused by its name."""
    with pytest.raises(OptionError, match="NotToBeCopied cannot be copied.*one request"):
        saccade.generate(
            llama(),
            left_padded([text_input(0), text_input(1)]),
            method="ar",
            logits_processor=LogitsProcessorList([NotToBeCopied()]),
        )


def test_hugging_faces_own_processors_are_followed_by_drafts():
    """Claim: penalties and bans do not count as processors that remember; a caller's subclass of
    one does. Fails if every answer with a penalty lost its draft."""
    from transformers.generation import logits_process as hf

    class Own(hf.MinLengthLogitsProcessor):
        pass

    assert not may_remember(hf.RepetitionPenaltyLogitsProcessor(1.2))
    assert may_remember(Own(3, 0)) and may_remember(lambda ids, scores: scores)

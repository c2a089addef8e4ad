"""Claims about what the target's process knows of its draft process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from beside import Inside, hired
from helpers import (
    backbone,
    drafter_of,
    noisy,
    qwen25,
)
from workers import GAMMA, INPUTS, token

import saccade
from saccade.core.errors import DraftFailed
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree
from saccade.drafting.parallel.process import DraftError, _without_local_hooks
from saccade.drafting.parallel.worker_drafter import WorkerDrafter
from saccade.methods import resolve

pytestmark = pytest.mark.usefixtures("unchecked")


class Script(Inside):
    """A worker that says what it is told to, when it is told to."""

    def says(self, *messages: tuple[Any, ...]) -> None:
        self._inbox.extend((self._job_number, *message) for message in messages)

    def receive(self, patience: float) -> tuple[Any, ...] | None:
        return tuple(self._inbox.popleft()[1:]) if self._inbox else None


def scripted(method: str = "pearl-syn") -> tuple[WorkerDrafter, Script]:
    model = backbone(qwen25())
    draft = drafter_of(resolve(method), model, model, [Sampling()], 64)
    assert isinstance(draft, WorkerDrafter)
    script = Script()
    with hired(script):
        draft.parallel_work.encode(INPUTS)
    return draft, script


def test_tokens_that_follow_a_refused_text_are_dropped():
    """Claim: tokens a worker sent before it heard of a refusal are not taken for the next ones,
    however late they come. Fails if epochs are not compared.
    """
    draft, script = scripted("pearl")
    script.says(("ready", {0: 0}, 0.0, 0.0), *token(0, 5))
    assert draft.propose({0: None})[0].tokens == (5,)
    script.says(*token(0, 6, 7))
    assert draft.extend({0: Tree((5,), (-1,), (None,))})[0].tokens == (5, 6)
    draft.commit({0: [5, 9]})  # 6 is refused
    script.says(*token(0, 8), *token(1, 10, 11))
    assert draft.propose({0: None})[0].tokens == ()
    assert draft.extend({0: Tree()})[0].tokens == (10,)


def test_a_turn_that_samples_after_one_that_did_not_is_drafted_with_its_laws():
    """Claim: a question that is sampled gets the same rounds after a greedy question as after a
    sampled one, and each drafted token comes with the law it was drawn from. Fails if rules are
    those of the first question: what is drawn would then be judged as if it had been chosen."""
    target, draft = backbone(qwen25()), backbone(noisy(qwen25, 0, 0.05))
    runs = []
    for first in ({"do_sample": False}, {"do_sample": True, "seed": 1}):
        with saccade.Conversation(target, draft=draft, method="pearl", max_new_tokens=12) as talk:
            talk.run(INPUTS, **first)
            later = list(talk.stream(INPUTS, do_sample=True, seed=5, temperature=1.5))
        runs.append([(round.tree.tokens, round.emitted) for round in later])
        assert all(q is not None for round in later for q in round.tree.q)
    assert runs[0] == runs[1] and any(tokens for tokens, _ in runs[0])


def test_silence_is_an_error_and_the_end_of_the_process():
    """Claim: a draft that says nothing while it is waited for is killed and reported."""
    draft, script = scripted("pearl")
    script.says(("ready", {0: 0}, 0.0, 0.0))
    draft.propose({0: None})
    with pytest.raises(DraftFailed) as failed:
        draft.extend({0: Tree()})
    assert isinstance(failed.value.__cause__, DraftError)
    assert "silent" in str(failed.value.__cause__) and failed.value.trees == {0: Tree()}
    assert script.poll() is not None


def test_a_plain_token_that_the_draft_foresaw_makes_no_larger_batch():
    """Claim: gamma tokens are judged after full acceptance, also where an early draft, not ready
    yet, had already drafted the very token that the target took beyond those in flight.

    Nothing is in flight after that round, so x1 is judged and then gamma tokens. Fails with
    2 gamma - 1: the batch that would have been in flight is counted a second time.
    """
    draft, script = scripted()
    script.says(*token(0, 1, 2, 3))
    in_flight = draft.propose({0: None})
    assert in_flight[0].tokens == (1, 2, 3)
    script.says(*token(0, 4))  # another before it heard of the target's prefill
    assert draft.extend(in_flight)[0].tokens == (1, 2, 3)
    draft.commit({0: [1, 2, 3, 4]})  # the target's own token is 4 as well
    script.says(("ready", {0: 0}, 0.0, 0.0), *token(1, *range(5, 20)))
    x1 = draft.extend({0: Tree()})
    assert x1[0].tokens == (5,)
    draft.commit({0: [5]})
    assert len(draft.propose({0: None})[0]) == GAMMA - 1


def test_a_models_hooks_keep_their_order_when_a_process_starts():
    """Claim: hooks that are no functions of a module are taken off while a model is sent to a
    process, and afterwards all are called in the order in which they were added. Fails if those
    taken off are put back at the end."""
    model = torch.nn.Linear(2, 2)
    calls: list[str] = []

    def add(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    model.register_forward_hook(add("local first"))
    model.register_forward_hook(partial(_note, calls))
    model.register_forward_hook(add("local last"))
    with _without_local_hooks(model):
        model(torch.zeros(1, 2))
        assert calls == ["of the module"]
    calls.clear()
    model(torch.zeros(1, 2))
    assert calls == ["local first", "of the module", "local last"]


def _note(calls: list[str], *_: object) -> None:
    calls.append("of the module")

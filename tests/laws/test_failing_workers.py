"""Claims about drafts in a process of their own that fail because of what they drew: the target's
law stays exact, however the process fails.

Each fault comes with one token: the draft's forward that reads that token, anywhere in an answer,
raises, has NaN for logits, never ends, is killed or finds no memory. So whether there is a draft at
all depends on a draw, and whoever takes that draw back bends the law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import markov
import pytest
import torch
from beside import Hung, Killed
from helpers import StubDraft
from markov import REGIMES, Play, Tables, distance

from saccade.core.errors import DraftFailed
from saccade.core.tree import Tree, chain, prefix
from saccade.drafting.fallback import Fallback
from saccade.drafting.parallel import child
from saccade.drafting.parallel.worker_drafter import WorkerDrafter
from saccade.drafting.recipe import Recipe
from saccade.methods import resolve

pytestmark = pytest.mark.usefixtures("unchecked")

EXACT = 1e-6
SAME, NEAR, FAR, WRONG = dict(enumerate(REGIMES))


class NoMemory(torch.OutOfMemoryError):
    """As a GPU's."""


FAULTS: dict[str, Callable[[], BaseException]] = {
    "raises": lambda: RuntimeError("broken"),
    "has no memory": lambda: NoMemory("out of memory"),
    "is killed": Killed,
    "hangs": Hung,
}


class Failing(Play):
    """Answers whose draft fails as soon as it reads a token."""

    fault: Callable[[], BaseException]
    token: int

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """Whoever drafts in this process fails; the target's tables do not."""
        fault, token = self.fault, self.token

        class Faulty(Tables):
            def score(self, trees: Mapping[int, Tree]) -> Any:
                if any(tree.tokens[-1:] == (token,) for tree in trees.values()):
                    raise fault()
                return super().score(trees)

        def tables(backbone: Any, rules: Any, **rest: Any) -> Tables:
            return Faulty(rules, [markov.DRAFTS[kind][0] for kind in self.regimes], self.before)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(child, "Session", tables)
            patch.setattr(markov, "drafter_of", guarded)
            return super().again(*args, **kwargs)


def guarded(*args: Any) -> Fallback:
    """A recipe's drafter as a call has it: its failure costs speed only."""
    from helpers import drafter_of

    return Fallback(drafter_of(*args), markov.IDS)


def failing(recipe: Recipe, kind: int, fault: Callable[[], BaseException], token: int) -> Failing:
    play = Failing(recipe, 3, [kind])
    play.fault, play.token = fault, token
    return play


def recipe(length: int) -> Recipe:
    return markov.plain(resolve(f"pearl/shape=chain-{length}"), None)


@pytest.mark.representatives(2)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize(("kind", "length", "token"), [(FAR, 2, 1), (NEAR, 3, 2), (WRONG, 1, 2)])
def test_a_parallel_draft_that_fails_because_of_a_token_leaves_the_law(name, kind, length, token):
    """Claim: the joint law of three tokens is p's to rounding where the draft's process raises,
    runs out of memory, dies or falls silent once it has drawn one token. Fails if what it had drawn
    is not judged."""
    assert distance(failing(recipe(length), kind, FAULTS[name], token)) < EXACT


@pytest.mark.representatives(1)
@pytest.mark.parametrize("turns", [0, 2, 7])
def test_so_it_does_however_far_ahead_the_draft_was(turns):
    """Claim: the same where the process was slow or had drafted far ahead when it died."""
    for name in ("is killed", "raises"):
        play = failing(recipe(3), FAR, FAULTS[name], 1)
        play.turns = lambda: turns
        assert distance(play) < EXACT


def test_a_failure_while_one_request_is_asked_for_keeps_what_others_drew():
    """Claim: what had been drawn for a request when drafting failed is handed over when that
    request is asked for, once, also if the failure came while another one was. Fails if it is taken
    back, which bends the law of that request."""

    class Fails(StubDraft):
        def propose(self, states: Mapping[int, Any]) -> dict[int, Tree]:
            raise DraftFailed({0: chain([1]), 1: chain([2])}) from RuntimeError("broken")

    draft = Fallback(Fails(lambda request, text, round: chain([])), markov.IDS)
    assert draft.propose({0: None}) == {0: chain([1])}
    empty = {0: Tree(), 1: Tree()}
    assert draft.extend(empty) == {0: Tree(), 1: chain([2])}
    assert draft.extend(empty) == empty


def test_logits_of_nan_after_one_token_leave_the_law():
    """Claim: the same where the draft's logits after one token are NaN, which is no error of its
    forward but of the law made of them."""
    play = failing(recipe(2), FAR, lambda: markov.sampling.BrokenLaw("the logits hold NaN"), 1)
    assert distance(play) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("token", range(markov.V))
@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", dict(enumerate(REGIMES)))
def test_every_failure_leaves_the_law(name, token, length, kind):
    """The same over every token, regime and length."""
    assert distance(failing(recipe(length), kind, FAULTS[name], token)) < EXACT


# -- controls: each of these must be far from the law ------------------------------------------


def _hand_over_nothing(patch: pytest.MonkeyPatch) -> None:
    """What had been drawn is dropped, as it was until 2026-11."""
    real = WorkerDrafter._raise_if_failed

    def bare(self: WorkerDrafter) -> None:
        for draft in self._drafts.values() if self._failure else ():
            draft.chain = Tree()
        real(self)

    patch.setattr(WorkerDrafter, "_raise_if_failed", bare)


def _drop_the_last(patch: pytest.MonkeyPatch) -> None:
    """The very token that brought the failure about is taken back."""
    real = WorkerDrafter._raise_if_failed

    def shorter(self: WorkerDrafter) -> None:
        for draft in self._drafts.values() if self._failure else ():
            draft.chain = prefix(draft.chain, max(0, len(draft.chain) - 1))
        real(self)

    patch.setattr(WorkerDrafter, "_raise_if_failed", shorter)


CONTROLS = {
    "nothing is handed over": _hand_over_nothing,
    "the last token is dropped": _drop_the_last,
}


@pytest.mark.representatives(1)
@pytest.mark.parametrize("name", CONTROLS)
def test_control_a_draw_that_is_taken_back_bends_the_law(name, monkeypatch):
    """Control: without the tokens that were drawn the same answers are far from the law."""
    CONTROLS[name](monkeypatch)
    assert distance(failing(recipe(2), FAR, FAULTS["is killed"], 1)) > 0.01


def test_the_draft_does_fail_there():
    """Control of the tests above: each fault happens in some answers, and in some it does not."""
    for fault in FAULTS.values():
        reasons = []
        for seed in range(60):
            caught: list[Fallback] = []
            with pytest.MonkeyPatch.context() as patch:
                real = Fallback.__init__

                def noted(self: Fallback, *args: Any, _real: Any = real) -> None:
                    _real(self, *args)
                    caught.append(self)  # noqa: B023

                patch.setattr(Fallback, "__init__", noted)
                failing(recipe(2), FAR, fault, 1)(seed)
            reasons.append(caught[0].reason is not None)
        assert any(reasons) and not all(reasons)

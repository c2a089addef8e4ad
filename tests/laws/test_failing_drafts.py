"""Claims about drafts that fail: whatever they drew by then, the answer has the target's law.

A failure that comes after one drawn token and not after another is the hard case: whoever takes
the drawn token back because of it bends the law. Judged exactly, as ``markov.py`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from markov import CHEAP, REGIMES, Known, Play, cases, distance, plain

from saccade.core.protocols import Growing, Shape, State
from saccade.core.sampling import BrokenLaw, Law, Scores
from saccade.core.tree import Tree, add
from saccade.drafting.fallback import Fallback
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import parallel
from saccade.drafting.shapes.policies import Chain
from saccade.methods import resolve

pytestmark = pytest.mark.usefixtures("unchecked")

EXACT = 1e-6
BAD = 1  # the token after which everything goes wrong
SAME, NEAR, FAR, WRONG = range(len(REGIMES))
Scored = dict[int, Scores]


def _drew_bad(scored: Mapping[int, Scores]) -> bool:
    return any(BAD in scores.tree.tokens for scores in scored.values())


def raises(scored: Scored) -> Scored:
    """A bug of the draft."""
    if _drew_bad(scored):
        raise RuntimeError("the draft cannot read this token")
    return scored


def runs_out_of_memory(scored: Scored) -> Scored:
    """The draft's device is full."""
    if _drew_bad(scored):
        raise torch.OutOfMemoryError("out of memory")
    return scored


@dataclass(frozen=True)
class Nan(Known):
    """Laws that are NaN after one token."""

    def law(self, node: int) -> Any:
        if node >= 0 and self.tree.tokens[node] == BAD:
            raise BrokenLaw("the logits hold NaN")
        return super().law(node)


def is_nan(scored: Scored) -> Scored:
    """The draft's logits are NaN at the nodes of one token, and elsewhere as they should be."""
    nan_scores: Scored = {}
    for request, scores in scored.items():
        assert isinstance(scores, Known)
        bad = [float("nan") if token == BAD else 0.0 for token in (0, *scores.tree.tokens)]
        rows = [row + nan for row, nan in zip(scores.rows, bad, strict=True)]
        nan_scores[request] = Nan(
            scores.tree, rows, scores.rules, (), scores.answer_length, request, laws=scores.laws
        )
    return nan_scores


def nothing(scored: Scored) -> Scored:
    """Nothing goes wrong with the scores: something else will."""
    return scored


FAILURES: dict[str, Callable[[Scored], Scored]] = {
    "raises": raises,
    "runs out of memory": runs_out_of_memory,
    "is NaN": is_nan,
}
CASES = {
    name: recipe
    for name, recipe in cases().items()
    if recipe.schedule is not parallel and recipe.drafts
}
OTHERS = ("auto cheap", "sampled-2x1", "distinct-2x1", "tabed", "shape=sage")
"""Methods whose every failure `make cases` runs."""


def _law_tests() -> list[Any]:
    """Returns every pair: each method fails in one way by default, in every way in the slow run."""
    params = []
    for place, name in enumerate(CASES):
        for turn, failure in enumerate(FAILURES):
            is_fast = turn == place % len(FAILURES) and not name.startswith("weights")
            is_extra = any(each in name for each in OTHERS)
            other = pytest.mark.extra if is_extra else pytest.mark.slow
            params.append(pytest.param(name, failure, marks=() if is_fast else other))
    return params


@pytest.mark.representatives(10)
@pytest.mark.parametrize(("name", "failure"), _law_tests())
def test_a_failure_after_one_drawn_token_does_not_bend_the_law(name, failure):
    """Claim: the joint law of three tokens is the target's when drafting fails wherever a certain
    token was drawn. Fails if anything that was drawn is taken back.
    """
    play = Play(CASES[name], 3, [FAR], spoil_draft=FAILURES[failure])
    assert distance(play) < EXACT


@pytest.mark.representatives(3)
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("regime", [SAME, NEAR, WRONG])
def test_a_chain_that_fails_keeps_the_law_whatever_the_draft(failure, regime):
    """The same for a chain in every other regime."""
    chain = plain(resolve("sd/shape=chain-2"), None)
    assert distance(Play(chain, 3, [regime], spoil_draft=FAILURES[failure])) < EXACT


def test_a_failed_draft_is_given_up_with_its_reason():
    """Claim: after a failure the answer goes on plainly and says why."""
    play = Play(plain(resolve("sd/shape=chain-4"), None), 24, [NEAR], spoil_draft=raises)
    (answer,) = play(3)
    assert len(answer) == 24
    assert play.failed is not None and "cannot read this token" in play.failed


def _take_back(patch: pytest.MonkeyPatch) -> None:
    """What Saccade did once: the whole tree is thrown away."""
    handed_over = Fallback._sound_trees

    def wrong(self: Fallback, otherwise: Any, draft: Any) -> Any:
        failed_before = self.reason is not None
        trees = handed_over(self, otherwise, draft)
        return dict(otherwise) if self.reason and not failed_before else trees

    patch.setattr(Fallback, "_sound_trees", wrong)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("failure", FAILURES)
def test_control_a_tree_that_is_thrown_away_bends_the_law(failure, monkeypatch):
    """Control: without what was drawn, the law is far from the target's."""
    _take_back(monkeypatch)
    chain = plain(resolve("sd/shape=chain-2"), None)
    assert distance(Play(chain, 3, [FAR], spoil_draft=FAILURES[failure])) > 0.01


@dataclass(frozen=True)
class Careless(Shape):
    """A chain whose own code raises right after it has drawn a certain token."""

    def grow(self, state: State) -> Growing:
        tree = Tree()
        for _ in range(2):
            scores: Scores = yield tree
            token, q = scores.draw(len(tree) - 1)
            if token == BAD:
                raise KeyError(token)
            tree = add(tree, len(tree) - 1, token, q)
        return tree


def test_a_shape_that_raises_by_what_it_drew_does_not_bend_the_law():
    """Claim: a token that was drawn and is in no tree yet is handed over too."""
    recipe = replace(plain(resolve("sd"), None), shape=Careless())
    assert distance(Play(recipe, 3, [FAR], spoil_draft=nothing)) < EXACT


# -- trees that are malformed --------------------------------------------------------------------


@dataclass(frozen=True)
class Malformed(Shape):
    """A chain of two that, after one of the tokens, has a third node that cannot be."""

    def grow(self, state: State) -> Growing:
        tree: Tree = yield from Chain(2).grow(None)
        return add(tree, 7, 0) if BAD in tree.tokens else tree


def test_a_malformed_tree_is_judged_as_far_as_it_is_sound():
    """Claim: nodes before the one at fault stand. Fails if the whole tree is thrown away."""
    recipe = replace(plain(resolve("sd"), None), shape=Malformed())
    play = Play(recipe, 3, [FAR], spoil_draft=nothing)
    assert distance(play) < EXACT
    play = replace(play, length=24)
    play(1)
    assert play.failed is not None and "parents must come first" in play.failed


# -- a target without memory for what was drafted ------------------------------------------------


@dataclass(frozen=True)
class Longer(Chain):
    """A chain of two, and of three where the second token is a certain one."""

    length: int = 3

    def goes_on(self, scores: Scores, node: int, law: Law | None) -> bool:
        return node == 0 or scores.tree.tokens[node] == BAD


def is_full(scored: Scored) -> Scored:
    """The target has memory for two drafted tokens at a time."""
    if any(len(scores.tree) > 2 for scores in scored.values()):
        raise torch.OutOfMemoryError("out of memory")
    return scored


def _longer() -> Recipe:
    return replace(plain(resolve("sd"), None), shape=Longer())


@pytest.mark.parametrize("regime", [SAME, FAR])
def test_a_target_without_memory_judges_all_that_was_drawn(regime):
    """Claim: where a tree is too large for the target, and how large it is depends on what was
    drawn, its tokens are judged one after another. Fails if those after the first are dropped.
    """
    assert distance(Play(_longer(), 3, [regime], spoil_target=is_full)) < EXACT


def test_control_tokens_dropped_for_want_of_memory_bend_the_law(monkeypatch):
    """Control: with all tokens after the first dropped, the law is far from the target's."""
    monkeypatch.setattr("saccade.drafting.schedule.unjudged_trees", lambda trees, judgement: {})
    assert distance(Play(_longer(), 3, [FAR], spoil_target=is_full)) > 0.01


def test_costs_of_the_cases_are_settled():
    """Control: timed shapes are among the cases, so that they are met with failures too."""
    assert any(recipe.shape.costs == CHEAP for recipe in CASES.values() if recipe.needs_costs)

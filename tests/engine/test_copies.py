"""Claims about drafts that are copied from the text: answers stay the target's, whoever drafts
between the copies, in batches and from turn to turn.

Copies are forced wherever a single token has occurred before, so that right and wrong ones occur.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from conversations import COUNT, script, talking
from helpers import answered, backbone, input_for, left_padded, noisy, qwen25, truth

import saccade
from saccade.core.costs import Costs
from saccade.core.protocols import Repetition, State
from saccade.core.tree import Tree, chain
from saccade.drafting import repetitions
from saccade.drafting.drafters import Copies
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.auto import Auto
from saccade.drafting.views.basic import FULL
from saccade.methods import resolve

pytestmark = pytest.mark.usefixtures("unchecked")

COPIES = "auto/drafter=copies"
COSTS = Costs((1, 64), (1.0, 1.1), 0.02, acceptance=0.8)


@dataclass(frozen=True)
class Copier(Auto):
    """Copies up to five tokens wherever it can."""

    def copy(self, state: State, repetition: Repetition) -> Tree:
        return replace(chain(repetition.tokens[:5]), match_length=repetition.match_length)


def method(name: str) -> Recipe:
    shape = Copier(COSTS)
    if name == COPIES:
        return replace(resolve("auto"), shape=shape, drafter=Copies, view=FULL)
    return replace(resolve(name), shape=shape)


@pytest.fixture(autouse=True)
def _every_token_matches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(repetitions, "SHORTEST_MATCH", 1)
    yield


@pytest.mark.representatives(3)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "lfm2"])
@pytest.mark.parametrize("name", ["auto", "auto/drafter=self", "layerskip", COPIES])
def test_an_answer_with_copies_is_the_targets_own(family, name):
    """Claim: 40 tokens equal transformers' generate and the cache-free reference, with copies and
    drafts of the model between them."""
    result = answered(family, method(name))
    assert result.ids == truth(family) and result.fallback_reason is None
    assert any(each.match_length for each in result.rounds)
    drafted = any(each.tokens and not each.match_length for each in result.rounds)
    assert drafted == (name != COPIES)


def test_some_copies_are_right_and_some_are_refused():
    """Claim: what these tests force has copies of both kinds, so that they prove something."""
    result = answered("qwen2_5_vl", method("auto"))
    copies = [each for each in result.rounds if each.match_length]
    assert any(each.accepted for each in copies)
    assert any(each.kind == "recovered" for each in copies)


def test_copies_in_a_batch_are_of_each_requests_own_text():
    """Claim: requests of one call copy from their own texts, and each answers as alone."""
    draft = backbone(noisy(qwen25, 0, 0.05))
    inputs = [input_for("qwen2_5_vl", seed) for seed in (0, 0)]
    out = saccade.generate(
        backbone(qwen25()),
        left_padded(inputs),
        draft=draft,
        method=method("auto"),
        max_new_tokens=40,
        do_sample=False,
    )
    expected = torch.tensor([truth("qwen2_5_vl")] * 2)
    assert torch.equal(out[:, -40:].cpu(), expected)


@pytest.mark.parametrize("name", ["auto", COPIES])
def test_a_later_turn_copies_from_the_conversation_as_it_is(name):
    """Claim: over three turns, each of which replaces the end of the answer before, the answers are
    the oracle's. Fails where copies are found at places that another text has by now."""
    copied = 0
    with talking("qwen2_5_vl", method(name)) as conversation:
        for inputs, answer in script("qwen2_5_vl"):
            result = conversation.run(inputs)
            assert result.ids == answer[:COUNT] and result.fallback_reason is None
            copied += sum(each.match_length > 0 for each in result.rounds)
    assert copied


def test_a_copy_proposes_no_placeholder():
    """Claim: ids that stand for pixels are never copied, though the prompt is full of them."""
    target = backbone(qwen25())
    result = answered("qwen2_5_vl", method("auto"))
    drafted = {token for each in result.rounds if each.match_length for token in each.tokens}
    assert drafted and not drafted & set(target.placeholders)

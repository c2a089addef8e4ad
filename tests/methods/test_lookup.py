"""Prompt lookup, and the combinations of methods that cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from by_hand import real
from helpers import (
    END,
    IMAGE,
    START,
    VIDEO,
    backbone,
    drafter_of,
    frames_input,
    llama,
    onevision,
    qwen25,
    text_input,
    video_input,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from saccade.core.errors import MethodError
from saccade.core.prompt import Prefill
from saccade.core.sampling import Sampling
from saccade.core.tree import chain
from saccade.drafting.drafters import find_continuation
from saccade.methods import resolve
from saccade.model.backbone import Backbone

LONGEST, COUNT = 3, 10
MODELS = {
    "qwen2_5_vl": lambda: (qwen25(), video_input()),
    "llava_onevision": lambda: (onevision(), frames_input()),
    "llama": lambda: (llama(), text_input(1, length=30)),
}
EACH = pytest.mark.parametrize("family", list(MODELS))


def by_hand(text: list[int], longest: int, count: int, latest: bool = True) -> list[int]:
    """What followed the latest earlier place of the longest ending that has one."""
    for size in range(longest, 0, -1):
        places = [
            at
            for at in range(len(text) - size)
            if all(text[at + i] == text[len(text) - size + i] for i in range(size))
        ]
        if places:
            after = (max if latest else min)(places) + size
            return text[after : after + count]
    return []


def until_placeholder(tokens: list[int]) -> list[int]:
    prefix = []
    for token in tokens:
        if token in (VIDEO, IMAGE):
            break
        prefix.append(token)
    return prefix


@settings(max_examples=300)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    longest=st.integers(1, 5),
    count=st.integers(0, 12),
)
def test_longest_match_first_then_latest(text, longest, count):
    """Claim: the longest ending with an earlier place wins, among its places the latest; what
    followed is proposed, up to ``count`` tokens and the end of the text.

    Texts over four ids match everywhere. Fails on earliest, shortest, or a match with itself.
    """
    assert find_continuation(text, longest, count) == by_hand(text, longest, count)


def test_control_earliest_or_shortest_proposes_otherwise():
    """Control: the claim above has power against both other orders."""
    text = [1, 2, 3, 7, 2, 3, 8, 9, 3, 5, 1, 2, 3]
    assert find_continuation(text, 3, 2) == [7, 2] == by_hand(text, 3, 2)
    assert by_hand(text, 1, 2) != find_continuation(text, 3, 2)
    text = [1, 2, 7, 1, 2, 8, 1, 2]
    assert find_continuation(text, 3, 1) == [8] and by_hand(text, 3, 1, latest=False) == [7]


@EACH
def test_every_round_drafts_what_followed_in_the_text_so_far(family):
    """Claim: on real runs each round's chain is the lookup over prompt ids and answer, ten tokens
    at most, cut before the first placeholder.

    Fails if the draft lags behind the committed text or drafts from what was refused.
    """
    run = real("lookup", *MODELS[family](), count=60)
    context = run.whole.full_ids.tolist()
    drafted = 0
    for round, text in run.texts():
        expected = until_placeholder(by_hand([*context, *text], LONGEST, COUNT))
        assert round.tree == chain(expected)
        drafted += len(expected)
    assert drafted and sum(len(r.verdict.accepted) for r in run.rounds)


def test_a_placeholder_is_never_drafted_nor_anything_behind_it():
    """Claim: where the text before the video comes again, the draft ends at the video.

    The question ends on the id before the video's start mark, so that what followed is
    [start, video, video, end, ...]. Fails if a visual id is proposed, or skipped over.
    """
    inputs = video_input(5, grid=(1, 2, 4))
    ids = inputs["input_ids"]
    first = ids[0].tolist().index(START)
    ids[0, -1] = ids[0, first - 1]
    run = real("lookup", qwen25(), inputs, count=12)
    context = run.whole.full_ids.tolist()
    assert by_hand(context, LONGEST, COUNT)[:4] == [START, VIDEO, VIDEO, END]
    drafter = drafter_of(resolve("lookup"), backbone(run.target), None, [Sampling()], 12)
    drafter.read_prompts([run.prefill])
    assert drafter.propose({0: drafter.learner.start()})[0].tokens == (START,)
    assert not {VIDEO, IMAGE} & {token for round in run.rounds for token in round.tree.tokens}


@EACH
def test_only_ids_are_read(family):
    """Claim: what is drafted is a function of the prompt's ids and the answer: the same without
    embeddings, cache or attention. Fails if the drafter looked at anything visual.
    """
    run = real("lookup", *MODELS[family](), count=40)
    recipe = resolve("lookup")
    assert not recipe.view.needs and run.result.draft_visual_tokens in (None, 0)
    blind = replace(run.whole, embeds=torch.full_like(run.whole.embeds, float("nan")))
    drafter = drafter_of(recipe, backbone(run.target), None, [Sampling()], 40)
    drafter.read_prompts([Prefill(blind, None, torch.full((1,), float("nan")))])
    drafter.commit({0: run.result.ids[:1]})
    for round in run.rounds:
        assert drafter.propose({0: drafter.learner.start()}) == {0: round.tree}
        drafter.commit({0: round.emitted})


IMPOSSIBLE = [
    ("lookup/shape=tree", "lookup needs a shape that drafts a chain"),
    ("lookup/shape=sage", "lookup needs a shape that drafts a chain"),
    ("sd-tree/drafter=lookup", "lookup needs a shape that drafts a chain"),
    ("sd/view=per-head", "drafter=self"),
    ("sage/view=per-head", "drafter=self"),
    ("std/drafter=model", "drafter=self"),
    ("layerskip/view=per-head", "drafter=self"),
    ("specvlm-self/positions=repacked", "cannot be re-packed"),
    ("sage/drafter=self/positions=repacked", "cannot be re-packed"),
    ("sage/drafter=early-exit/positions=repacked", "cannot be re-packed"),
    ("std/positions=repacked", "positions needs another view"),
    ("layerskip/keep=0.5", "keep needs another view"),
]


@pytest.mark.parametrize(("name", "says"), IMPOSSIBLE)
def test_what_cannot_be_is_refused_before_any_work(name, says, monkeypatch):
    """Claim: an impossible combination raises MethodError with what would work, from the name
    alone and from the engine before the model runs. Fails if it runs as something else.
    """
    with pytest.raises(MethodError, match=says):
        resolve(name)
    monkeypatch.setattr(Backbone, "prompts", lambda self, inputs: pytest.fail("work was done"))
    with pytest.raises(MethodError, match=says):
        saccade.run(backbone(llama()), text_input(), method=name)


POSSIBLE = [
    "lookup/shape=chain-3",
    "sage/drafter=self",
    "sage/positions=repacked",
    "std/shape=tree",
    "std/keep=0.5/shape=sage-live",
    "streaming/drafter=model",
    "layerskip/shape=sage",
    "layerskip/view=specvlm",
]


@pytest.mark.representatives(3)
@pytest.mark.parametrize("name", POSSIBLE)
def test_control_what_can_be_runs_and_answers_the_same(name):
    """Control: neighbours of the refused combinations run, greedily as plain decoding does."""
    target, inputs = qwen25(), video_input(7)
    plain = real("ar", target, inputs, count=16).result.ids
    assert real(name, target, inputs, qwen25(1), count=16).result.ids == plain

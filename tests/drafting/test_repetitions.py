"""Claims about copies of the text: what is found, and when ``auto`` copies it."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from saccade.core.costs import Costs
from saccade.core.protocols import Repetition
from saccade.core.result import Round, Verdict
from saccade.core.round_estimates import FadingMean, Pause
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree
from saccade.drafting.repetitions import LONGEST_MATCH, SHORTEST_MATCH, RepetitionIndex
from saccade.drafting.shapes.auto import Auto, Estimates
from saccade.model.likeliest import Vocabulary

VOCABULARY = Vocabulary(size=6, banned=(0,))  # Ids 0 and 6 are in texts and are no words.
COUNT = 9


def searched(text: list[int]) -> Repetition | None:
    """What the index must find, by looking at every place of the text."""
    ending = text[-SHORTEST_MATCH:]
    for place in range(len(text) - 1, SHORTEST_MATCH - 1, -1):
        run = text[place - SHORTEST_MATCH : place]
        if run == ending and all(0 < token < 6 for token in run):
            longest = max(
                n
                for n in range(min(place, LONGEST_MATCH) + 1)
                if text[place - n : place] == text[-n:]
            )
            period = text[place:]
            after = (period * COUNT)[:COUNT]
            words = next((i for i, token in enumerate(after) if not 0 < token < 6), COUNT)
            return Repetition(tuple(after[:words]), longest) if words else None
    return None


@pytest.mark.parametrize("seed", range(12))
def test_the_index_finds_what_a_search_of_the_whole_text_finds(seed):
    """Claim: while a text grows by tokens and by pieces, and is cut back as by another turn, the
    index finds the last place where the ending occurred before, how long the match is, and what
    followed. Fails where a place is forgotten, or is of a text that is gone."""
    noise = random.Random(seed)
    index, found = RepetitionIndex(VOCABULARY), 0
    text = [noise.randrange(7 if noise.random() < 0.3 else 3) for _ in range(200)]
    for _ in range(300):
        if noise.random() < 0.05:
            del text[-noise.randrange(1, 90) :]
        size = noise.choice((1, 1, 2, 30))
        start = noise.randrange(max(1, len(text) - size))
        piece = text[start : start + size] if noise.random() < 0.5 else []
        text += piece or [noise.randrange(7) for _ in range(size)]
        expected = searched(text)
        found += expected is not None
        assert index.find(text, COUNT) == expected
    assert 30 < found < 300


COSTS = Costs((1, 8, 64), (1.0, 1.1, 1.6), 0.4)
WORDS = tuple(range(40))


def estimates(rate: float = 0.7, **settings: Any) -> Estimates:
    start: Estimates = Auto(replace(COSTS, acceptance=rate)).start()
    return start._replace(**settings)


def copied(state: Estimates, match_length: int = 5, costs: Costs = COSTS) -> Tree:
    tree = Auto(replace(costs, acceptance=0.7)).copy(state, Repetition(WORDS, match_length))
    return tree or Tree()


def after_copy(state: Estimates, match_length: int, drafted: int, accepted: int) -> Estimates:
    """The estimates after a copy of so many tokens, of which the first ``accepted`` were right."""
    kind = "bonus" if accepted == drafted else "recovered"
    tree = Tree(WORDS[:drafted], tuple(range(-1, drafted - 1)), (None,) * drafted, (), match_length)
    verdict = Verdict(tuple(range(accepted)), WORDS[:accepted], 99, kind)
    p: Any = SimpleNamespace(rules=Sampling())
    round = Round(0, tree, verdict, None, p, None, 0.0, COSTS.verify(1 + drafted))
    folded: Estimates = Auto(replace(COSTS, acceptance=0.7)).fold(state, round)
    return folded


def test_a_longer_match_is_copied_further():
    """Claim: the longer the match, the more is copied of what followed it; a copy is a chain of
    those tokens, is marked as one, and was not drawn."""
    trees = [copied(estimates(), length) for length in (3, 6, 12, 32)]
    lengths = [len(tree) for tree in trees]
    assert lengths == sorted(lengths) and 0 < lengths[0] < lengths[-1]
    for tree, match_length in zip(trees, (3, 6, 12, 32), strict=True):
        assert tree.tokens == WORDS[: len(tree)] and not any(tree.q)
        assert tree.parents == tuple(range(-1, len(tree) - 1))
        assert tree.match_length == match_length


def test_a_draft_that_is_expected_to_earn_more_is_not_replaced_by_a_copy():
    """Claim: beside a draft that costs little and is mostly right nothing short is copied, and
    beside one that is paused, or dear, the same match is."""
    cheap = replace(COSTS, draft=0.02)
    assert not copied(estimates(0.95), 3, cheap)
    assert copied(estimates(0.95, pause=Pause(8, 1)), 3, cheap)
    assert copied(estimates(0.3), 3)


def test_nothing_is_copied_where_rows_are_dear():
    """Claim: where a row costs as much as a forward no copy is judged."""
    dear = Costs((1, 8, 64), (1.0, 8.0, 64.0), 0.4)
    assert not copied(estimates(0.1, pause=Pause(8, 1)), 5, dear)


def test_copies_that_are_refused_end_and_those_that_are_right_grow():
    """Claim: after copies whose first token was refused nothing is copied after a match of the same
    length, while a very long match is still tried; after copies that were right throughout more is
    copied at once. Fails where verdicts on copies are forgotten."""
    refused = estimates()
    for _ in range(8):
        refused = after_copy(refused, 4, 4, 0)
    assert not copied(refused, 4)
    right = estimates()
    before = len(copied(right, 4))
    for _ in range(4):
        right = after_copy(right, 4, 8, 8)
    assert len(copied(right, 4)) > before


def test_a_verdict_on_a_copy_says_nothing_of_the_draft():
    """Claim: what is believed of the draft and of its forward is the same after a copy, right or
    wrong, and the rate that the answer reaches is not."""
    before = estimates(pause=Pause(8, 3))
    for accepted in (0, 4):
        after = after_copy(before, 5, 4, accepted)
        assert after.acceptance == before.acceptance and after.pause == before.pause
        assert after.times.draft_forward == FadingMean(0.0, 0.0)
        assert (after.tokens, after.seconds) == (accepted + 1, COSTS.verify(5))


def test_a_round_that_shows_what_plain_decoding_takes_copies_nothing():
    """Claim: where a plain round is due, nothing is copied; else its seconds would not be known."""
    state = estimates()
    times = state.times
    while not Auto(replace(COSTS, acceptance=0.7))._next_round_measures_plain(
        state._replace(times=times)
    ):
        times = times.after_drafting(0, 0.0, 5, COSTS.verify(5), COSTS.verify(5), COSTS.draft)
    assert copied(state) and not copied(state._replace(times=times))

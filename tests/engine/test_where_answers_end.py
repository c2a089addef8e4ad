"""Claims about where an answer ends: at its end token or its length limit, whatever was drafted."""

from __future__ import annotations

import pytest
from helpers import (
    TEXT,
    answered,
    few,
    qwen25,
    stubbed,
)
from one_video import FAMILY, greedy_ids, run_on_video

from saccade.core.tree import chain

# test_greedy.py runs the same code with shapes and types checked.
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", few(["sd", "sd-tree", "specvlm", "sd/shape=chain-12"], 2))
def test_an_end_inside_an_accepted_run_ends_the_answer(method):
    """Claim: declare each emitted token in turn the end: the answer stops right there.

    Walking every index puts the end at every place of a round. Running past it fails at once.
    """
    for end in dict.fromkeys(greedy_ids(20)):
        result = answered(FAMILY, method, eos_token_id=end, count=24)
        assert result.ids == greedy_ids(greedy_ids().index(end) + 1)
        assert result.finish_reason == "stop"


@pytest.mark.representatives(1)
@pytest.mark.parametrize("amount", few([0.05, 0.0], 1))
def test_the_length_limit_and_the_end_give_different_finish_reasons(amount):
    """Claim: over every limit x every place of the end, up to two rounds, ids and finish reason
    are those of looking at one token after the other.
    """
    for limit in range(1, 9):
        for at in range(9):
            result = answered(
                FAMILY, "sd", eos_token_id=greedy_ids()[at], count=limit, amount=amount
            )
            assert result.ids == greedy_ids(min(limit, at + 1))
            assert result.finish_reason == ("stop" if at < limit else "length")


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["sd", "sd-tree"])
def test_tokens_after_the_end_count_nowhere(method):
    """Claim: tokens of the rounds are the ids emitted, accepted counts exclude what was cut, and
    no round accepts more than it drafted.
    """
    for at in range(1, 14):
        result = answered(FAMILY, method, eos_token_id=greedy_ids()[at], amount=0.0)
        spelled = tuple(token for r in result.rounds for token in r.emitted)
        assert spelled == result.ids == greedy_ids(at + 1)
        assert all(len(r.accepted) <= len(r.tokens) for r in result.rounds)
        last = result.rounds[-1]
        cut_inside = at % 6 != 0  # the first token is the prefill's
        assert (last.own is None) == cut_inside and (last.kind is None) == cut_inside


def test_a_rejected_end_token_ends_nothing():
    """Claim: a draft that proposes the end every round changes nothing."""
    end = next(i for i in range(TEXT) if i not in greedy_ids())
    result = run_on_video(qwen25(), None, stubbed(lambda *_: chain([end] * 3)), eos_token_id=end)
    assert result.ids == greedy_ids(24) and result.finish_reason == "length"
    assert result.acceptance_rate == 0.0


@pytest.mark.parametrize("limit", [2, 4, 9])
def test_a_draft_that_goes_beyond_the_limit_is_cut_there(limit):
    """Claim: a draft that knows no limit, such as one that was copied, and is right about every
    token adds only as many tokens as the answer may have, in its rounds too."""

    def next_tokens(request, text, number):
        return chain(list(greedy_ids(24)[len(text) :][:12]))

    result = run_on_video(qwen25(), None, stubbed(next_tokens), max_new_tokens=limit)
    assert result.ids == greedy_ids(limit) and result.finish_reason == "length"
    assert tuple(token for each in result.rounds for token in each.emitted) == result.ids
    last = result.rounds[-1]
    assert last.own is None and last.kind is None and len(last.accepted) == limit - 1

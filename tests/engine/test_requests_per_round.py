"""Claims about how many requests take part in a round: few where that costs little, else all."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.core.round_estimates import MAX_REMEMBERED_SIZES, NEW_ROUND_WEIGHT
from saccade.engine.requests_per_round import SPLIT_COST, RoundTimes

MILLISECONDS = st.floats(0.01, 300.0)


def _believed(fixed: float, each: float, live: int) -> RoundTimes:
    return RoundTimes({size: fixed + each * size for size in range(1, live + 2)})


@given(
    fixed=st.one_of(st.just(0.0), MILLISECONDS),
    each=MILLISECONDS,
    live=st.integers(1, 64),
    patience=MILLISECONDS,
)
def test_a_round_is_as_short_as_is_cheap_and_no_shorter_than_anybody_waits(
    fixed, each, live, patience
):
    """Claim: whatever rounds take, part of the requests take part where a request's share of that
    round is at most a fifth above its share of a round of all; and with one request fewer rounds
    would be, by their mean, dearer than by a tenth or shorter than the patience. Fails if turns
    cost throughput, or if newcomers wait longer than they must."""
    taken = _believed(fixed, each, live).requests_per_round(live, patience)
    assert 1 <= taken <= live

    def share(requests: float) -> float:
        return fixed / requests + each

    dear = (1 + SPLIT_COST) * share(live) * (1 + 1e-6)
    assert taken == live or share(taken) <= (1 + 2 * SPLIT_COST) * share(live) * (1 + 1e-6)
    if taken == 1:
        return
    fewer = live / ceil(live / (taken - 1))
    assert share(fewer) > dear * (1 - 2e-6) or fixed + each * fewer < patience * (1 + 1e-6)


@pytest.mark.parametrize("seconds", [{}, {1: 5.0, 8: 5.0}, {1: 5.0, 8: 4.0}], ids=str)
def test_all_take_part_where_turns_would_gain_nothing(seconds):
    """Claim: where nothing is known of rounds, or more requests make none longer, all take part.
    Control: where each makes them longer, half do."""
    assert RoundTimes(seconds).requests_per_round(16, 1.0) == 16
    assert RoundTimes({1: 1.0, 16: 16.0}).requests_per_round(16, 8.0) == 8


def test_a_size_that_was_never_tried_is_tried():
    """Claim: who has only seen rounds of all believes them to take time by request, tries half,
    and goes back to all once those turn out to save nothing. Fails if a constant load is never
    looked into, or a wrong belief stays."""
    pace = RoundTimes().fold(16, 16.0)
    assert pace.requests_per_round(16, 8.0) == 8
    assert pace.fold(8, 15.0).requests_per_round(16, 8.0) == 16


def test_more_than_ever_are_tried_together():
    """Claim: however long rounds of a few take, more than were in one are tried at once, and where
    that costs little more they stay together. Fails if requests that came one by one are served
    one by one for good."""
    pace = RoundTimes().fold(1, 10.0)
    assert pace.requests_per_round(2, 1.0) == 2
    assert pace.fold(2, 19.0).requests_per_round(16, 1.0) == 16
    assert pace.fold(2, 19.0).fold(16, 22.0).requests_per_round(16, 1.0) == 16
    assert pace.fold(2, 19.0).fold(16, 140.0).requests_per_round(16, 1.0) < 16


def test_a_guess_a_little_off_takes_as_many_turns():
    """Claim: where half of all fit, a round a twentieth dearer or cheaper than believed changes
    nothing. Fails if the last turn is taken only where it would be a whole one: at half and a
    little more, all would take part, and newcomers would wait twice as long."""
    for off in (0.95, 1.0, 1.05):
        seconds = {size: off * (5.0 + 3.3 * size) for size in (4, 8, 16)}
        assert RoundTimes(seconds).requests_per_round(16, 31.0) == 8, off


def test_what_rounds_took_lately_counts():
    """Claim: of rounds of a size, the last one changes what is believed by its part. Fails where a
    busy hour is believed in for good."""
    pace = RoundTimes().fold(4, 1.0).fold(4, 2.0)
    assert pace.seconds == {4: pytest.approx(1 + NEW_ROUND_WEIGHT)}
    for _ in range(20):
        pace = pace.fold(4, 2.0)
    assert pace.seconds[4] == pytest.approx(2.0, rel=0.01)


def test_sizes_that_were_not_seen_for_long_are_forgotten():
    """Claim: of the sizes of rounds the last few count, and one that comes again is among them.
    Fails where rounds over short prompts are believed in beside long ones."""
    pace = RoundTimes()
    for size in [1, 2, *range(3, 3 + MAX_REMEMBERED_SIZES - 2), 1, 99]:
        pace = pace.fold(size, float(size))
    assert [*pace.seconds] == [*range(3, 3 + MAX_REMEMBERED_SIZES - 2), 1, 99]

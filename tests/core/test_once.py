"""Claims about what is worked out once for objects: each its own, and gone with them."""

from __future__ import annotations

import gc
import weakref

from saccade.core.once import once


class _Thing:
    def __init__(self, name: str) -> None:
        self.name = name


def test_every_row_of_objects_has_an_answer_of_its_own_worked_out_once():
    """Claim: one, two or three objects, in their order, are asked about once each. Fails if the
    last one alone tells them apart, or if anything is worked out again."""
    calls: list[str] = []

    @once
    def join(*things: _Thing) -> str:
        calls.append("".join(each.name for each in things))
        return calls[-1]

    @once
    def alone(thing: _Thing) -> str:
        return thing.name

    a, b = _Thing("a"), _Thing("b")
    for _ in range(2):
        assert [join(a, b), join(b, a), join(a, a), join(b, b)] == ["ab", "ba", "aa", "bb"]
        assert (alone(a), alone(b)) == ("a", "b")
    assert calls == ["ab", "ba", "aa", "bb"]


def test_nothing_outlives_its_objects():
    """Claim: what was asked about, even with one that lives on, is freed."""

    @once
    def both(one: _Thing, other: _Thing) -> bool:
        return one.name == other.name

    stays, goes = _Thing("a"), _Thing("b")
    assert not both(stays, goes) and not both(goes, stays)
    gone = weakref.ref(goes)
    del goes
    gc.collect()
    assert gone() is None

"""What is worked out once for objects, and forgotten with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

Of, V = TypeVarTuple("Of"), TypeVar("V")


def once(work: Callable[[*Of], V]) -> Callable[[*Of], V]:
    """Of these very objects what it gave the first time. It must not hold on to them."""
    known: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    @wraps(work)
    def told(*of: *Of) -> V:
        *path, last = of
        at = known
        for each in path:
            at = at.setdefault(each, WeakKeyDictionary())
        if last not in at:
            at[last] = work(*of)
        found: V = at[last]
        return found

    return told

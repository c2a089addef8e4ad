"""What is worked out once for objects, and forgotten with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P, V = ParamSpec("P"), TypeVar("V")


def once(work: Callable[P, V]) -> Callable[P, V]:
    """Of these very objects what it gave the first time. It must not hold on to them."""
    known: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    @wraps(work)
    def told(*of: P.args, **named: P.kwargs) -> V:
        *path, last = of
        at = known
        for each in path:
            at = at.setdefault(each, WeakKeyDictionary())
        if last not in at:
            at[last] = work(*of, **named)
        found: V = at[last]
        return found

    return told

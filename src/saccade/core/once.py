"""A cache of results that lives as long as the objects they were computed from."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

Of = TypeVarTuple("Of")
V = TypeVar("V")


def once(work: Callable[[*Of], V]) -> Callable[[*Of], V]:
    """Makes ``work`` run once for the same objects and return its first result afterwards.

    The objects are compared by identity or their own ``__eq__``, and are not kept alive. ``work``
    must not keep them alive either.
    """
    results: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    @wraps(work)
    def work_once(*arguments: *Of) -> V:
        *path, last = arguments
        level = results
        for each in path:
            level = level.setdefault(each, WeakKeyDictionary())
        if last not in level:
            level[last] = work(*arguments)
        result: V = level[last]
        return result

    return work_once

"""Runs the steps of a generator within a scope that its caller never sees."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")


def each_within(
    scope: Callable[[], AbstractContextManager[object]], steps: Iterator[T]
) -> Generator[T, None, None]:
    """Yields these steps, computing each within a scope of its own, which ends before the step is
    yielded."""
    while True:
        with scope():
            try:
                step = next(steps)
            except StopIteration:
                return
        yield step

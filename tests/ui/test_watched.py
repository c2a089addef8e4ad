"""Claims about work that somebody watches from another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from saccade.core.errors import OptionError
from saccade.ui.watched import CurrentRun, Watched

DEADLINE = 20.0  # generous: nothing here takes longer than a blink


def forever(halted: Callable[[], bool]) -> Iterator[int]:
    number = 0
    while not halted():
        number += 1
        yield number
        time.sleep(0.001)


def test_it_ends_with_the_last_item_and_runs_in_one_thread() -> None:
    """Claim: the last thing yielded is always seen, and all the work was done in one thread."""
    threads = set()

    def work(halted: Callable[[], bool]) -> Iterator[int]:
        for number in range(50):
            threads.add(threading.get_ident())
            yield number

    seen = list(Watched(work))
    assert seen[-1] == 49 and seen == sorted(set(seen))
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_an_error_reaches_whoever_watches() -> None:
    """Claim: what the work raises is raised to its watcher, once, after what came before it."""

    def work(halted: Callable[[], bool]) -> Iterator[int]:
        yield 1
        raise OptionError("not so")

    watched = Watched(work)
    with pytest.raises(OptionError, match="not so"):
        list(watched)
    assert watched.join(DEADLINE) and list(watched) == []


def test_stop_ends_the_work() -> None:
    """Claim: after ``stop`` the thread ends though nobody asks any more."""
    watched = Watched(forever)
    assert next(watched) >= 1
    watched.stop()
    assert watched.join(DEADLINE)


def test_nobody_watching_ends_the_work() -> None:
    """Claim: work that nobody asks about for its patience ends by itself.

    The control: with patience it goes on."""
    left, kept = Watched(forever, patience=0.05), Watched(forever, patience=1000.0)
    assert left.join(DEADLINE)
    assert not kept.join(0.0)
    kept.stop()
    assert kept.join(DEADLINE)


def test_work_is_for_one_tab_at_a_time() -> None:
    """Claim: who starts is alone: the run before has ended, whether its tab is there or not."""
    current = CurrentRun[int]()
    first = current.start("one", forever)
    second = current.start("two", forever)
    assert first.join(0.0) and not second.join(0.0)
    current.stop("nobody")
    current.stop("two")
    assert second.join(DEADLINE)

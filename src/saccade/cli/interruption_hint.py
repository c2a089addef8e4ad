"""What the user is told after Ctrl-C, where a command has work under way."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

GOES_ON = "the same command goes on from there"

_hints: list[str] = []


@contextmanager
def explain_interruption(what_stays: str, *, goes_on: bool = True) -> Iterator[None]:
    """Lets Ctrl-C during the block say what stays, and how to go on where the command can."""
    command = shlex.join(["saccade", *sys.argv[1:]])
    advice = f"; {GOES_ON}: {command}" if goes_on else ""
    try:
        yield
    except KeyboardInterrupt:
        _hints.append(f"stopped: {what_stays}{advice}")
        raise


def hint() -> str | None:
    """Returns what to say after Ctrl-C, None where there is nothing to say."""
    return _hints.pop() if _hints else None

"""Files of JSON lines that outlive a kill, and which part of a list is whose.

A row is appended by one write and forced to the disk; a last line without its end was cut short by
a kill, and is cut off before the file is gone on with.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from saccade.core.errors import OptionError

T = TypeVar("T")


def append(path: Path, rows: Iterable[Any]) -> None:
    """Adds rows to a file, all by one write that is on the disk when this returns.

    Raises OptionError where the disk does not take them; what it took is cut off by ``mended``.
    """
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    try:
        with path.open("ab", buffering=0) as file:
            if file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    except OSError as error:
        raise OptionError(
            f"cannot write {path}: {error.strerror}; what is there is kept"
        ) from error


def lines(whole: bytes) -> Iterator[tuple[bytes, int]]:
    """Every line that has its end, and the offset behind it."""
    end = 0
    for line in whole.splitlines(keepends=True):
        end += len(line)
        if line.endswith(b"\n"):
            yield line, end


def cut(path: Path, end: int) -> None:
    """Cuts off what stands behind an offset, if anything does."""
    if end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())


def mended(path: Path) -> list[Any]:
    """The rows of a file, none where there is no file; a line cut short is cut off it.

    Raises OptionError, with the line's number, where a whole line is no JSON.
    """
    if not path.exists():
        return []
    found, end = [], 0
    for number, (line, stop) in enumerate(lines(path.read_bytes()), start=1):
        try:
            found.append(json.loads(line))
        except ValueError:
            raise OptionError(f"line {number} of {path} is no JSON: mend or delete it") from None
        end = stop
    cut(path, end)
    return found


def replace(path: Path, rows: Iterable[Any]) -> None:
    """Writes a file anew: a reader sees the old one or the new one, whatever happens meanwhile."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    append(fresh, rows)
    os.replace(fresh, path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """The only writer of a file, among processes that ask here. Ends with the process, also killed.

    Raises OptionError, naming the other one, where there is one.
    """
    place = path.with_name(path.name + ".lock")
    try:
        held = FileLock(place).acquire(timeout=0)
    except Timeout:
        who = place.read_text().strip() or "another process"
        raise OptionError(
            f"{path} is being written by {who}: give each worker a --shard or an --out of its own"
        ) from None
    with held:
        place.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        try:
            yield
        finally:
            place.unlink(missing_ok=True)


def shard(text: str) -> tuple[int, int]:
    """i/n, counted from 1, as (from 0, of how many)."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise OptionError(f"--shard {text} is not i/n with i from 1 to n, as in 2/4")
    return int(number) - 1, int(count)


def part(items: Sequence[T], shard: tuple[int, int]) -> list[T]:
    """This shard's items: every ``n``-th."""
    number, count = shard
    return list(items[number::count])

"""Files of JSON lines that survive a kill, and the split of a list into shards.

Rows are appended by one write that is forced to the disk. A kill may cut the last line short. A
caller that continues such a file removes that line first, by ``read_and_repair`` or ``truncate``.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from saccade.core.errors import OptionError
from saccade.core.json_text import parse_json

T = TypeVar("T")


def append_rows(path: Path, rows: Iterable[Any]) -> None:
    """Appends rows to a file by one write, and returns once they are on the disk.

    Raises OptionError where they cannot be written. A line that was written in part then stays in
    the file until ``read_and_repair`` removes it.
    """
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    try:
        with path.open("ab", buffering=0) as file:
            if file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    except OSError as error:
        raise OptionError(
            f"cannot write {path}: {error.strerror}; the rows written so far are kept"
        ) from error


def complete_lines(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Yields every line that ends in a line break, and the offset of its end in bytes."""
    end = 0
    for line in content.split(b"\n")[:-1]:  # What follows the last line break is incomplete.
        end += len(line) + 1
        yield line, end


def parse_object(path: Path, number: int, line: str | bytes) -> dict[str, Any]:
    """Returns the JSON object in a line of a file. Raises OptionError, with the line's number,
    where the line is anything else."""
    try:
        fields = parse_json(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise OptionError(f"line {number} of {path} is no JSON object: mend or delete it")
    return fields


def truncate(path: Path, end: int) -> None:
    """Removes what a file has after an offset in bytes."""
    if end < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())


def read_and_repair(path: Path) -> list[Any]:
    """Returns the rows of a file, none where there is no file, and removes an incomplete last line.

    Raises OptionError, with the line's number, where a complete line is no JSON.
    """
    if not path.exists():
        return []
    rows, end = [], 0
    for number, (line, line_end) in enumerate(complete_lines(path.read_bytes()), start=1):
        try:
            rows.append(parse_json(line))
        except ValueError:
            raise OptionError(f"line {number} of {path} is no JSON: mend or delete it") from None
        end = line_end
    truncate(path, end)
    return rows


def rewrite(path: Path, rows: Iterable[Any]) -> None:
    """Replaces a file in one step: a reader sees all of the old rows or all of the new ones."""
    new_path = path.with_name(path.name + ".new")
    new_path.unlink(missing_ok=True)
    append_rows(new_path, rows)
    os.replace(new_path, path)


@contextmanager
def write_lock(path: Path) -> Iterator[None]:
    """Locks a file against other writers. If this process is killed, the system releases the lock.

    Raises OptionError, naming the other writer, where there is one.
    """
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = FileLock(lock_path).acquire(timeout=0)
    except Timeout:
        owner = "another process"
        with suppress(OSError):  # That process may have ended and removed the file meanwhile.
            owner = lock_path.read_text().strip() or owner
        raise OptionError(
            f"{path} is being written by {owner}: give each worker a --shard or an --out of its own"
        ) from None
    with lock:
        lock_path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        try:
            yield
        finally:
            lock_path.unlink(missing_ok=True)


def parse_shard(text: str) -> tuple[int, int]:
    """Returns (index from 0, count) of a shard that is written i/n, where i counts from 1.

    Raises OptionError where the text is not of that form.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise OptionError(f"--shard {text} is not i/n with i from 1 to n, as in 2/4")
    return int(number) - 1, int(count)


def shard_items(items: Sequence[T], shard: tuple[int, int]) -> list[T]:
    """Returns the items of a shard. For example, the shard (1, 4) has the items 1, 5, 9 and so on,
    counted from 0."""
    index, count = shard
    return list(items[index::count])

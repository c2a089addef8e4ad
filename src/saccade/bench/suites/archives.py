"""Media packed in zip and tar archives, whole or in parts.

Nothing is unpacked but the members asked for, under names made here, so no archive can write
anywhere else.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import tarfile
import tempfile
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product, takewhile
from pathlib import Path, PurePosixPath
from string import ascii_lowercase
from typing import Any

from saccade.core.errors import VideoInputError

_FAULTS = (
    OSError, EOFError, RuntimeError, NotImplementedError, zlib.error, zipfile.BadZipFile,
    tarfile.TarError, UnicodeDecodeError,
)  # fmt: skip


class _Joined(io.RawIOBase):
    """Parts of a file that was cut into pieces, read as one."""

    def __init__(self, files: Sequence[Path], stack: ExitStack) -> None:
        super().__init__()
        self.files = [stack.enter_context(path.open("rb")) for path in files]
        self.starts = [0]
        for path in files:
            self.starts.append(self.starts[-1] + path.stat().st_size)
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.starts[-1])[whence])
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        if self.at >= self.starts[-1]:
            return 0
        part = bisect_right(self.starts, self.at) - 1
        self.files[part].seek(self.at - self.starts[part])
        data = self.files[part].read(min(len(buffer), self.starts[part + 1] - self.at))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


@dataclass(frozen=True)
class Archive:
    """A zip or tar, whole or in parts. Links, folders and names that climb are not members."""

    name: str
    files: tuple[Path, ...]

    @cached_property
    def listing(self) -> tuple[Mapping[str, int], str]:
        """Bytes of each member by name, and what is wrong with the archive, or nothing."""
        found: dict[str, int] = {}
        if lack := _gap([path.name for path in self.files]):
            return found, f"{self.name} is in parts and {lack} is missing"
        try:
            with self._open() as archive:
                for name, size, _ in archive:
                    if harmless(name):
                        found[name] = size
            whole = not self.name.lower().endswith(".tar") or self._ended
        except _FAULTS:
            whole = False
        return found, "" if whole else f"{self.name} is cut short or damaged"

    @property
    def _ended(self) -> bool:
        """Whether a tar ends with an empty block: tarfile takes any end for the end."""
        with self.files[-1].open("rb") as file:
            file.seek(-min(512, self.files[-1].stat().st_size), os.SEEK_END)
            return not any(file.read())

    def extract(self, names: Sequence[str], folder: Path) -> Path:
        """These members as files in a folder that is made whole or not at all.

        Raises `VideoInputError` where they cannot be read.
        """
        if folder.is_dir():
            return folder
        wanted, listing = set(names), self.listing[0]
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                with self._open() as archive:
                    for name, size, handle in archive:
                        if name in wanted and listing.get(name) == size:
                            with handle() as source, (made / file_name(name)).open("wb") as out:
                                _copy(source, out, size)
                            wanted.discard(name)
                            if not wanted:
                                break
                if wanted:
                    raise EOFError
                if not folder.is_dir():
                    made.rename(folder)
        except _FAULTS:
            if folder.is_dir():  # another process was faster
                return folder
            label = file_name(names[0])
            what = f"{label} cannot be unpacked from {self.name}: it is cut short, or the disk full"
            raise VideoInputError(what, "truncated") from None
        return folder

    @contextmanager
    def _open(self) -> Iterator[Iterator[tuple[str, int, Any]]]:
        """Regular files as (name, bytes, a function that opens it)."""
        with ExitStack() as stack:
            raw = io.BufferedReader(_Joined(self.files, stack), 1 << 16)
            if ".zip" in self.name.lower():
                zipped = stack.enter_context(zipfile.ZipFile(raw))
                yield (
                    (i.filename, i.file_size, lambda i=i: zipped.open(i))
                    for i in zipped.infolist()
                    if not i.is_dir() and not stat.S_ISLNK(i.external_attr >> 16)
                )
            else:
                tarred = stack.enter_context(tarfile.open(fileobj=raw, mode="r:*"))
                yield (
                    (i.name, i.size, lambda i=i: tarred.extractfile(i)) for i in tarred if i.isreg()
                )

    @cached_property
    def key(self) -> str:
        """Changes with the archive, so that what was unpacked of an older one is not used."""
        facts = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in self.files]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def archives(paths: Sequence[Path]) -> tuple[Archive, ...]:
    """The archives among these files, the parts of one put together."""
    found: dict[Path, list[tuple[int, str, Path]]] = {}
    for path in paths:
        stem, part = _part(path.name)
        if re.search(r"\.(zip|tar|tgz|tar\.gz)$", stem.lower()):
            found.setdefault(path.with_name(stem), []).append((len(part), part, path))
    return tuple(
        Archive(whole.name, tuple(path for *_, path in sorted(parts)))
        for whole, parts in sorted(found.items())
    )


def _part(name: str) -> tuple[str, str]:
    """ "videos.tar.part.aa" as ("videos.tar", "aa"); of a whole archive the part is empty."""
    pattern = r"(.+\.(?:zip|tar|tgz|tar\.gz))\.(?:part[._-]?)?([a-z]{2,3}|\d{1,4})"
    match = re.fullmatch(pattern, name, re.IGNORECASE)
    return (match[1], match[2]) if match and match[2] != "gz" else (name, "")


def _gap(names: Sequence[str]) -> str:
    """Of parts in order the first that is missing before the last one there is, if any."""
    parts = [_part(name)[1].lower() for name in names]
    width, last = len(parts[0]), parts[-1]
    every: Iterator[str]
    if last.isdigit():
        first = min(1, int(parts[0]))  # some count from 0
        every = (f"{number:0{width}d}" for number in range(first, int(last)))
    else:
        every = takewhile(last.__ne__, map("".join, product(ascii_lowercase, repeat=width)))
    return next((f"part {each}" for each in every if each not in parts), "")


def harmless(name: str) -> bool:
    """A relative name that stays below where it is put."""
    path = PurePosixPath(name)
    bad = path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name
    return bool(path.parts) and not bad and not re.match("[A-Za-z]:", name)


def file_name(name: str) -> str:
    """The last part of a member's name, safe to print and to make a file of."""
    last = "".join(c if c.isprintable() else "_" for c in PurePosixPath(name).name)
    return last[-120:] or "member"


def _copy(source: io.BufferedIOBase, out: io.BufferedIOBase, size: int) -> None:
    """Exactly as many bytes as were declared: an archive may lie about them."""
    left = size
    while left and (data := source.read(min(left, 1 << 20))):
        out.write(data)
        left -= len(data)
    if left or source.read(1):
        raise EOFError

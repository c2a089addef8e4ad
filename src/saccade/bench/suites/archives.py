"""Reads media from zip and tar archives, which may be cut into parts.

Benchmarks publish their videos as such archives, and ``media_index`` finds the videos inside. Only
requested members are unpacked, each into a given folder under the last part of its name, so no
archive can write anywhere else.
"""

from __future__ import annotations

import hashlib
import io
import lzma
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

from saccade.core.errors import VideoInputError, first_line

MAX_NAME_BYTES = 120  # Of a file that is unpacked. File systems allow 255.
# What zipfile, tarfile and their decompressors raise for archives that cannot be read, such as
# damaged, encrypted or truncated ones.
_READ_ERRORS = (
    OSError, EOFError, RuntimeError, NotImplementedError, zlib.error, zipfile.BadZipFile,
    lzma.LZMAError, tarfile.TarError, UnicodeDecodeError,
)  # fmt: skip


class _JoinedParts(io.RawIOBase):
    """A file that was cut into parts, read as one."""

    def __init__(self, files: Sequence[Path], stack: ExitStack) -> None:
        super().__init__()
        self.files = [stack.enter_context(path.open("rb")) for path in files]
        # The byte at which each part starts in the whole file, and then the whole file's size.
        self.starts = [0]
        for path in files:
            self.starts.append(self.starts[-1] + path.stat().st_size)
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.starts[-1]}
        self.position = max(0, origins[whence] + offset)
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        if self.position >= self.starts[-1]:
            return 0
        part = bisect_right(self.starts, self.position) - 1
        self.files[part].seek(self.position - self.starts[part])
        data = self.files[part].read(min(len(buffer), self.starts[part + 1] - self.position))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


@dataclass(frozen=True)
class Archive:
    """A zip or tar, whole or in parts. Links, folders and unsafe names are not members."""

    name: str  # Without the ending of a part: "videos.tar" for "videos.tar.aa".
    files: tuple[Path, ...]  # The archive's file, or its parts in order.

    @cached_property
    def listing(self) -> tuple[Mapping[str, int], str]:
        """The members' sizes in bytes by name, and a clause saying what is wrong with the archive.

        The clause is "" if nothing is wrong.
        """
        sizes: dict[str, int] = {}
        if missing := _missing_part([path.name for path in self.files]):
            return sizes, f"{self.name} is in parts and {missing} is missing"
        try:
            with self._open() as archive:
                for name, size, _ in archive:
                    if is_safe_name(name):
                        sizes[name] = size
            # An uncompressed tar that is cut short may be listed without an error. A zip or a
            # compressed tar that is cut short raises one.
            is_whole = not self.name.lower().endswith(".tar") or self._has_end_block
        except _READ_ERRORS:
            is_whole = False
        return sizes, "" if is_whole else f"{self.name} is cut short or damaged"

    @property
    def _has_end_block(self) -> bool:
        """Whether a tar ends with an empty block; tarfile itself accepts any end."""
        with self.files[-1].open("rb") as file:
            file.seek(-min(512, self.files[-1].stat().st_size), os.SEEK_END)
            return not any(file.read())

    def extract(self, names: Sequence[str], folder: Path) -> Path:
        """Unpacks the named members into a folder, which appears complete or not at all.

        Returns the folder. If it exists, it has been unpacked before, and nothing is done. Raises
        `VideoInputError` where a member cannot be read.
        """
        if folder.is_dir():
            return folder
        remaining = set(names)
        listed_sizes = self.listing[0]
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as scratch:
                target = Path(scratch) / "made"
                target.mkdir()
                with self._open() as archive:
                    for name, size, handle in archive:
                        # Two members may have one name. The one of the listed size is taken.
                        if name in remaining and listed_sizes.get(name) == size:
                            with handle() as source, (target / file_name(name)).open("wb") as out:
                                _copy_exactly(source, out, size)
                            remaining.discard(name)
                            if not remaining:
                                break
                if remaining:
                    raise EOFError  # It becomes the error "it is cut short" below.
                if not folder.is_dir():
                    target.rename(folder)
        except _READ_ERRORS as error:
            if folder.is_dir():  # Another process was faster.
                return folder
            reason = first_line(error) if str(error) else "it is cut short"
            message = f"{file_name(names[0])} cannot be unpacked from {self.name}: {reason}"
            raise VideoInputError(message, "truncated") from None
        return folder

    @contextmanager
    def _open(self) -> Iterator[Iterator[tuple[str, int, Any]]]:
        """Yields the regular files as (name, size in bytes, a function that opens it)."""
        with ExitStack() as stack:
            raw = io.BufferedReader(_JoinedParts(self.files, stack), 1 << 16)
            if self.name.lower().endswith(".zip"):
                zipped = stack.enter_context(zipfile.ZipFile(raw))
                yield (
                    (info.filename, info.file_size, lambda info=info: zipped.open(info))
                    for info in zipped.infolist()
                    if not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16)
                )
            else:
                tarred = stack.enter_context(tarfile.open(fileobj=raw, mode="r:*"))
                yield (
                    (info.name, info.size, lambda info=info: tarred.extractfile(info))
                    for info in tarred
                    if info.isreg()
                )

    @cached_property
    def key(self) -> str:
        """A digest that changes with the archive, so that old unpacked files are not used."""
        facts = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in self.files]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def find_archives(paths: Sequence[Path]) -> tuple[Archive, ...]:
    """Returns the archives among these files, with the parts of one put together.

    Where a whole archive lies beside its parts, the parts are left out. Parts with letters (aa, ab)
    and parts with numbers (001, 002) of one name are two archives.
    """
    parts_by_archive: dict[Path, list[tuple[int, str, Path]]] = {}
    for path in paths:
        stem, part = _split_part(path.name)
        if re.search(r"\.(zip|tar|tgz|tar\.gz)$", stem.lower()):
            parts_by_archive.setdefault(path.with_name(stem), []).append((len(part), part, path))
    archives = []
    for archive_path, parts in sorted(parts_by_archive.items()):
        whole = [path for _, part, path in parts if not part]
        # The files of each kind of parts. A kind is the number of letters, or 0 for numbers.
        by_kind: dict[int, list[Path]] = {}
        for width, part, path in sorted(parts):
            by_kind.setdefault(0 if part.isdigit() else width, []).append(path)
        groups = [whole] if whole else list(by_kind.values())
        # Another file may have an ending like a part's, such as a signature, "videos.tar.asc". Then
        # there are parts of two kinds, and a kind that lacks its first part is left out.
        groups = [files for files in groups if _is_first_part(files[0].name)] or groups
        archives += [Archive(archive_path.name, tuple(files)) for files in groups]
    return tuple(archives)


# The "gz" of "videos.tar.gz" looks like the name of a part, such as the "aa" of "videos.tar.aa". An
# archive with one of these endings is whole.
ENDINGS_OF_WHOLE_ARCHIVES = ("gz", "xz", "zst", "lz", "zip", "tar", "tgz")


def _split_part(name: str) -> tuple[str, str]:
    """Splits "videos.tar.part.aa" into ("videos.tar", "aa"). A whole archive has the part ""."""
    pattern = r"(.+\.(?:zip|tar|tgz|tar\.gz))\.(?:part[._-]?)?([a-z]{2,3}|\d{1,4})"
    match = re.fullmatch(pattern, name, re.IGNORECASE)
    is_part = match is not None and match[2].lower() not in ENDINGS_OF_WHOLE_ARCHIVES
    return (match[1], match[2]) if match and is_part else (name, "")


def _is_first_part(name: str) -> bool:
    """Whether a file is a whole archive, or the first part of one."""
    part = _split_part(name)[1].lower()
    return int(part) <= 1 if part.isdigit() else set(part) <= {"a"}


def _missing_part(names: Sequence[str]) -> str:
    """Returns the first missing part, or "" if none is missing, as in a whole archive.

    ``names`` are the parts of one archive in order. For "v.zip.001" and "v.zip.003" this returns
    "part 002", and for "v.zip.aa" and "v.zip.ac" it returns "part ab". Whether parts after the last
    one are missing cannot be known.
    """
    parts = [_split_part(name)[1].lower() for name in names]
    width = len(parts[0])
    last = parts[-1]
    expected: Iterator[str]
    if last.isdigit():
        first = min(1, int(parts[0]))  # Parts are numbered from 1, or in some archives from 0.
        expected = (f"{number:0{width}d}" for number in range(first, int(last)))
    else:
        all_parts = map("".join, product(ascii_lowercase, repeat=width))  # aa, ab, ac, ...
        expected = takewhile(last.__ne__, all_parts)
    return next((f"part {each}" for each in expected if each not in parts), "")


def is_safe_name(name: str) -> bool:
    """Returns whether a relative name stays below the folder that it is put into."""
    path = PurePosixPath(name)
    leaves_folder = path.is_absolute() or ".." in path.parts
    has_bad_character = "\\" in name or "\0" in name
    has_drive = re.match("[A-Za-z]:", name) is not None  # As on Windows.
    return bool(path.parts) and not (leaves_folder or has_bad_character or has_drive)


def file_name(name: str) -> str:
    """Returns the last part of a member's name, safe to print and as a file's name.

    Of a long name the end is returned, at most ``MAX_NAME_BYTES`` of it.
    """
    last = "".join(c if c.isprintable() else "_" for c in PurePosixPath(name).name)
    return last.encode()[-MAX_NAME_BYTES:].decode(errors="ignore") or "member"


def _copy_exactly(source: io.BufferedIOBase, out: io.BufferedIOBase, size: int) -> None:
    """Copies ``size`` bytes. Raises EOFError if the source has fewer or more.

    An archive may declare a wrong size.
    """
    bytes_left = size
    while bytes_left and (data := source.read(min(bytes_left, 1 << 20))):
        out.write(data)
        bytes_left -= len(data)
    if bytes_left or source.read(1):
        raise EOFError

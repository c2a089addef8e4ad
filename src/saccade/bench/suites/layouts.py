"""Where a benchmark's files lie: rows in parquet, JSON or a workbook; media in folders or archives.

Nothing is unpacked but the one member asked for, under a name made here, so no archive can write
anywhere else. Knows no benchmark and no paper.
"""

from __future__ import annotations

import hashlib
import io
import json
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
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable
from xml.etree import ElementTree

from saccade.core.errors import OptionError, VideoInputError

Row = Mapping[str, Any]

VIDEO = (".mp4", ".mkv", ".webm", ".avi", ".mov")  # the order in which twins are preferred
IMAGE = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
SKIPPED = frozenset({".cache", ".git", ".locks", "blobs", "refs", "__MACOSX"})
MAX_SHEET = 64 << 20  # bytes of XML in a workbook

_FAULTS = (
    OSError, EOFError, RuntimeError, NotImplementedError, zlib.error, zipfile.BadZipFile,
    tarfile.TarError, UnicodeDecodeError,
)  # fmt: skip


class LayoutError(Exception):
    """Files are not as they should be; the message is a clause without a subject's folder."""


# -- rows --------------------------------------------------------------------------------------


@runtime_checkable
class Rows(Protocol):
    """Rows in a fixed order, read when asked for."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def column(self, name: str) -> list[Any]: ...

    def take(self, numbers: Sequence[int]) -> Iterator[Row]:
        """The rows of these numbers, in this order."""
        ...


@dataclass(frozen=True)
class Listed:
    """Rows that are in memory already."""

    rows: tuple[Row, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.rows[0]) if self.rows else ()

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.rows]

    def take(self, numbers: Sequence[int]) -> Iterator[Row]:
        return (self.rows[number] for number in numbers)


@dataclass(frozen=True)
class Parquet:
    """Parquet files read a row group at a time, as pictures make a whole file large."""

    files: tuple[Path, ...]

    @cached_property
    def _groups(self) -> tuple[tuple[int, Path, int], ...]:
        """Of each row group: the number of its first row, its file, its place in the file."""
        found, start = [], 0
        for path in self.files:
            with _parquet(path) as file:
                for group in range(file.num_row_groups):
                    found.append((start, path, group))
                    start += file.metadata.row_group(group).num_rows
        return (*found, (start, Path(), -1))

    @cached_property
    def names(self) -> tuple[str, ...]:
        with _parquet(self.files[0]) as file:
            return tuple(file.schema_arrow.names)

    def __len__(self) -> int:
        return self._groups[-1][0]

    def column(self, name: str) -> list[Any]:
        values: list[Any] = []
        for path in self.files:
            with _parquet(path) as file, _reading(path):
                values += file.read(columns=[name]).column(name).to_pylist()
        return values

    def take(self, numbers: Sequence[int]) -> Iterator[Row]:
        starts = [start for start, _, _ in self._groups]
        for number in numbers:
            start, path, group = self._groups[bisect_right(starts, number) - 1]
            rows = _group(path, group, path.stat().st_mtime_ns)
            yield rows.slice(number - start, 1).to_pylist()[0]


def read_rows(files: Sequence[Path], nested: str | None = None) -> Rows:
    """The rows of these files, all of one kind; `nested` names a list whose entries are the rows.

    Raises `LayoutError` for what is cut short, damaged or a pointer to a file kept elsewhere.
    """
    for path in files:
        with path.open("rb") as file:
            if file.read(23) == b"version https://git-lfs":
                raise LayoutError(f"{path.name} is only a Git LFS pointer, not the file itself")
    if files[0].suffix == ".parquet":
        table = Parquet(tuple(files))
        len(table)
        return table
    rows: list[Row] = []
    for path in files:
        try:
            read = _workbook(path) if path.suffix == ".xlsx" else _json(path)
        except (ValueError, KeyError, IndexError, ElementTree.ParseError, *_FAULTS):
            raise LayoutError(f"{path.name} is cut short or damaged") from None
        rows += read
    if nested:
        rows = [{**row, **inner} for row in rows for inner in row.get(nested) or ()]
    return Listed(tuple(rows))


def missing_shards(files: Sequence[Path]) -> list[str]:
    """Names that should be beside these, going by "-00000-of-00003"."""
    names = {path.name for path in files}
    wanted: set[str] = set()
    for name in names:
        if match := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})(\..*)", name):
            stem, count, suffix = match.groups()
            wanted |= {f"{stem}-{n:05d}-of-{count}{suffix}" for n in range(min(int(count), 10000))}
    return sorted(wanted - names)


def _arrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise OptionError(
            "reading benchmarks needs pyarrow: install it with `pip install 'saccade[datasets]'`"
        ) from None
    return pyarrow


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    arrow = _arrow()
    try:
        yield
    except (arrow.ArrowException, OSError):
        raise LayoutError(f"{path.name} is cut short or damaged") from None


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    arrow = _arrow()
    with _reading(path):
        file = arrow.parquet.ParquetFile(path)
    with file:
        yield file


@lru_cache(maxsize=2)  # rows of a group are asked for one after another
def _group(path: Path, group: int, changed: int) -> Any:
    with _parquet(path) as file, _reading(path):
        return file.read_row_group(group)


def _json(path: Path) -> list[Row]:
    text = path.read_text(encoding="utf-8")
    lines = path.suffix == ".jsonl"
    # Not splitlines(): a text may hold other line ends, and JSON leaves them as they are.
    rows = [json.loads(line) for line in text.split("\n") if line.strip()] if lines else None
    rows = json.loads(text) if rows is None else rows
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("not a list of rows")
    return rows


def _workbook(path: Path) -> list[Row]:
    """The first sheet of an .xlsx, its first row being the names."""

    def texts(element: Any) -> str:
        return "".join(t.text or "" for t in element.iter() if t.tag.endswith("}t"))

    with zipfile.ZipFile(path) as book:

        def tree(name: str) -> Any:
            if book.getinfo(name).file_size > MAX_SHEET:
                raise ValueError("too large a sheet")
            return ElementTree.fromstring(book.read(name))

        sheets = [n for n in book.namelist() if re.fullmatch(r"xl/worksheets/sheet\d+\.xml", n)]
        shared = "xl/sharedStrings.xml"
        words = [texts(s) for s in tree(shared)] if shared in book.namelist() else []
        lines: list[dict[str, str]] = []
        first = min(sheets, key=lambda n: (len(n), n))
        for row in (e for e in tree(first).iter() if e.tag.endswith("}row")):
            line: dict[str, str] = {}
            for cell in row:
                place = re.sub(r"\d", "", cell.get("r", ""))
                value = next((v.text or "" for v in cell if v.tag.endswith("}v")), None)
                if cell.get("t") == "s" and value is not None:
                    line[place] = words[int(value)]
                else:
                    line[place] = texts(cell) if value is None else value
            lines.append(line)
    head, *body = lines
    return [{name: line.get(place) for place, name in head.items()} for line in body if line]


# -- archives ----------------------------------------------------------------------------------


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
                    if _harmless(name):
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
    found: dict[Path, list[tuple[str, Path]]] = {}
    for path in paths:
        stem, part = _part(path.name)
        if re.search(r"\.(zip|tar|tgz|tar\.gz)$", stem.lower()):
            found.setdefault(path.with_name(stem), []).append((part, path))
    return tuple(
        Archive(whole.name, tuple(path for _, path in sorted(parts)))
        for whole, parts in sorted(found.items())
    )


def unpack_folder() -> Path:
    """Where members are unpacked: below SACCADE_CACHE, or the user's cache folder."""
    home = os.environ.get("SACCADE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "saccade" / "media"


def _part(name: str) -> tuple[str, str]:
    """ "videos.tar.part.aa" as ("videos.tar", "aa"); of a whole archive the part is empty."""
    pattern = r"(.+\.(?:zip|tar|tgz|tar\.gz))\.(?:part[._-]?)?([a-z]{2,3}|\d{1,4})"
    match = re.fullmatch(pattern, name, re.IGNORECASE)
    return (match[1], match[2]) if match and match[2] != "gz" else (name, "")


def _gap(names: Sequence[str]) -> str:
    """The first part that is missing before the last one there is, if any."""
    parts = [_part(name)[1].lower() for name in names]
    if not parts[0]:
        return ""
    digits = parts[0].isdigit()
    have = {_number(part) for part in parts}
    first = 1 if digits and 0 not in have else 0
    lacking = [n for n in range(first, max(have) + 1) if n not in have]
    if not lacking:
        return ""
    number, width = lacking[0], len(parts[0])
    if digits:
        return f"part {number:0{width}d}"
    letters = ""
    for _ in range(width):
        number, letter = divmod(number, 26)
        letters = chr(ord("a") + letter) + letters
    return f"part {letters}"


def _number(part: str) -> int:
    if part.isdigit():
        return int(part)
    number = 0
    for letter in part:
        number = number * 26 + ord(letter) - ord("a")
    return number


def _harmless(name: str) -> bool:
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


# -- media -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a medium is: a file or a folder of frames, or members of an archive."""

    parts: tuple[str, ...]  # its folders and its name without extension, as they are written
    suffix: str  # empty of a folder of frames
    path: Path | None = None
    archive: Archive | None = None
    members: tuple[str, ...] = ()
    root: int = 0  # which of the index's folders it is below

    def local(self) -> Path:
        """A path to read; unpacks what is packed. Raises `VideoInputError`."""
        if self.path is not None or self.archive is None:
            return self.path or Path()
        name = hashlib.sha256("/".join(self.parts).encode()).hexdigest()[:16] + self.suffix.lower()
        folder = self.archive.extract(self.members, unpack_folder() / self.archive.key / name)
        return folder / file_name(self.members[0]) if self.suffix else folder


@dataclass(frozen=True)
class Index:
    """The media below some folders, found by name whatever the case and the extension."""

    roots: tuple[Path, ...]
    suffixes: tuple[str, ...]
    frames: bool = False  # a folder of images is a video
    fold: bool = True  # names may differ in case; ids of web videos differ in nothing else

    @cached_property
    def _files(self) -> Mapping[Path, tuple[int, tuple[str, ...]]]:
        """Files, the root each is below and its place there."""
        found: dict[Path, tuple[int, tuple[str, ...]]] = {}
        walked: set[str] = set()  # links to folders are followed, each folder once
        for number, root in enumerate(self.roots):
            for here, folders, names in os.walk(root, followlinks=True):
                if (real := os.path.realpath(here)) in walked:
                    folders[:] = []
                    continue
                walked.add(real)
                folders[:] = sorted(set(folders) - SKIPPED)
                inner = Path(here).relative_to(root).parts
                for name in sorted(names):
                    found.setdefault(Path(here) / name, (number, (*inner, name)))
        return found

    @cached_property
    def archives(self) -> tuple[Archive, ...]:
        return archives(list(self._files))

    @property
    def bare(self) -> bool:
        """Whether there is neither a medium nor an archive."""
        kinds = (*self.suffixes, *(IMAGE if self.frames else ()))
        return not self.archives and not any(p.suffix.lower() in kinds for p in self._files)

    @cached_property
    def _places(self) -> Mapping[str, Sequence[Place]]:
        """Places by the name without extension, in lower case."""
        found: dict[str, dict[tuple[Any, ...], Place]] = {}

        def add(place: Place) -> None:
            known = found.setdefault(place.parts[-1].lower(), {})
            known.setdefault((place.path or place.archive, place.parts, place.suffix), place)

        for path, (root, parts) in self._files.items():
            stem, suffix = os.path.splitext(parts[-1])
            if suffix.lower() in self.suffixes:
                add(Place((*parts[:-1], stem), suffix, path, root=root))
            elif self.frames and suffix.lower() in IMAGE and len(parts) > 1:
                add(Place(parts[:-1], "", path.parent, root=root))
        for archive in self.archives:
            root, (*above, whole) = self._files[archive.files[0]]
            # As if unpacked into a folder of its name: some hold that folder and some do not.
            above.append(_part(whole)[0].split(".")[0])
            pictures: dict[tuple[str, ...], list[str]] = {}
            for member in archive.listing[0]:
                inner = PurePosixPath(member).parts
                stem, suffix = os.path.splitext(inner[-1])
                if inner[0] in SKIPPED:
                    continue
                if suffix.lower() in self.suffixes:
                    parts = (*above, *inner[:-1], stem)
                    add(Place(parts, suffix, None, archive, (member,), root))
                elif self.frames and suffix.lower() in IMAGE and len(inner) > 1:
                    pictures.setdefault((*above, *inner[:-1]), []).append(member)
            for parts, members in pictures.items():
                add(Place(parts, "", None, archive, tuple(sorted(members)), root))
        return {name: tuple(places.values()) for name, places in found.items()}

    def find(self, name: str, folders: Sequence[str] = ("",)) -> Place:
        """The medium of this name in the first of these folders that has it.

        A folder is the end of the path above the name; "" is anywhere. Raises `LayoutError`,
        saying why, where there is none or more than one.
        """
        parts = PurePosixPath(name).parts if _harmless(name) else ()
        if not parts:
            raise LayoutError(f"its medium has no name that can be looked up: {name[:80]!r}")
        stem, suffix = os.path.splitext(parts[-1])
        if suffix.lower() not in (*self.suffixes, *VIDEO):
            stem = parts[-1]
        known = self._places.get(stem.lower(), ())
        for folder in folders:
            above = (*PurePosixPath(folder).parts, *parts[:-1])
            low = tuple(part.lower() for part in (*above, stem))
            matching = [
                place
                for place in known
                if tuple(part.lower() for part in place.parts[-len(low) :]) == low
                and (self.fold or place.parts[-1] == stem)
            ]
            if not matching:
                continue
            best = min(self._rank(place, stem, suffix) for place in matching)
            first, *others = [p for p in matching if self._rank(p, stem, suffix) == best]
            if others:
                raise LayoutError(f"there are {len(others) + 1} files named {file_name(name)}")
            return first
        faults = [fault for archive in self.archives if (fault := archive.listing[1])]
        because = f" ({faults[0]})" if faults else ""
        raise LayoutError(f"{file_name(name)} is missing{because}")

    def _rank(self, place: Place, stem: str, suffix: str) -> tuple[Any, ...]:
        """Small is better: the name as written, the likeliest kind, what needs no unpacking."""
        kinds = ("", *self.suffixes)
        return (
            place.parts[-1] != stem,
            place.suffix != suffix,
            kinds.index(place.suffix.lower()),
            place.suffix.isupper(),
            place.path is None,
            place.root,
            len(place.parts),
        )

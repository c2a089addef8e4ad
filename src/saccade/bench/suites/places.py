"""Where a benchmark's media are: files, folders of frames, members of archives, found by name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from saccade.bench.suites.archives import Archive, archives, file_name, harmless
from saccade.bench.suites.types import LayoutError
from saccade.core.home import home

VIDEO = (".mp4", ".mkv", ".webm", ".avi", ".mov")  # the order in which twins are preferred
IMAGE = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
SKIPPED = frozenset({".cache", ".git", ".locks", "blobs", "refs", "__MACOSX"})


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
        folder = self.archive.extract(self.members, home() / "media" / self.archive.key / name)
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
            root, (*above, _) = self._files[archive.files[0]]
            # As if unpacked into a folder of its name: some hold that folder and some do not.
            above.append(archive.name.split(".")[0])
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
        parts = PurePosixPath(name).parts if harmless(name) else ()
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

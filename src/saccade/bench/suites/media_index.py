"""Finds a benchmark's media by name among files, folders of frames and members of archives."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from saccade.bench.suites.archives import Archive, file_name, find_archives, is_safe_name
from saccade.bench.suites.types import LayoutError
from saccade.core.home import home

# If names differ only in the suffix, the file with the earliest of these suffixes is preferred.
VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
SKIPPED_FOLDERS = frozenset({".cache", ".git", ".locks", "blobs", "refs", "__MACOSX"})


@dataclass(frozen=True)
class MediaPlace:
    """Where a medium is: a file, a folder of frames, or members of an archive.

    ``parts`` are its folders below a root and its name without extension, as they are spelt.
    ``root`` is the position of that root in ``MediaIndex.roots``. ``members`` are the names in the
    archive: of a video's or an image's file, or of all images of a folder of frames.
    """

    parts: tuple[str, ...]
    suffix: str  # Empty for a folder of frames.
    path: Path | None = None
    archive: Archive | None = None
    members: tuple[str, ...] = ()
    root: int = 0

    def local(self) -> Path:
        """Returns a path to read, and unpacks an archive's member. Raises `VideoInputError`."""
        if self.path is not None or self.archive is None:
            return self.path or Path()
        name = hashlib.sha256("/".join(self.parts).encode()).hexdigest()[:16] + self.suffix.lower()
        folder = self.archive.extract(self.members, home() / "media" / self.archive.key / name)
        return folder / file_name(self.members[0]) if self.suffix else folder


@dataclass(frozen=True)
class MediaIndex:
    """The media below some folders, by name. Extensions are ignored.

    With ``ignores_case`` the case of names is ignored too.
    """

    roots: tuple[Path, ...]
    suffixes: tuple[str, ...]
    frames: bool = False  # Whether a folder of images is a video.
    # Whether to ignore the case of names. It is False for ids of web videos, which may differ in
    # nothing else.
    ignores_case: bool = True

    @cached_property
    def _files(self) -> Mapping[Path, tuple[int, tuple[str, ...]]]:
        """Every file, with the position of its root in ``roots`` and its path below that root."""
        by_path: dict[Path, tuple[int, tuple[str, ...]]] = {}
        visited: set[str] = set()  # Links to folders are followed, but each folder only once.
        for number, root in enumerate(self.roots):
            for folder_path, folders, names in os.walk(root, followlinks=True):
                if (real_path := os.path.realpath(folder_path)) in visited:
                    folders[:] = []
                    continue
                visited.add(real_path)
                folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
                inner = Path(folder_path).relative_to(root).parts
                for name in sorted(names):
                    by_path.setdefault(Path(folder_path) / name, (number, (*inner, name)))
        return by_path

    @cached_property
    def archives(self) -> tuple[Archive, ...]:
        return find_archives(list(self._files))

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a medium nor an archive."""
        kinds = (*self.suffixes, *(IMAGE_SUFFIXES if self.frames else ()))
        return not self.archives and not any(p.suffix.lower() in kinds for p in self._files)

    @cached_property
    def _places(self) -> Mapping[str, Sequence[MediaPlace]]:
        """Places by the name without extension, in lower case."""
        # A folder of frames is added once for each of its images, so equal places count once.
        by_name: dict[str, dict[tuple[Any, ...], MediaPlace]] = {}

        def add(place: MediaPlace) -> None:
            same_name = by_name.setdefault(place.parts[-1].lower(), {})
            same_name.setdefault((place.path or place.archive, place.parts, place.suffix), place)

        for path, (root, parts) in self._files.items():
            stem, suffix = os.path.splitext(parts[-1])
            if suffix.lower() in self.suffixes:
                add(MediaPlace((*parts[:-1], stem), suffix, path, root=root))
            elif self.frames and suffix.lower() in IMAGE_SUFFIXES and len(parts) > 1:
                add(MediaPlace(parts[:-1], "", path.parent, root=root))
        for archive in self.archives:
            root, (*above, _) = self._files[archive.files[0]]
            # Members are indexed as if the archive had been unpacked into a folder of its name.
            # Some archives contain a folder of that name too.
            above.append(archive.name.split(".")[0])
            pictures: dict[tuple[str, ...], list[str]] = {}
            for member in archive.listing[0]:
                inner = PurePosixPath(member).parts
                stem, suffix = os.path.splitext(inner[-1])
                if inner[0] in SKIPPED_FOLDERS:
                    continue
                if suffix.lower() in self.suffixes:
                    parts = (*above, *inner[:-1], stem)
                    add(MediaPlace(parts, suffix, None, archive, (member,), root))
                elif self.frames and suffix.lower() in IMAGE_SUFFIXES and len(inner) > 1:
                    pictures.setdefault((*above, *inner[:-1]), []).append(member)
            for parts, members in pictures.items():
                add(MediaPlace(parts, "", None, archive, tuple(sorted(members)), root))
        return {name: tuple(places.values()) for name, places in by_name.items()}

    def find(self, name: str, folders: Sequence[str] = ("",)) -> MediaPlace:
        """Returns the medium of this name in the first of these folders that has it.

        A folder is compared with the end of a medium's path above the name, so "" fits anywhere.
        The name may begin with folders too. Raises `LayoutError` where there is no medium, or more
        than one that fits equally well.
        """
        parts = PurePosixPath(name).parts if is_safe_name(name) else ()
        if not parts:
            raise LayoutError(f"its medium has no name that can be looked up: {name[:80]!r}")
        stem, suffix = os.path.splitext(parts[-1])
        if suffix.lower() not in (*self.suffixes, *VIDEO_SUFFIXES):
            stem = parts[-1]  # The name has no extension, only a dot, as in "clip_1.5".
        candidates = self._places.get(stem.lower(), ())
        for folder in folders:
            path = (*PurePosixPath(folder).parts, *parts[:-1], stem)
            lower_path = tuple(part.lower() for part in path)
            matching = [
                place
                for place in candidates
                if tuple(part.lower() for part in place.parts[-len(path) :]) == lower_path
                and (self.ignores_case or place.parts[-1] == stem)
            ]
            if not matching:
                continue
            best = min(self._rank(place, stem, suffix) for place in matching)
            first, *others = [p for p in matching if self._rank(p, stem, suffix) == best]
            if others:
                raise LayoutError(f"there are {len(others) + 1} files named {file_name(name)}")
            return first
        faults = [fault for archive in self.archives if (fault := archive.listing[1])]
        reason = f" ({faults[0]})" if faults else ""
        raise LayoutError(f"{file_name(name)} is missing{reason}")

    def _rank(self, place: MediaPlace, stem: str, suffix: str) -> tuple[Any, ...]:
        """Returns a sort key, which is smallest for the best place.

        It prefers the exact spelling of the name, then the exact suffix, then the likeliest suffix,
        then one in lower case, then a file that needs no unpacking, then an earlier root, and then
        fewer folders.
        """
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

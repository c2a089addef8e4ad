"""Finds a benchmark's media by name among files, folders of frames and members of archives.

The questions of a benchmark name their videos and images, and users keep these media in folders of
their own, unpacked or not. An index lists all media below such folders once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from saccade.bench.suites.archives import Archive, file_name, find_archives, is_safe_name
from saccade.bench.suites.types import LayoutError, MissingMediumError
from saccade.core.home import home

# If names differ only in the suffix, the file with the earliest of these suffixes is preferred.
VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
# Folders of these names, in which no media are looked for. Git, the hub's cache and archives that
# were made on macOS have them. Of the folders in an archive, only the outermost is compared.
SKIPPED_FOLDERS = frozenset({".cache", ".git", ".locks", "blobs", "refs", "__MACOSX"})


@dataclass(frozen=True)
class MediaPlace:
    """Where a medium is: a file, a folder of frames, or members of an archive.

    Either ``path`` or ``archive`` is set.
    """

    # The folders below one of the index's roots, then the name without extension, as they are
    # spelt: ("videos", "Clip1") for ROOT/videos/Clip1.mp4.
    parts: tuple[str, ...]
    suffix: str  # The extension with its dot; empty for a folder of frames.
    path: Path | None = None  # The file, or the folder of frames.
    archive: Archive | None = None
    # Names in the archive: of the file, or of all images of a folder of frames.
    members: tuple[str, ...] = ()
    root: int = 0  # The position of the root in ``MediaIndex.roots``.

    def local(self) -> Path:
        """Returns the path of the file or folder, after unpacking it if it is in an archive.

        Raises `VideoInputError`.
        """
        if self.path is not None:
            return self.path
        assert self.archive is not None
        # Two members may differ in the spelling of their extensions alone.
        place = "/".join(self.parts) + self.suffix
        name = hashlib.sha256(place.encode()).hexdigest()[:16] + self.suffix.lower()
        folder = self.archive.extract(self.members, home() / "media" / self.archive.key / name)
        return folder / file_name(self.members[0]) if self.suffix else folder


@dataclass(frozen=True)
class MediaIndex:
    """The media below some folders, by name. Extensions only decide between equal names."""

    roots: tuple[Path, ...]
    suffixes: tuple[str, ...]  # The extensions of media, in lower case, the likeliest first.
    frames: bool = False  # Whether a folder of images is a video.
    # Whether "Clip" also finds "clip". It is False where names are ids of web videos, because two
    # of those may differ in case alone.
    ignores_case: bool = True

    @cached_property
    def _files(self) -> Mapping[Path, tuple[int, tuple[str, ...]]]:
        """Every file outside ``SKIPPED_FOLDERS``, with the position of its root in ``roots`` and
        its path below that root."""
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
        suffixes = (*self.suffixes, *(IMAGE_SUFFIXES if self.frames else ()))
        return not self.archives and not any(p.suffix.lower() in suffixes for p in self._files)

    @cached_property
    def _places(self) -> Mapping[str, Sequence[MediaPlace]]:
        """Places by the name without extension, in lower case."""
        # A folder of frames is found once for each of its images, and must be added only once. So
        # the places of a name have keys, which are equal for equal places.
        by_name: dict[str, dict[tuple[Any, ...], MediaPlace]] = {}

        def add(place: MediaPlace) -> None:
            same_name = by_name.setdefault(place.parts[-1].lower(), {})
            container = place.path or place.archive
            key = (container, place.parts, place.suffix)
            same_name.setdefault(key, place)

        for path, (root, parts) in self._files.items():
            stem, suffix = os.path.splitext(parts[-1])
            if suffix.lower() in self.suffixes:
                add(MediaPlace((*parts[:-1], stem), suffix, path, root=root))
            elif self.frames and suffix.lower() in IMAGE_SUFFIXES and len(parts) > 1:
                add(MediaPlace(parts[:-1], "", path.parent, root=root))
        for archive in self.archives:
            # Members are indexed as if the archive had been unpacked into a folder of its name:
            # "clip.mp4" in ROOT/videos.zip has the parts ("videos", "clip"). Some archives contain
            # a folder of their own name, which is then there twice.
            root, (*above, _) = self._files[archive.files[0]]
            above.append(archive.name.split(".")[0])
            pictures: dict[tuple[str, ...], list[str]] = {}  # The images of each folder of frames.
            member_names, _ = archive.listing
            for member in member_names:
                inner = PurePosixPath(member).parts
                stem, suffix = os.path.splitext(inner[-1])
                if inner[0] in SKIPPED_FOLDERS:
                    continue
                if suffix.lower() in self.suffixes:
                    parts = (*above, *inner[:-1], stem)
                    add(
                        MediaPlace(
                            parts, suffix, path=None, archive=archive, members=(member,), root=root
                        )
                    )
                elif self.frames and suffix.lower() in IMAGE_SUFFIXES and len(inner) > 1:
                    pictures.setdefault((*above, *inner[:-1]), []).append(member)
            for parts, members in pictures.items():
                add(
                    MediaPlace(
                        parts,
                        suffix="",
                        path=None,
                        archive=archive,
                        members=tuple(sorted(members)),
                        root=root,
                    )
                )
        return {name: tuple(places.values()) for name, places in by_name.items()}

    def find(self, name: str, folders: Sequence[str] = ("",)) -> MediaPlace:
        """Returns the medium of this name in the first of these folders that has it.

        A medium is in a folder if its path ends in the folder and the name. So the folder "b" has
        ROOT/a/b/NAME, and the folder "" has every medium of the name. The name may begin with
        folders too. Raises `MissingMediumError` where there is no medium. Raises `LayoutError`
        where more than one fits equally well, and for a name that cannot be looked up.
        """
        parts = PurePosixPath(name).parts if is_safe_name(name) else ()
        if not parts:
            raise LayoutError(f"its medium has no name that can be looked up: {name[:80]!r}")
        stem, suffix = os.path.splitext(parts[-1])
        # A video's extension may end a name in every index, also in one of images.
        extensions = (*self.suffixes, *VIDEO_SUFFIXES)
        if suffix.lower() not in extensions:
            # What follows the last dot, if there is one, is no extension, as in "clip_1.5".
            stem = parts[-1]
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
        # The name may be missing because an archive is damaged, so the first fault is reported.
        faults = [fault for archive in self.archives if (fault := archive.listing[1])]
        reason = f" ({faults[0]})" if faults else ""
        raise MissingMediumError(f"{file_name(name)} is missing{reason}")

    def _rank(self, place: MediaPlace, stem: str, suffix: str) -> tuple[Any, ...]:
        """Returns a sort key, which is smallest for the best place.

        Each item prefers what its comment names. The first item in which two places differ decides,
        and False comes before True.
        """
        suffixes = ("", *self.suffixes)  # A folder of frames has no suffix.
        return (
            place.parts[-1] != stem,  # the exact spelling of the name
            place.suffix != suffix,  # the exact suffix
            suffixes.index(place.suffix.lower()),  # a folder of frames, or the likeliest suffix
            place.suffix.isupper(),  # a suffix in lower case
            place.path is None,  # a file that needs no unpacking
            place.root,  # an earlier root
            len(place.parts),  # fewer folders
        )

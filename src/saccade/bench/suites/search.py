"""Finding a benchmark on disk, and saying what is missing and how to fetch it."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.bench.suites.benchmarks import BENCHMARKS, Benchmark, Source
from saccade.bench.suites.datasets import Dataset, damage
from saccade.bench.suites.places import IMAGE, VIDEO, Index
from saccade.bench.suites.rows import Rows, missing_shards, read_rows
from saccade.bench.suites.types import Setting
from saccade.core.errors import OptionError

logger = logging.getLogger(__name__)


def open_dataset(
    name: str,
    root: str | Path | None = None,
    *,
    paper: str | None = None,
) -> Dataset:
    """A benchmark as a suite: `name` is one of `BENCHMARKS`, or "mvbench/action_count", a part.

    `root` is its folder, a folder that holds it, or a snapshot of the hub; without it the local hub
    cache is searched, and annotations without pictures may be fetched. `paper` is one of the
    benchmark's `papers` (default: the first). Raises `OptionError`, with the command that helps,
    where files are missing, cut short or changed.
    """
    key, part = _parse(name)
    known = BENCHMARKS[key]
    if paper is not None and paper not in known.papers:
        raise OptionError(f"{known.title} has no setting {paper!r}: use {', '.join(known.papers)}")
    setting = known.papers[paper or next(iter(known.papers))]
    fitting = [source for source in known.sources if setting.split in source.files]
    parts = () if known.part_column or not known.parts else (part,) if part else known.parts
    search = _Search(known, setting.split, parts or ("",), Path(root) if root is not None else None)
    for look in (search.folders, search.fetched):
        for source, folder in ((s, f) for s in fitting for f in look(s)):
            if dataset := search.load(source, folder, setting):
                only = part if known.part_column else ""
                return replace(dataset, name=f"{key}/{part}" if part else key, part=only)
    raise search.absent(fitting[0])


@dataclass(frozen=True)
class _Search:
    """Where to look for one split of a benchmark, and what to say where it is not."""

    known: Benchmark
    split: str
    parts: tuple[str, ...]
    root: Path | None

    def folders(self, source: Source) -> Iterator[Path]:
        """Folders that may be the dataset's own, the likeliest first; without a root those of the
        hub's client."""
        hub = ["--".join(("datasets", *repo.split("/"))) for repo in source.repos]
        if self.root is None:
            from huggingface_hub import constants

            bases = [Path(constants.HF_HUB_CACHE, name) for name in hub]
        elif self.root.is_dir():
            names = [repo.rpartition("/")[2] for repo in source.repos]
            bases = [self.root, *(self.root / name for name in (*names, *source.repos, *hub))]
        else:
            raise OptionError(f"there is no folder {self.root}: {self.remedy(source)}")
        for base in bases:
            if base.is_dir():
                yield base
                yield from _snapshots(base)

    def load(self, source: Source, folder: Path, setting: Setting) -> Dataset | None:
        """The dataset in this folder, if it holds any of its files."""
        known, remedy = self.known, self.remedy(source)
        files = {part: _matching(folder, source.files[self.split], part) for part in self.parts}
        if not any(files.values()):
            return None
        if lacking := [part for part, found in files.items() if not found]:
            names = ", ".join(self._patterns(source.files, lacking[:3]))
            raise self._half(f"{names} is missing", remedy)
        wanted = [names for role, names in known.columns.items() if role not in known.optional]
        extra = (known.part_column, known.where and known.where[0], known.join and known.join.on)
        wanted += [(name,) for name in extra if name]
        tables = tuple((part, self._rows(source, paths, wanted)) for part, paths in files.items())
        pictures = index = None
        if known.join is not None:
            paths = _matching(folder, known.join.files[self.split], "")
            if not paths:
                names = ", ".join(known.join.files[self.split])
                raise self._half(f"{names} is missing", remedy)
            pictures = self._rows(source, paths, [(known.join.key,), (known.join.column,)])
        if known.media is not None:
            remedy = self.remedy(source, beside=True)
            videos = "video" in known.columns
            roots, suffixes = self._roots(source, folder), VIDEO if videos else IMAGE
            index = Index(roots, suffixes, videos, known.media.fold)
            if index.bare:
                what = "videos" if videos else "images"
                names = ", ".join(known.media.packed)
                raise self._half(f"its {what} ({names}) are missing", remedy)
        return Dataset(known.title, setting, known, tables, "", pictures, index, remedy)

    def remedy(self, source: Source, beside: bool = False) -> str:
        """The command that fetches the files, or the media beside them."""
        repo, media_files = source.repos[0], self.known.media
        include = self._patterns(source.files, self.parts)
        if self.known.join is not None:
            include += self.known.join.files[self.split]
        if beside and media_files is not None:
            include = list(media_files.packed)
        words = ["hf", "download", repo, "--repo-type", "dataset"]
        words += ["--revision", source.revisions[0]] if source.revisions[0] else []
        words += [word for pattern in include for word in ("--include", pattern)]
        words += ["--local-dir", str(self.root)] if self.root is not None else []
        gate = (
            f" (it is gated: first accept its terms at https://huggingface.co/datasets/{repo} "
            "and run `hf auth login`)"
        )
        return f"fetch it with `{shlex.join(words)}`" + (gate if source.gated else "")

    def absent(self, source: Source) -> OptionError:
        """Nothing of it was found."""
        title, root = self.known.title, self.root
        where = "the local hub cache" if root is None else str(root)
        empty = root is not None and not any(root.iterdir())
        state = "is empty" if empty else "is not"
        said = f"{where} {state}" if empty else f"{title} {state} in {where}"
        return OptionError(f"{said}: {self.remedy(source)}")

    def _patterns(self, files: Mapping[str, tuple[str, ...]], parts: Sequence[str]) -> list[str]:
        named = ("*",) if len(parts) > 3 else parts
        return [files[self.split][0].format(part=part) for part in named]

    def _half(self, what: str, remedy: str) -> OptionError:
        return OptionError(f"{self.known.title} is only half there, {what}: {remedy}")

    def _rows(
        self, source: Source, files: Sequence[Path], wanted: Sequence[tuple[str, ...]]
    ) -> Rows:
        """Rows whose columns are those of the table."""
        remedy = self.remedy(source)
        if lacking := missing_shards(files):
            raise self._half(f"{lacking[0]} is missing", remedy)
        with damage(self.known.title, remedy):
            rows = read_rows(files, source.nested)
            names = rows.names
        if not len(rows):
            raise self._half(f"{files[0].name} holds no rows", remedy)
        for names_of_one in wanted:
            if not set(names_of_one) & set(names):
                has = ", ".join(names[:12])
                raise OptionError(
                    f"{files[0].name} of {self.known.title} has no column {names_of_one[0]!r} "
                    f"(it has {has}), so its layout is another one: {remedy}"
                )
        return rows

    def _roots(self, source: Source, folder: Path) -> tuple[Path, ...]:
        """Folders with media: its own, its other revisions', and where lmms-eval unpacks."""
        found = [folder]
        if folder.parent.name == "snapshots" and len(source.revisions) > 1:
            found += [path for path in _snapshots(folder.parent.parent) if path != folder]
        if self.root is None and self.known.media is not None:
            home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
            found += [p for name in self.known.media.unpacked if (p := Path(home, name)).is_dir()]
        return tuple(found)

    def fetched(self, source: Source) -> Iterator[Path]:
        """A snapshot fetched now, where no folder was given and nothing forbids it."""
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import GatedRepoError

        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        offline = offline or constants.HF_HUB_OFFLINE
        if self.root is not None or offline or not source.small:
            return
        patterns, revision = self._patterns(source.files, self.parts), source.revisions[0]
        for repo in source.repos:
            logger.warning("fetching %s of %s from the hub", ", ".join(patterns), repo)
            try:
                path = snapshot_download(
                    repo, repo_type="dataset", revision=revision, allow_patterns=patterns
                )
            except GatedRepoError:
                remedy = self.remedy(replace(source, gated=True))
                raise OptionError(f"{self.known.title} is gated: {remedy}") from None
            except Exception as fault:  # the client raises its own, its transport's, the system's
                logger.info("%s could not be fetched: %s", repo, type(fault).__name__)
            else:
                yield Path(path)


def _parse(name: str) -> tuple[str, str]:
    """A key of `BENCHMARKS` and a part of it or "", however the name is written."""
    plain = {re.sub(r"[^a-z0-9]", "", key): key for key in BENCHMARKS}
    first, _, part = name.partition("/")
    key = plain.get(re.sub(r"[^a-z0-9]", "", first.lower()))
    if key is None:
        raise OptionError(f"there is no benchmark {name!r}: use {', '.join(BENCHMARKS)}")
    if part and part not in BENCHMARKS[key].parts:
        parts = ", ".join(BENCHMARKS[key].parts) or "its name alone"
        raise OptionError(f"{BENCHMARKS[key].title} has no part {part!r}: use {parts}")
    return key, part


def _snapshots(base: Path) -> list[Path]:
    """Snapshots of a repository in the hub cache, that of its main branch first."""
    if not (folder := base / "snapshots").is_dir():
        return []
    main = base / "refs" / "main"
    named = main.read_text().strip() if main.is_file() else ""
    found = [path for path in folder.iterdir() if path.is_dir()]
    return sorted(found, key=lambda path: (path.name != named, path.name))


def _matching(folder: Path, patterns: Sequence[str], part: str) -> list[Path]:
    """Files of the first pattern that has any."""
    found = (sorted(folder.glob(pattern.format(part=part))) for pattern in patterns)
    return next((files for files in found if files), [])

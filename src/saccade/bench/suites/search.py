"""Finds the files of a benchmark on disk, or says what is missing and which command fetches it.

A benchmark (``benchmarks.yaml``) may have several sources, which are publications of the same
samples with other files or columns. Each is looked for in a folder that the user names, or in the
cache of the Hugging Face hub. Its samples are the rows of tables. Its videos or pictures are in the
rows, in a table of their own (``Join``), or in files beside the tables (``Media``).
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.bench.suites.benchmarks import BENCHMARKS, Benchmark, Source
from saccade.bench.suites.datasets import Dataset, explain_damage
from saccade.bench.suites.media_index import IMAGE_SUFFIXES, VIDEO_SUFFIXES, MediaIndex
from saccade.bench.suites.rows import Rows, missing_shards, read_rows
from saccade.bench.suites.types import Setting
from saccade.core.errors import OptionError
from saccade.inputs.checkpoints import offline

logger = logging.getLogger(__name__)


def open_dataset(
    name: str,
    root: str | Path | None = None,
    *,
    paper: str | None = None,
) -> Dataset:
    """Returns the benchmark of this name, ready to be read.

    `name` is one of `BENCHMARKS`, or "mvbench/action_count" for a part. `root` is its folder, a
    folder that contains it, or a snapshot of the hub. Without it the local hub cache is searched.
    If nothing is found there, the tables of some benchmarks may be fetched: small ones, without
    pictures. `paper` is the paper whose setting is used (split, samples, frames, prompt), a key of
    the benchmark's `papers`; by default the first. Raises `OptionError`, with the command that
    helps, where files are missing, incomplete or changed.
    """
    key, part = _parse(name)
    benchmark = BENCHMARKS[key]
    if paper is not None and paper not in benchmark.papers:
        raise OptionError(
            f"{benchmark.title} has no setting {paper!r}: use {', '.join(benchmark.papers)}"
        )
    setting = benchmark.papers[paper or next(iter(benchmark.papers))]
    sources = [source for source in benchmark.sources if setting.split in source.files]
    # If a benchmark has parts and no column names the part of each row, each part has files of its
    # own. In all other cases one search without a part's name finds all files.
    parts: tuple[str, ...] = ("",)
    if benchmark.parts and not benchmark.part_column:
        parts = (part,) if part else benchmark.parts
    suite_name = f"{key}/{part}" if part else key
    if paper:
        suite_name += f"@{paper}"
    search = _Search(benchmark, setting.split, parts, None if root is None else Path(root))
    # What is on disk is searched before anything is fetched.
    for find_folders in (search.folders, search.fetch):
        for source in sources:
            for folder in find_folders(source):
                if dataset := search.load(source, folder, setting):
                    part_of_rows = part if benchmark.part_column else ""
                    return replace(dataset, name=suite_name, part=part_of_rows)
    raise search.not_found_error(sources[0])


@dataclass(frozen=True)
class _Search:
    """Searches for the files of one split of a benchmark, and makes the errors for missing ones."""

    benchmark: Benchmark
    split: str  # the split that the paper uses, such as "test"
    parts: tuple[str, ...]  # the parts that have files of their own, or else ("",)
    root: Path | None  # the folder that the user named; None searches the hub's cache

    def folders(self, source: Source) -> Iterator[Path]:
        """Yields folders that may hold the dataset, the likeliest first.

        Without a root these are folders of the local hub cache. Raises OptionError if there is no
        folder at the root.
        """
        hub_names = ["--".join(("datasets", *repo.split("/"))) for repo in source.repos]
        if self.root is None:
            from huggingface_hub import constants

            bases = [Path(constants.HF_HUB_CACHE, name) for name in hub_names]
        elif self.root.is_dir():
            names = [repo.rpartition("/")[2] for repo in source.repos]
            bases = [self.root, *(self.root / name for name in (*names, *source.repos, *hub_names))]
        else:
            raise OptionError(f"there is no folder {self.root}: {self.remedy(source)}")
        for base in bases:
            if base.is_dir():
                yield base
                yield from _snapshots(base)

    def load(self, source: Source, folder: Path, setting: Setting) -> Dataset | None:
        """Returns the dataset in this folder, or None if the folder has none of the dataset's
        files. Raises OptionError if some are missing."""
        benchmark = self.benchmark
        remedy = self.remedy(source)
        # The files of rows, by part.
        files = {
            part: _matching_files(folder, source.files[self.split], part) for part in self.parts
        }
        if not any(files.values()):
            return None
        if missing := [part for part, paths in files.items() if not paths]:
            names = ", ".join(self._patterns(source.files, missing[:3]))
            raise self._incomplete_error(f"{names} is missing", remedy)
        # The rows. ``required`` has, for each column that must be there, the names it may have.
        required = [
            names for role, names in benchmark.columns.items() if role not in benchmark.optional
        ]
        if benchmark.part_column:
            required.append((benchmark.part_column,))
        if benchmark.row_filter:
            required.append((benchmark.row_filter[0],))
        if benchmark.join:
            required.append((benchmark.join.question_key,))
        tables = tuple((part, self._rows(source, paths, required)) for part, paths in files.items())
        # The table of pictures, and the files of media.
        pictures = index = None
        if benchmark.join is not None:
            paths = _matching_files(folder, benchmark.join.files[self.split], "")
            if not paths:
                names = ", ".join(benchmark.join.files[self.split])
                raise self._incomplete_error(f"{names} is missing", remedy)
            pictures = self._rows(
                source, paths, [(benchmark.join.picture_key,), (benchmark.join.picture,)]
            )
        if benchmark.media is not None:
            remedy = self.remedy(source, with_media=True)
            has_videos = "video" in benchmark.columns
            suffixes = VIDEO_SUFFIXES if has_videos else IMAGE_SUFFIXES
            roots = self._media_folders(source, folder)
            index = MediaIndex(roots, suffixes, has_videos, benchmark.media.ignores_case)
            if index.is_empty:
                what = "videos" if has_videos else "images"
                names = ", ".join(benchmark.media.packed)
                raise self._incomplete_error(f"its {what} ({names}) are missing", remedy)
        # ``open_dataset`` sets the name that the user gave, and the part.
        return Dataset(
            name=benchmark.title,
            setting=setting,
            benchmark=benchmark,
            tables=tables,
            pictures=pictures,
            media_index=index,
            remedy=remedy,
        )

    def remedy(self, source: Source, with_media: bool = False) -> str:
        """Returns the end of an error message, which says how to fetch what is missing.

        That is a command which fetches the tables. With ``with_media`` it fetches the archives of
        the media instead.
        """
        repo = source.repos[0]
        media_layout = self.benchmark.media
        include = self._patterns(source.files, self.parts)
        if self.benchmark.join is not None:
            include += self.benchmark.join.files[self.split]
        if with_media and media_layout is not None:
            include = list(media_layout.packed)
        command = ["hf", "download", repo, "--repo-type", "dataset"]
        command += ["--revision", source.revisions[0]] if source.revisions[0] else []
        command += [word for pattern in include for word in ("--include", pattern)]
        command += ["--local-dir", str(self.root)] if self.root is not None else []
        gate_note = (
            f" (it is gated: first accept its terms at https://huggingface.co/datasets/{repo} "
            "and run `hf auth login`)"
        )
        return f"fetch it with `{shlex.join(command)}`" + (gate_note if source.gated else "")

    def not_found_error(self, source: Source) -> OptionError:
        """Returns the error for a dataset that was not found."""
        title, root = self.benchmark.title, self.root
        place = "the local hub cache" if root is None else str(root)
        problem = f"{title} is not in {place}"
        if root is not None and not any(root.iterdir()):
            problem = f"{place} is empty"
        return OptionError(f"{problem}: {self.remedy(source)}")

    def _patterns(self, files: Mapping[str, tuple[str, ...]], parts: Sequence[str]) -> list[str]:
        """Returns a pattern of file names for each of these parts, for a message or a command.

        ``files`` has the patterns of each split. The first one of the searched split is used. If
        there are more than three parts, the result is one pattern that fits them all, to keep it
        short.
        """
        names = ("*",) if len(parts) > 3 else parts
        return [files[self.split][0].format(part=part) for part in names]

    def _incomplete_error(self, what: str, remedy: str) -> OptionError:
        return OptionError(f"{self.benchmark.title} is only half there, {what}: {remedy}")

    def _rows(
        self, source: Source, files: Sequence[Path], required: Sequence[tuple[str, ...]]
    ) -> Rows:
        """Returns the rows of files.

        ``required`` has, for each column that must be there, the names that it may have. Raises
        OptionError if the files lack one of these columns, or if they are incomplete or damaged.
        """
        remedy = self.remedy(source)
        if missing := missing_shards(files):
            raise self._incomplete_error(f"{missing[0]} is missing", remedy)
        with explain_damage(self.benchmark.title, remedy):
            rows = read_rows(files, source.nested)
            names = rows.names
        if not len(rows):
            raise self._incomplete_error(f"{files[0].name} holds no rows", remedy)
        for alternatives in required:
            if not set(alternatives) & set(names):
                columns = ", ".join(names[:12])
                raise OptionError(
                    f"{files[0].name} of {self.benchmark.title} has no column {alternatives[0]!r} "
                    f"(it has {columns}), so its layout is another one: {remedy}"
                )
        return rows

    def _media_folders(self, source: Source, folder: Path) -> tuple[Path, ...]:
        """Returns the folders in which media are searched for: the dataset's own, those of its
        other revisions in the hub cache, and those into which lmms-eval unpacks archives."""
        folders = [folder]
        if folder.parent.name == "snapshots" and len(source.revisions) > 1:
            folders += [path for path in _snapshots(folder.parent.parent) if path != folder]
        if self.root is None and self.benchmark.media is not None:
            home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
            unpacked = [Path(home, name) for name in self.benchmark.media.unpacked]
            folders += [path for path in unpacked if path.is_dir()]
        return tuple(folders)

    def fetch(self, source: Source) -> Iterator[Path]:
        """Fetches the dataset's tables from the hub and yields their folder.

        It yields nothing if they cannot be fetched. It does nothing if a root was given, the hub is
        switched off, or the source does not allow fetching without asking.
        """
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import GatedRepoError

        is_offline = offline() or constants.HF_HUB_OFFLINE
        if self.root is not None or is_offline or not source.may_fetch_unasked:
            return
        patterns = self._patterns(source.files, self.parts)
        revision = source.revisions[0]
        for repo in source.repos:
            logger.warning("fetching %s of %s from the hub", ", ".join(patterns), repo)
            try:
                path = snapshot_download(
                    repo, repo_type="dataset", revision=revision, allow_patterns=patterns
                )
            except GatedRepoError:
                remedy = self.remedy(replace(source, gated=True))
                raise OptionError(f"{self.benchmark.title} is gated: {remedy}") from None
            except Exception as error:  # The client raises many kinds of errors.
                logger.info("%s could not be fetched: %s", repo, type(error).__name__)
            else:
                yield Path(path)


def _parse(name: str) -> tuple[str, str]:
    """Returns the key of `BENCHMARKS` that a name stands for, and its part or "". Case and
    punctuation do not matter."""

    def simplify(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    first, _, part = name.partition("/")
    key = {simplify(key): key for key in BENCHMARKS}.get(simplify(first))
    if key is None:
        raise OptionError(f"there is no benchmark {name!r}: use {', '.join(BENCHMARKS)}")
    known_parts = BENCHMARKS[key].parts
    if not part or part in known_parts:
        return key, part
    known_part = {simplify(each): each for each in known_parts}.get(simplify(part))
    if known_part is None:
        parts = ", ".join(known_parts) or "its name alone"
        raise OptionError(f"{BENCHMARKS[key].title} has no part {part!r}: use {parts}")
    return key, known_part


def _snapshots(base: Path) -> list[Path]:
    """Returns the snapshots of a repository in the hub cache, the main branch's first."""
    if not (folder := base / "snapshots").is_dir():
        return []
    main = base / "refs" / "main"
    main_commit = main.read_text().strip() if main.is_file() else ""
    snapshots = [path for path in folder.iterdir() if path.is_dir()]
    return sorted(snapshots, key=lambda path: (path.name != main_commit, path.name))


def _matching_files(folder: Path, patterns: Sequence[str], part: str) -> list[Path]:
    """Returns the files of the first pattern that matches any."""
    matches = (sorted(folder.glob(pattern.format(part=part))) for pattern in patterns)
    return next((files for files in matches if files), [])

"""Runs ``saccade caption``: answers the jobs of a corpus into a file, and merges such files.

A job is a prompt about a video, a document, or both. Its answer, or its error, is one row of a file
of JSON lines. Rows are written as soon as they are there, and only jobs without a row are answered.
So a run that was interrupted goes on where it stopped. A corpus may be cut into shards, each with a
file of its own, which :func:`merge_shards` joins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from saccade.core.errors import OptionError
from saccade.corpus import json_lines
from saccade.corpus.manifest import UNEXPECTED_PREFIX, CaptionSettings, ClipJob, Row

# After this many unexpected errors in a row the machine is taken to be at fault.
MAX_UNEXPECTED_ERRORS = 10


@dataclass(frozen=True)
class Progress:
    """How far a run of jobs has come."""

    whole: int  # How many jobs there are.
    done: int  # How many of them have a row in the file.
    errors: int  # How many of them have a row that is an error.
    fresh: int  # How many rows this run has written.
    seconds: float  # How long this run has answered jobs.

    def __str__(self) -> str:
        """Returns a line for people, with the speed and the time left once rows were written."""
        counts = f"{self.done} of {self.whole} done, {self.errors} errors"
        if not self.fresh or not self.seconds:
            return counts
        rate = self.fresh / self.seconds
        time_left = timedelta(seconds=int((self.whole - self.done) / rate))
        return f"{counts}, {rate:.2f} a second, {time_left} left"


OnProgress = Callable[[Progress], None]
AnswerJobs = Callable[[Iterable[Sequence[ClipJob]]], Iterator[Sequence[Row]]]
"""Answers groups of jobs and yields groups of rows, in any order. Every kind of worker is used
through such a function."""


def run_jobs(
    jobs: Sequence[ClipJob],
    path: Path,
    settings: CaptionSettings,
    make_answer: Callable[[], AnswerJobs],
    *,
    batch: int = 1,
    retry: bool = False,
    on_progress: OnProgress | None = None,
) -> Progress:
    """Answers jobs that ``path`` has no row of, ``batch`` at a time, and writes rows as they come.

    Returns how far the run has come at its end. ``make_answer`` loads models and returns the
    function that answers, so it is called only if a job has no row. With ``retry`` the jobs of
    error rows are answered again. Raises OptionError where the folder of ``path`` does not exist,
    where another process writes the file, where the file has answers to other settings or
    questions, and after ``MAX_UNEXPECTED_ERRORS`` unexpected errors in a row.
    """
    if not path.parent.is_dir():
        raise OptionError(f"cannot write {path}: there is no folder {path.parent}")
    with json_lines.write_lock(path):
        path.touch()  # A shard without videos leaves an empty file, which can be merged.
        # What earlier runs have answered. The file may also have rows of jobs that are not in
        # ``jobs``; these stay.
        rows = _read_checked_rows(path, jobs, settings)
        ids = {job.id for job in jobs}
        if retry and any(row["error"] and row["id"] in ids for row in rows):
            rows = [row for row in rows if not (row["error"] and row["id"] in ids)]
            json_lines.rewrite(path, rows)
        rows_by_id = {row["id"]: row for row in rows if row["id"] in ids}
        todo = {job.id: job for job in jobs if job.id not in rows_by_id}
        errors = sum(row["error"] is not None for row in rows_by_id.values())
        progress = Progress(len(jobs), len(jobs) - len(todo), errors, fresh=0, seconds=0.0)
        if not todo:
            return progress
        remaining = list(todo.values())
        groups = [remaining[i : i + batch] for i in range(0, len(remaining), batch)]
        answer = make_answer()
        start = time.monotonic()
        unexpected_in_a_row = 0
        for new_rows in answer(groups):
            # A row takes its job out of ``todo``. A row whose job is not there is left out: the job
            # has a row already, or is not one of this run.
            new_rows = [row for row in new_rows if todo.pop(row.id, None)]
            json_lines.append_rows(path, map(asdict, new_rows))
            for row in new_rows:
                is_unexpected = row.error is not None and row.error.startswith(UNEXPECTED_PREFIX)
                unexpected_in_a_row = unexpected_in_a_row + 1 if is_unexpected else 0
            progress = replace(
                progress,
                done=len(jobs) - len(todo),
                errors=progress.errors + sum(row.error is not None for row in new_rows),
                fresh=progress.fresh + len(new_rows),
                seconds=time.monotonic() - start,
            )
            if on_progress is not None:
                on_progress(progress)
            if unexpected_in_a_row >= MAX_UNEXPECTED_ERRORS:
                raise OptionError(
                    f"{unexpected_in_a_row} videos in a row failed for no fault of theirs, the "
                    f"last by {new_rows[-1].error}; the same command with --retry-errors goes on"
                )
    return progress


def _read_checked_rows(
    path: Path, jobs: Sequence[ClipJob], settings: CaptionSettings
) -> list[dict[str, Any]]:
    """Returns the rows of a file.

    Raises OptionError where a row was answered with other settings, or where the job of its id now
    asks something else.
    """
    jobs_by_id = {job.id: job for job in jobs}
    rows = _read_rows(path)
    for row in rows:
        if row["run"] != settings.key:
            raise OptionError(
                f"{path} holds answers of another target, length or choice of frames: give "
                "another --out, or delete it"
            )
        job = jobs_by_id.get(row["id"])
        if job is None:
            continue
        row_media = row["video"], row.get("document", "")
        if (job.video, job.document) != row_media or job.prompt != row["prompt"]:
            media = " and ".join(filter(None, row_media))
            raise OptionError(
                f"{path} has {job.id} answer {row['prompt']!r} about {media}, which is "
                "not what the manifest asks: give another --out"
            )
    return rows


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file. Raises OptionError where they are not rows of answers."""
    rows = json_lines.read_and_repair(path)
    for row in rows:
        if not isinstance(row, dict) or not _REQUIRED_FIELDS <= row.keys():
            raise OptionError(f"{path} is no file of captions: give another")
    return rows


_REQUIRED_FIELDS = {field.name for field in fields(Row)} - {"document"}
"""The fields that every row must have. Rows of older files have no ``document``."""


def shard_path(path: Path, shard: tuple[int, int]) -> Path:
    """Returns the path of a shard's rows, such as captions-2-of-4.jsonl; ``path`` if there is one
    shard only. ``shard`` is the shard's number from 0 on, and how many shards there are."""
    number, count = shard
    if count == 1:
        return path
    return path.with_name(f"{path.stem}-{number + 1}-of-{count}{path.suffix}")


@dataclass(frozen=True)
class MergedRows:
    """The result of merging shards.

    ``rows`` is how many rows were written, and the other fields are ids of jobs. ``errors`` are
    those of error rows. ``missing`` are in the manifest and in no file, ``unknown`` are in a file
    and not in the manifest, and ``doubled`` occur more than once. Of several rows with one id the
    first answer is written, and an error only if there is no answer.
    """

    rows: int
    errors: tuple[str, ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    doubled: tuple[str, ...]


def merge_shards(jobs: Sequence[ClipJob], paths: Sequence[Path], out: Path) -> MergedRows:
    """Writes the rows of all shards' files to ``out``, in the order of ``jobs``, the manifest.

    Rows of jobs that are not in the manifest are left out. Raises OptionError where a file does not
    exist, is being written or has no captions, and where rows are of different runs.
    """
    rows_by_id: dict[str, dict[str, Any]] = {}
    doubled: list[str] = []
    # A row's ``run`` is a digest of the settings that it was answered with.
    first_path_by_run: dict[str, Path] = {}
    for path in paths:
        if not path.is_file():
            raise OptionError(f"no file of captions at {path}")
        with json_lines.write_lock(path):
            shard_rows = _read_rows(path)
        for row in shard_rows:
            first_path_by_run.setdefault(row["run"], path)
            earlier = rows_by_id.get(row["id"])
            if earlier is not None:
                doubled.append(row["id"])
            if earlier is None or earlier["error"]:
                rows_by_id[row["id"]] = row
    if len(first_path_by_run) > 1:
        one_path, other_path = list(first_path_by_run.values())[:2]
        who = f"{one_path} and {other_path} are"
        if one_path == other_path:
            who = f"the rows of {one_path} are"
        raise OptionError(f"{who} of different runs: another target, length or choice of frames")
    ids = [job.id for job in jobs]
    merged = [rows_by_id[name] for name in ids if name in rows_by_id]
    with json_lines.write_lock(out):
        json_lines.rewrite(out, merged)
    return MergedRows(
        len(merged),
        tuple(row["id"] for row in merged if row["error"]),
        tuple(name for name in ids if name not in rows_by_id),
        tuple(sorted(rows_by_id.keys() - set(ids))),
        tuple(dict.fromkeys(doubled)),
    )

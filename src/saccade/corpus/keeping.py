"""One file of rows: what it lacks is answered, each row is kept at once, and shards are joined."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from saccade.core.errors import OptionError
from saccade.corpus import rows
from saccade.corpus.manifest import UNEXPECTED, ClipJob, Row, Work

TOO_MANY = 10  # unexpected errors in a row: it is the machine, and the next will fare no better


@dataclass(frozen=True)
class Standing:
    """How far a run is."""

    whole: int
    done: int  # rows in the file, those of earlier runs too
    errors: int  # of these
    fresh: int  # done by this run
    seconds: float

    def __str__(self) -> str:
        said = f"{self.done} of {self.whole} done, {self.errors} errors"
        if not self.fresh or not self.seconds:
            return said
        rate = self.fresh / self.seconds
        left = timedelta(seconds=int((self.whole - self.done) / rate))
        return f"{said}, {rate:.2f} a second, {left} left"


Tell = Callable[[Standing], None]
Answer = Callable[[Iterable[Sequence[ClipJob]]], Iterator[Sequence[Row]]]
"""Groups of jobs to groups of rows, in any order. Whatever does the work is one."""


def run(
    jobs: Sequence[ClipJob],
    path: Path,
    work: Work,
    answer: Callable[[], Answer],
    *,
    batch: int = 1,
    retry: bool = False,
    tell: Tell | None = None,
) -> Standing:
    """Answers what ``path`` has no row of yet, ``batch`` jobs at a time; each row is kept at once.

    ``answer`` is asked for only when there is something to do: it loads models. ``retry`` does
    the rows of errors again. Raises OptionError where another process writes the file, or where it
    holds another run's answers.
    """
    if not path.parent.is_dir():
        raise OptionError(f"cannot write {path}: there is no folder {path.parent}")
    with rows.locked(path):
        path.touch()  # a shard without videos leaves a file too
        every = _checked(path, jobs, work)
        asked = {job.id for job in jobs}
        if retry and any(each["error"] and each["id"] in asked for each in every):
            every = [each for each in every if not (each["error"] and each["id"] in asked)]
            rows.replace(path, every)
        known = {each["id"]: each for each in every if each["id"] in asked}
        todo = {job.id: job for job in jobs if job.id not in known}
        errors = sum(each["error"] is not None for each in known.values())
        standing = Standing(len(jobs), len(jobs) - len(todo), errors, 0, 0.0)
        if not todo:
            return standing
        waiting = list(todo.values())
        groups = [waiting[at : at + batch] for at in range(0, len(waiting), batch)]
        answers = answer()
        began, unexpected = time.monotonic(), 0
        for fresh in answers(groups):
            fresh = [each for each in fresh if todo.pop(each.id, None)]
            rows.append(path, map(asdict, fresh))
            for each in fresh:
                strange = each.error is not None and each.error.startswith(UNEXPECTED)
                unexpected = unexpected + 1 if strange else 0
            standing = replace(
                standing,
                done=len(jobs) - len(todo),
                errors=standing.errors + sum(each.error is not None for each in fresh),
                fresh=standing.fresh + len(fresh),
                seconds=time.monotonic() - began,
            )
            if tell is not None:
                tell(standing)
            if unexpected >= TOO_MANY:
                raise OptionError(
                    f"{unexpected} videos in a row failed for no fault of theirs, the last by "
                    f"{fresh[-1].error}; the same command with --retry-errors goes on"
                )
    return standing


def _checked(path: Path, jobs: Sequence[ClipJob], work: Work) -> list[dict[str, Any]]:
    """The rows there are. Raises OptionError where they answer something else."""
    asked = {job.id: job for job in jobs}
    found = _rows(path)
    for each in found:
        if each["run"] != work.key:
            raise OptionError(
                f"{path} holds answers of another target, length or choice of frames: give "
                "another --out, or delete it"
            )
        job = asked.get(each["id"])
        about = each["video"], each.get("document", "")
        if job is not None and (job.video, job.document, job.prompt) != (*about, each["prompt"]):
            told = " and ".join(filter(None, about))
            raise OptionError(
                f"{path} has {job.id} answer {each['prompt']!r} about {told}, which is "
                "not what the manifest asks: give another --out"
            )
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    found = rows.mended(path)
    for each in found:
        if not isinstance(each, dict) or not _FIELDS <= each.keys():
            raise OptionError(f"{path} is no file of captions: give another")
    return found


_FIELDS = {field.name for field in fields(Row)} - {"document"}  # files of before have none


def shard_path(path: Path, shard: tuple[int, int]) -> Path:
    """Where a shard's rows go: captions-2-of-4.jsonl; all of them, where there is one shard."""
    number, count = shard
    if count == 1:
        return path
    return path.with_name(f"{path.stem}-{number + 1}-of-{count}{path.suffix}")


@dataclass(frozen=True)
class MergedRows:
    """What came of joining shards."""

    rows: int
    errors: tuple[str, ...]  # ids
    missing: tuple[str, ...]  # ids the manifest has and no shard
    unknown: tuple[str, ...]  # ids that are not in the manifest
    doubled: tuple[str, ...]  # ids that several files had; an answer goes before an error


def merge(jobs: Sequence[ClipJob], paths: Sequence[Path], out: Path) -> MergedRows:
    """One file of all shards' rows, in the manifest's order, and what is missing in it.

    Raises OptionError where a file is not there, is being written, or is of another run.
    """
    found: dict[str, dict[str, Any]] = {}
    doubled: list[str] = []
    runs: dict[str, Path] = {}
    for path in paths:
        if not path.is_file():
            raise OptionError(f"no file of captions at {path}")
        with rows.locked(path):
            own = _rows(path)
        for each in own:
            runs.setdefault(each["run"], path)
            before = found.get(each["id"])
            if before is not None:
                doubled.append(each["id"])
            if before is None or before["error"]:
                found[each["id"]] = each
    if len(runs) > 1:
        one, other = list(runs.values())[:2]
        raise OptionError(
            f"{one} and {other} are of different runs: another target, length or choice of frames"
        )
    order = [job.id for job in jobs]
    kept = [found[name] for name in order if name in found]
    with rows.locked(out):
        rows.replace(out, kept)
    return MergedRows(
        len(kept),
        tuple(each["id"] for each in kept if each["error"]),
        tuple(name for name in order if name not in found),
        tuple(sorted(found.keys() - set(order))),
        tuple(dict.fromkeys(doubled)),
    )

"""A corpus of videos to one file of captions: resumable, one row a video, a worker a shard.

A manifest names the jobs, a :class:`Worker` holds the models and answers a few jobs at a time, and
``run`` appends each answer the moment it is there. Rows come in any order, one per id. What goes
wrong with one video is that video's row. Knows nothing of the command line.
"""

from __future__ import annotations

import csv
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from saccade import captions, media, rows
from saccade.engine import DEFAULT_METHOD, stream
from saccade.errors import OptionError, SaccadeError
from saccade.media import Clip, Sampling
from saccade.models import ask, ask_draft, joined, load_pair, shown
from saccade.systems import resolve
from saccade.types import Inputs, Result

VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif", ".webp")
UNEXPECTED = "unexpected "  # how the error of a row begins that is no fault of the video
TOO_MANY = 10  # of these in a row: it is the machine, and the next video will fare no better


@dataclass(frozen=True)
class Job:
    """One video to be put into words."""

    id: str
    video: str  # as the manifest has it
    prompt: str
    path: str  # where it is


@dataclass(frozen=True)
class Row:
    """One job's answer, or why there is none."""

    id: str
    video: str
    prompt: str
    run: str = ""  # `Work.key` of what answered
    text: str | None = None
    error: str | None = None
    tokens: int = 0
    finish_reason: str | None = None
    method: str | None = None
    tau: float | None = None  # tokens a forward of the target
    seconds: float = 0.0  # of the whole batch it was answered in
    together: int = 1  # how many that were
    frames: int = 0
    visual_tokens: int = 0
    fallback: str | None = None
    warnings: tuple[str, ...] = ()


# -- what is to be done ------------------------------------------------------------------------


def jobs(manifest: Path, question: str) -> list[Job]:
    """What a manifest asks for, in its order.

    A folder (every video below it), a ``.jsonl`` or ``.csv`` with ``video`` and perhaps ``id`` and
    ``prompt``, or a text file with a path a line. A relative path is looked for beside the
    manifest first. Raises OptionError, with the line, where it cannot be read or an id comes twice.
    """
    if manifest.is_dir():
        found = sorted(path for path in manifest.rglob("*") if path.suffix.lower() in VIDEOS)
        named = [str(path.relative_to(manifest)) for path in found]
        entries = [(name, {"video": name}) for name in named]
    elif manifest.is_file():
        entries = list(_READERS.get(manifest.suffix.lower(), _paths)(manifest))
    else:
        raise OptionError(f"no manifest at {manifest}: give a list of videos or a folder of them")
    if not entries:
        raise OptionError(f"{manifest} names no video")
    seen: dict[str, str] = {}
    jobs = []
    for where, given in entries:
        video = given.get("video")
        if not isinstance(video, str) or not video:
            raise OptionError(f"{where} of {manifest} has no video: id, video, prompt are read")
        own = given.get("id")
        name = str(video if own in (None, "") else own)
        if name in seen:
            raise OptionError(f"{where} of {manifest} has the id of {seen[name]}: {name}")
        seen[name] = where
        beside = (manifest if manifest.is_dir() else manifest.parent) / video
        path = beside if beside.exists() else Path(video)
        jobs.append(Job(name, video, str(given.get("prompt") or question), str(path.absolute())))
    return jobs


Entries = Iterator[tuple[str, dict[str, Any]]]
"""(where, to tell people; its fields)"""


def _paths(manifest: Path) -> Entries:
    for number, line in enumerate(_text(manifest).splitlines(), start=1):
        if line.strip():
            yield f"line {number}", {"video": line.strip()}


def _json(manifest: Path) -> Entries:
    for number, line in enumerate(_text(manifest).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise OptionError(f"line {number} of {manifest} is no JSON object")
        yield f"line {number}", given


def _csv(manifest: Path) -> Entries:
    reader = csv.DictReader(_text(manifest).splitlines(keepends=True))
    for line in reader:
        yield f"line {reader.line_num}", line


def _text(manifest: Path) -> str:
    try:
        return manifest.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{manifest} cannot be read as text: give a list of videos") from error


_READERS: dict[str, Callable[[Path], Entries]] = {".jsonl": _json, ".csv": _csv}


# -- who does it -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """How every job is answered. Plain values, so that it can be sent to another machine."""

    target: str = "shapes"
    draft: str | None = None
    method: str = DEFAULT_METHOD
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    exact: bool = False
    captioner: str | None = None
    place: tuple[tuple[str, Any], ...] = ()  # of `load`: dtype, device, ...
    threads: int | None = None

    @property
    def key(self) -> str:
        """Names what decides the answers: neither draft nor method do."""
        place = {k: v for k, v in self.place if k in ("dtype", "quantize") and v is not None}
        told = [self.target, self.max_new_tokens, asdict(self.sampling), place]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Opened:
    """A job with its frames."""

    job: Job
    clip: Clip


class Worker:
    """The models, held; called with jobs, gives their rows. Several jobs are one batch if they can.

    In fp32 a request answers in a batch what it answers alone.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        if work.threads is not None:
            torch.set_num_threads(work.threads)
        self._recipe = resolve(work.method)
        self._target, self._draft = load_pair(work.target, work.draft, **dict(work.place))

    def __call__(self, jobs: Sequence[Job]) -> list[Row]:
        return self.answer(self.open(jobs))

    def open(self, jobs: Sequence[Job]) -> list[Opened | Row]:
        """Reads the videos, which needs no model: another thread may do it meanwhile."""
        return [self._open(job) for job in jobs]

    def answer(self, given: Sequence[Opened | Row]) -> list[Row]:
        """A row for each."""
        rows = [each for each in given if isinstance(each, Row)]
        opened = [each for each in given if isinstance(each, Opened)]
        if len(opened) > 1:
            try:
                return rows + self._together(opened)
            except Exception:  # whoever is to blame will fail alone too, and be told so
                pass
        return rows + [self._alone(each) for each in opened]

    def _open(self, job: Job) -> Opened | Row:
        try:
            return Opened(job, media.read(job.path, self.work.sampling))
        except Exception as error:
            return self._failed(job, error)

    def _alone(self, opened: Opened) -> Row:
        try:
            (row,) = self._together([opened])
        except Exception as error:
            return self._failed(opened.job, error)
        return row

    def _together(self, many: Sequence[Opened]) -> list[Row]:
        began = time.perf_counter()
        pictures = [shown(each.clip) for each in many]
        asked = [
            ask(self._target, each.job.prompt, **seen)
            for each, seen in zip(many, pictures, strict=True)
        ]
        read: list[Inputs | None] = [None]
        if self._draft is not None:
            read = [
                ask_draft(self._target, self._draft, each.job.prompt, **seen)
                for each, seen in zip(many, pictures, strict=True)
            ]
        own = [each for each in read if each is not None]
        rounds = stream(
            self._target.backbone,
            _one(self._target, asked),
            draft=None if self._draft is None else self._draft.backbone,
            draft_inputs=_one(self._draft, own) if self._draft is not None and own else None,
            method=self._recipe,
            tokenizer=self._target.tokenizer,
            captioner=self._captioner(many),
            exact=self.work.exact,
            max_new_tokens=self.work.max_new_tokens,
            do_sample=False,
        )
        for _ in rounds:
            pass
        seconds = time.perf_counter() - began
        return [
            replace(_told(each, result), run=self.work.key, seconds=seconds, together=len(many))
            for each, result in zip(many, rounds.results, strict=True)
        ]

    def _captioner(self, many: Sequence[Opened]) -> Callable[[Inputs], list[str]] | None:
        """Captions of the clips for views that read one, made only if one is asked for."""
        name = self.work.captioner or (captions.SHAPES if self.work.target == "shapes" else None)
        if name is None:
            return None
        device = dict(self.work.place).get("device")

        def caption(inputs: Inputs) -> list[str]:
            every = [captions.captioner(name, list(each.clip.frames), device) for each in many]
            return [text for captioner in every for text in captioner(inputs)]

        return caption

    def _failed(self, job: Job, error: Exception) -> Row:
        said = str(error)
        if not isinstance(error, SaccadeError):
            first = said.strip().splitlines() or [""]
            said = f"{UNEXPECTED}{type(error).__name__}: {first[0]}"
        return Row(job.id, job.video, job.prompt, self.work.key, error=said)


def _one(loaded: Any, asked: Sequence[Inputs]) -> Inputs:
    return asked[0] if len(asked) == 1 else joined(loaded, asked)


def _told(opened: Opened, result: Result) -> Row:
    job, clip = opened.job, opened.clip
    return Row(
        job.id,
        job.video,
        job.prompt,
        text=result.text,
        error="the target's numbers broke (NaN)" if result.finish_reason == "error" else None,
        tokens=len(result.ids),
        finish_reason=result.finish_reason,
        method=result.method,
        tau=result.tau,
        frames=len(clip.frames),
        visual_tokens=result.visual_tokens,
        fallback=result.fallback_reason,
        warnings=(*clip.warnings, *result.warnings),
    )


# -- doing it ----------------------------------------------------------------------------------


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
        left = int((self.whole - self.done) / rate)
        hours, minutes = left // 3600, left // 60 % 60
        return f"{said}, {rate:.2f} a second, {hours}:{minutes:02}:{left % 60:02} left"


Tell = Callable[[Standing], None]
Answer = Callable[[Iterable[Sequence[Job]]], Iterator[Sequence[Row]]]
"""Groups of jobs to groups of rows, in any order. Whatever does the work is one."""


def run(
    jobs: Sequence[Job],
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


def here(work: Work) -> Answer:
    """Answers in this process: the next videos are read while the models are busy."""
    worker = Worker(work)

    def answers(groups: Iterable[Sequence[Job]]) -> Iterator[Sequence[Row]]:
        with ThreadPoolExecutor(1) as reader:
            coming = None
            for group in groups:
                following = reader.submit(worker.open, group)
                if coming is not None:
                    yield worker.answer(coming.result())
                coming = following
            if coming is not None:
                yield worker.answer(coming.result())

    return answers


def _checked(path: Path, jobs: Sequence[Job], work: Work) -> list[dict[str, Any]]:
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
        if job is not None and (job.video, job.prompt) != (each["video"], each["prompt"]):
            raise OptionError(
                f"{path} has {job.id} answer {each['prompt']!r} about {each['video']}, which is "
                "not what the manifest asks: give another --out"
            )
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    found = rows.mended(path)
    for each in found:
        if not isinstance(each, dict) or not _FIELDS <= each.keys():
            raise OptionError(f"{path} is no file of captions: give another")
    return found


_FIELDS = {field.name for field in fields(Row)}


# -- joining shards ----------------------------------------------------------------------------


def shard_path(path: Path, shard: tuple[int, int]) -> Path:
    """Where a shard's rows go: captions-2-of-4.jsonl; all of them, where there is one shard."""
    number, count = shard
    if count == 1:
        return path
    return path.with_name(f"{path.stem}-{number + 1}-of-{count}{path.suffix}")


@dataclass(frozen=True)
class Merged:
    """What came of joining shards."""

    rows: int
    errors: tuple[str, ...]  # ids
    missing: tuple[str, ...]  # ids the manifest has and no shard
    unknown: tuple[str, ...]  # ids that are not in the manifest
    doubled: tuple[str, ...]  # ids that several files had; an answer goes before an error


def merge(jobs: Sequence[Job], paths: Sequence[Path], out: Path) -> Merged:
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
    rows.replace(out, kept)
    return Merged(
        len(kept),
        tuple(each["id"] for each in kept if each["error"]),
        tuple(name for name in order if name not in found),
        tuple(sorted(found.keys() - set(order))),
        tuple(dict.fromkeys(doubled)),
    )

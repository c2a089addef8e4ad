"""What is to be done: the jobs of a manifest, how they are answered, and what a row says."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saccade.core.errors import OptionError
from saccade.inputs.checkpoints import Answering
from saccade.inputs.media import FrameSampling
from saccade.inputs.media.media_file import is_visible

VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif", ".webp")
DECIDING = ("dtype", "quantize", "positions")  # of how models are loaded, what changes answers
UNEXPECTED = "unexpected "  # how the error of a row begins that is no fault of the video


@dataclass(frozen=True)
class ClipJob:
    """One video, document, or both to be put into words; empty where there is none."""

    id: str
    video: str  # as the manifest has it
    prompt: str
    path: str  # where it is
    document: str = ""  # as the manifest has it
    text: str = ""  # where that is


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
    document: str = ""


@dataclass(frozen=True)
class Work(Answering):
    """How every job is answered."""

    max_new_tokens: int = 256
    sampling: FrameSampling = field(default_factory=FrameSampling)
    exact: bool = False

    @property
    def key(self) -> str:
        """Names what decides the answers: neither draft nor method do."""
        load = {k: v for k, v in self.load if k in DECIDING and v not in (None, "auto")}
        told = [self.target, self.max_new_tokens, asdict(self.sampling), load]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]

    def row(self, job: ClipJob, **what: Any) -> Row:
        """What came of a job."""
        return Row(job.id, job.video, job.prompt, self.key, document=job.document, **what)


def jobs(manifest: Path, question: str) -> list[ClipJob]:
    """What a manifest asks for, in its order.

    A folder (every video below it), a ``.jsonl`` or ``.csv`` with ``video``, ``document`` (a file
    of long text) or both and perhaps ``id`` and ``prompt``, or a text file with a path a line. A
    line that begins with # is a comment. A relative path is looked for beside the manifest first.
    Raises OptionError, with the line, where it cannot be read or an id comes twice.
    """
    if manifest.is_dir():
        found = sorted(
            path
            for path in manifest.rglob("*")
            if path.suffix.lower() in VIDEOS and is_visible(path)
        )
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

    def placed(name: str) -> str:
        beside = (manifest if manifest.is_dir() else manifest.parent) / name
        return str((beside if beside.exists() else Path(name)).absolute()) if name else ""

    for where, given in entries:
        video, text = (given.get(name) or "" for name in ("video", "document"))
        if not isinstance(video, str) or not isinstance(text, str) or not (video or text):
            raise OptionError(
                f"{where} of {manifest} has no video: id, video, document, prompt are read"
            )
        own = given.get("id")
        name = str((video or text) if own in (None, "") else own)
        if name in seen:
            raise OptionError(f"{where} of {manifest} has the id of {seen[name]}: {name}")
        seen[name] = where
        prompt = str(given.get("prompt") or question)
        jobs.append(ClipJob(name, video, prompt, placed(video), text, placed(text)))
    return jobs


COMMENT = "#"
Entries = Iterator[tuple[str, dict[str, Any]]]
"""(where, to tell people; its fields)"""


def _paths(manifest: Path) -> Entries:
    for number, line in enumerate(_text(manifest).splitlines(), start=1):
        if line.strip() and not line.startswith(COMMENT):
            yield f"line {number}", {"video": line.strip()}


def _json(manifest: Path) -> Entries:
    for number, line in enumerate(_text(manifest).split("\n"), start=1):
        if not line.strip() or line.startswith(COMMENT):
            continue
        try:
            given = json.loads(line)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise OptionError(f"line {number} of {manifest} is no JSON object")
        yield f"line {number}", given


def _csv(manifest: Path) -> Entries:
    lines = _text(manifest).splitlines(keepends=True)
    head = next((at for at, line in enumerate(lines) if not line.startswith(COMMENT)), len(lines))
    reader = csv.DictReader(lines[head:])
    for line in reader:
        if not str(next(iter(line.values()))).startswith(COMMENT):
            yield f"line {head + reader.line_num}", line


def _text(manifest: Path) -> str:
    try:
        return manifest.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{manifest} cannot be read as text: give a list of videos") from error


_READERS: dict[str, Callable[[Path], Entries]] = {".jsonl": _json, ".csv": _csv}

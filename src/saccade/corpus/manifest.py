"""The jobs of ``saccade caption``, the settings by which they are answered, and the answers' rows.

A job is a prompt about a video, a document or both. A manifest is the file or folder that lists the
jobs of a run. A row is a line of the run's output: one job's answer, or why there is none.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saccade.core.errors import OptionError, first_line
from saccade.corpus import json_lines
from saccade.inputs.checkpoints import ModelsAndMethod
from saccade.inputs.media import FrameSampling
from saccade.inputs.media.media_file import is_not_hidden

VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif", ".webp")
ANSWER_SETTINGS = ("dtype", "quantize", "positions")  # Loading options that change answers.
# ``Row.error`` begins with this where the video may not be the cause: after an exception that is no
# ``SaccadeError``, and after the death of workers. A run stops when several consecutive rows have
# such an error.
UNEXPECTED_PREFIX = "unexpected "


@dataclass(frozen=True)
class ClipJob:
    """One video, one document, or both, about which a prompt is asked; "" for what a job lacks.

    ``video`` and ``document`` are spelt as in the manifest. ``video_path`` and ``document_path``
    are the absolute paths of their files.
    """

    id: str
    video: str
    prompt: str
    video_path: str
    document: str = ""
    document_path: str = ""


@dataclass(frozen=True)
class Row:
    """One job's answer, or the reason why there is none.

    ``run`` is ``CaptionSettings.key``. ``tau`` is the number of tokens per target forward.
    ``together`` is how many jobs were answered in one batch, and ``seconds`` is that batch's time.
    ``tokens`` is the length of the answer. ``frames`` and ``visual_tokens`` count what was read of
    the video. ``fallback`` is why drafting stopped, if it did.
    """

    id: str
    video: str
    prompt: str
    run: str = ""
    text: str | None = None
    error: str | None = None
    tokens: int = 0
    finish_reason: str | None = None
    method: str | None = None
    tau: float | None = None
    seconds: float = 0.0
    together: int = 1
    frames: int = 0
    visual_tokens: int = 0
    fallback: str | None = None
    warnings: tuple[str, ...] = ()
    document: str = ""


@dataclass(frozen=True)
class CaptionSettings(ModelsAndMethod):
    """The settings by which every job is answered."""

    max_new_tokens: int = 256
    sampling: FrameSampling = field(default_factory=FrameSampling)
    exact: bool = False

    @property
    def key(self) -> str:
        """A digest of the settings that decide the answers. The draft and the method are left out,
        because speculative decoding does not change greedy answers."""
        load = {k: v for k, v in self.load if k in ANSWER_SETTINGS and v not in (None, "auto")}
        parts = [self.target, self.max_new_tokens, asdict(self.sampling), load]
        if self.exact:  # In bf16 and fp16, answers with ``exact`` may differ from those without.
            parts.append("exact")
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    def row(self, job: ClipJob, **fields: Any) -> Row:
        """Returns a job's row."""
        return Row(job.id, job.video, job.prompt, self.key, document=job.document, **fields)


def read_jobs(manifest: Path, question: str) -> list[ClipJob]:
    """Returns the jobs of a manifest, in its order.

    A manifest is one of these:

    * a folder: every file below it that has an ending of ``VIDEOS`` and is not hidden is a job;
    * a ``.jsonl`` or ``.csv`` file. An entry has ``video``, ``document`` (a file of long text) or
      both. It may have ``prompt``, by default ``question``, and ``id``, by default its ``video`` or
      else its ``document``;
    * a text file with the path of a video on each line.

    A line that begins with # is a comment. A relative path is looked for beside the manifest (in it
    if it is a folder), and then in the working folder. Raises OptionError where the manifest cannot
    be read or has no entries, and, with the line, for an entry that cannot be used or whose id came
    before.
    """
    if manifest.is_dir():
        videos = sorted(
            path
            for path in manifest.rglob("*")
            if path.suffix.lower() in VIDEOS and is_not_hidden(path) and path.is_file()
        )
        names = [str(path.relative_to(manifest)) for path in videos]
        entries = [(name, {"video": name}) for name in names]
    elif manifest.is_file():
        entries = list(_READERS.get(manifest.suffix.lower(), _path_entries)(manifest))
    else:
        raise OptionError(f"no manifest at {manifest}: give a list of videos or a folder of them")
    if not entries:
        raise OptionError(f"{manifest} names no video")
    first_places: dict[str, str] = {}
    jobs = []

    def resolve_path(name: str) -> str:
        if not name:
            return ""
        beside = (manifest if manifest.is_dir() else manifest.parent) / name
        path = beside if beside.exists() else Path(name)
        return str(path.absolute())

    for place, entry in entries:
        video = entry.get("video") or ""
        document = entry.get("document") or ""
        are_texts = isinstance(video, str) and isinstance(document, str)
        if not are_texts or not (video or document):
            raise OptionError(
                f"{place} of {manifest} names no video and no document: the fields that are read "
                "are id, video, document and prompt"
            )
        own_id = entry.get("id")
        job_id = str((video or document) if own_id in (None, "") else own_id)
        if job_id in first_places:
            first_place = first_places[job_id]
            raise OptionError(f"{place} of {manifest} has the id of {first_place}: {job_id}")
        first_places[job_id] = place
        prompt = str(entry.get("prompt") or question)
        jobs.append(
            ClipJob(
                job_id,
                video,
                prompt,
                video_path=resolve_path(video),
                document=document,
                document_path=resolve_path(document),
            )
        )
    return jobs


COMMENT = "#"
Entries = Iterator[tuple[str, dict[str, Any]]]
"""Pairs of where an entry stands, such as "line 3", for error messages, and its fields. An entry of
several lines stands where its last line is."""


def _path_entries(manifest: Path) -> Entries:
    for number, line in enumerate(_read_text(manifest).split("\n"), start=1):
        if line.strip() and not line.startswith(COMMENT):
            yield f"line {number}", {"video": line.strip()}


def _json_entries(manifest: Path) -> Entries:
    for number, line in enumerate(_read_text(manifest).split("\n"), start=1):
        if not line.strip() or line.startswith(COMMENT):
            continue
        yield f"line {number}", json_lines.parse_object(manifest, number, line)


def _csv_entries(manifest: Path) -> Entries:
    text = _read_text(manifest)
    number = 0  # of the last line that the reader has taken
    row_begins = True  # whether the next line begins a row

    def lines_of_rows() -> Iterator[str]:
        """Yields the lines, except comments and blank lines between rows. A line inside a quoted
        cell is always kept, even if it is blank or begins with #."""
        nonlocal number, row_begins
        for line in io.StringIO(text):
            number += 1
            if row_begins and (not line.strip() or line.startswith(COMMENT)):
                continue
            row_begins = False
            yield line

    reader = csv.reader(lines_of_rows())
    header: list[str] | None = None
    try:
        for cells in reader:
            # The reader has taken the row's last line, so the next line begins another row.
            row_begins = True
            if header is None:
                header = [name.strip() for name in cells]
            else:
                yield f"line {number}", dict(zip(header, cells, strict=False))
    except csv.Error as error:
        raise OptionError(f"line {number} of {manifest} is no CSV: {first_line(error)}") from None


def _read_text(manifest: Path) -> str:
    """Returns the text of a manifest, in which every line break of the file is "\\n".

    It is split there only, and not by ``splitlines``, because prompts and names may contain other
    characters that Unicode counts as line breaks.
    """
    try:
        return manifest.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{manifest} cannot be read as text: give a list of videos") from error


_READERS: dict[str, Callable[[Path], Entries]] = {".jsonl": _json_entries, ".csv": _csv_entries}

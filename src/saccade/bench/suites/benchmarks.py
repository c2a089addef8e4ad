"""Loads `benchmarks.yaml`: where the papers' benchmarks lie, and how each paper ran them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from saccade.bench.suites.types import Setting, Task


@dataclass(frozen=True)
class Source:
    """One publication of a benchmark."""

    repos: tuple[str, ...]  # Ids on the hub, the newest first; all of them have the same files.
    # For each split, patterns of file names, where {part} stands for the name of a part (see
    # ``Benchmark``). The files of the first pattern that matches are read.
    files: Mapping[str, tuple[str, ...]]
    # Whether the files are fetched without asking. They are small then, without pictures.
    may_fetch_unasked: bool = False
    gated: bool = False  # Whether its terms have to be accepted on the hub first.
    # If a row of the file has several samples: the column that has them as a list. None if each row
    # is one sample.
    nested: str | None = None
    # The first revision is fetched; None is the default branch. If there are several, media are
    # looked for in all snapshots of the dataset that the hub's cache has.
    revisions: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class Media:
    """Media that lie beside the rows. A part is a subset of the samples (see ``Benchmark``)."""

    # For each part, the folders to search, in this order; "" is for parts that are not listed.
    folders: Mapping[str, tuple[str, ...]]
    # For each part, folders of uncut videos, which are searched after ``folders``. Of an uncut
    # video only the time between the row's start and end is read.
    uncut_folders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packed: tuple[str, ...] = ()  # Patterns of the archives' names, to fetch them.
    unpacked: tuple[str, ...] = ()  # Folders below HF_HOME where lmms-eval unpacks the archives.
    frame_rate: float = 1.0  # Frames per second of a video that is a folder of frames.
    ignores_case: bool = True  # Whether names may differ in case.


@dataclass(frozen=True)
class Join:
    """Pictures in a table of their own. A key in both tables says which picture a question has."""

    files: Mapping[str, tuple[str, ...]]  # Of the pictures' table, as in ``Source.files``.
    picture_key: str  # The column of the pictures' table that holds the key.
    question_key: str  # The column of the questions' table that holds the key.
    picture: str  # The column that holds the picture.


@dataclass(frozen=True)
class Benchmark:
    """The description of one benchmark.

    ``columns`` has, for each role, the names that its column may have. Names that a file lacks are
    skipped. A part is a subset of the samples that can be run by itself, such as "action_count" of
    "mvbench/action_count".
    """

    title: str
    sources: tuple[Source, ...]
    task: Task
    columns: Mapping[str, tuple[str, ...]]  # id, question, answer, options, image, video, ...
    papers: Mapping[str, Setting]  # How each paper ran it; the first is the default.
    media: Media | None = None
    join: Join | None = None
    parts: tuple[str, ...] = ()  # The names of all parts.
    # The column that names a row's part; None where each part has files of its own.
    part_column: str | None = None
    # (column, value): only rows with this value in this column belong to the benchmark.
    row_filter: tuple[str, str] | None = None
    option: str = "{letter}. {text}"  # How an option is written in the prompt.
    # Roles whose columns the files may lack. A column of the role "then" has the question of a
    # later turn.
    optional: frozenset[str] = frozenset({"id", "options", "start", "end", "then"})


def _benchmark(entry: Mapping[str, Any]) -> Benchmark:
    """Returns the benchmark that an entry of the file describes.

    If the entry lists no parts, the parts are the keys of its media folders.
    """
    fields: dict[str, Any] = {name: _lists_to_tuples(value) for name, value in entry.items()}
    fields["sources"] = tuple(Source(**source) for source in fields["sources"])
    fields["papers"] = {
        name: setting
        for paper, stated in fields["papers"].items()
        for name, setting in _settings(paper, **stated)
    }
    if "media" in fields:
        fields["media"] = Media(**fields["media"])
        fields.setdefault("parts", tuple(filter(None, fields["media"].folders)))
    if "join" in fields:
        fields["join"] = Join(**fields["join"])
    if "optional" in fields:
        fields["optional"] = frozenset(fields["optional"])
    return Benchmark(**fields)


def _settings(name: str, turns: bool = False, **stated: Any) -> Iterator[tuple[str, Setting]]:
    """Yields a paper's setting with its name, such as "tabed".

    ``turns`` says whether the paper also asked a second question after each sample's own. One more
    setting then follows for each kind of second question, such as "tabed-captioning".
    """
    setting = Setting(**stated)
    yield name, setting
    if not turns:
        return
    for kind, question in SECOND_TURNS.items():
        source = f"{setting.paper}; second turn as its published code words it"
        second = replace(setting, paper=source, then=question, asks_next_item=not question)
        yield f"{name}-{kind}", second


def _lists_to_tuples(value: Any) -> Any:
    """Returns a value with tuples instead of lists."""
    if isinstance(value, dict):
        return {name: _lists_to_tuples(each) for name, each in value.items()}
    return tuple(map(_lists_to_tuples, value)) if isinstance(value, list) else value


_FILE = yaml.safe_load(Path(__file__).with_name("benchmarks.yaml").read_text(encoding="utf-8"))
SECOND_TURNS: Mapping[str, str | None] = _FILE["turns"]
"""The kinds of second turns and their questions; None stands for the next sample's question."""
BENCHMARKS: Mapping[str, Benchmark] = {
    name: _benchmark(entry) for name, entry in _FILE["benchmarks"].items()
}

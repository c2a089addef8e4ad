"""The papers' benchmarks as `benchmarks.yaml` has them: where each lies, and how papers ran it."""

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

    repos: tuple[str, ...]  # The newest id first; all of them have the same files.
    files: Mapping[str, tuple[str, ...]]  # By split: patterns, of which the first that fits counts.
    small: bool = False  # The files hold no pictures, so they are fetched unasked.
    gated: bool = False
    nested: str | None = None  # The column whose lists hold the rows.
    revisions: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class Media:
    """Media that lie beside the rows."""

    # Folders by part, which are searched in this order; "" stands for parts that are not listed.
    folders: Mapping[str, tuple[str, ...]]
    # Folders of uncut videos, of which the moments between a row's start and end are read.
    whole: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packed: tuple[str, ...] = ()  # Patterns of the archives, for messages.
    unpacked: tuple[str, ...] = ()  # Below HF_HOME, where lmms-eval unpacks them.
    frame_rate: float = 1.0  # Of folders of frames, per second.
    fold: bool = True  # Whether names may differ in case.


@dataclass(frozen=True)
class Join:
    """Pictures kept apart from the questions."""

    files: Mapping[str, tuple[str, ...]]
    picture_key: str  # The column of the pictures' table that holds the key.
    question_key: str  # The column of the questions' table that holds the key.
    picture: str  # The column that holds the picture.


@dataclass(frozen=True)
class Benchmark:
    """The description of one benchmark.

    ``columns`` has, for each role, the names that its column may have. Names that a file lacks are
    skipped.
    """

    title: str
    sources: tuple[Source, ...]
    task: Task
    columns: Mapping[str, tuple[str, ...]]  # id, question, answer, options, image, video, ...
    papers: Mapping[str, Setting]  # How each paper ran it; the first is the default.
    media: Media | None = None
    join: Join | None = None
    parts: tuple[str, ...] = ()
    # The column that names a row's part; None where each part has files of its own.
    part_column: str | None = None
    where: tuple[str, str] | None = None  # A column and the value that its rows have.
    option: str = "{letter}. {text}"
    optional: frozenset[str] = frozenset({"id", "options", "start", "end", "then"})


def _benchmark(entry: Mapping[str, Any]) -> Benchmark:
    """Makes a benchmark of an entry of the file. Its media folders give the parts by default."""
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
    """Yields a paper's setting with its name, and one for each of its second turns."""
    setting = Setting(**stated)
    yield name, setting
    for kind, question in SECOND_TURNS.items() if turns else ():
        source = f"{setting.paper}; second turn as its published code words it"
        yield f"{name}-{kind}", replace(setting, paper=source, then=question, next=not question)


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

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

    repos: tuple[str, ...]  # the newest id first; all of them hold the same files
    files: Mapping[str, tuple[str, ...]]  # by split, patterns of which the first that fits counts
    small: bool = False  # the files hold no pictures, so they may be fetched unasked
    gated: bool = False
    nested: str | None = None  # a column whose list holds the rows
    revisions: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class Media:
    """Media that lie beside the rows."""

    folders: Mapping[str, tuple[str, ...]]  # by part ("" is every part), the first that has it
    whole: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # uncut: mind start and end
    packed: tuple[str, ...] = ()  # patterns of the archives, for messages
    unpacked: tuple[str, ...] = ()  # below HF_HOME, where lmms-eval unpacks them
    frame_rate: float = 1.0  # of folders of frames, per second
    fold: bool = True  # names may differ in case


@dataclass(frozen=True)
class Join:
    """Pictures kept apart from the questions."""

    files: Mapping[str, tuple[str, ...]]
    key: str  # of the pictures
    on: str  # of the questions
    column: str


@dataclass(frozen=True)
class Benchmark:
    """What is known of one benchmark. Of a column's names those that exist are used."""

    title: str
    sources: tuple[Source, ...]
    task: Task
    columns: Mapping[str, tuple[str, ...]]  # id, question, answer, options, image, video, ...
    papers: Mapping[str, Setting]  # how each ran it, the one that counts unasked first
    media: Media | None = None
    join: Join | None = None
    parts: tuple[str, ...] = ()
    part_column: str | None = None  # holds the part; without it each part has its own files
    where: tuple[str, str] | None = None  # a column and the value its rows have
    option: str = "{letter}. {text}"
    optional: frozenset[str] = frozenset({"id", "options", "start", "end", "then"})


def _benchmark(said: Mapping[str, Any]) -> Benchmark:
    """A benchmark of the file. Media in a folder for each part name the parts."""
    given: dict[str, Any] = {name: _tuples(value) for name, value in said.items()}
    given["sources"] = tuple(Source(**source) for source in given["sources"])
    given["papers"] = {
        name: setting
        for paper, stated in given["papers"].items()
        for name, setting in _settings(paper, **stated)
    }
    if "media" in given:
        given["media"] = Media(**given["media"])
        given.setdefault("parts", tuple(filter(None, given["media"].folders)))
    if "join" in given:
        given["join"] = Join(**given["join"])
    if "optional" in given:
        given["optional"] = frozenset(given["optional"])
    return Benchmark(**given)


def _settings(name: str, turns: bool = False, **stated: Any) -> Iterator[tuple[str, Setting]]:
    """A paper's setting by its name, and one for each of its second turns."""
    setting = Setting(**stated)
    yield name, setting
    for kind, question in TURNS.items() if turns else ():
        worded = f"{setting.paper}; second turn as its published code words it"
        yield f"{name}-{kind}", replace(setting, paper=worded, then=question, next=not question)


def _tuples(value: Any) -> Any:
    """The same without lists."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_FILE = yaml.safe_load(Path(__file__).with_name("benchmarks.yaml").read_text(encoding="utf-8"))
TURNS: Mapping[str, str | None] = _FILE["turns"]
"""Kinds of second turns, and what they ask; None: what the next sample does."""
BENCHMARKS: Mapping[str, Benchmark] = {
    name: _benchmark(said) for name, said in _FILE["benchmarks"].items()
}

"""The papers' benchmarks, read where they lie on disk, in the layouts they are published in.

`benchmarks` says of each which files and columns it has, `protocols` how the papers ran it; one
loader reads them all. An item that cannot be used is listed with its reason, and the others go on.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from saccade.bench.suites.benchmarks import BENCHMARKS, Benchmark, Source
from saccade.bench.suites.layouts import (
    IMAGE,
    Index,
    LayoutError,
    Place,
    Row,
    Rows,
    file_name,
    missing_shards,
    read_rows,
)
from saccade.bench.suites.protocols import IMAGE as MARK
from saccade.bench.suites.protocols import SETTINGS
from saccade.bench.suites.types import Item, Medium, Setting
from saccade.core.errors import OptionError, VideoInputError
from saccade.inputs import media
from saccade.inputs.media import Clip, Sampling

logger = logging.getLogger(__name__)

SEED = 42  # of the samples; SpecVLM's published code draws with it, and in this way
LETTERS = "ABCDEFGHIJ"
_LETTERED = re.compile(r"\(?([A-J])[).:]\s*(.*)")
_MARKS = re.compile(r"<image>|\{image#\d+\}")
_CAPTION = re.compile(r"Caption\s*#\s*\d+\s*:(.*?)(?=Caption\s*#\s*\d+\s*:|\Z)", re.DOTALL)


# -- a benchmark on disk -----------------------------------------------------------------------


@dataclass(frozen=True)
class Unusable:
    """A sample that cannot be used, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class Dataset:
    """A benchmark whose files were found. Of `setting.samples`, drawn by `SEED`, the usable ones
    come first in the order they were drawn; a sample that cannot be used is replaced by the next.
    """

    name: str
    setting: Setting
    benchmark: Benchmark
    tables: tuple[tuple[str, Rows], ...]  # part, rows
    part: str = ""  # the only one wanted, of a benchmark whose parts are a column
    pictures: Rows | None = None  # of a join
    index: Index | None = None  # of media beside the rows
    remedy: str = ""  # the command that fetches what is missing

    def items(self) -> Iterator[Item]:
        """Every usable item. Raises `OptionError` where the rows turn out to be damaged."""
        return (entry for entry in self.entries() if isinstance(entry, Item))

    def unusable(self) -> tuple[Unusable, ...]:
        """What was drawn and cannot be used: a medium that is missing, a row that is not whole."""
        return tuple(entry for entry in self.entries() if isinstance(entry, Unusable))

    def entries(self) -> Iterator[Item | Unusable]:
        """Usable or not, in order; nothing is decoded or unpacked yet."""
        numbers, wanted = self._numbers, self.setting.samples
        if wanted is not None:
            order = np.random.default_rng(SEED).permutation(len(numbers))
            numbers = [numbers[place] for place in order]
        usable = 0
        while numbers and (wanted is None or usable < wanted):
            drawn = numbers if wanted is None else numbers[: wanted - usable]
            numbers = numbers[len(drawn) :]
            for entry in self._read(sorted(drawn)):
                usable += isinstance(entry, Item)
                yield entry

    @cached_property
    def _numbers(self) -> list[tuple[int, int]]:
        """Every row that belongs to the benchmark: its table and its number there."""
        column, value = self.benchmark.where or (self.benchmark.part_column, self.part)
        found = []
        for place, (_, rows) in enumerate(self.tables):
            kept = list(range(len(rows)))
            if column and value:
                with self._damage():
                    kept = [n for n, has in enumerate(rows.column(column)) if has == value]
            found += [(place, number) for number in kept]
        return found

    @cached_property
    def _joined(self) -> Mapping[str, int]:
        """Rows of the pictures by their key."""
        if self.pictures is None or self.benchmark.join is None:
            return {}
        with self._damage():
            keys = self.pictures.column(self.benchmark.join.key)
        return {str(key): number for number, key in enumerate(keys)}

    def _read(self, drawn: Sequence[tuple[int, int]]) -> Iterator[Item | Unusable]:
        for place, (part, rows) in enumerate(self.tables):
            numbers = [number for table, number in drawn if table == place]
            taken = rows.take(numbers)
            for number in numbers:
                with self._damage():
                    row = next(taken)
                source = _first(row, self.benchmark.columns.get("id", ()))
                name = "/".join(str(word) for word in (part, source) if word not in ("", None))
                name = f"{name}#{number}"
                try:
                    yield self._item(name, part, row)
                except LayoutError as fault:
                    yield Unusable(name, str(fault))

    def _item(self, name: str, part: str, row: Row) -> Item:
        """The sample as the paper puts it. Raises `LayoutError` where it cannot be."""
        known, prompt, task = self.benchmark, self.setting.prompt, self.benchmark.task
        columns = known.columns
        raw = _first(row, columns["question"])
        if not isinstance(raw, str) or not raw.strip():
            raise LayoutError("it has no question")
        answers: tuple[str, ...] = ()
        code = task == "text"  # its spaces count
        question = raw if code else _MARKS.sub("", raw).strip()
        options = _texts(row, columns.get("options", ()))
        if task == "choice" and not options:
            question, options = _split_options(question)
        if task == "choice" and "{question}" not in prompt:
            task, options = "caption", ()  # a free description has no right letter
        elif task == "choice":
            if len(options) < 2:
                raise LayoutError("it has no options to choose from")
            answers = _letter(_first(row, columns["answer"]), options)
        else:
            answers = _answers(_first(row, columns["answer"]), verbatim=code)
        shown = self._media(name, part, row)
        if MARK in prompt and prompt.count(MARK) != len(shown):
            what = f"it has {len(shown)} images where the prompt has {prompt.count(MARK)}"
            raise LayoutError(what)
        lines = (
            known.option.format(letter=c, text=t) for c, t in zip(LETTERS, options, strict=False)
        )
        words = {
            "question": question,
            "options": _MARKS.sub("", "\n".join(lines)),
        }
        captions = [_MARKS.sub("", text).strip() for text in _CAPTION.findall(raw)]
        words |= {f"caption{n}": text for n, text in enumerate(captions, 1) if text}
        try:
            asked = re.sub(r"\{(question|options|caption\d)\}", lambda m: words[m[1]], prompt)
        except KeyError as lack:
            raise LayoutError(f"its question has no {lack.args[0]}") from None
        used = {column for names in columns.values() for column in names}
        meta = {
            key: value
            for key, value in row.items()
            if key not in used and isinstance(value, str | int | float | bool)
        }
        then = _texts(row, columns.get("then", ()))
        return Item(name, task, asked, shown, answers, options, then, {**meta, "part": part})

    def _media(self, name: str, part: str, row: Row) -> tuple[Medium, ...]:
        known, columns = self.benchmark, self.benchmark.columns
        if known.join is not None:
            key = str(row.get(known.join.on))
            if key not in self._joined:
                raise LayoutError(f"there is no image {key[:80]!r}")
            read = partial(self._joined_image, self._joined[key], key[:80])
            return (Medium("image", key[:80], read),)
        if "video" in columns:
            return (self._video(part, row),)
        found = []
        for column in columns.get("image", ()):
            values = row.get(column)
            for value in values if isinstance(values, list) else [values]:
                if value is not None:
                    found.append(self._image(value, f"{name} {column}"))
        if "image" in columns and not found:
            raise LayoutError("it has no image")
        return tuple(found)

    def _video(self, part: str, row: Row) -> Medium:
        beside, name = self.benchmark.media, _first(row, self.benchmark.columns["video"])
        if beside is None or self.index is None or not isinstance(name, str) or not name:
            raise LayoutError("it names no video")
        start = end = None
        try:
            place = self.index.find(name, _of_part(beside.folders, part))
        except LayoutError:
            if not (whole := _of_part(beside.whole, part)):
                raise
            place = self.index.find(name, whole)
            start, end = row.get("start"), row.get("end")
        read = partial(_read_video, place, self.setting.frames, start, end, beside.frame_rate)
        return Medium("video", file_name(name), read)

    def _image(self, value: Any, label: str) -> Medium:
        """A picture in the row (bytes, or a struct with them), or the name of a file."""
        data = value.get("bytes") if isinstance(value, Mapping) else value
        name = value.get("path") if isinstance(value, Mapping) else None
        if isinstance(data, bytes) and data:
            label = file_name(name) if name else label
            return Medium("image", label, partial(_read_image, data, label))
        path = name or data
        if not isinstance(path, str) or not path:
            raise LayoutError("an image of it is empty")
        if self.index is None:
            raise LayoutError(f"{file_name(path)} is not in its row and nothing is beside it")
        beside = self.benchmark.media
        place = self.index.find(path, _of_part(beside.folders, "") if beside else ("",))
        return Medium("image", file_name(path), partial(_read_place, place))

    def _joined_image(self, number: int, label: str) -> np.ndarray:
        assert self.pictures is not None and self.benchmark.join is not None
        with self._damage():
            row = next(iter(self.pictures.take([number])))
        try:
            medium = self._image(row[self.benchmark.join.column], label)
        except LayoutError as fault:
            raise VideoInputError(f"{label}: {fault}", "damaged") from None
        image = medium.read()
        assert isinstance(image, np.ndarray)
        return image

    def _damage(self) -> _Damage:
        return _Damage(self.benchmark.title, self.remedy)


def open_dataset(
    name: str,
    root: str | Path | None = None,
    *,
    paper: str | None = None,
    split: str | None = None,
) -> Dataset:
    """A benchmark as a suite: `name` is one of `BENCHMARKS`, or "mvbench/action_count", a part.

    `root` is its folder, a folder that holds it, or a snapshot of the hub; without it the local hub
    cache is searched, and annotations without pictures may be fetched. `paper` is one of the
    benchmark's `SETTINGS` (default: the first), `split` another split than the paper's. Raises
    `OptionError`, with the command that helps, where files are missing, cut short or changed.
    """
    key, part = _parse(name)
    known = BENCHMARKS[key]
    settings = SETTINGS[key]
    if paper is not None and paper not in settings:
        raise OptionError(f"{known.title} has no setting {paper!r}: use {', '.join(settings)}")
    setting = settings[paper or next(iter(settings))]
    if split is not None:
        setting = replace(setting, split=split)
    splits = [word for source in known.sources for word in source.files]
    if setting.split not in splits:
        raise OptionError(f"{known.title} has no split {split!r}: use {', '.join(splits)}")
    fitting = [source for source in known.sources if setting.split in source.files]
    parts = () if known.part_column or not known.parts else (part,) if part else known.parts
    search = _Search(known, setting.split, parts or ("",), Path(root) if root is not None else None)
    for look in (search.folders, search.fetched):
        for source, folder in ((s, f) for s in fitting for f in look(s)):
            if dataset := search.load(source, folder, setting):
                only = part if known.part_column else ""
                return replace(dataset, name=f"{key}/{part}" if part else key, part=only)
    raise search.absent(fitting[0])


def message_parts(item: Item) -> tuple[str | Medium, ...]:
    """The item as a chat message: media first, or where the prompt marks them."""
    texts = item.question.split(MARK)
    if len(texts) != len(item.media) + 1:
        return (*item.media, item.question)
    found: list[str | Medium] = []
    for text, medium in zip(texts, (*item.media, None), strict=True):
        found += [text.strip()] if text.strip() else []
        found += [medium] if medium is not None else []
    return tuple(found)


# -- finding it --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Search:
    """Where to look for one split of a benchmark, and what to say where it is not."""

    known: Benchmark
    split: str
    parts: tuple[str, ...]
    root: Path | None

    def folders(self, source: Source) -> Iterator[Path]:
        """Folders that may be the dataset's own, the likeliest first."""
        if self.root is None:
            yield from self._cached(source)
            return
        if not self.root.is_dir():
            raise OptionError(f"there is no folder {self.root}: {self.remedy(source)}")
        names = [repo.split("/") for repo in source.repos]
        inner = [Path(repo[-1]) for repo in names] + [Path(*repo) for repo in names]
        inner += [Path("--".join(("datasets", *repo))) for repo in names]
        for base in (self.root, *(self.root / path for path in inner)):
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
            suffixes = known.media.suffixes
            index = Index(
                self._roots(source, folder), suffixes, suffixes != IMAGE, known.media.fold
            )
            if index.bare:
                what = "images" if known.media.suffixes == IMAGE else "videos"
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
        others = [
            split
            for other in self.known.sources
            for split in other.files
            for folder in (self.folders(other) if root is not None else ())
            if any(_matching(folder, other.files[split], part) for part in self.parts)
        ]
        if others:
            return OptionError(
                f"{where} has no {self.split!r} split of {title} but {others[0]!r}: ask for "
                f"split={others[0]!r}, or {self.remedy(source)}"
            )
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
        with _Damage(self.known.title, remedy):
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
            home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
            found += [p for name in self.known.media.unpacked if (p := Path(home, name)).is_dir()]
        return tuple(found)

    def _cached(self, source: Source) -> Iterator[Path]:
        """Snapshots in the local cache of the hub's client."""
        from huggingface_hub import constants

        for repo in source.repos:
            name = "--".join(("datasets", *repo.split("/")))
            yield from _snapshots(Path(constants.HF_HUB_CACHE, name))

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


class _Damage:
    """Says what to do about a `LayoutError` of a whole file."""

    def __init__(self, title: str, remedy: str) -> None:
        self.title, self.remedy = title, remedy

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, fault: Any, trace: Any) -> None:
        if isinstance(fault, LayoutError):
            raise OptionError(f"{self.title}: {fault}: {self.remedy}") from None


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


def _of_part(folders: Mapping[str, tuple[str, ...]], part: str) -> tuple[str, ...]:
    return folders.get(part, folders.get("", ()))


# -- what a row says ---------------------------------------------------------------------------


def _first(row: Row, names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _texts(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    """The texts of these columns, lists included, without padding and without their letters."""
    values: list[Any] = []
    for name in names:
        value = row.get(name)
        values += value if isinstance(value, list) else [value]
    texts = [text for text in (str(v).strip() for v in values if v is not None) if text]
    texts = [text for text in texts if text != "N/A"]
    matches = [_LETTERED.fullmatch(text) for text in texts]
    if texts and all(m and m[1] == letter for m, letter in zip(matches, LETTERS, strict=False)):
        texts = [match[2] for match in matches if match]
    return tuple(texts)


def _split_options(text: str) -> tuple[str, tuple[str, ...]]:
    """A question and its options where both are in one text, an option a line."""
    question: list[str] = []
    options: list[str] = []
    for line in text.splitlines():
        match = _LETTERED.fullmatch(line.strip())
        if match and len(options) < len(LETTERS) and match[1] == LETTERS[len(options)]:
            options.append(match[2].strip())
        elif options:
            options[-1] = f"{options[-1]} {line.strip()}".strip()
        else:
            question.append(line)
    return "\n".join(question).strip(), tuple(options)


def _letter(answer: Any, options: Sequence[str]) -> tuple[str, ...]:
    """The letter of the right option, given as a letter, a number or the option's text."""
    letters = LETTERS[: len(options)]
    if answer is None or answer == "" or answer == -1:
        return ()
    if isinstance(answer, int) and 0 <= answer < len(letters):
        return (letters[answer],)
    text = str(answer).strip()
    bare = text.strip("(). ").upper()
    same = [
        c for c, option in zip(letters, options, strict=False) if option.lower() == text.lower()
    ]
    match = _LETTERED.fullmatch(text)
    for found in (same[0] if same else "", bare, match[1] if match else ""):
        if len(found) == 1 and found in letters:
            return (found,)
    raise LayoutError(f"its answer {text[:40]!r} is none of its options")


def _answers(answer: Any, verbatim: bool = False) -> tuple[str, ...]:
    """Every answer that is right, each once."""
    values = answer if isinstance(answer, list) else [] if answer is None else [answer]
    if verbatim:
        return tuple(str(value) for value in values)
    texts = (text.strip() for value in values for text in str(value).split("<OR>"))
    return tuple(dict.fromkeys(text for text in texts if text))


# -- reading a medium --------------------------------------------------------------------------


def _read_video(place: Place, frames: int | None, start: Any, end: Any, frame_rate: float) -> Clip:
    """The video's frames from `start` to `end` seconds; a folder's are `frame_rate` a second."""
    path = place.local()
    folder = path.is_dir()
    scale = frame_rate if folder else 1.0  # a folder read by count is taken for one a second
    first, last = (
        float(t) * scale if isinstance(t, int | float) and not isinstance(t, bool) else None
        for t in (start, end)
    )
    clip = media.read(path, Sampling(num_frames=frames, start=first, end=last))
    if not folder:
        return clip
    return replace(
        clip,
        timestamps=clip.timestamps / scale,
        duration=clip.duration / scale,
        fps=clip.fps * scale,
        sampled_fps=clip.sampled_fps * scale,
    )


def _read_image(data: bytes, label: str) -> np.ndarray:
    try:
        return media.read_image(data)
    except VideoInputError as fault:
        words = str(fault).replace("the input", label, 1)
        raise VideoInputError(words, fault.code, fault.limit) from None


def _read_place(place: Place) -> np.ndarray:
    return media.read_image(place.local())

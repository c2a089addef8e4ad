"""The papers' benchmarks, read where they lie on disk, in the layouts they are published in.

`benchmarks.yaml` says of each which files and columns it has and how the papers ran it; one loader
reads them all. An item that cannot be used is listed with its reason, and the others go on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from saccade.bench.suites import wording
from saccade.bench.suites.archives import file_name
from saccade.bench.suites.benchmarks import Benchmark
from saccade.bench.suites.places import Index, Place
from saccade.bench.suites.rows import Row, Rows
from saccade.bench.suites.types import MARK, Item, LayoutError, Medium, Setting, in_a_row
from saccade.core.errors import OptionError, VideoInputError
from saccade.inputs import media
from saccade.inputs.media import Clip, FrameSampling

SEED = 42  # of the samples; SpecVLM's published code draws with it, and in this way


@contextmanager
def damage(title: str, remedy: str) -> Iterator[None]:
    """Says what to do about a `LayoutError` of a whole file."""
    try:
        yield
    except LayoutError as fault:
        raise OptionError(f"{title}: {fault}: {remedy}") from None


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
        found = (entry for entry in self.entries() if isinstance(entry, Item))
        return in_a_row(found) if self.setting.next else found

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
                source = wording.first(row, self.benchmark.columns.get("id", ()))
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
        raw = wording.first(row, columns["question"])
        if not isinstance(raw, str) or not raw.strip():
            raise LayoutError("it has no question")
        answers: tuple[str, ...] = ()
        code = task == "text"  # its spaces count
        question = raw if code else wording.MARKS.sub("", raw).strip()
        options = wording.texts(row, columns.get("options", ()))
        if task == "choice" and not options:
            question, options = wording.split_options(question)
        if task == "choice" and "{question}" not in prompt:
            task, options = "caption", ()  # a free description has no right letter
        elif task == "choice":
            if len(options) < 2:
                raise LayoutError("it has no options to choose from")
            answers = wording.letter(wording.first(row, columns["answer"]), options)
        else:
            answers = wording.answers(wording.first(row, columns["answer"]), verbatim=code)
        shown = self._media(name, part, row)
        if MARK in prompt and prompt.count(MARK) != len(shown):
            what = f"it has {len(shown)} images where the prompt has {prompt.count(MARK)}"
            raise LayoutError(what)
        lettered = zip(wording.LETTERS, options, strict=False)
        lines = (known.option.format(letter=letter, text=text) for letter, text in lettered)
        words = {
            "question": question,
            "options": wording.MARKS.sub("", "\n".join(lines)),
        }
        captions = [wording.MARKS.sub("", text).strip() for text in wording.CAPTION.findall(raw)]
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
        then = wording.texts(row, columns.get("then", ()))
        then += (self.setting.then,) if self.setting.then else ()
        told = {**meta, "part": part}
        return Item(name, task, asked, shown, answers, options, then, meta=told)

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
        beside, name = self.benchmark.media, wording.first(row, self.benchmark.columns["video"])
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
        return Medium("image", file_name(path), lambda: media.read_image(place.local()))

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

    def _damage(self) -> AbstractContextManager[None]:
        return damage(self.benchmark.title, self.remedy)


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


def _of_part(folders: Mapping[str, tuple[str, ...]], part: str) -> tuple[str, ...]:
    return folders.get(part, folders.get("", ()))


def _read_video(place: Place, frames: int | None, start: Any, end: Any, frame_rate: float) -> Clip:
    """The video's frames from `start` to `end` seconds; a folder's are `frame_rate` a second."""
    path = place.local()
    folder = path.is_dir()
    scale = frame_rate if folder else 1.0  # a folder read by count is taken for one a second
    first, last = (
        float(t) * scale if isinstance(t, int | float) and not isinstance(t, bool) else None
        for t in (start, end)
    )
    clip = media.read(path, FrameSampling(num_frames=frames, start=first, end=last))
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

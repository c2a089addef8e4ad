"""The papers' benchmarks, read from disk in the layouts in which they are published.

`benchmarks.yaml` describes the files and columns of each, and how the papers ran it (`Benchmark`,
`Setting`). The module `search` finds the files, and `Dataset` reads all benchmarks: it turns rows
of their tables into items, which are questions about media. A row that cannot be used is listed
with the reason, and the others go on.
"""

from __future__ import annotations

import math
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
from saccade.bench.suites.media_index import MediaIndex, MediaPlace
from saccade.bench.suites.rows import Row, Rows
from saccade.bench.suites.types import (
    IMAGE_MARK,
    Item,
    LayoutError,
    Medium,
    MissingMediumError,
    Setting,
    with_next_items,
)
from saccade.core.errors import OptionError, VideoInputError
from saccade.inputs import media
from saccade.inputs.media import Clip, FrameSampling

# SpecVLM's published code draws its samples with this seed, in the way of `Dataset.entries`.
SAMPLE_SEED = 42


@contextmanager
def explain_damage(title: str, remedy: str) -> Iterator[None]:
    """Turns a `LayoutError` of a whole file into an `OptionError` that says what to do."""
    try:
        yield
    except LayoutError as error:
        raise OptionError(f"{title}: {error}: {remedy}") from None


@dataclass(frozen=True)
class Unusable:
    """A sample that cannot be used, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class Dataset:
    """A benchmark whose files were found.

    Each row of its tables is a sample. A part is a subset of the samples that can be run by itself,
    such as "action_count" of "mvbench/action_count".

    If `setting.samples` is set, that many usable samples are drawn by `SAMPLE_SEED`. The samples
    drawn first are read in the order of the files. For each of them that cannot be used, one more
    is drawn, and these are read after all the others.
    """

    name: str
    setting: Setting  # How the chosen paper ran the benchmark.
    benchmark: Benchmark
    tables: tuple[tuple[str, Rows], ...]  # Each with the part that its rows belong to.
    # The selected part, or "" for all. It is set only if a column names the part of each row.
    # Otherwise each part has files of its own, and `tables` has only those of the selected parts.
    part: str = ""
    pictures: Rows | None = None  # The table of pictures, if they are kept apart (`Join`).
    media_index: MediaIndex | None = None  # The media that lie beside the rows.
    remedy: str = ""  # The command that fetches what is missing.

    def items(self) -> Iterator[Item]:
        """Yields every usable item. Raises `OptionError` where the rows are damaged.

        In some settings the last turn of an item asks the question of the item after it. Then each
        item has the one after it as `next_item`, and the last item has the first.
        """
        items = (entry for entry in self.entries() if isinstance(entry, Item))
        return with_next_items(items) if self.setting.asks_next_item else items

    def entries(self) -> Iterator[Item | Unusable]:
        """Yields the samples, usable or not; nothing is decoded or unpacked yet."""
        wanted_count = self.setting.samples
        if wanted_count is None:
            yield from self._read(self._row_numbers)
            return
        order = np.random.default_rng(SAMPLE_SEED).permutation(len(self._row_numbers))
        undrawn = [self._row_numbers[place] for place in order]
        usable_count = 0
        while undrawn and usable_count < wanted_count:
            missing_count = wanted_count - usable_count
            drawn = undrawn[:missing_count]
            undrawn = undrawn[missing_count:]
            for entry in self._read(sorted(drawn)):
                usable_count += isinstance(entry, Item)
                yield entry

    @cached_property
    def _row_numbers(self) -> list[tuple[int, int]]:
        """Every row that belongs to the benchmark or its selected part, in the order of the files,
        as (index in ``tables``, number of the row there)."""
        # If the benchmark is only some rows of its files, ``row_filter`` has the column and the
        # value of these rows. Otherwise a part may be selected, by the column that names parts. If
        # there is no such column, or no part is selected, every row is taken.
        column, value = self.benchmark.row_filter or (self.benchmark.part_column, self.part)
        row_numbers = []
        for table, (_, rows) in enumerate(self.tables):
            rows_of_part = list(range(len(rows)))
            if column and value:
                with self._explain_damage():
                    rows_of_part = [
                        n for n, cell in enumerate(rows.column(column)) if cell == value
                    ]
            row_numbers += [(table, number) for number in rows_of_part]
        return row_numbers

    @cached_property
    def _picture_rows(self) -> Mapping[str, int]:
        """The row of each picture in ``pictures``, by its key; empty without such a table."""
        if self.pictures is None or self.benchmark.join is None:
            return {}
        with self._explain_damage():
            keys = self.pictures.column(self.benchmark.join.picture_key)
        return {str(key): number for number, key in enumerate(keys)}

    def _read(self, drawn: Sequence[tuple[int, int]]) -> Iterator[Item | Unusable]:
        """Reads rows, given as (table, row number) in ascending order."""
        for table, (part, rows) in enumerate(self.tables):
            numbers = [number for drawn_table, number in drawn if drawn_table == table]
            selected_rows = rows.rows_at(numbers)
            for number in numbers:
                with self._explain_damage():
                    row = next(selected_rows)
                own_id = wording.first_value(row, self.benchmark.columns.get("id", ()))
                name = "/".join(str(word) for word in (part, own_id) if word not in ("", None))
                name = f"{name}#{number}"
                try:
                    yield self._item(name, part, row)
                except LayoutError as error:
                    yield Unusable(name, str(error))

    def _item(self, name: str, part: str, row: Row) -> Item:
        """Returns the item that a row stands for, worded as in the paper.

        Raises `LayoutError` for a row that cannot be used.
        """
        benchmark, prompt, task = self.benchmark, self.setting.prompt, self.benchmark.task
        columns = benchmark.columns
        raw = wording.first_value(row, columns["question"])
        if not isinstance(raw, str) or not raw.strip():
            raise LayoutError("it has no question")
        # The question, its options and the right answers, without the prompt around them.
        answers: tuple[str, ...] = ()
        # Reasoning and code (the task "text") keep their texts as they are: spaces matter in code.
        is_verbatim = task == "text"
        question = raw if is_verbatim else wording.IMAGE_MARKS.sub("", raw).strip()
        options = wording.column_texts(row, columns.get("options", ()))
        if task == "choice" and not options:
            question, options = wording.split_options(question)
        if task == "choice" and "{question}" not in prompt:
            # A prompt that leaves the question out asks for a description instead. Then no letter
            # is right, and the answer is scored as a caption.
            task, options = "caption", ()
        elif task == "choice":
            if len(options) < 2:
                raise LayoutError("it has no options to choose from")
            answers = wording.right_letter(wording.first_value(row, columns["answer"]), options)
        else:
            answers = wording.right_answers(
                wording.first_value(row, columns["answer"]), verbatim=is_verbatim
            )
        media_items = self._media(name, part, row)
        if IMAGE_MARK in prompt and prompt.count(IMAGE_MARK) != len(media_items):
            marks = prompt.count(IMAGE_MARK)
            raise LayoutError(f"it has {len(media_items)} images where the prompt has {marks}")
        # The prompt, with the question in the place of its placeholders.
        lettered = zip(wording.LETTERS, options, strict=False)
        lines = (benchmark.option.format(letter=letter, text=text) for letter, text in lettered)
        # What replaces {question} and {options}. The captions that a question lists as "Caption #1:
        # ...", "Caption #2: ..." replace {caption1}, {caption2} and so on.
        words = {
            "question": question,
            "options": wording.IMAGE_MARKS.sub("", "\n".join(lines)),
        }
        captions = [
            wording.IMAGE_MARKS.sub("", text).strip()
            for text in wording.NUMBERED_CAPTION.findall(raw)
        ]
        words |= {f"caption{n}": text for n, text in enumerate(captions, 1) if text}
        try:
            question = re.sub(r"\{(question|options|caption\d)\}", lambda m: words[m[1]], prompt)
        except KeyError as missing:
            raise LayoutError(f"its question has no {missing.args[0]}") from None
        # Later turns, and what else the row says.
        later_questions = wording.column_texts(row, columns.get("then", ()))
        if self.setting.then:
            later_questions += (self.setting.then,)
        used_columns = {column for names in columns.values() for column in names}
        meta = {
            key: value
            for key, value in row.items()
            if key not in used_columns and isinstance(value, str | int | float | bool)
        }
        meta["part"] = part
        return Item(name, task, question, media_items, answers, options, later_questions, meta=meta)

    def _media(self, name: str, part: str, row: Row) -> tuple[Medium, ...]:
        """Returns the media of a row: a picture from the table of pictures, a video, or the
        pictures in the row's own columns. Raises `LayoutError` where they are missing."""
        benchmark, columns = self.benchmark, self.benchmark.columns
        if benchmark.join is not None:
            key = str(row.get(benchmark.join.question_key))
            if key not in self._picture_rows:
                raise LayoutError(f"there is no image {key[:80]!r}")
            read = partial(self._read_joined_image, self._picture_rows[key], key[:80])
            return (Medium("image", key[:80], read),)
        if "video" in columns:
            return (self._video(part, row),)
        items = []
        for column in columns.get("image", ()):
            values = row.get(column)
            for value in values if isinstance(values, list) else [values]:
                if value is not None:
                    items.append(self._image(value, f"{name} {column}"))
        if "image" in columns and not items:
            raise LayoutError("it has no image")
        return tuple(items)

    def _video(self, part: str, row: Row) -> Medium:
        media_layout = self.benchmark.media
        name = wording.first_value(row, self.benchmark.columns["video"])
        if (
            media_layout is None
            or self.media_index is None
            or not isinstance(name, str)
            or not name
        ):
            raise LayoutError("it names no video")
        start = end = None
        try:
            place = self.media_index.find(name, _folders_of_part(media_layout.folders, part))
        except MissingMediumError:
            # The row says which part of the uncut video the missing one is.
            if not (uncut_folders := _folders_of_part(media_layout.uncut_folders, part)):
                raise
            place = self.media_index.find(name, uncut_folders)
            start = _seconds(row, "start")
            end = _seconds(row, "end")
        read = partial(_read_video, place, self.setting.frames, start, end, media_layout.frame_rate)
        return Medium("video", file_name(name), read)

    def _image(self, value: Any, label: str) -> Medium:
        """Returns the picture of a cell, which holds its bytes or the name of its file.

        The cell may also be a struct of ``bytes`` and ``path``.
        """
        data = value.get("bytes") if isinstance(value, Mapping) else value
        name = value.get("path") if isinstance(value, Mapping) else None
        if isinstance(data, bytes) and data:
            label = file_name(name) if name else label
            return Medium("image", label, partial(_read_image, data, label))
        path = name or data
        if not isinstance(path, str) or not path:
            raise LayoutError("an image of it is empty")
        if self.media_index is None:
            raise LayoutError(f"{file_name(path)} is not in its row and nothing is beside it")
        media_layout = self.benchmark.media
        place = self.media_index.find(
            path, _folders_of_part(media_layout.folders, "") if media_layout else ("",)
        )
        return Medium("image", file_name(path), lambda: media.read_image(place.local()))

    def _read_joined_image(self, number: int, label: str) -> np.ndarray:
        """Reads the picture in this row of the table of pictures."""
        assert self.pictures is not None and self.benchmark.join is not None
        with self._explain_damage():
            row = next(iter(self.pictures.rows_at([number])))
        try:
            medium = self._image(row[self.benchmark.join.picture], label)
        except LayoutError as error:
            raise VideoInputError(f"{label}: {error}", "damaged") from None
        image = medium.read()
        assert isinstance(image, np.ndarray)
        return image

    def _explain_damage(self) -> AbstractContextManager[None]:
        return explain_damage(self.benchmark.title, self.remedy)


def message_parts(item: Item) -> tuple[str | Medium, ...]:
    """Returns the item as a chat message: media first, or where the prompt marks them."""
    texts = item.question.split(IMAGE_MARK)
    if len(texts) != len(item.media) + 1:
        return (*item.media, item.question)
    parts: list[str | Medium] = []
    for text, medium in zip(texts, (*item.media, None), strict=True):
        parts += [text.strip()] if text.strip() else []
        parts += [medium] if medium is not None else []
    return tuple(parts)


def _folders_of_part(folders: Mapping[str, tuple[str, ...]], part: str) -> tuple[str, ...]:
    """Returns the folders of a part; those under "" are for parts that are not listed."""
    return folders.get(part, folders.get("", ()))


def _seconds(row: Row, column: str) -> float | None:
    """Returns a cell's seconds, or None where the row has none. Raises `LayoutError` for a cell
    that is neither empty nor a number of seconds."""
    cell: Any = row.get(column)
    if cell is None or cell == "" or cell != cell:  # A table may write "none" as NaN.
        return None
    try:
        seconds = float(cell)
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(cell, bool) or not math.isfinite(seconds):
        raise LayoutError(f"its {column} is {cell!r}, which is no number of seconds")
    return seconds


def _read_video(
    place: MediaPlace,
    frames: int | None,
    start: float | None,
    end: float | None,
    frame_rate: float,
) -> Clip:
    """Reads frames from `start` to `end` seconds; a folder has `frame_rate` frames a second."""
    path = place.local()
    is_folder = path.is_dir()
    # ``media.read`` takes a folder for a video of one frame a second. If its frames are 3 a second,
    # what happens 2 s into the video is read as happening at 6 s. So start and end are multiplied
    # by 3, and the times of the result are divided by 3.
    time_scale = frame_rate if is_folder else 1.0
    sampling = FrameSampling(
        num_frames=frames,
        start=None if start is None else start * time_scale,
        end=None if end is None else end * time_scale,
    )
    clip = media.read(path, sampling)
    if not is_folder:
        return clip
    return replace(
        clip,
        timestamps=clip.timestamps / time_scale,
        duration=clip.duration / time_scale,
        fps=clip.fps * time_scale,
        sampled_fps=clip.sampled_fps * time_scale,
    )


def _read_image(data: bytes, label: str) -> np.ndarray:
    try:
        return media.read_image(data)
    except VideoInputError as error:
        message = str(error).replace("the input", label, 1)
        raise VideoInputError(message, error.code, error.limit) from None

"""Reads the rows of a benchmark's files: parquet, JSON, JSON lines or an .xlsx workbook.

A row maps the names of columns to values. Which columns mean what is in ``benchmarks.yaml``.
"""

from __future__ import annotations

import re
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from saccade.bench.suites.types import LayoutError
from saccade.core.errors import OptionError, how_to_install
from saccade.core.json_text import read_json

Row = Mapping[str, Any]

MAX_SHEET_BYTES = 64 << 20  # A workbook is a zip archive, whose files may be this large unpacked.


@dataclass(frozen=True)
class InMemoryRows:
    """Rows that are in memory."""

    rows: tuple[Row, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns. A column counts if any row has it."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row))

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.rows]

    def rows_at(self, numbers: Sequence[int]) -> Iterator[Row]:
        return (self.rows[number] for number in numbers)


@dataclass(frozen=True)
class ParquetRows:
    """Rows of parquet files, read one row group at a time because pictures make files large."""

    files: tuple[Path, ...]

    @cached_property
    def _groups(self) -> tuple[tuple[int, Path, int], ...]:
        """For each row group the number of its first row among the rows of all files, its file, and
        the group's number in that file.

        One more entry follows, which stands for no group. It begins with the total number of rows.
        """
        groups, start = [], 0
        for path in self.files:
            with _open_parquet(path) as file:
                for group in range(file.num_row_groups):
                    groups.append((start, path, group))
                    start += file.metadata.row_group(group).num_rows
        return (*groups, (start, Path(), -1))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns. A column counts if any file has it."""
        return tuple(dict.fromkeys(name for path in self.files for name in _column_names(path)))

    def __len__(self) -> int:
        return self._groups[-1][0]

    def column(self, name: str) -> list[Any]:
        values: list[Any] = []
        for path in self.files:
            with _open_parquet(path) as file:
                if name in file.schema_arrow.names:
                    values += file.read(columns=[name]).column(name).to_pylist()
                else:
                    values += [None] * file.metadata.num_rows
        return values

    def rows_at(self, numbers: Sequence[int]) -> Iterator[Row]:
        starts = [start for start, _, _ in self._groups]
        for number in numbers:
            start, path, group = self._groups[bisect_right(starts, number) - 1]
            rows = _read_group(path, group, path.stat().st_mtime_ns)
            yield rows.slice(number - start, 1).to_pylist()[0]


Rows = InMemoryRows | ParquetRows
"""Rows in a fixed order. Those of parquet files are read on demand."""


def read_rows(files: Sequence[Path], nested: str | None = None) -> Rows:
    """Returns the rows of files of one kind.

    `nested` names a column of lists, whose entries are the rows that are returned. Each has its own
    fields and those of the row of the file that it comes from. It is ignored for parquet files.

    Raises `LayoutError` for a file that is cut short or damaged, holds no list of rows, or is only
    a Git LFS pointer.
    """
    for path in files:
        with path.open("rb") as file:
            if file.read(23) == b"version https://git-lfs":
                raise LayoutError(f"{path.name} is only a Git LFS pointer, not the file itself")
    if files[0].suffix == ".parquet":
        table = ParquetRows(tuple(files))
        len(table)  # This reads the metadata of every file, so a damaged one is reported now.
        return table
    rows: list[Row] = []
    for path in files:
        try:
            file_rows = _read_workbook(path) if path.suffix == ".xlsx" else _read_json(path)
            rows += _unnest(file_rows, nested, path) if nested else file_rows
        except (OptionError, LayoutError):
            raise
        except Exception:  # What the reader of workbooks raises over a damaged one is not known.
            raise LayoutError(f"{path.name} is cut short or damaged") from None
    return InMemoryRows(tuple(rows))


def _unnest(rows: Sequence[Row], nested: str, path: Path) -> list[Row]:
    """Returns the rows that rows of a file have in lists (see :func:`read_rows`)."""
    all_rows: list[Row] = []
    for row in rows:
        inner_rows = row.get(nested) or []
        if not isinstance(inner_rows, list) or not all(
            isinstance(each, dict) for each in inner_rows
        ):
            raise LayoutError(f"a {nested} of {path.name} is not a list of rows")
        all_rows += [{**row, **inner} for inner in inner_rows]
    return all_rows


def missing_shards(files: Sequence[Path]) -> list[str]:
    """Returns the names of missing files, as far as the names of the given files tell.

    Only names that count the files tell: "rows-00000-of-00003.parquet" is the first of three. If a
    name counts more than 10,000 files, only the first 10,000 of them are looked for.
    """
    names = {path.name for path in files}
    expected: set[str] = set()
    for name in names:
        if match := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})(\..*)", name):
            stem, count, suffix = match.groups()
            # At most 10,000 names are made, whatever number the name gives.
            expected |= {
                f"{stem}-{n:05d}-of-{count}{suffix}" for n in range(min(int(count), 10000))
            }
    return sorted(expected - names)


def _import_library(name: str) -> Any:
    """Imports a library that only benchmarks need. Raises OptionError where it is missing."""
    try:
        return import_module(name)
    except ImportError:
        message = f"reading benchmarks needs {name.partition('.')[0]}: {how_to_install('datasets')}"
        raise OptionError(message) from None


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    parquet = _import_library("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (_import_library("pyarrow").ArrowException, OSError):
        raise LayoutError(f"{path.name} is cut short or damaged") from None


def _column_names(path: Path) -> list[str]:
    with _open_parquet(path) as file:
        names: list[str] = file.schema_arrow.names
        return names


@lru_cache(maxsize=2)  # Rows are read in order, so the next one is mostly in the same group.
def _read_group(path: Path, group: int, modified_ns: int) -> Any:
    # ``modified_ns`` is not read. It makes the cache miss once the file was changed.
    with _open_parquet(path) as file:
        return file.read_row_group(group)


def _read_json(path: Path) -> list[Row]:
    """Returns the rows of a JSON file, or of a .jsonl file with one row a line."""
    rows = read_json(path)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise LayoutError(f"{path.name} is not a list of rows")
    return rows


def _read_workbook(path: Path) -> list[Row]:
    """Returns the first sheet of an .xlsx as texts, with the first row as names.

    Empty rows are left out, and so are columns without a name.
    """
    excel = _import_library("openpyxl")
    with path.open("rb") as file:
        if any(part.file_size > MAX_SHEET_BYTES for part in zipfile.ZipFile(file).infolist()):
            raise LayoutError(f"{path.name} has a sheet of over {MAX_SHEET_BYTES >> 20} MiB")
        book = excel.load_workbook(file, read_only=True, data_only=True)
        lines = [
            [None if value is None else str(value) for value in line]
            for line in book.worksheets[0].iter_rows(values_only=True)
        ]
    names, *rows = lines
    named_places = [(place, name) for place, name in enumerate(names) if name]
    return [
        {name: row[place] for place, name in named_places if place < len(row)}
        for row in rows
        if any(row)
    ]

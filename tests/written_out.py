"""Answers written out by hand, and a report's tables read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from saccade.bench import records, runner
from saccade.bench.records import Answer
from saccade.inputs import Loaded

SUITE = "handmade"


class Embedded(NamedTuple):
    """The pair of the package."""

    target: Loaded
    draft: Loaded


class Ran(NamedTuple):
    """A run that was not interrupted."""

    plan: runner.Benchmark
    folder: Path
    answers: list[Answer]


def answer(
    item: str = "a",
    method: str = "sd",
    accepted: tuple[int, ...] = (),
    drafted: tuple[int, ...] = (),
    **more: Any,
) -> Answer:
    """An answer of a chain draft; every round but one that is told ends in the target's token."""
    fields: dict[str, Any] = {
        "suite": SUITE,
        "turn": 0,
        "nodes": drafted,
        "own": len(accepted),
        "ids": tuple(range(10)),
        **more,
    }
    return Answer(item=item, method=method, accepted=accepted, drafted=drafted, **fields)


def lines(folder: Path) -> list[dict[str, Any]]:
    """A run's answers as they stand in the file, without the line about the run."""
    every = map(json.loads, (folder / records.RESULTS_FILE).read_text().splitlines()[1:])
    return [line for line in every if records.ITEM_DONE_KEY not in line]


def tables(markdown: str) -> list[dict[str, dict[str, str]]]:
    """Every table of a report: method -> column -> cell."""
    all_tables: list[dict[str, dict[str, str]]] = []
    head: list[str] | None = None
    for line in markdown.splitlines():
        if not line.startswith("|"):
            head = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if head is None:
            head = cells
            all_tables.append({})
        elif not set(line) <= set("|-: "):
            all_tables[-1][cells[0].strip("`")] = dict(zip(head, cells, strict=True))
    return all_tables

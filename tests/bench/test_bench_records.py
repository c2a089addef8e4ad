"""Claims about a run's file: what was written is read, and a killed run can be gone on with."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from helpers import few
from written_out import Embedded, Ran, answer, lines

from saccade.bench import records, runner
from saccade.bench.records import Answer
from saccade.core.errors import OptionError
from saccade.core.result import Result, RoundRecord, Timings

pytestmark = pytest.mark.usefixtures("unchecked")

NUMBERS = dict(
    **dict(
        total=1.5,
        first=0.25,
        vision=0.1,
        prefill=0.2,
        guide=0.3,
        draft_prefill=0.35,
        beside_prefill=0.6,
        beside_guide=0.1,
        beside_draft=0.7,
        planning=0.15,
        caption=0.8,
        caption_hidden=0.6,
        draft=0.4,
        verify=0.5,
    ),
    captures=0.05,
    **dict(decode=0.9, counted=2, prompt_tokens=30, visual_tokens=20, draft_visual_tokens=2),
    **dict(reused_tokens=4, own=1, peak=123),
)
ROUNDS: dict[str, Any] = dict(ids=(5, 6, 7), accepted=(1,), drafted=(3,), nodes=(7,))
WORDS: dict[str, Any] = dict(text="é\n\u2028ü", fallback="no room", error="none", task="open")
OTHERS: dict[str, Any] = dict(identical=True, answers=("yes", "aye"), meta={"nested": [1, {}]})
FIELDS: dict[str, Any] = {**NUMBERS, **ROUNDS, **WORDS, **OTHERS}
FULL = Answer(suite="s", item="s-1", turn=1, method="sd", **FIELDS)


def test_every_field_comes_back(tmp_path: Path) -> None:
    """Claim: an answer read is the answer written, field by field, line breaks included.

    Fails if a field is dropped or comes back as a list. Control: no field of it has its default.
    """
    blank = Answer(suite="", item="", turn=0, method="")
    same = [f.name for f in fields(Answer) if getattr(FULL, f.name) == getattr(blank, f.name)]
    assert not same
    about = {"plan": {"seed": 1}, "fingerprint": "f"}
    records.append_answers(tmp_path, about, [FULL, blank])
    records.append_answers(tmp_path, {"another": "line"}, [replace(FULL, turn=2)])
    assert records.read_and_repair_run(tmp_path) == (about, [FULL, blank, replace(FULL, turn=2)])


def test_fields_of_a_result() -> None:
    """Claim: a result of ours is recorded with its rounds counted by hand.

    Fails if nodes and depths, or accepted tokens and rounds, change places.
    """
    tree = RoundRecord((4, 5, 6), (-1, -1, 0), (4, 6), 9, "bonus", 0.25, 0.5)
    cut = RoundRecord((4,), (-1,), (4,), None, None, 0.5, 0.25)
    times = Timings(
        **dict(vision=1, prefill=2, guide=3, draft_prefill=9, decode=4, first_token=5, total=11),
        beside_prefill=6,
        beside_guide=1,
        beside_draft=8,
        planning=12,
        caption=7,
        caption_hidden=5,
        captures=10,
    )
    result = Result(
        *((4, 6, 9, 4), "text", "sage", "length", (tree, cut), times, 30, 20, 2),
        fallback_reason="why",
        reused_tokens=7,
        peak_bytes=99,
    )
    row = Answer(suite="", item="", turn=0, method="", **records.result_fields(result))
    expected: dict[str, Any] = {
        **{"ids": (4, 6, 9, 4), "text": "text", "total": 11, "first": 5, "vision": 1},
        **{
            "prefill": 2,
            "guide": 3,
            "draft_prefill": 9,
            "decode": 4,
            "beside_prefill": 6,
            "beside_guide": 1,
            "beside_draft": 8,
            "planning": 12,
            "caption": 7,
            "caption_hidden": 5,
            "captures": 10,
            "draft": 0.75,
            "verify": 0.75,
            "counted": 3,
        },
        **{"accepted": (2, 1), "drafted": (2, 1), "nodes": (3, 1), "own": 1, "fallback": "why"},
        **{"prompt_tokens": 30, "visual_tokens": 20, "draft_visual_tokens": 2},
        **{"reused_tokens": 7, "peak": 99},
    }
    assert {name: getattr(row, name) for name in expected} == expected


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    """Claim: reading cuts an unfinished last item off the file, and what follows is whole again.

    Fails if a torn line is kept: the next answer would be glued to it.
    """
    path = tmp_path / records.RESULTS_FILE
    records.append_answers(tmp_path, {"fingerprint": "f"}, [answer("a"), answer("b")])
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert [each.item for each in records.read_and_repair_run(tmp_path)[1]] == ["a"]
    assert path.read_bytes() == whole[: whole.index(b"\n", whole.index(b'{"done')) + 1]
    records.append_answers(tmp_path, {}, [answer("b")])
    assert path.read_bytes() == whole
    assert [each["item"] for each in lines(tmp_path)] == ["a", "b"]


def torn(ran: Ran, folder: Path, keep: int) -> int:
    """A copy of a run torn within the last item, ``keep`` bytes of its last line left."""
    whole = (ran.folder / records.RESULTS_FILE).read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    (folder / records.RESULTS_FILE).write_bytes(whole[: last + keep])
    return last


@pytest.mark.parametrize("keep", few([40, 0], 1))
def test_a_torn_item_is_run_again(ran: Ran, embedded: Embedded, tmp_path: Path, keep: int) -> None:
    """Claim: an item that was not written in full is run again, none of its answers twice.

    Fails if an item counts as done once any line of it is there. ``keep=0``: torn between lines.
    """
    torn(ran, tmp_path, keep)
    answers = runner.run_benchmark(ran.plan, *embedded, tmp_path)
    keys = [(each.suite, each.item, each.method, each.turn) for each in answers]
    assert keys == [(each.suite, each.item, each.method, each.turn) for each in ran.answers]


def test_no_run(tmp_path: Path) -> None:
    """Claim: a folder without a run, or with an empty file, is refused in a sentence."""
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(OptionError, match="holds no results.jsonl"):
            records.read_and_repair_run(folder)
    (tmp_path / records.RESULTS_FILE).write_text('{"torn')
    with pytest.raises(OptionError, match="empty"):
        records.read_and_repair_run(tmp_path)
    assert not (tmp_path / "nowhere").exists()


def test_a_run_that_cannot_be_read_is_refused(ran: Ran, tmp_path: Path) -> None:
    """Claim: a damaged line, and a row of another version, are refused in a sentence."""
    header, row, *_ = (ran.folder / records.RESULTS_FILE).read_text().splitlines()
    other_version = json.dumps({**json.loads(row), "seconds_of_nothing": 1})
    for rows, why in (
        ([header, row[:-5]], "line 2 of .* is no JSON object"),
        ([header, "[]"], "line 2 of .* is no JSON object"),
        ([header, other_version], "another version"),
    ):
        (tmp_path / records.RESULTS_FILE).write_text("\n".join(rows) + "\n")
        for read in (records.read_and_repair_run, records.read_run):
            with pytest.raises(OptionError, match=why):
                read(tmp_path)


def test_a_packed_run_is_finished(ran: Ran, embedded: Embedded, tmp_path: Path) -> None:
    """Claim: a packed run is read as the unpacked one is, without an incomplete item; a damaged one
    is refused in a sentence; and no new run is made beside it, whose report would be the old one's.
    """
    packed = tmp_path / records.PACKED_FILE
    lines = (ran.folder / records.RESULTS_FILE).read_bytes().splitlines(keepends=True)
    packed.write_bytes(gzip.compress(b"".join([*lines, lines[1]])))
    assert records.read_run(tmp_path)[1] == ran.answers
    with pytest.raises(OptionError, match="holds a finished run"):
        runner.run_benchmark(ran.plan, *embedded, tmp_path)
    for damaged in (b"", packed.read_bytes()[:-20], b"no gzip"):
        packed.write_bytes(damaged)
        with pytest.raises(OptionError, match="cannot be unpacked|empty"):
            records.read_run(tmp_path)


def test_another_plans_run(ran: Ran, embedded: Embedded, tmp_path: Path) -> None:
    """Claim: a folder that holds another plan's run is refused and left as it was.

    Fails if runs of unlike plans are mixed. Control: with the plan's own fingerprint it goes on.
    """
    path = tmp_path / records.RESULTS_FILE
    path.write_bytes((ran.folder / records.RESULTS_FILE).read_bytes())
    before = path.read_bytes()
    with pytest.raises(OptionError, match="another plan"):
        runner.run_benchmark(replace(ran.plan, seed=1), *embedded, tmp_path)
    assert path.read_bytes() == before
    assert runner.run_benchmark(ran.plan, *embedded, tmp_path) == ran.answers
    assert path.read_bytes() == before


def test_lines_are_json(ran: Ran) -> None:
    """Claim: a line about the run, one an answer, one when an item is done: each readable JSON."""
    first, *rest = (ran.folder / records.RESULTS_FILE).read_text().split("\n")[:-1]
    assert set(json.loads(first)) == {"plan", "fingerprint", "environment"}
    every = [json.loads(line) for line in rest]
    assert [line for line in every if records.ITEM_DONE_KEY not in line] == [
        json.loads(json.dumps(asdict(each))) for each in ran.answers
    ]
    assert sum(records.ITEM_DONE_KEY in line for line in every) == len(list(ran.plan.items()))

"""Claims about the table of peers. Needs no peer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.commands import peers as command
from lab.peers import rows, turns
from lab.peers.rows import GENERATE, REFERENCES, ROWS, TRAINED, Task, Turn
from saccade.core.errors import OptionError

ROOT = Path(__file__).parents[2]
TASK = Task("frames.npy", (1, 4, 28), 1.0, "What happens?", 1)
EMPTY: Mapping[str, Any] = {"versions": {}, "answers": {}, "errors": {}, "runs": []}


def _run(row: str, total: float, ids: tuple[int, ...] = (5, 6, 7)) -> dict[str, Any]:
    return {"row": row, "ids": ids, "first": 1.0, "total": total, "early": 1, "load": 0.0}


def test_the_table_is_of_medians_over_generate_and_has_every_row() -> None:
    """Claim: medians over turns stand beside their ratio to `generate`'s; a row that failed says
    why and one that was not asked says so; none is missing."""
    report = {
        "versions": {"saccade": {"torch": "2", "transformers": "5"}},
        "answers": {GENERATE: (5, 6, 7)},
        "errors": {"FlashSpec": "OSError: a | b"},
        "runs": [
            *(_run(GENERATE, total) for total in (3.0, 2.0, 100.0)),
            *(_run("Saccade, `auto`", total) for total in (1.5, 1.5, 1.0625)),
        ],
    }
    lines = {line.split(" | ")[0].strip("| "): line for line in rows.table(report).splitlines()[2:]}
    assert list(lines) == [row.name for row in ROWS]
    assert lines[GENERATE] == (
        f"| {GENERATE} | 1.00 | 1 (1.00x) | 1 (1.00x) | yes | transformers 5, torch 2 |  |"
    )
    assert "| 1.00 | 4 (4.00x) | 2 (2.00x) | yes |" in lines["Saccade, `auto`"]
    assert lines["FlashSpec"].endswith("shows both models the clip; OSError: a \\| b |")
    assert lines["vLLM, eager"].endswith("| not run |")


def test_an_answer_is_compared_with_generate_and_then_at_its_own_positions() -> None:
    """Claim: the first token that differs is told, and whether the engine's own positions explain
    it; an answer that ends early differs where it ends."""
    answers = {GENERATE: (1, 2, 3), TRAINED: (1, 9, 8)}
    assert rows.compare_answer((1, 2, 3), TRAINED, answers) == "yes"
    assert rows.compare_answer((1, 2), GENERATE, answers) == "differs at token 3"
    assert rows.compare_answer((1, 9, 8), TRAINED, answers).endswith(
        "2; at its own positions equal"
    )
    assert rows.compare_answer((1, 9, 7), TRAINED, answers).endswith("2; at its own positions at 3")
    assert rows.compare_answer((1, 2, 3), GENERATE, {}) == "not compared"


def test_tokens_that_came_first_are_no_decoding() -> None:
    """Claim: what came with the first token counts for the whole alone, and nothing after it is
    no rate at all."""
    turn = Turn(ids=(1, 2, 3, 4, 5), first=1.0, total=2.0, early=3)
    assert rows.figures(turn) == {"first": 1.0, "decode": 2.0, "whole": 2.5}
    assert rows.figures(replace(turn, early=5))["decode"] == 0.0


def test_a_missing_environment_says_so_by_name(tmp_path: Path) -> None:
    """Claim: an environment that is not there is an error that names it and what makes it."""
    worker = turns.Worker("vllm", TASK, tmp_path, 5, Path(".cache/nobody/bin/python"))
    assert worker.ask("vLLM, eager", 2) == {
        "error": "no environment .cache/nobody: `make peers` makes it"
    }
    assert worker.versions == {}


def test_a_worker_tells_what_it_lacks_and_how_it_ended(tmp_path: Path) -> None:
    """Claim: an engine that cannot be imported is an error of its row, and one that is killed is
    one as well; neither ends the comparison."""
    worker = turns.Worker("nobody", TASK, tmp_path, 60, Path(sys.executable))
    assert worker.ask("x", 2) == {
        "error": "ModuleNotFoundError: No module named 'lab.peers.nobody'"
    }
    assert worker._process is not None
    worker._process.kill()
    assert "it ended" in worker.ask("x", 2)["error"] and "it ended" in worker.ask("x", 2)["error"]
    worker.close()


class _Fake:
    """Answers at once; vLLM's compiled row is out of order."""

    versions = {"torch": "2"}

    def __init__(self, engine: str, *given: object) -> None:
        self.rows: list[str] = []

    def ask(self, row: str, tokens: int) -> dict[str, Any]:
        self.rows.append(row)
        if row == "vLLM, compiled":
            return {"error": "out of order"}
        return {"ids": [len(self.rows)], "first": 1.0, "total": 2.0, "early": 1}

    def close(self) -> None: ...


def test_turns_go_round_and_the_first_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: rows take turns, in reverse every other time; a row that failed is asked no more, the
    turn that warms up is not kept, and what is kept is on disk."""
    monkeypatch.setattr(turns, "Worker", _Fake)
    monkeypatch.setattr(turns, "PAUSE_SECONDS", 0.0)
    chosen = (GENERATE, "vLLM, eager", "vLLM, compiled")
    plan = turns.Plan(scene=(1, 4, 56), repeat=2, rows=chosen)
    messages: list[str] = []
    report = turns.run(plan, tmp_path / "peers.json", messages.append)
    rows = [GENERATE, "vLLM, eager"]
    assert [one["row"] for one in report["runs"]] == [*rows[::-1], *rows]
    assert report["errors"] == {"vLLM, compiled": "out of order"}
    assert list(report["answers"]) == [GENERATE, *REFERENCES]
    assert [line for line in messages if "compiled" in line] == ["turn 0 of 2: vLLM, compiled"]
    assert json.loads((tmp_path / "peers.json").read_text())["runs"] == report["runs"]


def test_an_unknown_row_is_refused() -> None:
    """Claim: a row that is not there is refused by name, with those that are."""
    with pytest.raises(OptionError, match="'SGLang'.*Saccade"):
        command.peers(row=["SGLang"])

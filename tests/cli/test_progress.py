"""What commands show while they work, and what is said when they are stopped."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import typer
from rich.console import RenderableType

from saccade.bench.comparison import TimedRuns
from saccade.bench.peers import TimedRun
from saccade.cli import application, interruption_hint, terminal
from saccade.cli.compare import ComparisonProgress
from saccade.cli.terminal import console

Call = Callable[..., tuple[int, str, str]]


def _run(seconds: float) -> TimedRun:
    return TimedRun((1, 2, 3), seconds, seconds, 2, None)


def test_a_comparison_is_a_table_that_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: after each run the table has the methods that have run, and the line says which runs
    now and how long the rest takes at the pace so far. Control: before the first run there is no
    table and no time."""
    now = 0.0
    monkeypatch.setattr("saccade.cli.compare.time", SimpleNamespace(monotonic=lambda: now))
    updates: list[tuple[RenderableType, str]] = []
    progress = ComparisonProgress(lambda view, line: updates.append((view, line)), 2)
    timed = TimedRuns({name: [] for name in ("ar", "sd", "std")}, {})
    for iteration in range(3):
        for name in timed.runs:
            progress.start_run(name, iteration)
            now += 10.0
            if iteration:
                timed.runs[name].append(_run(1.0))
                progress.end_run(timed)
    assert updates[0] == ("", "warming up: ar")
    rows = [getattr(view, "row_count", 0) for view, _ in updates]
    assert rows == [0, 0, 0, 0, 1, 2, 3, 3, 3]
    assert updates[4][1] == "run 1 of 2: sd, about 0:00:50 left"
    assert updates[-1][1].endswith("std, about 0:00:10 left")


def test_the_view_is_in_place_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim: a terminal sees the view and the line; a log sees no table."""
    for is_terminal in (True, False):
        page = io.StringIO()
        monkeypatch.setattr(terminal, "err", console(file=page, force_terminal=is_terminal))
        monkeypatch.setattr(terminal, "LOG_INTERVAL_SECONDS", 0.0)
        with terminal.live_view() as display:
            display("a table", "the line")
        assert "the line" in page.getvalue() and ("a table" in page.getvalue()) == is_terminal


def test_every_help_is_whole(call: Call) -> None:
    """Claim: also the commands of a group are described in whole sentences."""
    for group in ("shapes", "real", "bench"):
        code, printed, _ = call(group, "--help")
        commands = " ".join(printed.split("Commands:")[1].split())
        assert code == 0 and "..." not in commands


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a command that is stopped says what stays and the command that goes on, and ends with
    130. Control: one that has nothing under way says nothing."""
    monkeypatch.setattr("sys.argv", ["saccade", "caption", "my list.txt"])
    app, app_before = typer.Typer(), typer.Typer()

    def stopped(words: list[str]) -> None:
        with interruption_hint.explain_interruption("the rows of a.jsonl stay"):
            raise KeyboardInterrupt

    def stopped_before(words: list[str]) -> None:
        raise KeyboardInterrupt

    app.command()(stopped)
    app_before.command()(stopped_before)
    for commands, has_hint in ((app, True), (app_before, False)):
        page = io.StringIO()
        monkeypatch.setattr(application, "err", console(file=page, width=200))
        with pytest.raises(SystemExit) as ended:
            application.run_application(commands)
        assert ended.value.code == 130
        assert ("the rows of a.jsonl stay" in page.getvalue()) == has_hint
        assert ("saccade caption 'my list.txt'" in page.getvalue()) == has_hint

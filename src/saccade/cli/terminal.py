"""What all commands share: consoles, lines of progress, logging, and common options."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.logging import RichHandler
from rich.text import Text

LOG_INTERVAL_SECONDS = 30.0  # Between lines of progress where there is no terminal.
PIPED_WIDTH = 120  # Characters a line where standard output is no terminal.


def console(**options: Any) -> Console:
    """Returns a console without emoji or highlighting.

    Square brackets are markup: print with ``markup=False`` what a user or a file may have named.
    """
    return Console(highlight=False, emoji=False, **options)


out = console()
err = console(stderr=True)
if not out.is_terminal:
    out = console(width=PIPED_WIDTH)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="The answer's text and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")]


def prepare(threads: int | None, verbose: bool, *, quiet: bool = False) -> None:
    """Sets up logging and threads, and imports torch, which takes seconds by itself."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.ERROR,
        format="%(message)s",
        handlers=[RichHandler(console=err, show_path=False, show_time=verbose, show_level=verbose)],
    )
    with status("starting PyTorch and Transformers", quiet=quiet):
        from transformers.utils import logging as hf_logging

        from saccade.core import free_cores
        from saccade.inputs.loading import use_threads

    if not quiet:  # A warning that other programs keep the machine busy needs no --verbose.
        free_cores.log.setLevel(logging.WARNING)
    if not verbose:
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
    use_threads(threads)


def silence_output() -> None:
    """Stops all output of this process, where another process prints for it."""
    out.quiet = err.quiet = True


@contextmanager
def status(what: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Displays a line on a terminal with what is going on; yields a function that changes it.

    Nothing is displayed with ``quiet`` or where standard error is no terminal.
    """
    if quiet or not err.is_terminal:
        yield lambda text: None
        return
    with err.status(Text(what)) as line:
        yield lambda text: line.update(Text(text))


@contextmanager
def progress_line(what: str, *, quiet: bool = False) -> Iterator[Callable[[str, bool], None]]:
    """Displays the progress of long work: a changing line on a terminal, which begins as ``what``.

    Elsewhere the latest text is printed once in ``LOG_INTERVAL_SECONDS`` at most, and the last text
    in any case. With ``quiet`` nothing is displayed. Yields a function to call with a text, and
    with whether it is the last one.
    """
    if quiet or err.is_terminal:
        with status(what, quiet=quiet) as update:
            yield lambda text, last: update(text)
        return
    logged_at = time.monotonic()

    def tell(text: str, last: bool) -> None:
        nonlocal logged_at
        if last or time.monotonic() - logged_at >= LOG_INTERVAL_SECONDS:
            logged_at = time.monotonic()
            err.print(text, markup=False, soft_wrap=True)

    yield tell


@contextmanager
def live_view() -> Iterator[Callable[[RenderableType, str], None]]:
    """Displays something that changes, such as a table that fills.

    Yields a function to call with what to display and with a line of text. On a terminal both are
    redrawn in place, the line below. Otherwise only the line is printed, now and then.
    """
    if err.is_terminal:
        with Live(console=err, transient=True, auto_refresh=False) as live:

            def update(view: RenderableType, line: str) -> None:
                live.update(Group(view, Text(line, style="dim")), refresh=True)

            yield update
        return
    with progress_line("") as tell:
        yield lambda view, line: tell(line, False)


class ProgressCallback(Protocol):
    """A function that is called with the current step, and with its progress where known."""

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None: ...


@contextmanager
def progress_bars(*, quiet: bool) -> Iterator[ProgressCallback]:
    """Displays a bar for one step after another on a terminal; a bar without a total pulses.

    Nothing is displayed with ``quiet`` or where standard error is no terminal.
    """
    if quiet or not err.is_terminal:
        yield lambda what, done=0, total=None: None
        return
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    step_column = TextColumn("{task.description}", markup=False)
    count_column = TextColumn("{task.fields[count]}", markup=False)
    columns = step_column, BarColumn(), count_column, TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int = 0, total: int | None = None) -> None:
            if what not in tasks:
                for earlier in tasks.values():
                    bars.update(earlier, visible=False)
                tasks[what] = bars.add_task(what, total=total, count="")
            count = "" if total is None else f"{done}/{total}"
            bars.update(tasks[what], completed=done, total=total, count=count)

        yield tell

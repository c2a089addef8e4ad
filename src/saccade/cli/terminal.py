"""What every command shares: consoles, a status line, logging, and the options they all take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

EVERY = 30.0  # seconds between lines of progress where there is no terminal

PIPED_WIDTH = 120


def console(**how: Any) -> Console:
    """A console that prints what it is given: no :word: becomes a picture, no number a colour."""
    return Console(highlight=False, emoji=False, **how)


out, err = console(), console(stderr=True)
if not out.is_terminal:
    out = console(width=PIPED_WIDTH)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="The answer's text and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")]


def prepare(threads: int | None, verbose: bool, *, quiet: bool = False) -> None:
    """Threads and logging, before anything heavy runs; importing torch takes seconds by itself."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.ERROR,
        format="%(message)s",
        handlers=[RichHandler(console=err, show_path=False)],
    )
    with status("starting PyTorch and Transformers", quiet=quiet):
        from transformers.utils import logging as hf_logging

        from saccade.inputs.loading import use_threads

    if not verbose:
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
    use_threads(threads)


def hush() -> None:
    """Nothing more is said here: of several processes, one speaks."""
    out.quiet = err.quiet = True


@contextmanager
def status(what: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line that says what is going on, on a terminal only; yields how to change it."""
    if quiet or not err.is_terminal:
        yield lambda text: None
        return
    with err.status(Text(what)) as line:
        yield lambda text: line.update(Text(text))


@contextmanager
def pace(what: str, *, quiet: bool = False) -> Iterator[Callable[[str, bool], None]]:
    """How far long work is: a line that changes on a terminal, one now and then in a log.

    Yields what is called with it and with whether that is the end.
    """
    if quiet or err.is_terminal:
        with status(what, quiet=quiet) as update:
            yield lambda text, last: update(text)
        return
    said = time.monotonic()

    def tell(text: str, last: bool) -> None:
        nonlocal said
        if last or time.monotonic() - said >= EVERY:
            said = time.monotonic()
            err.print(text, markup=False, soft_wrap=True)

    yield tell


class Tell(Protocol):
    """Called with what is going on, and how far it is where that is known."""

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None: ...


@contextmanager
def steps(*, quiet: bool) -> Iterator[Tell]:
    """A bar for one step after the other, on a terminal only; it pulses where no end is known."""
    if quiet or not err.is_terminal:
        yield lambda what, done=0, total=None: None
        return
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    what, count = "{task.description}", "{task.fields[count]}"
    columns = TextColumn(what, markup=False), BarColumn(), TextColumn(count, markup=False)
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True) as bars:
        shown: dict[str, TaskID] = {}

        def tell(what: str, done: int = 0, total: int | None = None) -> None:
            if what not in shown:
                for before in shown.values():
                    bars.update(before, visible=False)
                shown[what] = bars.add_task(what, total=total, count="")
            count = "" if total is None else f"{done}/{total}"
            bars.update(shown[what], completed=done, total=total, count=count)

        yield tell

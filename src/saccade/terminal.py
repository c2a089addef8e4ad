"""What every command shares: consoles, a status line, logging, and the options they all take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

PIPED_WIDTH = 120

out, err = Console(highlight=False), Console(stderr=True, highlight=False)
if not out.is_terminal:
    out = Console(highlight=False, width=PIPED_WIDTH)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
Verbose = Annotated[bool, typer.Option(help="Log what happens.")]


def prepare(threads: int | None, verbose: bool) -> None:
    """Threads and logging, before anything heavy runs."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.ERROR,
        format="%(message)s",
        handlers=[RichHandler(console=err, show_path=False)],
    )
    import torch
    from transformers.utils import logging as hf_logging

    if not verbose:
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)


def hush() -> None:
    """Nothing more is said here: of several processes, one speaks."""
    out.quiet = err.quiet = True


@contextmanager
def status(what: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line that says what is going on, on a terminal only; yields how to change it."""
    if quiet or not err.is_terminal:
        yield lambda text: None
        return
    with err.status(what) as line:
        yield line.update

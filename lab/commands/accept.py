"""The command ``python -m lab accept``, which checks Saccade on a GPU."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import typer

from saccade.cli import command_options
from saccade.cli.terminal import Threads, Verbose, prepare
from saccade.core.errors import OptionError

DEFAULT_SECONDS = 480.0


def accept(
    out: Annotated[
        Path, typer.Option(help="A file to which every line is appended, as JSON.")
    ] = Path("runs/accept.jsonl"),
    seconds: Annotated[float, typer.Option(min=30, help="Time for everything.")] = DEFAULT_SECONDS,
    small: Annotated[
        bool,
        typer.Option("--small", help="Use shrunken models to try the command; judge no speed."),
    ] = False,
    sections: Annotated[str, typer.Option(help="Comma-separated; all when left out.")] = "",
    methods: Annotated[str, typer.Option(help="Comma-separated; all when left out.")] = "",
    device: command_options.Device = None,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Check answers, steps, costs, memory and speed on a GPU, with random models made there.

    Needs no network, no weights and no video. Exits with 1 if any check fails.
    """
    prepare(threads, verbose)
    import torch

    from lab.acceptance.models import Models
    from lab.acceptance.report import Report
    from lab.acceptance.sections import FULL, SMALL, Acceptance
    from saccade.methods import resolve

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: torch has no GPU here; --small --device cpu would work")
    if place.type != "cuda" and not small:
        raise OptionError("there is no GPU here; --small tries the command with shrunken models")
    names = [name for name in methods.split(",") if name]
    for name in names:
        resolve(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    report = Report(out, seconds, place, judges_time=not small)
    acceptance = Acceptance(report, Models(place, small), SMALL if small else FULL, names)
    chosen = [name for name in sections.split(",") if name]
    unknown = [name for name in chosen if name not in acceptance.sections()]
    if unknown:
        available = ", ".join(acceptance.sections())
        raise OptionError(f"--sections {','.join(unknown)} is unknown; there are: {available}")
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, SACCADE_CACHE=folder),  # No costs of earlier runs are used.
        report.time_limit(),
    ):
        acceptance.run(chosen)
    report.end()
    if report.failures:
        raise typer.Exit(1)

"""``saccade train-draft``: trains a draft by a paper's recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.command_options import with_option_groups
from saccade.cli.terminal import Json, Threads, Verbose, out, prepare, progress_line
from saccade.world.train_draft.recipes import Settings


@with_option_groups
def train_draft(
    out_dir: Annotated[Path, typer.Option("--out", help="The folder the draft is written to.")],
    settings: Settings,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = (
        False
    ),
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train a draft by a paper's recipe, on conversations about the synthetic world."""
    prepare(threads, verbose)
    from saccade.world.train_draft import run

    with progress_line("loading the models", quiet=as_json) as show_line:

        def show_progress(phase: str, done: int, total: int, loss: float | None) -> None:
            stage = phase if loss is None else f"{phase}, loss {loss:.3f}"
            is_last = done == total  # The last line of a phase is never left out of a log.
            show_line(f"{stage}: {done} of {total} samples", is_last)

        report = run.train_draft(out_dir, settings, resume=resume, on_progress=show_progress)
    if as_json:
        typer.echo(json.dumps(report))
        return
    for phase in report["phases"]:
        out.print(
            f"{phase['phase']}: {phase['steps']} steps of {' + '.join(phase['trains'])}, "
            f"loss {phase['loss_first']:.3f} -> {phase['loss_last']:.3f}"
        )
    out.print(f"Use it: saccade describe VIDEO --draft {out_dir}", soft_wrap=True, markup=False)

"""The command ``python -m lab head-trial``, which compares an EAGLE-3 head with a draft model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.terminal import Json, Threads, Verbose, prepare, status
from saccade.core.errors import OptionError


def head_trial(
    folder: Annotated[Path, typer.Argument(help="The head's folder; a stopped training goes on.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of four clips.")] = 250,
    clips: Annotated[int, typer.Option(min=1, help="Unseen clips, with two questions each.")] = 20,
    visual_tokens: Annotated[int, typer.Option(help="Of an unseen clip.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 96,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train an EAGLE-3 head for the embedded target, and compare it with the embedded draft.

    A folder that holds a head already is measured and not trained.
    """
    prepare(threads, verbose)
    from lab.studies import head_trial as study
    from lab.training.agreement import FRAMES

    if visual_tokens not in FRAMES:
        sizes = ", ".join(map(str, FRAMES))
        raise OptionError(f"there are no clips of {visual_tokens} visual tokens; sizes: {sizes}")
    with status("training a head", quiet=as_json) as on_progress:
        if not (folder / "model.safetensors").exists():
            study.train_head(folder, steps, on_progress)
        results = study.compare(
            folder,
            clips=clips,
            size=visual_tokens,
            tokens=max_new_tokens,
            on_progress=on_progress,
        )
    typer.echo(json.dumps(results) if as_json else study.table(results))

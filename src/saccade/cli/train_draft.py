"""``saccade train-draft``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.terminal import Json, Threads, Verbose, err, out, prepare

Told = Callable[[str, int, int, float | None], None]


def train_draft(
    out_dir: Annotated[Path, typer.Option("--out", help="The folder the draft is written to.")],
    recipe: Annotated[
        str, typer.Option(help="llava-1.5-68m, llava-1.5-160m or llava-onevision-68m.")
    ] = "llava-1.5-68m",
    phases: Annotated[
        str | None, typer.Option(help="Comma-separated; all of the recipe's when left out.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="A checkpoint to start from; a fresh one when left out.")
    ] = None,
    target: Annotated[
        str, typer.Option(help="The model to draft for: its processor, and the teacher.")
    ] = "shapes",
    steps: Annotated[
        int, typer.Option(min=1, help="Optimizer steps, shared by the phases as in the paper.")
    ] = 100,
    distill: Annotated[
        float, typer.Option(metavar="WEIGHT", help="Weight of the target's law in the loss, 0-1.")
    ] = 0.0,
    drop_visual: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Samples lose up to this share of visual tokens."),
    ] = 0.0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples a step; the recipe's 128-512 if left out.")
    ] = None,
    lr_scale: Annotated[float, typer.Option(help="Multiplies the recipe's learning rates.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Names the samples and a fresh draft.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = (
        False
    ),
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train a draft by a paper's recipe, on conversations about the synthetic world."""
    prepare(threads, verbose)
    from saccade.world.train_draft import recipes, run

    settings = recipes.Settings(
        recipe=recipe,
        phases=phases,
        draft=draft,
        target=target,
        steps=steps,
        distill=distill,
        drop_visual=drop_visual,
        seed=seed,
        batch_size=batch_size,
        lr_scale=lr_scale,
    )
    with _progress(quiet=as_json) as tell:
        found = run.train_draft(out_dir, settings, resume=resume, tell=tell)
    if as_json:
        typer.echo(json.dumps(found))
        return
    for phase in found["phases"]:
        out.print(
            f"{phase['phase']}: {phase['steps']} steps of {' + '.join(phase['trains'])}, "
            f"loss {phase['loss_first']:.3f} -> {phase['loss_last']:.3f}"
        )
    out.print(f"Use it: saccade describe VIDEO --draft {out_dir}", soft_wrap=True)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Told]:
    """A bar per phase on a terminal, a line per tenth of it elsewhere; on standard error."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    if quiet:
        yield lambda phase, done, total, loss: None
        return
    shown: dict[str, TaskID] = {}
    tenths: dict[str, int] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn("samples"), Remaining(), console=err) as bars:
        if not err.is_terminal:
            bars.stop()

        def tell(phase: str, done: int, total: int, loss: float | None) -> None:
            at = phase if loss is None else f"{phase}, loss {loss:.3f}"
            if err.is_terminal:
                if phase not in shown:
                    shown[phase] = bars.add_task(phase, total=total)
                bars.update(shown[phase], completed=done, description=at)
            elif 10 * done // total > tenths.get(phase, -1):
                tenths[phase] = 10 * done // total
                err.print(f"{at}: {done} of {total} samples")

        yield tell

"""The commands ``python -m lab train | eval``, which train and measure the embedded pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.terminal import Json, Threads, Verbose, prepare, status
from saccade.core.errors import OptionError

RUN_DIR = Path("runs/shapes")


def train(
    run_dir: Annotated[Path, typer.Option(help="Where stages, logs and weights go.")] = RUN_DIR,
    stages: Annotated[str | None, typer.Option(help="Comma-separated; all when left out.")] = None,
    export: Annotated[Path | None, typer.Option(help="Write the trained folders here.")] = None,
    pair: Annotated[
        Path | None, typer.Option("--from", help="A pair's folder to continue from, at `medium`.")
    ] = None,
    smoke: Annotated[bool, typer.Option(help="Train two minutes on one-object clips.")] = False,
    threads: Threads = None,
    verbose: Verbose = True,
) -> None:
    """Train the pair in stages; a finished stage is not repeated."""
    prepare(threads, verbose)
    from lab.training import train

    names = [stage.name for stage in train.STAGES]
    chosen = names if stages is None else [name.strip() for name in stages.split(",")]
    if unknown := [name for name in chosen if name not in names]:
        raise OptionError(f"unknown stage {unknown[0]!r}; stages: {', '.join(names)}")
    train.train(run_dir, chosen, pair=pair, smoke=smoke)
    if export is not None:
        train.export(run_dir, export)


def evaluate(
    clips: Annotated[int, typer.Option(min=2, help="Unseen clips of each size.")] = 50,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Visual tokens per clip (repeatable).")
    ] = None,
    run_dir: Annotated[Path, typer.Option(help="The training run, for its curves.")] = RUN_DIR,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write page, figure and numbers here (.md).")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure the pair's accuracy with and without the video, and its agreement by view."""
    prepare(threads, verbose)
    from lab.training import agreement, report
    from saccade.inputs.checkpoints import EMBEDDED

    sizes = tuple(tokens or agreement.SIZES)
    if unknown := [size for size in sizes if size not in agreement.FRAMES]:
        known_sizes = ", ".join(map(str, agreement.FRAMES))
        raise OptionError(f"there are no clips of {unknown[0]} visual tokens; sizes: {known_sizes}")
    # The numbers of an earlier evaluation have the learning curves, if the training run is gone.
    numbers_file = None if out_file is None else out_file.with_suffix(".json")
    earlier_results = {}
    if numbers_file is not None and numbers_file.exists():
        earlier_results = json.loads(numbers_file.read_text())
    with status("measuring", quiet=as_json) as on_progress:
        results = report.measure(
            EMBEDDED,
            run_dir,
            clips=clips,
            sizes=sizes,
            before=earlier_results,
            on_progress=on_progress,
        )
    command = f"python -m lab eval --clips {clips}" + "".join(f" --tokens {n}" for n in sizes)
    figure = None
    if out_file is not None and numbers_file is not None:
        numbers_file.write_text(json.dumps(results, indent=1) + "\n")
        if results["curves"]:
            figure = out_file.with_suffix(".png")
            report.draw_curves(results, figure)
        name = None if figure is None else figure.name
        out_file.write_text(report.page(results, name, f"{command} --out {out_file}"))
    typer.echo(json.dumps(results) if as_json else report.page(results, None, command))

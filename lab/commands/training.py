"""``python -m lab train | eval``: the embedded pair, trained and measured."""

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
        Path | None, typer.Option("--from", help="A pair's folder: train it on, from `medium`.")
    ] = None,
    smoke: Annotated[bool, typer.Option(help="Two minutes on one-object clips.")] = False,
    threads: Threads = None,
    verbose: Verbose = True,
) -> None:
    """Train the pair in stages; a stage that is done is not done again."""
    prepare(threads, verbose)
    from lab.training import train

    known = [stage.name for stage in train.STAGES]
    chosen = known if stages is None else [name.strip() for name in stages.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise OptionError(f"unknown stage {unknown[0]!r}; stages: {', '.join(known)}")
    train.train(run_dir, chosen, pair=pair, smoke=smoke)
    if export is not None:
        train.export(run_dir, export)


def evaluate(
    clips: Annotated[int, typer.Option(min=2, help="Unseen clips a size.")] = 50,
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
    """Measure the pair: accuracy with and without the video, agreement under each view."""
    prepare(threads, verbose)
    from lab.training import agreement, report
    from saccade.inputs.checkpoints import EMBEDDED

    sizes = tuple(tokens or agreement.SIZES)
    if unknown := [size for size in sizes if size not in agreement.FRAMES]:
        known = ", ".join(map(str, agreement.FRAMES))
        raise OptionError(f"no clips of {unknown[0]} visual tokens are set up; sizes: {known}")
    stored = None if out_file is None else out_file.with_suffix(".json")
    before = json.loads(stored.read_text()) if stored is not None and stored.exists() else {}
    with status("measuring", quiet=as_json) as tell:
        found = report.measure(
            EMBEDDED, run_dir, clips=clips, sizes=sizes, before=before, tell=tell
        )
    shown = f"python -m lab eval --clips {clips}" + "".join(f" --tokens {n}" for n in sizes)
    figure = None
    if out_file is not None and stored is not None:
        stored.write_text(json.dumps(found, indent=1) + "\n")
        if found["curves"]:
            figure = out_file.with_suffix(".png")
            report.figure(found, figure)
        name = None if figure is None else figure.name
        out_file.write_text(report.page(found, name, f"{shown} --out {out_file}"))
    typer.echo(json.dumps(found) if as_json else report.page(found, None, shown))

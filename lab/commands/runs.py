"""The command ``python -m lab run``: makes a run again that the claims rest on."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.terminal import out
from saccade.core.errors import OptionError


def run(
    name: Annotated[str, typer.Argument(help="A stored run, such as sage-2k.")],
    folder: Annotated[
        Path | None, typer.Option("--out", help="Its folder, else runs/NAME.")
    ] = None,
    results: Annotated[Path, typer.Option(help="The folder of stored runs.")] = Path(
        "docs/results"
    ),
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="A trial of so many items of each suite, in runs/trial-NAME."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Above 0: a repeat, in runs/NAME-seed-N.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Print the command, run nothing.")] = False,
) -> None:
    """Run the benchmark of this name again, with the methods and suites that the claims need."""
    from lab.claims.runs import bench_arguments

    repeat = f"{name}-seed-{seed}" if seed else name
    folder = folder or Path("runs", repeat if limit is None else f"trial-{repeat}")
    if limit is not None and folder.resolve() == (results / repeat).resolve():
        raise OptionError(
            f"a trial would end up among the stored runs: give another --out than {folder}"
        )
    arguments = bench_arguments(name, results, limit, seed)
    arguments += ["--out", str(folder)]
    out.print(shlex.join(["saccade", "bench", *arguments]), markup=False, soft_wrap=True)
    if not show:
        raise typer.Exit(subprocess.call([sys.executable, "-m", "saccade", "bench", *arguments]))

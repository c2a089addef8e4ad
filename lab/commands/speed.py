"""The command ``python -m lab speed``, which measures the ratios of speed that have a goal.

A ratio says how many times as fast one method is as another, and its goal is the least value that
it should have. Some ratios have no goal and are only reported. A part is a suite of clips with the
methods that take turns on them. The parts and their ratios are in ``lab/speed.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from saccade.cli import command_options, run_setup
from saccade.cli.run_setup import split_names
from saccade.cli.terminal import Json, Threads, Verbose, out, prepare, status


def speed(
    only: Annotated[
        str | None,
        typer.Option(help="decode-2k, whole-256, context-10k, auto, useless; else all."),
    ] = None,
    clips: Annotated[int, typer.Option(min=1, help="Of each part.")] = 4,
    repeat: command_options.Repeat = 3,
    path: Annotated[Path | None, typer.Option("--out", help="Write the JSON here too.")] = None,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure every ratio of speed that has a goal, on the embedded pair."""
    prepare(threads, verbose)
    from lab import speed as measured

    parts = measured.parts_named(split_names(only or ""))
    command_options.check_output_path(path)

    def write_results(results: Mapping[str, Any]) -> None:
        if path is not None:
            path.write_text(json.dumps(results) + "\n")

    models = run_setup.load_models("shapes", draft=None, quiet=as_json)
    assert models.draft is not None
    pair = measured.Pair(models.target, models.draft)
    with status("measuring", quiet=as_json) as tell:
        results = measured.measure_speed(
            pair, parts, clips=clips, repeat=repeat, on_progress=tell, on_part=write_results
        )
    if as_json:
        typer.echo(json.dumps(results))
        return
    out.print(goals_table(results["ratios"]))
    for part in results["parts"]:
        identity = "same ids as ar"
        if not part["identical"]:
            identity = f"OTHER IDS THAN ar: {part['differing']}"
        errors = "".join(f"; {name}: {why}" for name, why in part["errors"].items())
        line = f"{part['about']}: {', '.join(part['clips'])}; {identity}{errors}"
        out.print(line, markup=False, soft_wrap=True, style="dim")


def goals_table(ratios: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table of a run's ratios with their intervals and goals, and which goals are met."""
    from saccade.bench.terminal_output import make_table

    table = make_table(["part", "ratio"], ["x", "95 %", "goal", "met"])
    for each in ratios:
        value = each["value"]
        goal = each["goal"]
        met = each["met"]
        interval = "" if each["interval"] is None else "{:.3f} to {:.3f}".format(*each["interval"])
        met_text = {None: Text(""), True: Text("yes", "green"), False: Text("no", "bold red")}[met]
        best = each["detail"].get("best")
        table.add_row(
            each["part"],
            each["name"] + ("" if best is None else f": {best}"),
            "failed" if value is None else f"{value:.3f}",
            interval,
            "" if goal is None else f"{goal:g}",
            met_text,
        )
    return table

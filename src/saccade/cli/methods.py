"""``saccade methods``."""

from __future__ import annotations

import json

import typer
from rich.table import Table
from rich.text import Text

from saccade.cli import loading
from saccade.cli.terminal import Json, out


def methods(as_json: Json = False) -> None:
    """The named methods, what each chooses, and the choices there are on each axis."""
    known = loading.listing()
    if as_json:
        typer.echo(json.dumps({"methods": known.methods, "axes": known.axes}))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, told in known.methods.items():
        chosen = "/".join(f"{axis}={value}" for axis, value in told.items() if axis != "about")
        table.add_row(Text(name, "bold"), Text.assemble(told["about"], "\n", (chosen, "dim")))
    out.print(table)
    out.print(
        "\nAny choice can be swapped: NAME/axis=value/..., e.g. specvlm/shape=chain-7/keep=0.05\n"
    )
    choices = Table(box=None, pad_edge=False, show_header=False)
    for axis, values in known.axes.items():
        choices.add_row(Text(axis, "bold"), ", ".join(values))
    out.print(choices)

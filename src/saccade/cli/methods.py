"""``saccade methods``."""

from __future__ import annotations

import json

import typer
from rich.table import Table

from saccade.cli.terminal import Json, out


def methods(as_json: Json = False) -> None:
    """The named methods, what each chooses, and the choices there are on each axis."""
    from saccade.methods import SYSTEMS, axes, choices

    if as_json:
        listed = {
            name: {"about": recipe.about, **choices(recipe)} for name, recipe in SYSTEMS.items()
        }
        typer.echo(json.dumps({"methods": listed, "axes": axes()}))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, recipe in SYSTEMS.items():
        chosen = "/".join(f"{axis}={value}" for axis, value in choices(recipe).items())
        table.add_row(f"[bold]{name}[/bold]", f"{recipe.about}\n[dim]{chosen}[/dim]")
    out.print(table)
    out.print(
        "\nAny choice can be swapped: NAME/axis=value/..., e.g. specvlm/shape=chain-7/keep=0.05\n"
    )
    known = Table(box=None, pad_edge=False, show_header=False)
    for axis, values in axes().items():
        known.add_row(f"[bold]{axis}[/bold]", ", ".join(values))
    out.print(known)

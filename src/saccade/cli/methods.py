"""``saccade methods``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from saccade.cli import loading
from saccade.cli.terminal import Json, out

if TYPE_CHECKING:
    from saccade.methods.listing import Listing


OneName = Annotated[str | None, typer.Argument(help="One method alone.", show_default=False)]


def methods(
    name: OneName = None,
    as_json: Json = False,
) -> None:
    """The named methods, what each chooses, and the choices there are on each axis."""
    known = loading.listing()
    if name is not None:
        known = _only(known, name)
    if as_json:
        typer.echo(json.dumps({"methods": known.methods, "axes": known.axes}))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for each, told in known.methods.items():
        chosen = "/".join(f"{axis}={value}" for axis, value in told.items() if axis != "about")
        table.add_row(Text(each, "bold"), Text.assemble(told["about"], "\n", (chosen, "dim")))
    out.print(table)
    out.print(
        "\nAny choice can be swapped: NAME/axis=value/..., e.g. specvlm/shape=chain-7/keep=0.05\n"
    )
    choices = Table(box=None, pad_edge=False, show_header=False)
    for axis, values in known.axes.items():
        choices.add_row(Text(axis, "bold"), ", ".join(values))
    out.print(choices)


def _only(known: Listing, name: str) -> Listing:
    """The listing of one method, without overrides. Raises MethodError for a name that is none."""
    known.check(name)
    base = name.partition("/")[0]
    return replace(known, methods={base: known.methods[base]})

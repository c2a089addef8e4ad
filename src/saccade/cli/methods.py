"""``saccade methods``: lists the methods and the choices on each axis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from saccade.cli import run_setup
from saccade.cli.terminal import Json, out

if TYPE_CHECKING:
    from saccade.methods.listing import Listing


STUDIES_HEADING = "Studies: not faster than plain decoding in the stored runs, for these reasons."
OneName = Annotated[str | None, typer.Argument(help="One method alone.", show_default=False)]


def methods(
    name: OneName = None,
    as_json: Json = False,
) -> None:
    """The named methods, what each chooses, and the choices there are on each axis."""
    listing = run_setup.list_methods()
    if name is not None:
        listing = _select_method(listing, name)
    if as_json:
        typer.echo(json.dumps({"methods": listing.methods, "axes": listing.axes}))
        return
    useful, studies = listing.split_studies()
    if useful:
        out.print(_make_table(useful))
    if studies:
        out.print(f"\n{STUDIES_HEADING}\n")
        out.print(_make_table(studies))
    out.print(
        "\nAny choice can be swapped: NAME/axis=value/..., e.g. specvlm/shape=chain-7/keep=0.05\n"
    )
    axes = Table(box=None, pad_edge=False, show_header=False)
    for axis, values in listing.axes.items():
        axes.add_row(Text(axis, "bold"), ", ".join(values))
    out.print(axes)


def _make_table(methods: Mapping[str, Mapping[str, str]]) -> Table:
    """Returns a table of methods: what each does, why it is a study if it is one, its choices."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for method, fields in methods.items():
        choices = [f"{axis}={fields[axis]}" for axis in fields if axis not in ("about", "study")]
        reason = f"\n{fields['study']}" if "study" in fields else ""
        description = Text.assemble(fields["about"], reason, "\n", ("/".join(choices), "dim"))
        table.add_row(Text(method, "bold"), description)
    return table


def _select_method(listing: Listing, name: str) -> Listing:
    """Returns the listing with one method alone.

    ``name`` may have overrides, as in "specvlm/keep=0.2". They are checked, but the method is
    listed without them. Raises MethodError for an unknown method or axis.
    """
    listing.check(name)
    base = name.partition("/")[0].strip()
    return replace(listing, methods={base: listing.methods[base]})

"""The command ``python -m lab peers``, which needs the environments that ``make peers`` makes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.terminal import status
from saccade.core.errors import OptionError

PAGE = Path("docs/results/peers.md")


def peers(
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each row.")] = 3,
    row: Annotated[list[str] | None, typer.Option(help="Only these rows (repeatable).")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of the answer, at most.")] = 192,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of every engine.")] = 2,
    path: Annotated[Path, typer.Option("--out", help="Where the run is stored.")] = Path(
        "docs/results/peers.json"
    ),
) -> None:
    """Compare this library with its peers, and write the table of docs/results/peers.md."""
    from lab.peers import rows, turns

    names = [one.name for one in rows.ROWS]
    if unknown := [name for name in row or () if name not in names]:
        raise OptionError(f"there is no row {unknown[0]!r}; rows: {', '.join(names)}")
    chosen: dict[str, Any] = {"rows": tuple(row)} if row else {}
    plan = turns.Plan(repeat=repeat, tokens=tokens, threads=threads, **chosen)
    with status("starting", quiet=False) as tell:
        facts = turns.run(plan, path, tell)
    typer.echo(rows.table(facts))
    if path == PAGE.with_suffix(".json"):
        PAGE.write_text(turns.page_with_table(PAGE.read_text(), facts))

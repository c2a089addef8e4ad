"""``python -m lab vllm``: in the environment of ``make vllm``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.terminal import status

PAGE = Path("docs/vllm.md")


def vllm(
    at_once: Annotated[
        list[int] | None, typer.Option(help="Requests at once (repeatable); else 1, 8 and 32.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each engine.")] = 3,
    row: Annotated[list[str] | None, typer.Option(help="Only these rows (repeatable).")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of every answer.")] = 128,
    path: Annotated[Path, typer.Option("--out", help="Where the run is kept.")] = Path(
        "docs/results/vllm.json"
    ),
    more: Annotated[
        bool, typer.Option("--more", help="Keep what the file has for other numbers at once.")
    ] = False,
) -> None:
    """Write the table of docs/vllm.md: engines of vLLM and our drafts in it, taking turns."""
    from lab.hardware import inside

    given: dict[str, Any] = {"at_once": tuple(at_once or ()), "rows": tuple(row or ())}
    chosen = {name: value for name, value in given.items() if value}
    plan = inside.Plan(repeat=repeat, tokens=tokens, **chosen)
    with status("starting", quiet=False) as tell:
        found = inside.run(plan, path, tell, more=more)
    told = inside.table(found["runs"])
    typer.echo(told)
    if path == Path("docs/results/vllm.json"):
        PAGE.write_text(inside.written(PAGE.read_text(), told))

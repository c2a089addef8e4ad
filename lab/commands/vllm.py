"""The command ``python -m lab vllm``, which needs the environment that ``make vllm`` makes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.terminal import status

PAGE = Path("docs/vllm.md")  # Its table is replaced, unless --out names another file.


def vllm(
    at_once: Annotated[
        list[int] | None, typer.Option(help="Requests at once (repeatable); else 1, 8 and 32.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each engine.")] = 3,
    row: Annotated[list[str] | None, typer.Option(help="Only these rows (repeatable).")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of every answer.")] = 128,
    path: Annotated[Path, typer.Option("--out", help="Where the run is stored.")] = Path(
        "docs/results/vllm.json"
    ),
    more: Annotated[
        bool, typer.Option("--more", help="Keep the file's results for other numbers at once.")
    ] = False,
) -> None:
    """Compare engines of vLLM with and without our drafts, and write the table of docs/vllm.md."""
    from lab.hardware import vllm_comparison

    options: dict[str, Any] = {"at_once": tuple(at_once or ()), "rows": tuple(row or ())}
    chosen = {name: value for name, value in options.items() if value}
    plan = vllm_comparison.Plan(repeat=repeat, tokens=tokens, **chosen)
    with status("starting", quiet=False) as tell:
        facts = vllm_comparison.run_comparison(plan, path, tell, more=more)
    table = vllm_comparison.table(facts["runs"])
    typer.echo(table)
    if path == Path("docs/results/vllm.json"):
        PAGE.write_text(vllm_comparison.replace_table(PAGE.read_text(), table))

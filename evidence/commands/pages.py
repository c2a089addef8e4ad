"""``python -m evidence report | claims | scaling | pairs | chart | listed``: no model is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.terminal import out


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
) -> None:
    """Write a run's report.md and figures anew, and below them the papers' own tables."""
    from evidence import layouts
    from saccade.bench import report

    path = report.write(run, layouts.section)
    out.print(f"{path} has the report", markup=False, soft_wrap=True)


def claims(
    results: Annotated[Path, typer.Argument(help="The folder of runs and figures.")] = Path(
        "docs/results"
    ),
) -> None:
    """Judge every claim of the papers by stored results: claims.md beside them."""
    from evidence.claims import page
    from evidence.claims.evidence import Evidence

    path = results / "claims.md"
    path.write_text(page(Evidence(results)))
    out.print(f"{path} has the claims", markup=False, soft_wrap=True)


def scaling() -> None:
    """Print the tables of docs/scaling.md: a 72B/7B pair over several GPUs, by arithmetic alone."""
    from evidence import scaling as plans

    typer.echo(plans.page())


def pairs(
    tokens: Annotated[int, typer.Option(min=1, help="Of the prompt.")] = 8192,
    keep: Annotated[
        float, typer.Option(min=0.001, max=1, help="The share of them the draft reads.")
    ] = 0.1,
) -> None:
    """Print docs/families.md's table of pairs: what they need and may gain on a GPU in bfloat16."""
    from evidence.hardware.pairs import table

    typer.echo(table(tokens, keep))


def chart(
    results: Annotated[Path, typer.Argument(help="The folder of runs.")] = Path("docs/results"),
    path: Annotated[Path, typer.Option("--out", help="The .svg to write.")] = Path(
        "docs/speed.svg"
    ),
) -> None:
    """Draw the README's chart of speed from a stored run; nothing is run."""
    from evidence import chart

    chart.write(results, path)
    out.print(f"{path} has the chart", markup=False, soft_wrap=True)


def listed() -> None:
    """Write the listing of the package's own methods, which `saccade methods` reads."""
    from saccade.methods import listing, names

    listing.keep(names.listing())
    out.print(f"{listing.LISTED} has the methods", markup=False, soft_wrap=True)

"""The commands ``python -m lab report | claims | scaling | pairs | numbers | listed``.

No model is run. `listed` writes what the registered methods and the commands' options are, and the
others write or print pages from stored results or by arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.terminal import out
from saccade.methods.listing import Listing

METHODS = Path("docs/methods/README.md")
OPTIONS = Path("docs/options.md")
BEGIN = "<!-- `make listed` writes from here -->"


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
) -> None:
    """Write a run's report.md and figures again, followed by the papers' own tables."""
    from lab import layouts
    from saccade.bench import report

    path = report.write_report(run, layouts.papers_section)
    out.print(f"wrote the report to {path}", markup=False, soft_wrap=True)


def claims(
    results: Annotated[Path, typer.Argument(help="The folder of runs and figures.")] = Path(
        "docs/results"
    ),
) -> None:
    """Judge every claim of the papers by stored results, and write claims.md beside them."""
    from lab.claims import page
    from lab.claims.claim import StoredResults

    path = results / "claims.md"
    path.write_text(page(StoredResults(results)))
    out.print(f"wrote the claims to {path}", markup=False, soft_wrap=True)


def scaling() -> None:
    """Print the tables of docs/results/scaling.md: what a 72B/7B pair should reach on GPUs."""
    from lab import scaling as plans

    typer.echo(plans.page())


def pairs(
    tokens: Annotated[int, typer.Option(min=1, help="In the prompt.")] = 8192,
    keep: Annotated[
        float, typer.Option(min=0.001, max=1, help="The share of them the draft reads.")
    ] = 0.1,
) -> None:
    """Print the table of docs/results/pairs.md: what pairs need and may gain on a GPU."""
    from lab.hardware.pairs import table

    typer.echo(table(tokens, keep))


def numbers(
    results: Annotated[Path, typer.Option(help="The folder of stored runs.")] = Path(
        "docs/results"
    ),
    page: Annotated[Path, typer.Option(help="The page whose tables are replaced.")] = Path(
        "docs/numbers.md"
    ),
) -> None:
    """Write the tables of docs/numbers.md, a chart of each processor beside it, and the page of
    every ratio beside the runs."""
    from lab import chart, speed_page
    from lab import numbers as tables

    page.write_text(tables.page_with(page.read_text(), tables.tables_by_name(results)))
    for name, run in chart.RUNS.items():
        chart.write_chart(results / run, page.parent / name)
    (results / "speed.md").write_text(speed_page.page(results))
    out.print(f"wrote the numbers to {page}", markup=False, soft_wrap=True)


def listed(
    page: Annotated[Path, typer.Option(help="The page with the table of methods.")] = METHODS,
    options_page: Annotated[
        Path, typer.Option(help="The page with every option of every command.")
    ] = OPTIONS,
) -> None:
    """Write the listing of built-in methods that `saccade methods` reads, and the documents' tables
    of methods and of command line options."""
    from lab import options_table
    from lab.hardware.vllm_comparison import replace_table
    from saccade.methods import listing, names

    method_listing = names.listing()
    listing.save_listing(method_listing)
    page.write_text(replace_table(page.read_text(), methods_tables(method_listing), BEGIN))
    options = options_table.options_table()
    options_page.write_text(replace_table(options_page.read_text(), options, options_table.BEGIN))
    out.print(f"wrote {listing.LISTED}, {page} and {options_page}", markup=False, soft_wrap=True)


def methods_tables(listing: Listing) -> str:
    """Returns a Markdown table of the methods, and one of the studies with their reasons."""
    useful, studies = listing.split_studies()
    by_reason: dict[str, list[str]] = {}
    for name, fields in studies.items():
        by_reason.setdefault(fields["study"], []).append(f"`{name}`")
    reasons = "".join(f"* {', '.join(names)}: {why}.\n" for why, names in by_reason.items())
    return (
        methods_table(useful)
        + "\n### Studies\n\nThese were not faster than plain decoding in the stored runs.\n\n"
        + methods_table(studies)
        + f"\nWhy:\n\n{reasons}"
    )


def methods_table(methods: Mapping[str, Mapping[str, str]]) -> str:
    """Returns a Markdown table of methods with what each does and its main parts."""
    columns = ("drafter", "view", "shape", "schedule")
    rows = (
        "| "
        + " | ".join([f"`{name}`", fields["about"], *(fields.get(each, "") for each in columns)])
        for name, fields in methods.items()
    )
    head = f"| method | what it does | {' | '.join(columns)} |\n|{'-|' * 6}\n"
    return head + "".join(f"{row} |\n" for row in rows)

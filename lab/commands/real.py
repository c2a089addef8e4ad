"""The commands ``python -m lab text | ablations``, which run studies on real weights."""

from __future__ import annotations

import shlex
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.terminal import Threads, Verbose, out, prepare, status
from saccade.core.errors import OptionError

Paths = Annotated[
    list[Path] | None, typer.Argument(help="Documents; else those of docs/results/real.md.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Documents, and questions of each kind.")]
Together = Annotated[int, typer.Option(min=1, help="Documents that share forwards.")]


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
    from lab.studies import text as study
    from saccade.bench.real import answers as measure
    from saccade.methods import resolve

    model, texts, facts = _prepare_study(paths, path, limit, max_new_tokens, together)
    facts["settings"]["draft_bits"] = study.BITS
    settings = measure.answer_settings(model, max_new_tokens, measure.REPETITION_PENALTY)
    results = measure.Results(path.with_suffix(".json"), facts)
    questions = [each for kind in study.TASKS.values() for each in kind[:limit]]
    with status("rounding a draft", quiet=False) as tell:
        draft = study.rounded_draft(model)
        for some, methods in (
            (questions, study.METHODS_WITHOUT_DOCUMENT),
            (texts, study.METHODS_OVER_DOCUMENTS),
        ):
            measure.run_methods(
                model,
                some,
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
                own = results.reference(each, lambda: ())
                results.add([study.measure_entropies(model, draft, each, own)], "looked")
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
    from lab.studies import ablations as study
    from lab.studies.experiment import Experiment
    from saccade.bench.real import answers as measure

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
    paths: list[Path] | None, path: Path, limit: int | None, count: int, together: int
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Returns the model, the documents, and the facts about the run for its page.

    Raises OptionError if the page cannot be written or no file is long enough.
    """
    from saccade.bench.real.answers import REPETITION_PENALTY
    from saccade.bench.suites.long_documents import find_documents
    from saccade.engine.trace import environment
    from saccade.inputs import load
    from saccade.inputs import real_weights as weights

    if not path.parent.is_dir():
        raise OptionError(f"cannot write {path}: there is no folder {path.parent}")
    texts = list(islice(find_documents(paths or []), limit))
    if not texts:
        raise OptionError("none of these files is a text of 1,800 tokens or more")
    facts = {
        "model": weights.SMOLLM2.name,
        "settings": {"max_new_tokens": count, "penalty": REPETITION_PENALTY},
        "together": together,
        "machine": "{processor}, {threads} threads, torch {torch}.".format(**environment()),
        "command": shlex.join(["python", "-m", "lab", *sys.argv[1:]]),
    }
    return load(str(weights.require_checkpoint())), texts, facts

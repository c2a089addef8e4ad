"""``python -m lab text | ablations``: on real weights, beside ``saccade bench real``."""

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
        Path, typer.Option("--out", help="The page; F.json beside it is gone on from.")
    ] = Path("docs/results/real-drafts.md"),
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    together: Together = 4,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """SpecVLM's and SAGE's shapes and views on real weights, with a draft model beside them."""
    prepare(threads, verbose)
    from lab.studies import text as study
    from saccade.bench.real import answers as measure
    from saccade.methods import resolve

    model, texts, facts = _began(paths, path, limit, max_new_tokens, together)
    facts["settings"]["draft_bits"] = study.BITS
    settings = measure.answer_settings(model, max_new_tokens, measure.REPETITION_PENALTY)
    results = measure.Results(path.with_suffix(".json"), facts)
    asked = [each for kind in study.TASKS.values() for each in kind[:limit]]
    with status("rounding a draft", quiet=False) as tell:
        draft = study.rounded_draft(model)
        for some, methods in (
            (asked, study.METHODS_WITHOUT_DOCUMENT),
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
        for each in (*asked, *texts):
            if not results.has_attention(each):
                tell(f"{each.name}: the draft's entropy")
                own = results.reference(each, lambda: ())
                results.add([study.measure_entropies(model, draft, each, own)], "looked")
    path.write_text(study.page(results.facts))
    out.print(f"{path} has the tables", markup=False, soft_wrap=True)


def ablations(
    paths: Paths = None,
    path: Annotated[
        Path, typer.Option("--out", help="The numbers; gone on from where they are.")
    ] = Path("docs/methods/fresh.json"),
    page: Annotated[Path, typer.Option(help="The page whose table is written anew.")] = Path(
        "docs/results/fresh.md"
    ),
    limit: Limit = None,
    clips: Annotated[int, typer.Option(min=1, help="Of the embedded pair's, 2,048 tokens.")] = 24,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    together: Together = 4,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """What each choice of `fresh` is worth, over documents and over clips."""
    prepare(threads, verbose)
    from lab.studies import ablations as study
    from lab.studies.experiment import Experiment
    from saccade.bench.real import answers as measure

    model, texts, facts = _began(paths, path, limit, max_new_tokens, together)
    settings = measure.answer_settings(model, max_new_tokens, measure.REPETITION_PENALTY)
    results = measure.Results(path, facts)
    with status("asking", quiet=False) as tell:
        study.measure_clips(Experiment(clips), results, tell)
        choices = list(study.CHOICES.values())
        measure.run_methods(
            model, texts, choices, settings, results, together=together, on_progress=tell
        )
    table = study.results_table(results.facts["measured"])
    if page.is_file():
        page.write_text(study.page_with_table(page.read_text(), table))
    out.print(table, markup=False, soft_wrap=True)


def _began(
    paths: list[Path] | None, path: Path, limit: int | None, count: int, together: int
) -> tuple[Any, list[Any], dict[str, Any]]:
    """The model, the documents, and what a page says of a run."""
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
        "model": weights.NAME,
        "settings": {"max_new_tokens": count, "penalty": REPETITION_PENALTY},
        "together": together,
        "machine": "{processor}, {threads} threads, torch {torch}.".format(**environment()),
        "command": shlex.join(["python", "-m", "lab", *sys.argv[1:]]),
    }
    return load(str(weights.require_checkpoint())), texts, facts

"""The commands ``python -m lab seeing train | draft | judge``.

They teach the language model of `saccade real make` to see drawn clips, train a draft for it, and
measure methods on that pair.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import command_options
from saccade.cli.terminal import Threads, Verbose, out, prepare, status
from saccade.core.errors import ModelError

app = typer.Typer(help="A language model that learns to see drawn clips.", no_args_is_help=True)
RunDir = Annotated[
    Path, typer.Option(help="Has state, logs, adapter, and the folders `model` and `draft`.")
]
RUN_DIR = Path("runs/seeing")
MODEL = "model"
DRAFT = "draft"


@app.command()
def train(
    run_dir: RunDir = RUN_DIR,
    seconds: Annotated[
        float | None, typer.Option(help="CPU seconds of the last stage, earlier runs included.")
    ] = None,
    threads: Threads = None,
    verbose: Verbose = True,
) -> None:
    """Teach the language model of `saccade real make` to see drawn clips.

    An interrupted training is continued.
    """
    prepare(threads, verbose)
    from lab.training import adapted_llama, seeing

    seeing.train(run_dir, seconds)
    model, tok = adapted_llama.load_adapted(run_dir / adapted_llama.ADAPTER_FILE)
    adapted_llama.save_checkpoint(model, tok, run_dir / MODEL)


@app.command()
def draft(
    run_dir: RunDir = RUN_DIR,
    threads: Threads = None,
    verbose: Verbose = True,
) -> None:
    """Train a draft of four layers for the model that learnt to see, by its probabilities.

    An interrupted training is continued.
    """
    prepare(threads, verbose)
    from lab.training import adapted_llama, seeing_draft

    model, tok = seeing_draft.train(run_dir)
    adapted_llama.save_checkpoint(model, tok, run_dir / DRAFT)


@app.command()
def judge(
    run_dir: RunDir = RUN_DIR,
    clips: Annotated[int, typer.Option(min=1, help="Of 512 visual tokens.")] = 20,
    timed: Annotated[
        int,
        typer.Option(min=0, help="Only time this many clips; the machine must be otherwise idle."),
    ] = 0,
    together: Annotated[int, typer.Option(min=1, help="Clips that share forwards.")] = 4,
    path: Annotated[
        Path, typer.Option("--out", help="The page; a run stored beside it is continued.")
    ] = Path("docs/results/seeing.md"),
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Measure views, self-drafts and the draft on video with the model that learnt to see."""
    prepare(threads, verbose)
    from lab.real import answers as measure
    from lab.studies import seeing as study
    from lab.studies import seeing_page
    from lab.training import adapted_llama
    from saccade.inputs import load, real_weights

    command_options.check_output_path(path)
    adapter = run_dir / adapted_llama.ADAPTER_FILE
    if not adapter.is_file():
        raise ModelError(
            f"there is no adapter at {adapter}; `python -m lab seeing train` makes one"
        )
    # A run that is stored at this path is continued only if it was made with the same adapter. With
    # another one it is begun anew, and the first result overwrites it.
    digest = hashlib.sha256(adapter.read_bytes()).hexdigest()[:16]
    command = shlex.join(["python", "-m", "lab", *sys.argv[1:]])
    facts = study.run_facts(real_weights.SMOLLM2.name, digest, together, run_dir, command)
    results = measure.Results(path.with_suffix(".json"), facts, study.KINDS)
    model = load(str(run_dir / MODEL))
    draft = load(str(run_dir / DRAFT))
    with status("running the methods", quiet=False) as tell:
        if timed:
            study.time_methods(model, draft, timed, results, tell)
        else:
            study.measure_answers(
                model, draft, run_dir / MODEL, clips, results, together=together, on_progress=tell
            )
    path.write_text(seeing_page.page(results.facts))
    out.print(f"wrote the tables to {path}", markup=False, soft_wrap=True)

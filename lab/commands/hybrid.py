"""The commands ``python -m lab train-hybrid | hybrid``.

A hybrid has layers of attention and layers with a recurrent state, like Qwen3.5. The first command
trains a small hybrid target and draft from the embedded pair, and the second measures methods on
them.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli import command_options
from saccade.cli.terminal import Threads, Verbose, out, prepare, status
from saccade.core.errors import ModelError, OptionError

Folder = Annotated[Path, typer.Argument(help="Gets or has the folders `target` and `draft`.")]
TRAINING_FILE = "training.json"  # The CPU seconds of each stage, beside the two models.
RUN_DIR = Path("runs/hybrid")


def train_hybrid(
    folder: Folder,
    run_dir: Annotated[Path, typer.Option(help="Where stages, logs and weights go.")] = RUN_DIR,
    stages: Annotated[str | None, typer.Option(help="Comma-separated; all when left out.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="CPU seconds of each stage, instead of its own.")
    ] = None,
    threads: Threads = None,
    verbose: Verbose = True,
) -> None:
    """Train a small hybrid target and draft from the embedded pair, and write them to FOLDER.

    A finished stage is not repeated, and an interrupted one is continued.
    """
    prepare(threads, verbose)
    from lab.training import hybrid

    names = [stage.name for stage in hybrid.STAGES]
    chosen = names if stages is None else [name.strip() for name in stages.split(",")]
    if unknown := [name for name in chosen if name not in names]:
        raise OptionError(f"unknown stage {unknown[0]!r}; stages: {', '.join(names)}")
    budget = {} if seconds is None else dict.fromkeys(chosen, seconds)
    hybrid.train(run_dir, chosen, budget)
    # Stages that were not chosen may not be finished yet.
    if missing := hybrid.missing_stages(run_dir):
        out.print(f"nothing is written to {folder} before: {', '.join(missing)}", markup=False)
        return
    hybrid.export(run_dir, folder)
    (folder / TRAINING_FILE).write_text(json.dumps(hybrid.training_seconds(run_dir)) + "\n")
    out.print(f"wrote the target and the draft to {folder}", markup=False, soft_wrap=True)


def hybrid(
    folder: Folder,
    clips: Annotated[int, typer.Option(min=2, help="Unseen clips of each size.")] = 12,
    timed: Annotated[
        int, typer.Option(help="Only time this many clips; the machine must be otherwise idle.")
    ] = 0,
    path: Annotated[
        Path, typer.Option("--out", help="The page; the numbers go beside it and are completed.")
    ] = Path("docs/results/hybrids.md"),
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Measure methods on the hybrid pair in FOLDER, beside the embedded pair."""
    prepare(threads, verbose)
    if not (folder / TRAINING_FILE).is_file():
        raise ModelError(
            f"{folder} has no trained hybrid pair; `python -m lab train-hybrid {folder}` makes one"
        )
    command_options.check_output_path(path)
    from lab.machine import describe_machine
    from lab.real.answers import format_facts
    from lab.studies import hybrid as study
    from lab.studies import hybrid_page

    # Numbers of earlier runs are kept, because a run measures either seconds or everything else.
    numbers_file = path.with_suffix(".json")
    facts: dict[str, Any] = {}
    if numbers_file.is_file():
        facts = json.loads(numbers_file.read_text())
    pairs = study.pairs_to_compare(folder)
    command = shlex.join(["python", "-m", "lab", *sys.argv[1:]])
    machine = describe_machine()
    facts |= {"training": json.loads((folder / TRAINING_FILE).read_text())}
    with status("measuring", quiet=False) as tell:
        if timed:
            facts |= {"command": command, "machine": machine, "machine_load": study.machine_load()}
            facts["speed"] = study.time_methods(pairs, timed, study.SIZES[0], tell)
            facts["forwards"] = study.time_forwards(pairs, study.SIZES[0], tell)
            facts["layers"] = study.time_layers(study.SIZES[0], tell)
        else:
            # An earlier run's command and machine are kept: if it was timed, its seconds depend on
            # them.
            facts = {"command": command, "machine": machine} | facts
            facts["accuracy"] = study.measure_accuracy(pairs, tell)
            facts["acceptance"] = study.measure_acceptance(pairs, clips, tell)
    numbers_file.write_text(format_facts(facts) + "\n")
    path.write_text(hybrid_page.page(json.loads(numbers_file.read_text())))
    out.print(f"wrote the table to {path}", markup=False, soft_wrap=True)

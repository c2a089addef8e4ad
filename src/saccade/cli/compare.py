"""``saccade compare``, and the comparison that ``saccade demo`` prints too."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import ClipOptions, LoadOptions, ModelOptions, with_option_groups
from saccade.cli.terminal import Json, Verbose, err, live_view, out, prepare

if TYPE_CHECKING:
    from saccade.bench.comparison import TimedRuns
    from saccade.core.result import Result
    from saccade.inputs import Pair
    from saccade.inputs.subjects import Subject

REPEATS = 3  # How often each method runs, where --repeat is not given.
MAX_REPEATED_METHODS = 8  # With more methods than this, each runs once.
# The names of Hugging Face's own ways to decode, which can be compared with our methods. They are
# repeated here because ``saccade.bench.peers`` imports PyTorch, and names are checked before that.
PEERS = ("hf", "hf-assisted", "hf-assisted-seeing", "hf-lookup")


@with_option_groups
def compare(
    models: ModelOptions,
    frames: ClipOptions,
    loading: LoadOptions,
    video: command_options.Video = None,
    question: command_options.Question = None,
    document: command_options.Documents = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", "-m", help="Comma-separated, or all; hf, hf-assisted, hf-lookup too."
        ),
    ] = None,
    prompt: command_options.Prompt = command_options.QUESTION,
    max_new_tokens: command_options.Tokens = 256,
    repeat: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Interleaved runs a method; else {REPEATS}, "
            f"or 1 of more than {MAX_REPEATED_METHODS} methods.",
        ),
    ] = None,
    seed: command_options.Seed = None,
    exact: command_options.Exact = False,
    trace: command_options.Trace = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run several methods on one video or document, interleaved, and show what each one costs."""
    video, question = command_options.split_arguments(video, question, bool(document))
    prompt = command_options.resolve_question(question, prompt)
    settings = run_setup.resolve_settings(models, loading)
    methods = f"ar,{settings.method},hf" if methods is None else methods
    names = run_setup.parse_method_names(methods)
    run_setup.check_methods(names, extra_names=PEERS)
    subject = run_setup.read_subject(
        video, document, frames.sampling(), quiet=as_json, target=settings.target
    )
    prepare(settings.threads, verbose, quiet=as_json)
    from saccade.bench.comparison import resolve_methods

    # A method that cannot be used is refused here, before the models are loaded. Where a method
    # drafts in a process of its own, that process starts here and gets ready while they load. The
    # recipe of a peer is None.
    ours = [name for name, recipe in resolve_methods(names).items() if recipe is not None]
    run_setup.resolve_recipes(ours, exact)
    pair = settings.load_models(quiet=as_json)
    labels: dict[str, Any] = {"video": None if video is None else Path(video).name}
    if document:
        labels["documents"] = [file.name for file in document]
    comparison = compare_methods(
        pair,
        subject,
        labels,
        prompt,
        names,
        repeat=repeat or (REPEATS if len(names) <= MAX_REPEATED_METHODS else 1),
        max_new_tokens=max_new_tokens,
        seed=seed,
        captioner=settings.make_captioner(subject.frames),
        exact=exact,
        # A method that runs only because of ``all`` may fail without ending the comparison.
        may_refuse=run_setup.unnamed_methods(methods, names),
    )
    if trace is not None:
        from saccade.engine import trace as traces

        for name, result in comparison.results.items():
            file_name = name.replace("/", "_")
            traces.write_trace(trace.with_name(f"{trace.stem}-{file_name}{trace.suffix}"), result)
    if as_json:
        typer.echo(json.dumps(comparison.json()))
        return
    out.print(comparison.answer, markup=False)
    out.print()
    comparison.print_to(out)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison, and the JSON of `compare` and `demo`.

    ``about`` says what was measured and on which device. ``rows`` has a row of the table for each
    method (a :class:`saccade.bench.comparison.Summary`). ``results`` has the last answer of each of
    our methods that has run; peers have none.
    """

    about: dict[str, Any]
    rows: dict[str, Any]
    results: dict[str, Result]
    answer: str  # The text that plain decoding gave.
    warning: str | None = None  # Why the times may be wrong.

    def json(self) -> dict[str, Any]:
        """Returns the JSON object of the comparison."""
        warning = {} if self.warning is None else {"warning": self.warning}
        rows = {name: row.json() for name, row in self.rows.items()}
        return {**self.about, **warning, "methods": rows}

    def print_to(self, page: Console) -> None:
        """Prints the table and its notes."""
        from saccade.bench import terminal_output

        about = self.about
        repeat = self.about["repeat"]
        runs = "one run each" if repeat == 1 else f"medians of {repeat} interleaved runs"
        page.print(terminal_output.summary_table(self.rows))
        page.print(
            f"[dim]{about['visual_tokens']} visual tokens, {about['dtype']} on {about['device']}, "
            f"{about['threads']} threads; {runs}; "
            "speedups are against ar in the same run; before s: seconds before decoding (vision, "
            "prefills, and choosing what the draft reads)[/dim]"
        )
        terminal_output.print_notes(page, self.rows)
        if self.warning is not None:
            err.print(self.warning, style="yellow", markup=False, soft_wrap=True)


class ComparisonProgress:
    """Displays the table of a comparison while it fills, and the time that is left."""

    def __init__(self, display: Callable[[RenderableType, str], None], repeat: int) -> None:
        self._display, self._repeat = display, repeat
        self._timed: TimedRuns | None = None
        # How many timed runs have ended, and how long they took together.
        self._finished_runs, self._finished_seconds = 0, 0.0
        self._run_start = time.monotonic()

    def start_run(self, name: str, iteration: int) -> None:
        """Displays which run begins; ``iteration`` 0 is the warm-up."""
        self._run_start = time.monotonic()
        step = f"run {iteration} of {self._repeat}" if iteration else "warming up"
        self._display(self._table(), f"{step}: {name}{self._time_left()}")

    def end_run(self, timed: TimedRuns) -> None:
        """Counts a timed run that has ended. ``timed`` has every timed run so far."""
        self._finished_runs += 1
        self._finished_seconds += time.monotonic() - self._run_start
        self._timed = timed

    def _table(self) -> RenderableType:
        from saccade.bench import terminal_output

        return "" if self._timed is None else terminal_output.summary_table(self._timed.summaries())

    def _time_left(self) -> str:
        """Returns how long the remaining runs will take, at the average of those so far.

        It is the end of a line, such as ", about 0:00:50 left". It is empty until the first timed
        run has ended.
        """
        if self._timed is None:
            return ""
        # A method that has failed does not run again.
        runs_left = sum(
            self._repeat - len(runs)
            for name, runs in self._timed.runs.items()
            if name not in self._timed.errors
        )
        seconds = round(self._finished_seconds / self._finished_runs * runs_left)
        return f", about {timedelta(seconds=seconds)} left"


def compare_methods(
    models: Pair,
    subject: Subject,
    labels: Mapping[str, Any],
    prompt: str,
    names: Sequence[str],
    *,
    repeat: int,
    max_new_tokens: int,
    **run_options: Any,
) -> Comparison:
    """Runs methods in turns on one question about a subject.

    ``labels`` are fields of the JSON that name the subject. ``run_options`` are further arguments
    of :func:`saccade.bench.comparison.run_interleaved`.
    """
    import torch

    from saccade.bench.comparison import BASELINE, resolve_methods, run_interleaved
    from saccade.bench.hardware.disturbance import DisturbanceWatch

    backbone = models.target.backbone
    inputs = models.ask(prompt, **subject.ask_arguments)
    watch = DisturbanceWatch()
    recipes = resolve_methods(names)
    with live_view() as display:
        progress = ComparisonProgress(display, repeat)
        outcome = run_interleaved(
            models,
            inputs,
            recipes,
            repeat=repeat,
            settings={"max_new_tokens": max_new_tokens, "do_sample": False},
            on_run=progress.start_run,
            on_run_end=progress.end_run,
            **run_options,
        )
    # The times may be wrong if other programs were busy, or if plain decoding varied a lot.
    warning = watch.warning([run.decode_seconds for run in outcome.runs[BASELINE]])
    results = outcome.last_results()
    baseline = results[BASELINE]
    about = {
        **labels,
        "visual_tokens": baseline.visual_tokens,
        "max_new_tokens": max_new_tokens,
        "device": str(backbone.device),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "repeat": repeat,
    }
    return Comparison(about, outcome.summaries(), results, baseline.text or "", warning)

"""``saccade bench``: runs suites by several methods, and writes the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import LoadOptions, ModelOptions, with_option_groups
from saccade.cli.compare import PEERS
from saccade.cli.interruption_hint import explain_interruption
from saccade.cli.terminal import Verbose, err, out, prepare
from saccade.core.errors import OptionError, suggest

if TYPE_CHECKING:
    from saccade.bench.suites.types import Suite

DEFAULT_SUITE = "shapes-caption"
# Options besides the models' names that decide what is answered. A run is only resumed with the
# same ones.
MODEL_OPTIONS = ("quantize", "draft_quantize", "positions", "captioner")
DEFAULT_METHODS = "ar,auto,sd,specvlm,specvlm/shape=fit,sage,hf,hf-assisted-seeing"

bench_app = typer.Typer(
    invoke_without_command=True,
    help="Run suites by several methods side by side, and report.",
    rich_markup_mode=None,
)


@bench_app.callback()
@with_option_groups
def bench(
    context: typer.Context,
    models: ModelOptions,
    loading: LoadOptions,
    suite: Annotated[
        str,
        typer.Option(
            help="Suites between commas: NAME, or NAME@PAPER with that paper's settings. list "
            "prints all names; all is each synthetic task once, with short clips."
        ),
    ] = DEFAULT_SUITE,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            "-m",
            help="Methods between commas, or all; hf and hf-... are Hugging Face's generate, and "
            "draft/view=NAME is the draft model answering by itself.",
        ),
    ] = DEFAULT_METHODS,
    out_dir: Annotated[
        Path,
        typer.Option("--out", help="The folder of the run; an interrupted run in it is resumed."),
    ] = Path("runs/bench"),
    data: Annotated[
        Path | None, typer.Option(help="The folder of a paper's dataset; else the hub's cache.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items of each suite.")] = None,
    shard: Annotated[str, typer.Option(help="i/n: every n-th item, from the i-th.")] = "1/1",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", "-n", min=1, help="The longest answer; else each suite's own."
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="The sampling temperature; 0 is greedy.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="The seed of sampling.")] = 0,
    batch: Annotated[
        int,
        typer.Option(
            min=1, help="Items answered in one batch; above 1, only the first question of each."
        ),
    ] = 1,
    exact: command_options.Exact = False,
    verbose: Verbose = False,
) -> None:
    """Run suites by several methods, interleaved; results.jsonl, report.md and figures."""
    if context.invoked_subcommand is not None:
        return
    if suite == "list":
        from saccade.bench.suites.benchmarks import BENCHMARKS
        from saccade.world import demo_clips

        out.print("\n".join([*demo_clips.suites(), *BENCHMARKS]))
        return
    settings = run_setup.resolve_settings(models, loading)
    prepare(settings.threads, verbose)
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from saccade.bench import runner
    from saccade.bench.hardware.disturbance import DisturbanceWatch
    from saccade.corpus import json_lines

    shard_place = json_lines.parse_shard(shard)
    suites = named_suites(suite, data)
    names = _check_method_names(methods, exact)
    pair = settings.load_models(quiet=False)
    watch = DisturbanceWatch()
    plan = runner.Benchmark(
        suites,
        names,
        limit=limit,
        shard=shard_place,
        seed=seed,
        max_new_tokens=max_new_tokens,
        exact=exact,
        temperature=temperature,
        batch=batch,
        model_options=tuple(
            (name, str(value))
            for name, value in (*settings.load, ("captioner", settings.captioner))
            if name in MODEL_OPTIONS and value not in (None, "auto")
        ),
    )

    with (
        explain_interruption(f"the answers in {out_dir} stay"),
        Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=err,
            transient=True,
        ) as bar,
    ):
        task = bar.add_task("starting", total=None)
        runner.run_benchmark(
            plan,
            pair.target,
            pair.draft,
            out_dir,
            make_captioner=settings.make_captioner,
            on_progress=lambda what, done, total: bar.update(
                task, description=what, completed=done, total=total
            ),
        )
    if (warning := watch.warning()) is not None:
        err.print(warning, style="yellow", markup=False, soft_wrap=True)
    _print_report(out_dir)


def _print_report(folder: Path) -> None:
    """Writes a run's report, and prints its table of speeds for each suite."""
    from saccade.bench import report, terminal_output

    path = report.write_report(folder)
    for suite, (heads, rows) in report.speed_tables(folder).items():
        table = terminal_output.make_table(heads[:1], heads[1:])
        table.columns[0].no_wrap = True
        for row in rows:
            table.add_row(*row)
        out.print(f"[bold]{suite}[/bold]")
        out.print(table)
        out.print()
    out.print(f"{path} has the report", markup=False, soft_wrap=True)


@bench_app.command("report")
def bench_report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
) -> None:
    """Write a run's report.md and figures anew."""
    _print_report(run)


def named_suites(names: str, data: Path | None) -> tuple[Suite, ...]:
    """Returns the suites of comma-separated names; "all" stands for several of our own.

    A suite is one of our own, whose videos are drawn by ``saccade.world``, or a paper's benchmark,
    whose files are looked for in the folder ``data`` (None: in the hub's cache). Raises OptionError
    where there is no such suite, or where its files are missing.
    """
    from saccade.bench.suites.search import open_dataset
    from saccade.world import demo_clips

    drawn_suites = demo_clips.suites()
    suites: list[Suite] = []
    for name in dict.fromkeys(run_setup.split_names(names)):
        if name == "all":
            suites += demo_clips.default_suites()
        elif name in drawn_suites:
            suites.append(drawn_suites[name])
        elif suggestion := suggest(name, drawn_suites):  # A drawn suite's name, misspelt.
            raise OptionError(f"there is no suite {name!r}{suggestion}: saccade bench --suite list")
        else:
            benchmark, _, paper = name.partition("@")
            suites.append(open_dataset(benchmark, data, paper=paper or None))
    if not suites:
        raise OptionError("name a suite: saccade bench --suite list")
    return tuple({suite.name: suite for suite in suites}.values())


def _check_method_names(text: str, exact: bool = False) -> tuple[str, ...]:
    """Returns the names in a list between commas, once all of them are known to be usable.

    A name stands for one of our methods, for the draft alone (``draft/view=...``) or for Hugging
    Face's ``generate`` (``PEERS``); "all" stands for all of our methods. Raises SaccadeError for a
    name that does not exist or cannot run. With ``exact`` a method of ours that can only draft
    trees cannot run.
    """
    from saccade.bench.draft_only import draft_only_recipe, is_draft_only

    names = run_setup.parse_method_names(text)
    for name in filter(is_draft_only, names):
        draft_only_recipe(name)  # It raises where the draft cannot answer under this view.
    others = [name for name in names if not is_draft_only(name)]
    run_setup.check_methods(others, extra_names=PEERS)
    # This raises where a method cannot run, and starts the draft's process if a method needs one.
    run_setup.resolve_recipes([name for name in others if name not in PEERS], exact)
    return names

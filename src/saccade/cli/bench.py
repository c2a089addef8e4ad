"""``saccade bench``: suites run by every method, and the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from saccade.cli import loading, options
from saccade.cli.options import DeviceOptions, LoadOptions, ModelOptions, grouped
from saccade.cli.terminal import Json, Verbose, err, out, prepare, status
from saccade.core.errors import OptionError

if TYPE_CHECKING:
    from saccade.bench.suites.types import Suite
    from saccade.drafting.recipe import Recipe

DEFAULT_SUITE = "shapes-caption"
DEFAULT_METHODS = "ar,auto,sd,specvlm,specvlm/shape=fit,sage,hf,hf-assisted-seeing"

bench_app = typer.Typer(
    invoke_without_command=True,
    help="Run suites by several methods side by side, and report.",
    rich_markup_mode=None,
)


@bench_app.callback()
@grouped
def bench(
    context: typer.Context,
    models: ModelOptions,
    how: LoadOptions,
    suite: Annotated[
        str,
        typer.Option(help="Comma-separated, NAME or NAME@paper; list, or all (embedded)."),
    ] = DEFAULT_SUITE,
    methods: Annotated[
        str,
        typer.Option(help="Comma-separated, or all; peers (hf, ...) and draft/view=NAME too."),
    ] = DEFAULT_METHODS,
    out_dir: Annotated[
        Path, typer.Option("--out", help="A folder; an interrupted run in it is gone on with.")
    ] = Path("runs/bench"),
    data: Annotated[
        Path | None, typer.Option(help="Where a paper's dataset lies; else the hub's cache.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items of each suite.")] = None,
    shard: Annotated[str, typer.Option(help="i/n: every n-th item, from the i-th.")] = "1/1",
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The longest answer; else each suite's own.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sample at it; 0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Names the noise of sampling.")] = 0,
    exact: options.Exact = False,
    verbose: Verbose = False,
) -> None:
    """Run suites by several methods, interleaved; results.jsonl, report.md and figures."""
    if context.invoked_subcommand is not None:
        return
    if suite == "list":
        from saccade.bench.suites import shapes
        from saccade.bench.suites.benchmarks import BENCHMARKS

        out.print("\n".join([*shapes.suites(), *BENCHMARKS]))
        return
    known = loading.known(models, how)
    prepare(known.threads, verbose)
    from saccade.bench import report, runner
    from saccade.corpus import rows

    part = rows.shard(shard)
    suites = named_suites(suite, data)
    names = _methods(methods, exact)
    pair = known.models(quiet=False)
    plan = runner.Plan(suites, names, limit, part, seed, max_new_tokens, exact, temperature)

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
    ) as bar:
        task = bar.add_task("starting", total=None)
        runner.run(
            plan,
            pair.target,
            pair.draft,
            out_dir,
            captioner=known.captions,
            tell=lambda what, done, whole: bar.update(
                task, description=what, completed=done, total=whole
            ),
        )
    path = report.write(out_dir)
    out.print(f"{path} has the report", markup=False, soft_wrap=True)


@bench_app.command("report")
def bench_report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
) -> None:
    """Write a run's report.md and figures anew."""
    from saccade.bench import report

    out.print(f"{report.write(run)} has the report", markup=False, soft_wrap=True)


@bench_app.command("cost")
@grouped
def bench_cost(
    how: DeviceOptions,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = (
        "sd/shape=chain-3,sd/shape=chain-7,specvlm,specvlm/shape=chain-7"
    ),
    accepted: Annotated[
        float | None, typer.Option(min=0, help="Accepted tokens a round, on average.")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="0.9,0.8,...: the chance of each place of a draft.")
    ] = None,
    suite: Annotated[str, typer.Option(help="Its first item is the prompt.")] = "shapes-caption-2k",
    max_new_tokens: options.Tokens = 128,
    repeat: options.Repeat = 3,
    target: options.Target = None,
    draft: options.Draft = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Impose an acceptance on real forwards: what drafting costs, and how close to the ideal it is.

    The verdicts are decreed, so models with random weights will do.
    """
    prepare(how.threads, verbose)
    from saccade.bench.compare import named
    from saccade.bench.hardware.synthetic import Decree, imposed

    if accepted is None and rates is None:
        accepted = 3.0
    decree = Decree(accepted, tuple(map(_rate, rates.split(","))) if rates else ())
    recipes = {
        name: recipe if name == "ar" else imposed(recipe, decree)
        for name, recipe in named(split(methods)).items()
        if recipe is not None
    }
    models = loading.models(target or "shapes", draft, quiet=as_json, **how.load)
    # no token ends a text, so that all answers are as long
    settings = {"max_new_tokens": max_new_tokens, "eos_token_id": -1}
    profiled(models, recipes, suite, 1, repeat, settings, as_json)


def profiled(
    models: loading.Models,
    recipes: Mapping[str, Recipe],
    suite: str,
    limit: int,
    repeat: int,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Measures over a suite's first items, and prints."""
    from saccade.bench import runner, show
    from saccade.bench.hardware.profile import profile
    from saccade.bench.trace import environment
    from saccade.inputs import ask

    (chosen,) = named_suites(suite, None)
    items = islice(chosen.items(), limit)
    with status("profiling", quiet=as_json) as tell:
        found = profile(
            models.target,
            models.draft,
            [ask(models.target, item.question, **runner.shown(item)) for item in items],
            recipes,
            settings={
                "max_new_tokens": chosen.setting.max_new_tokens,
                "do_sample": False,
                **settings,
            },
            repeat=repeat,
            tell=tell,
        )
    if as_json:
        about = {"suite": chosen.name, "items": limit, "repeat": repeat}
        every = [asdict(each) for each in found]
        typer.echo(json.dumps({**about, "environment": environment(), "methods": every}))
        return
    out.print(show.profiles(found))
    out.print(
        f"[dim]milliseconds a round (of it: drafting, verifying, the rest) and a drafted level; by "
        f"bare forwards: c a level, T(n) the rows, both a round, T(1) "
        f"{found[0].bare_plain * 1e3:.2f}; ideal and got: times ar. {limit} items of "
        f"{chosen.name} x {repeat} runs[/dim]",
        soft_wrap=True,
    )


def split(names: str) -> list[str]:
    """Names between commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{text!r} is no rate: --rates 0.9,0.8,0.6") from None


def named_suites(given: str, data: Path | None) -> tuple[Suite, ...]:
    """Suites by their names between commas. Raises OptionError for one nobody knows."""
    from saccade.bench.suites import shapes
    from saccade.bench.suites.search import open_dataset

    known = shapes.suites()
    found: list[Suite] = []
    for name in dict.fromkeys(split(given)):
        if name == "all":
            found += [suite for task, suite in known.items() if task in shapes.TASKS]
        elif name in known:
            found.append(known[name])
        else:
            benchmark, _, paper = name.partition("@")
            found.append(open_dataset(benchmark, data, paper=paper or None))
    if not found:
        raise OptionError("name a suite: saccade bench --suite list")
    return tuple({suite.name: suite for suite in found}.values())


def _methods(given: str, exact: bool = False) -> tuple[str, ...]:
    from saccade.bench.alone import is_alone, recipe
    from saccade.methods import SYSTEMS

    every = [each for name in split(given) for each in (SYSTEMS if name == "all" else [name])]
    chosen = tuple(dict.fromkeys(every))
    for name in filter(is_alone, chosen):
        recipe(name)
    ours = [n for n in chosen if not is_alone(n) and (n in SYSTEMS or "/" in n)]
    loading.recipes(ours, exact)
    return chosen

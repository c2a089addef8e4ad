"""``saccade bench``: suites run by every method, and the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from saccade.cli import loading, options
from saccade.errors import OptionError
from saccade.terminal import Threads, Verbose, err, out, prepare

if TYPE_CHECKING:
    from saccade.suites.types import Suite

DEFAULT_SUITE = "shapes-caption"
DEFAULT_METHODS = "ar,sd,specvlm,specvlm/shape=fit,sage,hf,hf-assisted-seeing"

bench_app = typer.Typer(
    invoke_without_command=True,
    help="Run suites by several methods side by side, and report.",
    rich_markup_mode=None,
)


@bench_app.callback()
def bench(
    context: typer.Context,
    suite: Annotated[
        str, typer.Option(help="Comma-separated; list names them, all runs the embedded ones.")
    ] = DEFAULT_SUITE,
    methods: Annotated[
        str, typer.Option(help="Comma-separated, or all; hf, hf-assisted, hf-lookup too.")
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
    target: options.Target = None,
    draft: options.Draft = None,
    config: options.Config = None,
    captioner: options.Captioner = None,
    seed: Annotated[int, typer.Option(help="Names the noise of sampling.")] = 0,
    threads: Threads = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    quantize: options.Quantize = None,
    trust_remote_code: options.Trust = False,
    verbose: Verbose = False,
) -> None:
    """Run suites by several methods, interleaved; results.jsonl, report.md and figures."""
    if context.invoked_subcommand is not None:
        return
    if suite == "list":
        out.print("\n".join(_names()))
        return
    known = loading.known(config, target, draft, None)
    prepare(threads or known.threads, verbose)
    from saccade.bench import report, runner

    part = _shard(shard)
    suites = _suites(suite, data)
    names = _methods(methods)
    place = loading.Place(dtype, device, device_map, quantize, trust_remote_code)
    models = loading.models(known.target, known.draft, place, quiet=False)
    plan = runner.Plan(suites, names, limit, part, seed, max_new_tokens)

    def caption(clip: Any) -> Any:
        return loading.captioner(captioner, known.target, clip, device)

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
            models.target,
            models.draft,
            out_dir,
            captioner=caption,
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


def _names() -> list[str]:
    from saccade.suites import shapes

    return list(shapes.suites())


def _suites(given: str, data: Path | None) -> tuple[Suite, ...]:
    from saccade.suites import shapes

    known = shapes.suites()
    found: list[Suite] = []
    for name in dict.fromkeys(part.strip() for part in given.split(",") if part.strip()):
        if name == "all":
            found += [suite for task, suite in known.items() if task in shapes.TASKS]
        elif name in known:
            found.append(known[name])
        else:
            found.append(_dataset(name, data))
    if not found:
        raise OptionError("name a suite: saccade bench --suite list")
    return tuple(found)


def _dataset(name: str, data: Path | None) -> Suite:
    from saccade.suites.datasets import open_dataset

    return open_dataset(name, data)


def _methods(given: str) -> tuple[str, ...]:
    from saccade.systems import SYSTEMS

    names = [name.strip() for name in given.split(",") if name.strip()]
    every = [each for name in names for each in (SYSTEMS if name == "all" else [name])]
    chosen = tuple(dict.fromkeys(every))
    loading.recipes([name for name in chosen if name in SYSTEMS or "/" in name])
    return chosen


def _shard(text: str) -> tuple[int, int]:
    """i/n, counted from 1, as (from 0, of how many)."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise OptionError(f"--shard {text} is not i/n with i from 1 to n, as in 2/4")
    return int(number) - 1, int(count)

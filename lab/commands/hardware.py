"""The commands ``python -m lab methods | prefill | verify | flips | pool | following``.

They measure what methods and forwards cost on this machine.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from lab.commands.pair import PairOptions, TargetOptions
from saccade.cli import command_options
from saccade.cli.bench import named_suites
from saccade.cli.command_options import with_option_groups
from saccade.cli.run_setup import split_names
from saccade.cli.terminal import Json, Threads, Verbose, out, prepare, status
from saccade.core.errors import OptionError

MIB = 2**20


@with_option_groups
def prefill(
    options: TargetOptions,
    visual_tokens: Annotated[int, typer.Option(min=1, help="About how many to read.")] = 8192,
    rows: Annotated[int, typer.Option(min=1, help="Of the verification that follows.")] = 8,
    record: Annotated[
        bool, typer.Option("--record", help="Record the text's attention too.")
    ] = False,
    turns: Annotated[
        int, typer.Option(min=0, help="Compare with and without --record, this many times each.")
    ] = 0,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Read one long clip and verify one draft, and print the seconds and the peak memory."""
    prepare(options.threads, verbose)
    from lab.hardware.prefill import measure_reading, measure_recording

    target = options.loaded()
    if turns:
        plain, recorded = measure_recording(target, visual_tokens, turns)
        typer.echo(
            f"prefill {plain * 1e3:.1f} ms, {recorded * 1e3:.1f} ms with attention recorded: "
            f"{recorded / plain - 1:.1%} more"
        )
        return
    reading = measure_reading(target, visual_tokens, rows=rows, record=record)
    if as_json:
        typer.echo(json.dumps(asdict(reading)))
        return
    peaks = [
        "unknown" if peak is None else f"{peak / MIB:.0f} MiB"
        for peak in (reading.vision_peak, reading.prefill_peak)
    ]
    out.print(
        f"{reading.visual_tokens} visual tokens, {reading.prompt_tokens} in all\n"
        f"vision   {reading.vision_seconds:.2f} s, at most {peaks[0]} more than before\n"
        f"prefill  {reading.prefill_seconds:.2f} s, at most {peaks[1]} more than before "
        f"(keys and values {reading.kv / MIB:.0f} MiB; weights {reading.weights / MIB:.0f} MiB)\n"
        f"verify   {reading.verify_seconds * 1e3:.1f} ms for {reading.rows} rows",
        soft_wrap=True,
    )


@with_option_groups
def verify(
    options: TargetOptions,
    visual_tokens: Annotated[int, typer.Option(min=1, help="Cached keys.")] = 2048,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Of a verification (repeatable).")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Of each; the fastest counts.")] = 60,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure T(n)/T(1): what a verification of several rows costs, compared with one row."""
    prepare(options.threads, verbose)
    from lab.hardware.prefill import measure_verifications

    seconds = measure_verifications(
        options.loaded(), visual_tokens, {1, *(rows or (4, 8, 16))}, turns
    )
    if as_json:
        typer.echo(json.dumps({"keys": visual_tokens, "seconds": seconds}))
        return
    ratios = [f"T({n})/T(1) {value / seconds[1]:.2f}" for n, value in seconds.items() if n > 1]
    typer.echo(", ".join([f"over {visual_tokens} keys: T(1) {seconds[1] * 1e3:.2f} ms", *ratios]))


@with_option_groups
def flips(
    options: TargetOptions,
    suite: Annotated[str, typer.Option(help="Its items are the prompts.")] = "shapes-caption",
    limit: Annotated[int, typer.Option(min=1, help="Items.")] = 20,
    rows: Annotated[int, typer.Option(min=2, help="Rows of a forward, compared with 1.")] = 8,
    max_new_tokens: command_options.Tokens = 128,
    exact: command_options.Exact = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Count how often the target's arg-max differs when a forward has several rows."""
    prepare(options.threads, verbose)
    from lab.hardware.flips import count_flips
    from saccade.bench.runner import media_arguments
    from saccade.inputs import ask

    loaded = options.loaded()
    (chosen,) = named_suites(suite, data=None)
    counts = [
        count_flips(
            loaded.backbone,
            ask(loaded, item.question, **media_arguments(item)),
            rows=rows,
            tokens=max_new_tokens,
            exact=exact,
        )
        for item in islice(chosen.items(), limit)
    ]
    sums = {name: sum(getattr(each, name) for each in counts) for name in asdict(counts[0])}
    if as_json:
        typer.echo(json.dumps({"items": len(counts), "rows": rows, **sums}))
        return
    share = sums["flips"] / sums["compared"]
    out.print(
        f"{len(counts)} answers, {sums['compared']} tokens, {rows} rows compared with 1: "
        f"{sums['flips']} arg-maxes differ ({share:.2%}), the logits of {sums['unlike']} tokens do",
        soft_wrap=True,
    )


@with_option_groups
def pool(
    options: PairOptions,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once (repeatable).")
    ] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = "ar,auto",
    suite: Annotated[str, typer.Option(help="Where the requests come from.")] = "shapes-caption",
    limit: Annotated[int, typer.Option(min=1, help="How many requests.")] = 16,
    max_new_tokens: command_options.Tokens = 256,
    path: Annotated[
        Path | None, typer.Option("--out", help="Write the numbers here, and a figure beside it.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Serve the same requests with several numbers at once, and print throughput and latency."""
    prepare(options.threads, verbose)
    from lab.hardware.throughput import draw_throughput, make_requests, measure_throughput
    from saccade.bench.figures import save_figure
    from saccade.bench.terminal_output import make_table

    (chosen,) = named_suites(suite, data=None)
    models = options.models(quiet=as_json)
    drafting = None if models.draft is None else models.draft.backbone
    with status("serving", quiet=as_json):
        requests = make_requests(models.target, islice(chosen.items(), limit), max_new_tokens)
        results = measure_throughput(
            models.target.backbone,
            drafting,
            requests,
            split_names(methods),
            rows or [1, 2, 4, 8],
            options.repeat,
        )
    rates = [asdict(each) | {"tokens_per_second": each.tokens_per_second} for each in results]
    if path is not None:
        path.write_text(json.dumps(rates, indent=1) + "\n")
        save_figure(draw_throughput(results), path.with_suffix(".png"))
    if as_json:
        typer.echo(json.dumps(rates))
        return
    numbers = ["rows", "tok/s", "s in all", "first token s", "ms a token", "95 %", "same ids"]
    table = make_table(["method"], numbers)
    for each in results:
        table.add_row(
            each.method,
            str(each.rows),
            f"{each.tokens_per_second:.0f}",
            f"{each.seconds:.2f}",
            f"{each.first_token:.3f}",
            *(f"{1e3 * seconds:.1f}" for seconds in each.between),
            "yes" if each.same else "NO",
        )
    out.print(table)


def following(
    document: Annotated[Path, typer.Argument(help="A text of 1,800 tokens or more.")],
    keep: Annotated[float, typer.Option(help="The share of it that the draft reads.")] = 0.1,
    rounds: Annotated[int, typer.Option(min=2, help="How many are timed.")] = 24,
    path: Annotated[
        Path | None,
        typer.Option("--out", help="Store the numbers here: docs/results/following.json."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Replace the table in this page: docs/results/fresh.md.")
    ] = None,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Measure on real weights what it costs to choose a self-draft's keys again every round."""
    prepare(threads, verbose)
    from lab.hardware.following import MARKS, measure_following, page_section
    from lab.machine import describe_machine
    from lab.real.long_documents import find_documents
    from lab.studies.ablations import page_with_table
    from saccade.inputs import load, real_weights

    text = next(find_documents([document]), None)
    if text is None:
        raise OptionError(f"{document} is shorter than 1,800 tokens; give a longer text")
    model = load(str(real_weights.require_checkpoint()))
    costs = measure_following(model, text, keep=keep, rounds=rounds)
    facts = {
        "command": shlex.join(["python", "-m", "lab", *sys.argv[1:]]),
        "model": real_weights.SMOLLM2.name,
        "machine": f"{describe_machine()}.",
        **asdict(costs),
    }
    if path is not None:
        path.write_text(json.dumps(facts, indent=1) + "\n")
    if page is not None:
        page.write_text(page_with_table(page.read_text(), page_section(facts), MARKS))


@with_option_groups
def methods(
    options: PairOptions,
    max_new_tokens: command_options.Tokens = 256,
    path: Annotated[Path, typer.Option("--out", help="Store the run here.")] = Path(
        "docs/results/methods.json"
    ),
    page: Annotated[Path, typer.Option(help="Replace the table in this page.")] = Path(
        "docs/results/methods.md"
    ),
    verbose: Verbose = False,
) -> None:
    """Run every method on three clips, and compare ids, tokens a forward and speed with ar's."""
    prepare(options.threads, verbose)
    from lab.hardware.methods import MARKS, SEEDS, compare_on_clip, page_section
    from lab.machine import describe_machine
    from lab.studies.ablations import page_with_table
    from saccade.methods import METHODS

    pair = options.models(quiet=False)
    clips = []
    for seed in SEEDS:
        with status(f"clip {seed}", quiet=False):
            rows = compare_on_clip(
                pair, seed, [*METHODS], repeat=options.repeat, tokens=max_new_tokens
            )
            clips.append(rows)
    facts = {
        "command": shlex.join(["python", "-m", "lab", *sys.argv[1:]]),
        "machine": describe_machine(),
        "repeat": options.repeat,
        "clips": clips,
    }
    path.write_text(json.dumps(facts, indent=1) + "\n")
    page.write_text(page_with_table(page.read_text(), page_section(facts), MARKS))

"""``python -m lab methods | prefill | verify | flips | pool | following``: their cost."""

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
    how: TargetOptions,
    visual_tokens: Annotated[int, typer.Option(min=1, help="About how many to read.")] = 8192,
    rows: Annotated[int, typer.Option(min=1, help="Of the verification that follows.")] = 8,
    record: Annotated[
        bool, typer.Option("--record", help="Write down what the text attends to, too.")
    ] = False,
    turns: Annotated[
        int, typer.Option(min=0, help="With and without --record, in turns: what that costs.")
    ] = 0,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Read one long clip and verify one draft: seconds, and how much memory it took at most."""
    prepare(how.threads, verbose)
    from lab.hardware.prefill import read, recording

    target = how.loaded()
    if turns:
        plain, recorded = recording(target, visual_tokens, turns)
        typer.echo(
            f"prefill {plain * 1e3:.1f} ms, {recorded * 1e3:.1f} ms with attention written down: "
            f"{recorded / plain - 1:.1%} more"
        )
        return
    found = read(target, visual_tokens, rows=rows, record=record)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    peaks = [
        "unknown" if peak is None else f"{peak / MIB:.0f} MiB"
        for peak in (found.vision_peak, found.prefill_peak)
    ]
    out.print(
        f"{found.visual_tokens} visual tokens, {found.prompt_tokens} in all\n"
        f"vision   {found.vision_seconds:.2f} s, at most {peaks[0]} more than before\n"
        f"prefill  {found.prefill_seconds:.2f} s, at most {peaks[1]} more than before "
        f"(keys and values {found.kv / MIB:.0f} MiB; weights {found.weights / MIB:.0f} MiB)\n"
        f"verify   {found.verify_seconds * 1e3:.1f} ms for {found.rows} rows",
        soft_wrap=True,
    )


@with_option_groups
def verify(
    how: TargetOptions,
    visual_tokens: Annotated[int, typer.Option(min=1, help="Keys there are already.")] = 2048,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Of a verification (repeatable).")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Of each; the least counts.")] = 60,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """What it costs to verify several rows at once, over one: T(n)/T(1)."""
    prepare(how.threads, verbose)
    from lab.hardware.prefill import verifications

    found = verifications(how.loaded(), visual_tokens, {1, *(rows or (4, 8, 16))}, turns)
    if as_json:
        typer.echo(json.dumps({"keys": visual_tokens, "seconds": found}))
        return
    ratios = (f"T({each})/T(1) {took / found[1]:.2f}" for each, took in found.items() if each > 1)
    typer.echo(", ".join([f"over {visual_tokens} keys: T(1) {found[1] * 1e3:.2f} ms", *ratios]))


@with_option_groups
def flips(
    how: TargetOptions,
    suite: Annotated[str, typer.Option(help="Its items are the prompts.")] = "shapes-caption",
    limit: Annotated[int, typer.Option(min=1, help="Items.")] = 20,
    rows: Annotated[int, typer.Option(min=2, help="Rows of a forward, against one.")] = 8,
    max_new_tokens: command_options.Tokens = 128,
    exact: command_options.Exact = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """How often the target alone picks another token when it reads several rows at once."""
    prepare(how.threads, verbose)
    from lab.hardware.flips import flips as counted
    from saccade.bench.runner import media_arguments
    from saccade.inputs import ask

    loaded = how.loaded()
    (chosen,) = named_suites(suite, None)
    found = [
        counted(
            loaded.backbone,
            ask(loaded, item.question, **media_arguments(item)),
            rows=rows,
            tokens=max_new_tokens,
            exact=exact,
        )
        for item in islice(chosen.items(), limit)
    ]
    sums = {name: sum(getattr(each, name) for each in found) for name in asdict(found[0])}
    if as_json:
        typer.echo(json.dumps({"items": len(found), "rows": rows, **sums}))
        return
    share = sums["flips"] / sums["compared"]
    out.print(
        f"{len(found)} answers, {sums['compared']} tokens, 1 row against {rows}: "
        f"{sums['flips']} other arg-maxes ({share:.2%}), {sums['unlike']} other logits",
        soft_wrap=True,
    )


@with_option_groups
def pool(
    how: PairOptions,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once (repeatable).")
    ] = None,
    methods: Annotated[str, typer.Option(help="Methods, by commas.")] = "ar,auto",
    suite: Annotated[str, typer.Option(help="Where the requests come from.")] = "shapes-caption",
    limit: Annotated[int, typer.Option(min=1, help="How many requests.")] = 16,
    max_new_tokens: command_options.Tokens = 256,
    path: Annotated[
        Path | None, typer.Option("--out", help="Write the numbers here, and a figure beside.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Serve the same requests with so many rows at once: tokens a second of all together."""
    prepare(how.threads, verbose)
    from lab.hardware.throughput import draw, questions, race
    from saccade.bench.figures import save_figure
    from saccade.bench.terminal_output import make_table

    (chosen,) = named_suites(suite, None)
    models = how.models(quiet=as_json)
    drafting = None if models.draft is None else models.draft.backbone
    with status("serving", quiet=as_json):
        asked = questions(models.target, islice(chosen.items(), limit), max_new_tokens)
        found = race(
            models.target.backbone,
            drafting,
            asked,
            split_names(methods),
            rows or [1, 2, 4, 8],
            how.repeat,
        )
    rates = [asdict(each) | {"tokens_per_second": each.tokens_per_second} for each in found]
    if path is not None:
        path.write_text(json.dumps(rates, indent=1) + "\n")
        save_figure(draw(found), path.with_suffix(".png"))
    if as_json:
        typer.echo(json.dumps(rates))
        return
    numbers = ["rows", "tok/s", "s in all", "first token s", "ms a token", "95 %", "same ids"]
    table = make_table(["method"], numbers)
    for each in found:
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
    keep: Annotated[float, typer.Option(help="The share of it that is drafted on.")] = 0.1,
    rounds: Annotated[int, typer.Option(min=2, help="Timed, after one another.")] = 24,
    path: Annotated[
        Path | None,
        typer.Option("--out", help="Keep the numbers here, as docs/results/following.json."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write them anew in this page: docs/results/fresh.md.")
    ] = None,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """What it costs to choose a self-draft's keys again every round, on real weights."""
    prepare(threads, verbose)
    from lab.hardware.following import MARKS, follow, told
    from lab.studies.ablations import page_with_table
    from saccade.bench.suites.long_documents import find_documents
    from saccade.engine.trace import environment
    from saccade.inputs import load, real_weights

    text = next(find_documents([document]), None)
    if text is None:
        raise OptionError(f"{document} is shorter than 1,800 tokens")
    found = follow(load(str(real_weights.require_checkpoint())), text, keep=keep, rounds=rounds)
    facts = {
        "command": shlex.join(["python", "-m", "lab", *sys.argv[1:]]),
        "model": real_weights.NAME,
        "machine": "{processor}, {threads} threads, torch {torch}.".format(**environment()),
        **asdict(found),
    }
    if path is not None:
        path.write_text(json.dumps(facts, indent=1) + "\n")
    if page is not None:
        page.write_text(page_with_table(page.read_text(), told(facts), MARKS))


@with_option_groups
def methods(
    how: PairOptions,
    max_new_tokens: command_options.Tokens = 256,
    path: Annotated[Path, typer.Option("--out", help="Keep the run here.")] = Path(
        "docs/results/methods.json"
    ),
    page: Annotated[Path, typer.Option(help="Write its table anew in this page.")] = Path(
        "docs/results/methods.md"
    ),
    verbose: Verbose = False,
) -> None:
    """Every method on three clips: the same ids, tokens a forward, ratios to plain decoding."""
    prepare(how.threads, verbose)
    from lab.hardware.methods import MARKS, SEEDS, compared, told
    from lab.studies.ablations import page_with_table
    from saccade.engine.trace import environment
    from saccade.methods import SYSTEMS

    pair, clips = how.models(quiet=False), []
    for seed in SEEDS:
        with status(f"clip {seed}", quiet=False):
            clips.append(compared(pair, seed, [*SYSTEMS], repeat=how.repeat, tokens=max_new_tokens))
    facts = {
        "command": shlex.join(["python", "-m", "lab", *sys.argv[1:]]),
        "machine": "{processor}, {threads} threads, torch {torch}".format(**environment()),
        "repeat": how.repeat,
        "clips": clips,
    }
    path.write_text(json.dumps(facts, indent=1) + "\n")
    page.write_text(page_with_table(page.read_text(), told(facts), MARKS))

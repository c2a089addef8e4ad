"""The commands ``python -m lab profile | cost``, which measure where a round's time goes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lab.commands.pair import PairOptions
from saccade.cli import command_options
from saccade.cli.bench import named_suites
from saccade.cli.command_options import with_option_groups
from saccade.cli.run_setup import split_names
from saccade.cli.terminal import Json, Verbose, out, prepare, status
from saccade.core.errors import OptionError

if TYPE_CHECKING:
    from lab.hardware.profile import Profile
    from saccade.drafting.recipe import Recipe


@with_option_groups
def profile(
    options: PairOptions,
    methods: Annotated[str, typer.Option(help="Comma-separated; serial methods only.")] = (
        "auto,sd/shape=fit,specvlm/shape=fit,sd/view=uniform/keep=0.1/shape=fit"
    ),
    suite: Annotated[str, typer.Option(help="Its first items are used.")] = "shapes-caption-2k",
    limit: Annotated[int, typer.Option(min=1, help="Items.")] = 4,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The longest answer; else the suite's own.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure where a round's time goes, and how close it is to what bare forwards allow."""
    prepare(options.threads, verbose)
    settings = {"max_new_tokens": max_new_tokens} if max_new_tokens else {}
    _profile_suite(options, _recipes(methods), suite, limit, settings, as_json)


@with_option_groups
def cost(
    options: PairOptions,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = (
        "sd/shape=chain-3,sd/shape=chain-7,specvlm,specvlm/shape=chain-7"
    ),
    accepted: Annotated[
        float | None, typer.Option(min=0, help="Accepted tokens a round, on average.")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(help="0.9,0.8,...: the acceptance rate at each place of a draft.")
    ] = None,
    suite: Annotated[str, typer.Option(help="Its first item is the prompt.")] = "shapes-caption-2k",
    max_new_tokens: command_options.Tokens = 128,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Impose an acceptance on real forwards, to measure what drafting costs.

    The text of the answers does not matter, so random weights will do.
    """
    prepare(options.threads, verbose)
    from lab.hardware.imposed import ImposedAcceptance, impose_acceptance

    if accepted is None and rates is None:
        accepted = 3.0
    chances = tuple(map(_parse_rate, rates.split(","))) if rates else ()
    acceptance = ImposedAcceptance(accepted, chances)
    recipes = {
        name: recipe if name == "ar" else impose_acceptance(recipe, acceptance)
        for name, recipe in _recipes(methods).items()
    }
    # No token ends a text, so that all answers have the same length.
    settings = {"max_new_tokens": max_new_tokens, "eos_token_id": -1}
    _profile_suite(options, recipes, suite, limit=1, settings=settings, as_json=as_json)


def _recipes(methods: str) -> dict[str, Recipe]:
    """Returns the recipes of these methods without the peers, which have no rounds."""
    from saccade.bench.comparison import resolve_methods

    return {
        name: recipe
        for name, recipe in resolve_methods(split_names(methods)).items()
        if recipe is not None
    }


def _parse_rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{text!r} is not a rate; give --rates 0.9,0.8,0.6") from None


def _profile_suite(
    options: PairOptions,
    recipes: Mapping[str, Recipe],
    suite: str,
    limit: int,
    settings: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Profiles the methods on a suite's first items, and prints the profiles."""
    from lab.hardware.profile import profile_methods
    from saccade.bench import runner
    from saccade.engine.trace import environment
    from saccade.inputs import ask

    models = options.models(quiet=as_json)
    (chosen,) = named_suites(suite, data=None)
    items = islice(chosen.items(), limit)
    longest = {"max_new_tokens": chosen.setting.max_new_tokens, "do_sample": False}
    with status("profiling", quiet=as_json) as on_progress:
        profiles = profile_methods(
            models.target,
            models.draft,
            [ask(models.target, item.question, **runner.media_arguments(item)) for item in items],
            recipes,
            settings={**longest, **settings},
            repeat=options.repeat,
            on_progress=on_progress,
        )
    if as_json:
        about = {"suite": chosen.name, "items": limit, "repeat": options.repeat}
        every = [asdict(each) for each in profiles]
        typer.echo(json.dumps({**about, "environment": environment(), "methods": every}))
        return
    out.print(profiles_table(profiles))
    bare_plain = f"{profiles[0].bare_plain * 1e3:.2f}"
    out.print(
        "[dim]Times are milliseconds. ms is a round, of which draft, verify and rest are shares; "
        "level is a drafted level. c, T(n) and bare are a level, a verification and a round by "
        f"bare forwards, whose T(1) is {bare_plain}. ideal and got are speedups over ar. "
        f"{limit} items of {chosen.name}, {options.repeat} runs each.[/dim]",
        soft_wrap=True,
    )


def profiles_table(profiles: Sequence[Profile]) -> Table:
    """Returns a table with a line a method: what a round does, what it takes, and the ideal."""
    from saccade.bench.terminal_output import make_table

    heads = ("tau", "gamma", "rows", "ms", "draft", "verify", "rest", "level", "c", "T(n)", "bare")
    table = make_table(["method"], [*heads, "ideal", "got", "share"])
    for each in profiles:
        parts = (each.drafting, each.verifying, each.rest)
        table.add_row(
            each.method,
            *(f"{value:.2f}" for value in (each.tau, each.gamma, each.rows)),
            _milliseconds(each.round),
            *(f"{part / each.round:.0%}" for part in parts),
            "" if each.level is None else _milliseconds(each.level),
            *map(_milliseconds, (each.bare_level, each.bare_verify, each.bare_round)),
            f"{each.ideal[0]:.2f}",
            f"{each.measured[0]:.2f}",
            Text(f"{each.share[0]:.0%}", style="bold"),
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"

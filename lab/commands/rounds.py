"""``python -m lab profile | cost``: where a round's time goes."""

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
    how: PairOptions,
    methods: Annotated[str, typer.Option(help="Comma-separated; serial ones.")] = (
        "auto,sd/shape=fit,specvlm/shape=fit,sd/view=uniform/keep=0.1/shape=fit"
    ),
    suite: Annotated[str, typer.Option(help="Whose first items are asked.")] = "shapes-caption-2k",
    limit: Annotated[int, typer.Option(min=1, help="Items.")] = 4,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The longest answer; else the suite's own.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Where a round's time goes, and how near it comes to what bare forwards allow."""
    prepare(how.threads, verbose)
    settings = {"max_new_tokens": max_new_tokens} if max_new_tokens else {}
    _profiled(how, _recipes(methods), suite, limit, settings, as_json)


@with_option_groups
def cost(
    how: PairOptions,
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
    max_new_tokens: command_options.Tokens = 128,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Impose an acceptance on real forwards: what drafting costs, and how close to the ideal it is.

    What the models say does not count, so random weights will do.
    """
    prepare(how.threads, verbose)
    from lab.hardware.imposed import ImposedAcceptance, imposed

    if accepted is None and rates is None:
        accepted = 3.0
    chances = tuple(map(_rate, rates.split(","))) if rates else ()
    acceptance = ImposedAcceptance(accepted, chances)
    recipes = {
        name: recipe if name == "ar" else imposed(recipe, acceptance)
        for name, recipe in _recipes(methods).items()
    }
    # no token ends a text, so that all answers are as long
    settings = {"max_new_tokens": max_new_tokens, "eos_token_id": -1}
    _profiled(how, recipes, suite, 1, settings, as_json)


def _recipes(methods: str) -> dict[str, Recipe]:
    """Our methods among these names; a peer has no rounds."""
    from saccade.bench.compare import resolve_methods

    return {
        name: recipe
        for name, recipe in resolve_methods(split_names(methods)).items()
        if recipe is not None
    }


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{text!r} is no rate: --rates 0.9,0.8,0.6") from None


def _profiled(
    how: PairOptions,
    recipes: Mapping[str, Recipe],
    suite: str,
    limit: int,
    settings: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Measures over a suite's first items, and prints."""
    from lab.hardware.profile import profile
    from saccade.bench import runner
    from saccade.engine.trace import environment
    from saccade.inputs import ask

    models = how.models(quiet=as_json)
    (chosen,) = named_suites(suite, None)
    items = islice(chosen.items(), limit)
    longest = {"max_new_tokens": chosen.setting.max_new_tokens, "do_sample": False}
    with status("profiling", quiet=as_json) as tell:
        found = profile(
            models.target,
            models.draft,
            [ask(models.target, item.question, **runner.media_arguments(item)) for item in items],
            recipes,
            settings={**longest, **settings},
            repeat=how.repeat,
            tell=tell,
        )
    if as_json:
        about = {"suite": chosen.name, "items": limit, "repeat": how.repeat}
        every = [asdict(each) for each in found]
        typer.echo(json.dumps({**about, "environment": environment(), "methods": every}))
        return
    out.print(table(found))
    out.print(
        f"[dim]milliseconds a round (of it: drafting, verifying, the rest) and a drafted level; by "
        f"bare forwards: c a level, T(n) the rows, both a round, T(1) "
        f"{found[0].bare_plain * 1e3:.2f}; ideal and got: times ar. {limit} items of "
        f"{chosen.name} x {how.repeat} runs[/dim]",
        soft_wrap=True,
    )


def table(found: Sequence[Profile]) -> Table:
    """A line a method: what a round does, its milliseconds and where they go, the ideal."""
    from saccade.bench.terminal_output import make_table

    heads = ("tau", "gamma", "rows", "ms", "draft", "verify", "rest", "level", "c", "T(n)", "bare")
    made = make_table(["method"], [*heads, "ideal", "got", "share"])
    for each in found:
        parts = (each.drafting, each.verifying, each.rest)
        made.add_row(
            each.method,
            *(f"{value:.2f}" for value in (each.tau, each.gamma, each.rows)),
            _milli(each.round),
            *(f"{part / each.round:.0%}" for part in parts),
            "" if each.level is None else _milli(each.level),
            *map(_milli, (each.bare_level, each.bare_verify, each.bare_round)),
            f"{each.ideal[0]:.2f}",
            f"{each.measured[0]:.2f}",
            Text(f"{each.share[0]:.0%}", style="bold"),
        )
    return made


def _milli(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"

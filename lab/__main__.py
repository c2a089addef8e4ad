"""The command ``python -m lab``, run from the root of the repository."""

from __future__ import annotations

import typer

from lab.commands.accept import accept
from lab.commands.checkpoint import make_checkpoint
from lab.commands.daily import busy, live
from lab.commands.figure import figure
from lab.commands.gpu import gpu
from lab.commands.hardware import flips, following, methods, pool, prefill, verify
from lab.commands.head_trial import head_trial
from lab.commands.hybrid import hybrid, train_hybrid
from lab.commands.pages import claims, listed, numbers, pairs, report, scaling
from lab.commands.peers import peers
from lab.commands.real import ablations, real, real_pair, text
from lab.commands.rounds import cost, profile
from lab.commands.runs import run
from lab.commands.seeing import app as seeing
from lab.commands.speed import speed
from lab.commands.training import evaluate, train
from lab.commands.vllm import vllm
from saccade.cli.application import run_application

app = typer.Typer(
    help="Measure the papers' figures, tables and claims again, and train the embedded pair.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command()(figure)
app.command()(report)
app.command()(claims)
app.command()(run)
app.command()(speed)
app.command()(scaling)
app.command()(pairs)
app.command()(numbers)
app.command()(listed)
app.command()(profile)
app.command()(cost)
app.command()(methods)
app.command()(prefill)
app.command()(verify)
app.command()(flips)
app.command()(pool)
app.command()(following)
app.command()(real)
app.command()(real_pair)
app.command()(text)
app.command()(ablations)
app.command()(gpu)
app.command()(accept)
app.command()(busy)
app.command()(live)
app.command()(head_trial)
app.command()(vllm)
app.command()(peers)
app.command("make-checkpoint")(make_checkpoint)
app.command()(train)
app.command("eval")(evaluate)
app.add_typer(seeing, name="seeing")
app.command("train-hybrid")(train_hybrid)
app.command()(hybrid)


def main() -> None:
    run_application(app)


if __name__ == "__main__":
    main()

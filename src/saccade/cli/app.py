"""The application: every command by its name, and errors that become one line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from saccade.cli.bench import bench_app
from saccade.cli.calibrate import calibrate
from saccade.cli.caption import caption, caption_merge
from saccade.cli.chat import chat
from saccade.cli.compare import compare
from saccade.cli.demo import demo
from saccade.cli.describe import describe
from saccade.cli.doctor import doctor
from saccade.cli.methods import methods
from saccade.cli.real import bench_real, real_app
from saccade.cli.sections import Sections
from saccade.cli.serve import serve
from saccade.cli.shapes import shapes_app
from saccade.cli.terminal import err
from saccade.cli.train_draft import train_draft
from saccade.cli.ui import ui
from saccade.core.errors import SaccadeError

app = typer.Typer(
    help="Vision-language models that answer faster, with exactly the same answers.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from saccade import __version__

        typer.echo(f"saccade {__version__}")
        raise typer.Exit()


app.command(cls=Sections)(demo)
app.command(cls=Sections)(describe)
app.command(cls=Sections)(chat)
app.command(cls=Sections)(caption)
app.command("caption-merge", cls=Sections)(caption_merge)
app.command(cls=Sections)(compare)
app.command(cls=Sections)(serve)
app.command(cls=Sections)(ui)
app.command(cls=Sections)(methods)
app.command(cls=Sections)(calibrate)
app.command(cls=Sections)(doctor)
app.command("train-draft", cls=Sections)(train_draft)
bench_app.command("real", cls=Sections)(bench_real)
app.add_typer(bench_app, name="bench")
app.add_typer(real_app, name="real")
app.add_typer(shapes_app, name="shapes")


def main() -> None:
    """Runs the command line."""
    called(app)


def called(commands: typer.Typer) -> None:
    """Runs commands: an error meant for a person is one line and exit code 2."""
    try:
        commands(standalone_mode=True)
    except SaccadeError as error:
        err.print(f"saccade: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

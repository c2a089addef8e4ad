"""The application: every command by its name, its help in sections, and errors in a line."""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from saccade.cli import printing
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
from saccade.cli.serve import serve
from saccade.cli.shapes import shapes_app
from saccade.cli.terminal import err
from saccade.cli.train_draft import train_draft
from saccade.cli.ui import ui
from saccade.core.errors import SaccadeError

SECTIONS: dict[str, tuple[str, ...]] = {
    "Arguments": ("video", "videos", "manifest", "question"),
    "Input": (
        *("prompt", "document", "num_frames", "fps", "every_frame", "start", "end", "tokens"),
        *("media_root", "media_host", "private_media_hosts", "any_media_host"),
        *("allow_media_options", "max_frames", "max_media_mb", "max_body_mb", "max_upload_mb"),
        *("max_prompt", "shard", "retry_errors"),
    ),
    "Models": ("target", "draft", "captioner", "config", "positions", "trust_remote_code"),
    "Decoding": (
        *("method", "methods", "max_new_tokens", "temperature", "top_p", "top_k", "stop", "seed"),
        *("exact", "keep", "max_choices"),
    ),
    "Hardware": (
        *(
            "device",
            "dtype",
            "threads",
            "quantize",
            "draft_device",
            "device_map",
            "tp",
            "memory",
            "batch",
            "ray",
        ),
        *("workers", "replicas", "max_replicas"),
    ),
    "Output": (
        *("out_file", "out_path", "out_dir", "quiet", "as_json", "trace", "picture", "verbose"),
        *("repeat", "seconds"),
    ),
}
OTHERS = "Other options"


class Sections(TyperCommand):
    """A command whose help is in ``SECTIONS``, in their order; what is in none comes last."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence of its help, whole, in as many lines as it needs."""
        return super().get_short_help_str(limit=1000)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        told = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        names = {title: [name for name in own if told.get(name)] for title, own in SECTIONS.items()}
        placed = {name for own in names.values() for name in own}
        names[OTHERS] = [name for name in told if told[name] and name not in placed]
        for title, own in names.items():
            if own:
                with formatter.section(title):
                    formatter.write_dl([told[name] for name in own])


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
    printing.prepare_streams()
    try:
        try:
            commands(standalone_mode=True)
        finally:  # Typer leaves by SystemExit.
            printing.flush_output()
    except SaccadeError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is not None:  # A file stands in the way, or is not ours to write.
            _fail(f"{error.filename}: {error.strerror}")
        if error.errno not in printing.UNWRITABLE:
            raise
        printing.forget_output()
        _fail(f"the output cannot be written: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(what: str) -> NoReturn:
    err.print(f"saccade: {what}", markup=False, soft_wrap=True)
    sys.exit(2)

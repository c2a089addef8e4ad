"""The application: its commands, their help in sections, and errors as one line."""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from saccade.cli import interruption_hint, output_streams
from saccade.cli.bench import bench_app
from saccade.cli.calibrate import calibrate
from saccade.cli.caption import caption, caption_merge
from saccade.cli.chat import chat
from saccade.cli.compare import compare
from saccade.cli.demo import demo
from saccade.cli.describe import describe
from saccade.cli.doctor import doctor
from saccade.cli.methods import methods
from saccade.cli.real import real_app
from saccade.cli.serve import serve
from saccade.cli.shapes import shapes_app
from saccade.cli.terminal import err
from saccade.cli.train_draft import train_draft
from saccade.cli.ui import ui
from saccade.cli.watch import watch
from saccade.core.errors import SaccadeError
from saccade.core.spinning import limit_spinning

# The sections of a command's help, each with the names of the parameters that it shows.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Arguments": ("video", "videos", "manifest", "question"),
    "Input": (
        "prompt",
        "document",
        "num_frames",
        "fps",
        "every_frame",
        "start",
        "end",
        "tokens",
        "ask",
        "every",
        "window",
        "realtime",
        "media_root",
        "media_host",
        "private_media_hosts",
        "any_media_host",
        "allow_media_options",
        "max_frames",
        "max_media_mb",
        "max_body_mb",
        "max_upload_mb",
        "max_prompt",
        "shard",
        "retry_errors",
    ),
    "Models": ("target", "draft", "captioner", "config", "positions", "trust_remote_code"),
    "Decoding": (
        "method",
        "methods",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "seed",
        "exact",
        "keep",
        "max_choices",
    ),
    "Hardware": (
        "device",
        "dtype",
        "threads",
        "quantize",
        "draft_device",
        "draft_quantize",
        "device_map",
        "tp",
        "memory",
        "batch",
        "ray",
        "workers",
        "replicas",
        "max_replicas",
    ),
    "Output": (
        "out_file",
        "out_path",
        "out_dir",
        "quiet",
        "as_json",
        "trace",
        "picture",
        "verbose",
        "repeat",
        "seconds",
    ),
}
OTHER_OPTIONS = "Other options"


class SectionedCommand(TyperCommand):
    """A command whose help has the ``SECTIONS`` in their order, and other options at the end."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """Returns the whole first sentence of the help, in as many lines as it needs."""
        return super().get_short_help_str(limit=1000)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        sections = {
            title: [name for name in names if records.get(name)]
            for title, names in SECTIONS.items()
        }
        placed = {name for names in sections.values() for name in names}
        sections[OTHER_OPTIONS] = [name for name in records if records[name] and name not in placed]
        for title, names in sections.items():
            if names:
                with formatter.section(title):
                    formatter.write_dl([records[name] for name in names])


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


app.command(cls=SectionedCommand)(demo)
app.command(cls=SectionedCommand)(describe)
app.command(cls=SectionedCommand)(chat)
app.command(cls=SectionedCommand)(watch)
app.command(cls=SectionedCommand)(caption)
app.command("caption-merge", cls=SectionedCommand)(caption_merge)
app.command(cls=SectionedCommand)(compare)
app.command(cls=SectionedCommand)(serve)
app.command(cls=SectionedCommand)(ui)
app.command(cls=SectionedCommand)(methods)
app.command(cls=SectionedCommand)(calibrate)
app.command(cls=SectionedCommand)(doctor)
app.command("train-draft", cls=SectionedCommand)(train_draft)
for group in (bench_app, real_app, shapes_app):
    for registered in group.registered_commands:
        registered.cls = SectionedCommand
app.add_typer(bench_app, name="bench")
app.add_typer(real_app, name="real")
app.add_typer(shapes_app, name="shapes")


INTERRUPTED_EXIT_CODE = 130  # What shells report after Ctrl-C: 128 plus the number of SIGINT.


def main() -> None:
    """Runs the command line."""
    # This lets torch's threads sleep soon while they wait for each other, instead of keeping cores
    # busy. It has an effect only before torch is imported. A command imports torch when it runs.
    limit_spinning()
    run_application(app)


def run_application(commands: typer.Typer) -> None:
    """Runs commands. An error for the user is printed as one line, with exit code 2. Ctrl-C gives
    ``INTERRUPTED_EXIT_CODE``, and the command's hint on what stays is printed if it has one."""
    output_streams.prepare_streams()
    try:
        try:
            commands(standalone_mode=True)
        finally:  # Typer raises SystemExit even if a command succeeds.
            output_streams.flush_output()
    except SaccadeError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is not None:  # A file cannot be read, written or replaced.
            _fail(f"{error.filename}: {error.strerror}")
        # Without a file's name it may be the output that cannot be written, as on a full disk.
        if error.errno not in output_streams.UNWRITABLE_ERRNOS:
            raise
        output_streams.discard_output()
        _fail(f"the output cannot be written: {error.strerror}")
    except KeyboardInterrupt:
        _print_interruption_hint()
        sys.exit(INTERRUPTED_EXIT_CODE)
    except SystemExit as end:
        if end.code == INTERRUPTED_EXIT_CODE:  # Typer turns Ctrl-C into this SystemExit.
            _print_interruption_hint()
        raise


def _print_interruption_hint() -> None:
    if (hint := interruption_hint.hint()) is not None:
        err.print(hint, style="dim", markup=False, soft_wrap=True)


def _fail(message: str) -> NoReturn:
    err.print(f"saccade: {message}", markup=False, soft_wrap=True)
    sys.exit(2)

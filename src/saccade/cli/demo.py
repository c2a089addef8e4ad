"""``saccade demo``: describes a drawn video with the embedded pair, and compares methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import DEFAULT_METHOD
from saccade.cli.compare import compare_methods
from saccade.cli.terminal import Json, Threads, Verbose, console, out, prepare
from saccade.core.answer_text import TextDecoder
from saccade.core.errors import OptionError
from saccade.inputs.checkpoints import EMBEDDED_TARGET

PICTURE_WIDTH = 80  # Characters a line; the picture must be readable at half a page's width.


def demo(
    max_new_tokens: command_options.Tokens = 256,
    repeat: command_options.Repeat = 3,
    threads: Threads = None,
    picture: Annotated[
        Path | None, typer.Option(help="Save the answer in its colours as an SVG.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Describe a video with the embedded pair, plainly and drafted, and compare."""
    if as_json and picture is not None:
        raise OptionError("--picture draws the answer and --json prints figures: give one of them")
    prepare(threads, verbose)
    from saccade.answering import coloured_text
    from saccade.bench import terminal_output
    from saccade.inputs.subjects import Subject
    from saccade.world.demo_clips import demo_clip

    clip, description = demo_clip()
    models = run_setup.load_models(EMBEDDED_TARGET, draft=None, quiet=as_json)
    methods = ["ar", DEFAULT_METHOD, "specvlm/shape=fit", "hf"]
    labels = {"video": "demo.mp4"}  # What the JSON calls the drawn clip. There is no such file.
    comparison = compare_methods(
        models,
        Subject(clip),
        labels,
        command_options.QUESTION,
        methods,
        repeat=repeat,
        max_new_tokens=max_new_tokens,
    )
    if as_json:
        typer.echo(json.dumps(comparison.json()))
        return
    result = comparison.results[DEFAULT_METHOD]
    coloured = coloured_text.IncrementalDecoder(TextDecoder(models.target.decode))
    pieces = [coloured.styled_text(round) for round in result.rounds]
    page = out if picture is None else console(record=True, width=PICTURE_WIDTH)
    # Four frames are drawn side by side, each with two spaces after it.
    frame_width = PICTURE_WIDTH // 4 - 2
    page.print(terminal_output.frames_as_text(clip.frames, width=frame_width))
    page.print(
        "[bold]The target's answer, drafted by the small model:[/bold] ",
        *pieces,
        coloured.rest(),
        sep="",
    )
    page.print(coloured_text.legend())
    if picture is not None:
        # The comparison is not in the picture, because times differ between machines.
        picture.write_text(terminal_output.remove_web_fonts(page.export_svg(title="saccade demo")))
    out.print(f"\n[bold]What the generator drew:[/bold] [dim]{description}[/dim]\n")
    comparison.print_to(out)

"""``saccade demo``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli import loading, options
from saccade.cli.compare import compared
from saccade.cli.options import DEFAULT_METHOD
from saccade.cli.terminal import Json, Threads, Verbose, console, out, prepare

PICTURE = 80  # characters across, to be read at half a page's width
DEMO_SEED, DEMO_FRAMES, DEMO_SIZE = 20_000_002, 64, 224  # never trained on


def demo(
    max_new_tokens: options.Tokens = 256,
    repeat: options.Repeat = 3,
    threads: Threads = None,
    picture: Annotated[
        Path | None, typer.Option(help="Save the answer in its colours as an SVG.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Describe a video with the embedded pair, plainly and drafted, and compare."""
    prepare(threads, verbose)
    from saccade.bench import terminal_output
    from saccade.inputs.texts import About
    from saccade.world import descriptions, drawing, scenes

    scene = scenes.scene(DEMO_SEED)
    clip = drawing.render_through_mp4(scene, DEMO_FRAMES, DEMO_SIZE)
    models = loading.models("shapes", None, quiet=as_json)
    methods = ["ar", DEFAULT_METHOD, "specvlm/shape=fit", "hf"]
    found = compared(
        models,
        About(clip),
        {"video": "demo.mp4"},
        options.QUESTION,
        methods,
        repeat=repeat,
        max_new_tokens=max_new_tokens,
    )
    if as_json:
        typer.echo(json.dumps(found.json()))
        return
    result = found.results[DEFAULT_METHOD]
    typist = terminal_output.IncrementalDecoder(models.target.decode)
    page = out if picture is None else console(record=True, width=PICTURE)
    page.print(terminal_output.frames_as_text(clip.frames, width=PICTURE // 4 - 2))
    page.print(
        "[bold]The target's answer, drafted by the small model:[/bold] ",
        *[*(typist.type(round) for round in result.rounds), typist.rest()],
        sep="",
    )
    page.print(terminal_output.legend())
    if picture is not None:  # of the answer: times are another machine's soon
        picture.write_text(terminal_output.remove_web_fonts(page.export_svg(title="saccade demo")))
    out.print(
        f"\n[bold]What the generator drew:[/bold] [dim]{descriptions.describe(scene)}[/dim]\n"
    )
    found.show(out)

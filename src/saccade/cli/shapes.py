"""``saccade shapes make``: writes a clip of the synthetic world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.terminal import Json, out

shapes_app = typer.Typer(help="The synthetic world.", no_args_is_help=True)


@shapes_app.command("make")
def shapes_make(
    out_file: Annotated[
        Path, typer.Option("--out", help="The clip to write; F.json goes beside it.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Names the scene.")] = 0,
    frames: Annotated[int, typer.Option(min=1, help="Frames in the clip.")] = 64,
    size: Annotated[int, typer.Option(min=56, help="Height and width in pixels.")] = 224,
    fps: Annotated[float, typer.Option(min=0.1, help="Frames per second.")] = 8.0,
    as_json: Json = False,
) -> None:
    """Write one clip of the world as a real MP4, and what is true of it as JSON."""
    from saccade.world import demo_clips

    record = demo_clips.write_clip(out_file, seed, frames, size, fps)
    out_file.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(record))
    else:
        out.print(
            f"{out_file}: {frames} frames of {size} x {size}; the truth is beside it",
            markup=False,
            soft_wrap=True,
        )

"""``saccade shapes make | train | eval``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from saccade.errors import OptionError
from saccade.terminal import Json, Threads, Verbose, out, prepare, status

RUN_DIR = Path("runs/shapes")

shapes_app = typer.Typer(help="The synthetic world and its trained pair.", no_args_is_help=True)


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
    from saccade.shapes import text, world

    scene = world.scene(seed)
    if size % 2:
        raise OptionError(f"--size {size} must be even for MP4")
    try:
        world.write_clip(scene, out_file, frames, size, fps=fps)
        truth = world.truth(scene, frames, size, fps=fps)
        turn = text.conversation(scene, "describe", seed)[0]
        found = {**truth, "prompt": turn.question, "answer": turn.answer}
        out_file.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise OptionError(f"cannot write {out_file}: {error.strerror}") from error
    if as_json:
        typer.echo(json.dumps(found))
    else:
        out.print(f"{out_file}: {frames} frames of {size} x {size}; the truth is beside it")


@shapes_app.command("train")
def shapes_train(
    run_dir: Annotated[Path, typer.Option(help="Where stages, logs and weights go.")] = RUN_DIR,
    stages: Annotated[str | None, typer.Option(help="Comma-separated; all when left out.")] = None,
    export: Annotated[Path | None, typer.Option(help="Write the trained folders here.")] = None,
    smoke: Annotated[bool, typer.Option(help="Two minutes on one-object clips.")] = False,
    threads: Threads = None,
    verbose: Verbose = True,
) -> None:
    """Train the pair in stages; a stage that is done is not done again."""
    prepare(threads, verbose)
    from saccade.shapes import train

    known = [stage.name for stage in train.STAGES]
    chosen = known if stages is None else [name.strip() for name in stages.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise OptionError(f"unknown stage {unknown[0]!r}; stages: {', '.join(known)}")
    train.train(run_dir, chosen, smoke=smoke)
    if export is not None:
        train.export(run_dir, export)


@shapes_app.command("eval")
def shapes_eval(
    clips: Annotated[int, typer.Option(min=2, help="Unseen clips a size.")] = 50,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Visual tokens per clip (repeatable).")
    ] = None,
    run_dir: Annotated[Path, typer.Option(help="The training run, for its curves.")] = RUN_DIR,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write page, figure and numbers here (.md).")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure the pair: accuracy with and without the video, agreement under each view."""
    prepare(threads, verbose)
    from saccade.models import EMBEDDED
    from saccade.shapes import agreement, report

    sizes = tuple(tokens or agreement.SIZES)
    if unknown := [size for size in sizes if size not in agreement.FRAMES]:
        known = ", ".join(map(str, agreement.FRAMES))
        raise OptionError(f"no clips of {unknown[0]} visual tokens are set up; sizes: {known}")
    stored = None if out_file is None else out_file.with_suffix(".json")
    before = json.loads(stored.read_text()) if stored is not None and stored.exists() else {}
    with status("measuring", quiet=as_json) as tell:
        found = report.measure(
            EMBEDDED, run_dir, clips=clips, sizes=sizes, before=before, tell=tell
        )
    shown = f"saccade shapes eval --clips {clips}" + "".join(f" --tokens {n}" for n in sizes)
    figure = None
    if out_file is not None and stored is not None:
        stored.write_text(json.dumps(found, indent=1) + "\n")
        if found["curves"]:
            figure = out_file.with_suffix(".png")
            report.figure(found, figure)
        name = None if figure is None else figure.name
        out_file.write_text(report.page(found, name, f"{shown} --out {out_file}"))
    typer.echo(json.dumps(found) if as_json else report.page(found, None, shown))

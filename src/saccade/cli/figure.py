"""``saccade figure``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.errors import OptionError
from saccade.terminal import Threads, Verbose, out, prepare, status

SUFFIXES = (".svg", ".png")


def figure(
    name: Annotated[str, typer.Argument(help="specvlm, sparse-to-dense, tabed, sage or hippo.")],
    picture: Annotated[
        Path | None, typer.Option("--out", help="An .svg or .png; NAME.svg when left out.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Draw these numbers of an earlier run; nothing is run.")
    ] = None,
    clips: Annotated[int, typer.Option(min=1, help="Unseen clips to run.")] = 4,
    size: Annotated[int, typer.Option(help="Visual tokens of each.")] = 2048,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 128,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Draw a method's plot of docs/methods from runs of the embedded pair; the numbers as JSON."""
    prepare(threads, verbose)
    from saccade.measure import figures
    from saccade.shapes.agreement import FRAMES

    _, draw = figures.named(name)
    path = picture or Path(f"{name}.svg")
    if path.suffix not in SUFFIXES or not path.parent.is_dir():
        raise OptionError(f"cannot write {path}; give --out an .svg or .png in a folder there is")
    if size not in FRAMES:
        raise OptionError(f"there are no clips of {size} visual tokens; known: {list(FRAMES)}")
    if data is None:
        data = path.with_suffix(".json")
        with status("loading the pair", quiet=False) as tell:
            figures.write(data, name, figures.Bench(clips, size, max_new_tokens, tell))
    figures.save(draw(figures.read(data, name)), path)
    out.print(f"{path}, from {data}", markup=False, soft_wrap=True)

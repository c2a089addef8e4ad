"""``python -m lab figure``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.terminal import Threads, Verbose, out, prepare, status
from saccade.core.errors import OptionError

SUFFIXES = (".svg", ".png")


def figure(
    name: Annotated[
        str, typer.Argument(help="list shows them all, with their papers' places; all draws them.")
    ],
    picture: Annotated[
        Path | None,
        typer.Option("--out", help="An .svg or .png, NAME.svg when left out; of all, a folder."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Draw these numbers of an earlier run; nothing is run.")
    ] = None,
    clips: Annotated[
        int | None, typer.Option(min=1, help="Unseen clips to run; else the figure's own number.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Visual tokens of each.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each answer; else the figure's own number.")
    ] = None,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Draw a figure of a paper from runs of the embedded pair; its numbers are kept as JSON."""
    if name == "list":
        from lab.studies import STUDIES

        for known, each in STUDIES.items():
            out.print(f"{known:22} {each.place}: {each.about}", markup=False, soft_wrap=True)
        return
    prepare(threads, verbose)
    from lab import studies
    from lab.training.agreement import FRAMES
    from saccade.bench.figures import save_figure

    if name == "all":
        with status("loading the pair", quiet=False) as tell:
            page = studies.draw_all(picture or Path("figures"), tell)
        out.print(f"{page} shows them", markup=False, soft_wrap=True)
        return
    study = studies.study_named(name)
    path = picture or Path(f"{name}.svg")
    if path.suffix not in SUFFIXES or not path.parent.is_dir():
        raise OptionError(f"cannot write {path}; give --out an .svg or .png in a folder there is")
    if size is not None and size not in FRAMES:
        raise OptionError(f"there are no clips of {size} visual tokens; known: {list(FRAMES)}")
    if data is None:
        data = path.with_suffix(".json")
        with status("loading the pair", quiet=False) as tell:
            experiment = studies.Experiment(
                clips or study.clips, size or study.size, max_new_tokens or study.tokens, tell
            )
            studies.measure_and_save(data, name, experiment)
    save_figure(study.draw(studies.load_numbers(data, name)), path)
    out.print(f"{path}, from {data}", markup=False, soft_wrap=True)

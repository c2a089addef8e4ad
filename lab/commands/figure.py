"""The command ``python -m lab figure``, which draws a paper's figure from runs of the pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from saccade.cli.terminal import Threads, Verbose, out, prepare, status
from saccade.core.errors import OptionError

SUFFIXES = (".svg", ".png")


def figure(
    name: Annotated[
        str, typer.Argument(help="A figure; list prints all with their papers, all draws them.")
    ],
    picture: Annotated[
        Path | None,
        typer.Option("--out", help="An .svg or .png, else NAME.svg; with all, a folder."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Draw the numbers of an earlier run; run nothing.")
    ] = None,
    clips: Annotated[
        int | None, typer.Option(min=1, help="Unseen clips to run; else the figure's own number.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Visual tokens of each clip.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each answer; else the figure's own number.")
    ] = None,
    threads: Threads = None,
    verbose: Verbose = False,
) -> None:
    """Draw a figure of a paper from runs of the embedded pair, and store its numbers as JSON."""
    if name == "list":
        from lab.studies import STUDIES

        for study_name, study in STUDIES.items():
            out.print(f"{study_name:22} {study.place}: {study.about}", markup=False, soft_wrap=True)
        return
    prepare(threads, verbose)
    from lab import studies
    from lab.training.agreement import FRAMES
    from saccade.bench.figures import save_figure

    if name == "all":
        with status("loading the pair", quiet=False) as tell:
            page = studies.draw_all(picture or Path("figures"), tell)
        out.print(f"wrote {page}, which has all figures", markup=False, soft_wrap=True)
        return
    study = studies.study_named(name)
    path = picture or Path(f"{name}.svg")
    if path.suffix not in SUFFIXES or not path.parent.is_dir():
        raise OptionError(f"cannot write {path}; give --out an .svg or .png in an existing folder")
    if size is not None and size not in FRAMES:
        raise OptionError(f"there are no clips of {size} visual tokens; sizes: {list(FRAMES)}")
    if data is None:
        data = path.with_suffix(".json")
        with status("loading the pair", quiet=False) as tell:
            experiment = studies.Experiment(
                clips or study.clips, size or study.size, max_new_tokens or study.tokens, tell
            )
            studies.measure_and_save(data, name, experiment)
    save_figure(study.draw(studies.load_numbers(data, name)), path)
    out.print(f"wrote {path} from the numbers in {data}", markup=False, soft_wrap=True)

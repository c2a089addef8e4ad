"""Measures and draws the papers' figures on the embedded pair, for ``python -m lab figure``.

A study here is one figure: how it is measured and how it is drawn. Each study's numbers are saved
as JSON, and the figure is drawn from these. ``methods`` measures for the pictures of
``docs/methods``, and the other modules that are imported here for the papers' own figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.draw import Data
from lab.studies import (
    cases,
    growth,
    hippo,
    methods,
    sage,
    specvlm,
    std,
    tabed,
    tabed_appendix,
    tabed_stories,
)
from lab.studies.experiment import AnsweredClip, Experiment
from lab.studies.study import Study
from saccade.bench import figures
from saccade.core.errors import OptionError
from saccade.engine.trace import environment

STUDIES: dict[str, Study] = {
    "sparse-to-dense": Study("Sparse-to-Dense", "Tau by K.", methods.measure_sparse_to_dense),
    "tabed": Study("TABED", "The weights of every round.", methods.measure_tabed),
    "sage": Study("SAGE", "The tree of every round.", methods.measure_sage),
    "hippo": Study(
        "HIPPO", "What is kept, and every round.", methods.measure_hippo, methods.draw_frames
    ),
    **specvlm.STUDIES,
    **cases.STUDIES,
    **hippo.STUDIES,
    **std.STUDIES,
    **growth.STUDIES,
    **tabed.STUDIES,
    **tabed_appendix.STUDIES,
    **tabed_stories.STUDIES,
    **sage.STUDIES,
}


METHOD_FIGURES = ("sparse-to-dense", "tabed", "sage", "hippo")  # The pictures of docs/methods.
PAPER_FIGURES = tuple(name for name in STUDIES if name not in METHOD_FIGURES)


def study_named(name: str) -> Study:
    """Returns the study of a figure. Raises OptionError for a name that no figure has."""
    if name not in STUDIES:
        raise OptionError(f"unknown figure {name!r}; known: {', '.join(STUDIES)}")
    return STUDIES[name]


def measure_and_save(path: Path, name: str, experiment: Experiment) -> None:
    """Measures a figure's numbers and saves them as JSON with what was run, and on what machine.

    Raises OptionError for a name that no figure has.
    """
    about = {
        "figure": name,
        "clips": experiment.clips,
        "size": experiment.size,
        "tokens": experiment.tokens,
    }
    about["environment"] = environment()
    path.write_text(
        json.dumps(about | study_named(name).measure(experiment), separators=(",", ":")) + "\n"
    )


def draw_all(folder: Path, on_progress: Callable[[str], None], names: Sequence[str] = ()) -> Path:
    """Draws the figures ``PAPER_FIGURES``, or those named, into a folder, and returns their page.

    Each figure's numbers are stored beside it. Numbers that are already there are not measured
    again, so an interrupted run can go on. The page has all figures whose numbers are in the
    folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shared_clips: dict[tuple[int, int, int], AnsweredClip] = {}
    for name in names or PAPER_FIGURES:
        study = study_named(name)
        path = folder / f"{name}.json"
        if not path.exists():
            measure_and_save(
                path,
                name,
                Experiment(
                    study.clips, study.size, study.tokens, on_progress, shared_clips=shared_clips
                ),
            )
        figures.save_figure(study.draw(load_numbers(path, name)), path.with_suffix(".png"))
    page = folder / "README.md"
    page.write_text(figures_page(folder))
    return page


FIGURES_HEAD = """\
# The papers' figures, measured on the embedded pair

`python -m lab figure all --threads 1 --out docs/results/figures` makes this page and its figures,
which are drawn from the JSON beside them. Tau is tokens per target forward, the target's own
included. Intervals are 95 % bootstraps over clips. *The draft that never saw pruning* was trained
on whole videos alone, so it is the fair one for comparing views. Seconds are of the machine and the
threads in the JSON's `environment`, which may differ from the command above.
"""


def figures_page(folder: Path) -> str:
    """Returns the page, in Markdown, of the figures whose numbers are in a folder."""
    lines = [FIGURES_HEAD]
    for name, study in STUDIES.items():
        if not (folder / f"{name}.json").is_file():
            continue
        data = load_numbers(folder / f"{name}.json", name)
        size = f"{data['clips']} clips of {data['size']} visual tokens"
        lines += [f"## {study.place}: `{name}`", "", f"{study.about} *{size}.*", ""]
        lines += [f"![{study.about}]({name}.png)", ""]
    return "\n".join(lines)


def load_numbers(path: Path, name: str) -> Data:
    """Returns the stored numbers of a figure.

    Raises OptionError where the file cannot be read or holds those of another figure.
    """
    try:
        data: Data = json.loads(path.read_text())
        figure = data["figure"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"cannot read {path}; give --data the JSON of an earlier run") from error
    if figure != name:
        raise OptionError(f"{path} holds the numbers of {figure!r}, not of {name!r}")
    return data

"""The papers' figures on the embedded pair: each measures, keeps its numbers, and is drawn of them.

``methods`` has the pictures of ``docs/methods``, a file a paper those of its own figures.
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
)
from lab.studies.lab import Lab, Shot
from lab.studies.study import Study
from saccade.bench import figures
from saccade.core.errors import OptionError
from saccade.engine.trace import environment

STUDIES: dict[str, Study] = {
    "sparse-to-dense": Study("Sparse-to-Dense", "Tau by K.", methods.sparse_to_dense),
    "tabed": Study("TABED", "The weights of every round.", methods.tabed),
    "sage": Study("SAGE", "The tree of every round.", methods.sage),
    "hippo": Study("HIPPO", "What is kept, and every round.", methods.hippo, methods.frames),
    **specvlm.STUDIES,
    **cases.STUDIES,
    **hippo.STUDIES,
    **std.STUDIES,
    **growth.STUDIES,
    **tabed.STUDIES,
    **tabed_appendix.STUDIES,
    **sage.STUDIES,
}


METHODS = ("sparse-to-dense", "tabed", "sage", "hippo")  # of docs/methods
OWN = tuple(name for name in STUDIES if name not in METHODS)


def named(name: str) -> Study:
    if name not in STUDIES:
        raise OptionError(f"unknown figure {name!r}; known: {', '.join(STUDIES)}")
    return STUDIES[name]


def write(path: Path, name: str, lab: Lab) -> None:
    """Measures; the file says what was run."""
    about = {"figure": name, "clips": lab.clips, "size": lab.size, "tokens": lab.tokens}
    about["environment"] = environment()
    path.write_text(json.dumps(about | named(name).measure(lab), separators=(",", ":")) + "\n")


def every(folder: Path, tell: Callable[[str], None], names: Sequence[str] = ()) -> Path:
    """Every figure (or these) into a folder, with its numbers and a page that shows them all.

    Numbers that are there already are kept, so that an interrupted run is gone on with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    album: dict[tuple[int, int, int], Shot] = {}
    for name in names or OWN:
        study = named(name)
        path = folder / f"{name}.json"
        if not path.exists():
            write(path, name, Lab(study.clips, study.size, study.tokens, tell, album=album))
        figures.save_figure(study.draw(read(path, name)), path.with_suffix(".png"))
    page = folder / "README.md"
    page.write_text(index(folder))
    return page


INDEX = """\
# The papers' figures, measured on the embedded pair

Made by `python -m lab figure all --threads 1 --out docs/results/figures`, drawn from the JSON
beside it. Tau is tokens per target forward, the target's own included; intervals are 95 %
bootstraps over clips. *The draft that never saw pruning* was trained on whole videos alone: the
fair one for comparing views. Seconds are of one machine and so many threads as `environment` in
the JSON says, which may be others than above.
"""


def index(folder: Path) -> str:
    """The page over the figures that are in a folder."""
    lines = [INDEX]
    for name, study in STUDIES.items():
        if not (folder / f"{name}.json").is_file():
            continue
        held = read(folder / f"{name}.json", name)
        size = f"{held['clips']} clips of {held['size']} visual tokens"
        lines += [f"## {study.place}: `{name}`", "", f"{study.about} *{size}.*", ""]
        lines += [f"![{study.about}]({name}.png)", ""]
    return "\n".join(lines)


def read(path: Path, name: str) -> Data:
    """The numbers of this figure; OptionError where the file holds something else."""
    try:
        data: Data = json.loads(path.read_text())
        held = data["figure"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"cannot read {path}; give --data the JSON of an earlier run") from error
    if held != name:
        raise OptionError(f"{path} holds the numbers of {held!r}, not of {name!r}")
    return data

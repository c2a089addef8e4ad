"""The papers' figures on the embedded pair: each measures, keeps its numbers, and is drawn of them.

``methods`` has the pictures of ``docs/methods``, a file a paper those of its own figures.
"""

from __future__ import annotations

import json
from pathlib import Path

from saccade.errors import OptionError
from saccade.measure.draw import Data
from saccade.studies import methods, specvlm
from saccade.studies.lab import Lab
from saccade.studies.study import Study

STUDIES: dict[str, Study] = {
    "specvlm": Study("SpecVLM", "Tau of a chain of 7 by what the draft sees.", methods.specvlm),
    "sparse-to-dense": Study("Sparse-to-Dense", "Tau by K.", methods.sparse_to_dense),
    "tabed": Study("TABED", "The weights of every round.", methods.tabed),
    "sage": Study("SAGE", "The tree of every round.", methods.sage),
    "hippo": Study("HIPPO", "What is kept, and every round.", methods.hippo, methods.frames),
    **specvlm.STUDIES,
}


def named(name: str) -> Study:
    if name not in STUDIES:
        raise OptionError(f"unknown figure {name!r}; known: {', '.join(STUDIES)}")
    return STUDIES[name]


def write(path: Path, name: str, lab: Lab) -> None:
    """Measures; the file says what was run."""
    about = {"figure": name, "clips": lab.clips, "size": lab.size, "tokens": lab.tokens}
    path.write_text(json.dumps(about | named(name).measure(lab), separators=(",", ":")) + "\n")


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

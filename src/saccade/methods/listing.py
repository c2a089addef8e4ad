"""The methods of this package as data, so that a name can be checked without importing PyTorch.

``registry`` collects all methods, but it imports their files, and PyTorch with them. So the list of
methods is also stored in ``listed.json``: ``make listed`` writes it, and a test compares it with
the registry. The file is used only if two conditions hold: no installed package and no file of the
user's own adds methods, and the folder of this module has Python files of the same names as when
``listed.json`` was written. Otherwise commands ask the registry, which takes longer.

A method is written ``NAME/axis=value/...``: a name, and overrides of its choices, such as
``specvlm/view=uniform/keep=0.2``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path

from saccade.core.errors import MethodError, suggest

ENTRY_POINT_GROUP = "saccade.methods"
FILES_VARIABLE = "SACCADE_METHODS"  # The environment variable that names files with methods.
FOLDER = Path(__file__).parent
LISTED = FOLDER / "listed.json"


@dataclass(frozen=True)
class Listing:
    """Every named method, and the values that each axis of overrides takes, in words."""

    # By the method's name, and then by these keys:
    #   "about": the method in words
    #   "study": the reason why it is a study; left out if it is none
    #   the name of an axis: the method's value on this axis; left out if it is the default
    methods: dict[str, dict[str, str]]
    axes: dict[str, list[str]]  # By the axis's name: the values that it takes.

    def split_studies(self) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
        """Returns the methods in two groups: those that are no studies, then the studies.

        A study is a method that was slower than plain decoding in every stored run."""
        others: dict[str, dict[str, str]] = {}
        studies: dict[str, dict[str, str]] = {}
        for name, fields in self.methods.items():
            group = studies if "study" in fields else others
            group[name] = fields
        return others, studies

    def check(self, name: str) -> None:
        """Raises MethodError if a name has a method or an axis that is not in this listing."""
        split_name(name, self.methods, self.axes)


def load_listing() -> Listing | None:
    """Returns the stored listing; None where it is missing, or may lack some of the methods."""
    if os.environ.get(FILES_VARIABLE) or any(entry_points(group=ENTRY_POINT_GROUP)):
        return None
    try:
        stored = json.loads(LISTED.read_text("utf-8"))
        is_complete = stored["files"] == method_files()
        return Listing(stored["methods"], stored["axes"]) if is_complete else None
    except (OSError, ValueError, KeyError):
        return None


def save_listing(listing: Listing) -> None:
    """Writes the listing of this package's own methods."""
    stored = {"files": method_files(), **asdict(listing)}
    LISTED.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", "utf-8")


def method_files() -> list[str]:
    """Returns the names of the Python files in this folder, sorted."""
    return sorted(path.name for path in FOLDER.glob("*.py"))


def split_name(
    name: str, methods: Collection[str], axes: Collection[str]
) -> tuple[str, dict[str, str]]:
    """Splits ``NAME/axis=value/...`` into the name and the value of each axis that it overrides.

    ``methods`` and ``axes`` are the known names. Raises MethodError for others, for an override
    without "=", and for an axis that is given twice. The values are not checked.
    """
    base, *overrides = name.strip().split("/")
    if base not in methods:
        raise MethodError(
            f"unknown method {base!r}{suggest(base, methods)}; known methods: "
            f"{', '.join(methods)} (SACCADE_METHODS=FILE.py brings one of your own)"
        )
    chosen: dict[str, str] = {}
    for override in overrides:
        axis, equals, value = override.partition("=")
        if axis not in axes or not equals:
            raise MethodError(
                f"cannot read {override!r} in {name!r}{suggest(axis, axes)}: write axis=value with "
                f"an axis out of {', '.join(axes)}"
            )
        if axis in chosen:
            raise MethodError(f"axis {axis!r} is given twice in {name!r}")
        chosen[axis] = value
    return base, chosen

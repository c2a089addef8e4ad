"""The methods of this package as data: naming one waits for no model library.

``listed.json`` holds what the registry would say, and is written anew by ``make listed``. It is
believed only where its methods are all there are (no installed package and no file of the user's
own bring more) and where the files beside it are those it was written from: with a new one there,
everything is read from the files, and only starts later.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path

from saccade.core.errors import MethodError, suggest

GROUP, FILES = "saccade.methods", "SACCADE_METHODS"
FOLDER = Path(__file__).parent
LISTED = FOLDER / "listed.json"


@dataclass(frozen=True)
class Listing:
    """Every named method, and the choices there are on each axis, in words."""

    methods: dict[str, dict[str, str]]  # what each is about and chooses, by its name
    axes: dict[str, list[str]]

    def check(self, name: str) -> None:
        """Raises MethodError for a method or an axis that nobody brings."""
        split_name(name, self.methods, self.axes)


def load_listing() -> Listing | None:
    """The listing beside the methods; None where it may not be all there is, or is another's."""
    if os.environ.get(FILES) or any(entry_points(group=GROUP)):
        return None
    try:
        stored = json.loads(LISTED.read_text("utf-8"))
        is_current = stored["of"] == _digests()
        return Listing(stored["methods"], stored["axes"]) if is_current else None
    except (OSError, ValueError, KeyError):
        return None


def save_listing(listing: Listing) -> None:
    """Writes the listing of this package's own methods."""
    written = json.dumps({"of": _digests(), **asdict(listing)}, indent=1, ensure_ascii=False)
    LISTED.write_text(written + "\n", "utf-8")


def split_name(
    name: str, methods: Collection[str], axes: Collection[str]
) -> tuple[str, dict[str, str]]:
    """``NAME/axis=value/...`` as the name and its overrides. Raises MethodError."""
    base, *overrides = name.strip().split("/")
    if base not in methods:
        raise MethodError(
            f"unknown method {base!r}{suggest(base, methods)}; known methods: {', '.join(methods)}"
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


def _digests() -> dict[str, str]:
    """Of each file of methods, whatever its line ends."""
    return {
        path.name: hashlib.sha256(b"".join(path.read_bytes().splitlines())).hexdigest()[:16]
        for path in sorted(FOLDER.glob("*.py"))
    }

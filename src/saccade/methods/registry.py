"""Collects all methods, and the views, shapes and other parts that methods are made of.

They come from files of this package, of installed packages and of the user. Each file defines
``PROVIDES``, which says what it provides. A package names its module under the entry point group
``saccade.methods``. The user's own files are named in the environment variable ``SACCADE_METHODS``,
separated as in ``PATH``.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from saccade.core.errors import MethodError
from saccade.core.protocols import Schedule, Shape, View
from saccade.drafting.ensemble import Weighting
from saccade.drafting.provides import Axis, Provides
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import parallel, serial
from saccade.drafting.setup import MakeDrafter
from saccade.methods.listing import ENTRY_POINT_GROUP, FILES_VARIABLE

NOT_METHODS = {"listing", "names", "registry"}  # Modules of this folder that provide none.
FIRST_LISTED = "baselines"  # This module comes first, and the others by name.

log = logging.getLogger(__name__)


def load_method_files() -> Iterator[tuple[str, Provides]]:
    """Yields the name of every file of methods with what it provides: the files of this package,
    then those of installed packages, then the user's own.

    A file of an installed package that cannot be read is left out, with an error in the log. A
    user's own file that cannot be read raises MethodError.
    """
    folder = str(Path(__file__).parent)
    names = {module.name for module in pkgutil.iter_modules([folder])} - NOT_METHODS
    for name in sorted(names, key=lambda name: (name != FIRST_LISTED, name)):
        module = f"{__package__}.{name}"
        yield module, read_provides(module, import_module(module))
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            yield point.value, read_provides(point.value, point.load())
        except Exception as error:
            log.error("the methods of %s are left out: %s", point.value, error)
    for path in filter(None, os.environ.get(FILES_VARIABLE, "").split(os.pathsep)):
        try:
            yield path, read_provides(path, _load_file(Path(path)))
        except Exception as error:
            raise MethodError(
                f"{FILES_VARIABLE} names {path}, which provides no method: {error}"
            ) from error


def read_provides(name: str, module: ModuleType) -> Provides:
    """Returns a module's PROVIDES. Raises MethodError where it has none."""
    provides = vars(module).get("PROVIDES")
    if not isinstance(provides, Provides):
        raise MethodError(
            f"{name} defines no PROVIDES = Provides(...), which says what it provides"
        )
    return provides


def _load_file(path: Path) -> ModuleType:
    """Imports a file as a module of the file's name, so that a draft's worker process can import
    the same module."""
    if not path.is_file():
        raise MethodError("there is no such file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = import_module(path.stem)
    loaded_from = getattr(module, "__file__", None)
    if loaded_from is None or Path(loaded_from).resolve() != path.resolve():
        raise MethodError(
            f"Python has another module of the name {path.stem} ({loaded_from or 'built in'}): "
            "rename the file"
        )
    return module


def _collect(entries: Callable[[Provides], Iterable[tuple[str, Any]]]) -> dict[str, Any]:
    """Returns the entries of one kind from all files, such as all recipes, by name.

    ``entries`` takes what one file provides, and returns its (name, entry) pairs of that kind.
    Raises MethodError for a name that occurs twice.
    """
    table: dict[str, Any] = {}
    file_of: dict[str, str] = {}
    for file, provides in PROVIDED:
        for name, value in entries(provides):
            if name in table:
                raise MethodError(
                    f"both {file_of[name]} and {file} provide {name!r}: rename one of them"
                )
            table[name] = value
            file_of[name] = file
    return table


PROVIDED = tuple(load_method_files())  # (name of the file, what it provides) of every file.
METHODS: dict[str, Recipe] = _collect(
    lambda provides: ((each.name, each) for each in provides.recipes)
)
"""The recipes of the methods, by the method's name."""
VIEWS: dict[str, View] = _collect(lambda provides: ((each.name, each) for each in provides.views))
SHAPES: dict[str, Shape] = _collect(lambda provides: provides.shapes.items())
"""Shapes without a parameter, such as "auto", by the name that ``shape=`` takes."""
SHAPE_FAMILIES: dict[str, type[Shape]] = _collect(
    lambda provides: ((each.family, each) for each in provides.shape_families)
)
"""Classes of shapes with a parameter, by the family's name: "chain" for ``shape=chain-5``."""
DRAFTERS: dict[str, MakeDrafter] = _collect(lambda provides: provides.drafters.items())
WEIGHTINGS: dict[str, Callable[[int | None], Weighting]] = _collect(
    lambda provides: provides.weights.items()
)
"""The rules by which an ensemble weighs its views, by the names that ``weights=`` takes. Each entry
is a function that returns the rule. It takes the number of last verified positions that the rule
reads, or None for all of them."""
METHOD_SETTINGS: dict[str, Axis] = _collect(lambda provides: provides.axes.items())
"""The axes of overrides that files of methods add, such as ``lambda``, by the axis's name."""
SCHEDULES: dict[str, Schedule] = {each.name: each for each in (serial, parallel)}

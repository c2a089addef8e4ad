"""Every method there is: a file each in this package, in installed packages, and of the user's own.

A file says what it brings in ``PROVIDES``. A package names its module under the entry point group
``saccade.methods``; a single file is named in the environment variable ``SACCADE_METHODS``.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from saccade.core.errors import MethodError
from saccade.core.protocols import Schedule, Shape, View
from saccade.drafting.ensemble import Weighting
from saccade.drafting.provides import Axis, Provides
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import parallel, serial
from saccade.drafting.setup import MakeDrafter
from saccade.methods.listing import FILES, GROUP

OURS = {"listing", "names", "registry"}  # beside the files of methods
FIRST = "baselines"

log = logging.getLogger(__name__)

T = TypeVar("T")


def find_files() -> Iterator[tuple[str, Provides]]:
    """What each file brings, with the name it goes by: ours, installed ones, the user's own.

    An installed one that cannot be read is left out, and that is told; the user's own raises
    MethodError.
    """
    own = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])} - OURS
    for name in sorted(own, key=lambda name: (name != FIRST, name)):
        module = f"{__package__}.{name}"
        yield module, provided(module, import_module(module))
    for point in entry_points(group=GROUP):
        try:
            yield point.value, provided(point.value, point.load())
        except Exception as error:
            log.error("the methods of %s are left out: %s", point.value, error)
    for path in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        try:
            yield path, provided(path, _load_file(Path(path)))
        except Exception as error:
            raise MethodError(f"{FILES} names {path}, which brings no method: {error}") from error


def provided(name: str, module: ModuleType) -> Provides:
    brought = vars(module).get("PROVIDES")
    if not isinstance(brought, Provides):
        raise MethodError(f"{name} needs PROVIDES = Provides(...), as a file of methods has")
    return brought


def _load_file(path: Path) -> ModuleType:
    """A file as a module that a draft's process can import by its name too."""
    if not path.is_file():
        raise MethodError("there is no such file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return import_module(path.stem)


def _table(bring: Callable[[Provides], Iterator[tuple[str, Any]]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for file, brought in BROUGHT:
        for name, value in bring(brought):
            if name in table:
                raise MethodError(
                    f"both {origin[name]} and {file} bring {name!r}: rename one of them"
                )
            table[name], origin[name] = value, file
    return table


BROUGHT = tuple(find_files())
SYSTEMS: dict[str, Recipe] = _table(lambda file: ((each.name, each) for each in file.recipes))
VIEWS: dict[str, View] = _table(lambda file: ((each.name, each) for each in file.views))
SHAPES: dict[str, Shape] = _table(lambda file: iter(file.shapes.items()))
FAMILIES: dict[str, type[Shape]] = _table(lambda f: ((each.family, each) for each in f.families))
DRAFTERS: dict[str, MakeDrafter] = _table(lambda file: iter(file.drafters.items()))
WEIGHTS: dict[str, Callable[[int | None], Weighting]] = _table(lambda f: iter(f.weights.items()))
SETTINGS: dict[str, Axis] = _table(lambda file: iter(file.axes.items()))
SCHEDULES: dict[str, Schedule] = {each.name: each for each in (serial, parallel)}

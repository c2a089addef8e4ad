"""The named methods, one file per paper, and the choices on each axis.

``registry`` collects what each file provides, and ``names`` parses ``NAME/axis=value/...``.
``listing`` reads the methods' names and the values of each axis from a file, so that a name can be
checked without importing torch. For the same reason the names below are imported only when they are
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.methods.names import (
        AXES,
        DRAFTERS,
        METHODS,
        SCHEDULES,
        SHAPE_FAMILIES,
        SHAPES,
        VIEWS,
        WEIGHTINGS,
        axes,
        choices,
        resolve,
    )

__all__ = [
    "AXES",
    "DRAFTERS",
    "SHAPE_FAMILIES",
    "SCHEDULES",
    "SHAPES",
    "METHODS",
    "VIEWS",
    "WEIGHTINGS",
    "axes",
    "choices",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'saccade.methods' has no attribute {name!r}")
    return getattr(import_module("saccade.methods.names"), name)

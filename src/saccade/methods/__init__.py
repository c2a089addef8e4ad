"""The named methods, one file per paper, and the choices on each axis.

``registry`` collects what each file provides, ``names`` parses ``NAME/axis=value/...``, and
``listing`` is both as data. The names below are imported when they are first used, so that a list
of methods does not wait for torch.
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

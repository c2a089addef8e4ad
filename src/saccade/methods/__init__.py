"""The named methods, a file a paper, and the choices on each axis; everything else is an override.

``registry`` has what each file brings, ``names`` reads ``NAME/axis=value/...``, ``listing`` is both
as data. The names below are imported when first used: whoever only lists does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.methods.names import AXES, axes, choices, resolve
    from saccade.methods.registry import (
        DRAFTERS,
        FAMILIES,
        SCHEDULES,
        SHAPES,
        SYSTEMS,
        VIEWS,
        WEIGHTS,
    )

_NAMES = {"AXES", "axes", "choices", "resolve"}

__all__ = [
    "AXES",
    "DRAFTERS",
    "FAMILIES",
    "SCHEDULES",
    "SHAPES",
    "SYSTEMS",
    "VIEWS",
    "WEIGHTS",
    "axes",
    "choices",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'saccade.methods' has no attribute {name!r}")
    home = "names" if name in _NAMES else "registry"
    return getattr(import_module(f"saccade.methods.{home}"), name)

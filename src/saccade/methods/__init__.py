"""The named methods, a file a paper, and the choices on each axis; everything else is an override.

``registry`` has what each file brings, ``names`` reads ``NAME/axis=value/...``.
"""

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

"""NumPy's numbers as Python's own, which is what settings are checked and computed as."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np


def to_plain(value: Any) -> Any:
    """The value with every number of NumPy in it, however deep in lists, as Python's number."""
    match value:
        case bool() | int() | float() | str() | None:
            return value
        case np.bool_():
            return bool(value)
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case np.ndarray():
            return to_plain(value.tolist())
        case list() | tuple():
            return type(value)(map(to_plain, value))
    return value

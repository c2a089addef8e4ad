"""Splits, edits and explains what a method is written as, ``NAME/axis=value/...``, for the page's
controls.

The page keeps this text alone. A control changes one axis in it and leaves the other axes alone.
"""

from __future__ import annotations

from saccade.core.errors import MethodError
from saccade.methods import (
    AXES,
    DRAFTERS,
    METHODS,
    SCHEDULES,
    SHAPES,
    VIEWS,
    choices,
    resolve,
)

UNCHANGED = ""  # The value of a control that leaves its axis to the method.
MENU: dict[str, list[str]] = {
    "view": [*VIEWS, "full+text"],
    "drafter": list(DRAFTERS),
    "shape": ["chain-4", "chain-7", "best-12", *SHAPES],
    "schedule": list(SCHEDULES),
}
"""What the controls offer; other values can be typed, as ``saccade methods`` lists them."""


def split_method(method: str) -> tuple[str, dict[str, str]]:
    """Returns NAME, and the value of each axis that follows it. Parts that are no ``axis=value`` of
    a known axis are ignored."""
    name, *parts = method.strip().split("/")
    pairs = [part.partition("=") for part in parts]
    return name, {axis: value for axis, equals, value in pairs if equals and axis in AXES}


def set_axis(method: str, axis: str, value: str) -> str:
    """Returns the method with one axis set to ``value``, or without the axis if ``value`` is
    ``UNCHANGED`` or blank. Parts that are no ``axis=value`` of a known axis are left out."""
    name, axes = split_method(method)
    written_axes = {**axes, axis: value.strip()}
    return "/".join([name, *(f"{axis}={value}" for axis, value in written_axes.items() if value)])


def explain_method(method: str) -> tuple[bool, str]:
    """Returns whether the method is possible, and a description of it or the reason why not."""
    try:
        recipe = resolve(method)
    except MethodError as error:
        return False, str(error)
    choices_by_axis = ", ".join(f"{axis} {value}" for axis, value in choices(recipe).items())
    about = METHODS[split_method(method)[0]].about
    return True, f"{about} ({choices_by_axis})"

"""A method as it is written, ``NAME/axis=value/...``, beside the controls that stand for its axes.

The writing is the truth: a control changes one part of it and leaves the rest alone.
"""

from __future__ import annotations

from saccade.core.errors import MethodError
from saccade.methods import (
    AXES,
    DRAFTERS,
    SCHEDULES,
    SHAPES,
    SYSTEMS,
    VIEWS,
    choices,
    resolve,
)

AS_IT_IS = ""  # a control that leaves its axis to the method
MENU: dict[str, list[str]] = {
    "view": [*VIEWS, "full+text"],
    "drafter": list(DRAFTERS),
    "shape": ["chain-4", "chain-7", "best-12", *SHAPES],
    "schedule": list(SCHEDULES),
}
"""What the controls offer; others can be written, as ``saccade methods`` lists them."""


def taken_apart(method: str) -> tuple[str, dict[str, str]]:
    """The name, and what is written of each axis; parts that are no ``axis=value`` are left out."""
    name, *parts = method.strip().split("/")
    pairs = [part.partition("=") for part in parts]
    return name, {axis: value for axis, equals, value in pairs if equals and axis in AXES}


def changed(method: str, axis: str, value: str) -> str:
    """The method with one axis written otherwise, or no more (``AS_IT_IS``)."""
    name, axes = taken_apart(method)
    written = {**axes, axis: value.strip()}
    return "/".join([name, *(f"{axis}={value}" for axis, value in written.items() if value)])


def explained(method: str) -> tuple[bool, str]:
    """Whether there can be such a method; what it chooses on each axis, or the sentence why not."""
    try:
        recipe = resolve(method)
    except MethodError as error:
        return False, str(error)
    chosen = ", ".join(f"{axis} {value}" for axis, value in choices(recipe).items())
    about = SYSTEMS[taken_apart(method)[0]].about
    return True, f"{about} ({chosen})"

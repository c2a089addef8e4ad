"""What one file of methods brings: named recipes, and the choices it adds to their axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade.core.errors import MethodError
from saccade.core.protocols import Shape, View
from saccade.drafting.ensemble import Weighting
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import MakeDrafter

Choices = dict[str, Any]
"""A recipe's fields while they are being chosen: together they may not make sense yet."""


@dataclass(frozen=True)
class Axis:
    """A choice that an override makes, written ``axis=value``."""

    choose: Callable[[Choices, str], Choices]  # the fields it changes; raises MethodError
    told: Callable[[Recipe], str | None]  # the value a recipe has there; None: not worth saying
    options: Callable[[], list[str]]  # in words


@dataclass(frozen=True)
class Provides:
    """A file's ``PROVIDES``: see ``docs/methods/a-sixth-method.md``."""

    recipes: tuple[Recipe, ...] = ()
    views: tuple[View, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    families: tuple[type[Shape], ...] = ()  # shapes with a parameter, written NAME-...
    drafters: Mapping[str, MakeDrafter] = field(default_factory=dict)
    weights: Mapping[str, Callable[[int | None], Weighting]] = field(default_factory=dict)
    axes: Mapping[str, Axis] = field(default_factory=dict)  # of its views' own settings


def share(axis: str, value: str) -> float:
    """A number from 0 to 1. Raises MethodError."""
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise MethodError(f"{axis}={value} is not a share between 0 and 1")
    return found

"""What a file of methods provides: named recipes, and the choices that it adds to their axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from saccade.core.errors import MethodError
from saccade.core.protocols import Shape, View
from saccade.drafting.ensemble import Weighting
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import MakeDrafter

Choices = dict[str, Any]
"""A recipe's fields while overrides change them; they may not fit together until the end."""


@dataclass(frozen=True)
class Axis:
    """One axis of overrides, written ``axis=value``."""

    choose: Callable[[Choices, str], Choices]  # returns the changed fields; raises MethodError
    describe: Callable[[Recipe], str | None]  # returns a recipe's value; None for the default
    options: Callable[[], list[str]]  # returns the possible values in words


def setting(
    axis: str,
    at: str,
    kind: type,
    read: Callable[[str], object],
    options: str,
    needs: str,
    default: object = None,
    write: Callable[[Any], str] = str,
) -> Axis:
    """Makes an axis that sets a field of an object of this ``kind``.

    ``at`` is the field's path from a recipe, as in ``view.keep`` or ``view.select.draw``. Recipes
    are described by the axis where the field is not ``default``.
    """
    part, *between, name = at.split(".")

    def owner(chosen: Any) -> Any:
        inner = getattr(chosen, between[0], None) if between else chosen
        return inner if isinstance(inner, kind) else None

    def choose(choices: Choices, value: str) -> Choices:
        if (own := owner(choices[part])) is None:
            raise MethodError(f"{axis} is {needs}")
        own = replace(own, **{name: read(value)})
        return {part: replace(choices[part], **{between[0]: own}) if between else own}

    def describe(recipe: Recipe) -> str | None:
        value = getattr(owner(getattr(recipe, part)), name, default)
        return None if value == default else write(value)

    return Axis(choose, describe, lambda: [options])


@dataclass(frozen=True)
class Provides:
    """A file's ``PROVIDES``: see ``docs/methods/a-sixth-method.md``."""

    recipes: tuple[Recipe, ...] = ()
    views: tuple[View, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    families: tuple[type[Shape], ...] = ()  # shapes with a parameter, spelled NAME-...
    drafters: Mapping[str, MakeDrafter] = field(default_factory=dict)
    weights: Mapping[str, Callable[[int | None], Weighting]] = field(default_factory=dict)
    axes: Mapping[str, Axis] = field(default_factory=dict)  # settings of its own parts

    def __post_init__(self) -> None:
        """Raises MethodError for parts that could not be chosen by their names."""
        for field_name, kind in (("recipes", Recipe), ("views", View)):
            parts = getattr(self, field_name)
            if not isinstance(parts, tuple) or not all(isinstance(e, kind) for e in parts):
                raise MethodError(
                    f"{field_name}= is a tuple of {kind.__name__}s: ({kind.__name__}(...),)"
                )
        names = [recipe.name for recipe in self.recipes] + [view.name for view in self.views]
        for name in names:
            if not name or {*name} & {*"/=+, "}:
                raise MethodError(
                    f"{name!r} cannot be chosen: a name has none of / = + , and space"
                )
        for family in self.families:
            _check_family(family)


def _check_family(family: type[Shape]) -> None:
    """Raises MethodError unless a family of shapes parses its examples and spells them back."""
    if not isinstance(family, type) or not issubclass(family, Shape):
        raise MethodError(f"families= is a tuple of Shape's classes, and {family!r} is none")
    for own in ("family", "usage", "examples", "parse", "spelling"):
        if own not in vars(family):
            raise MethodError(f"{family.__name__} needs {own} of its own: it has another shape's")
    for example in family.examples:
        spelling = family.parse(example).spelling
        if spelling != f"{family.family}-{example}":
            raise MethodError(
                f"{family.__name__} reads {family.family}-{example} and writes it as {spelling}"
            )


def parse_positive(axis: str, value: str) -> float:
    """Parses a finite number above 0. Raises MethodError."""
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise MethodError(f"{axis}={value} is not a number above 0")
    return number


def parse_whole(axis: str, value: str, *, zero: bool = False) -> int:
    """Parses a whole number above 0, or with ``zero`` at least 0. Raises MethodError."""
    if not value.isascii() or not value.isdigit() or not (zero or int(value)):
        raise MethodError(f"{axis}={value} is not a whole number {'from' if zero else 'above'} 0")
    return int(value)


def parse_share(axis: str, value: str) -> float:
    """Parses a number from 0 to 1. Raises MethodError."""
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise MethodError(f"{axis}={value} is not a share between 0 and 1")
    return number

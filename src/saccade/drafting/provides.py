"""What a file of methods provides in its variable ``PROVIDES``: recipes, and choices of parts.

A method is written ``NAME/axis=value/...``, such as ``specvlm/view=uniform/keep=0.2``. NAME is the
name of a recipe. Each override ``axis=value`` replaces one part of the recipe, as ``view=`` does,
or sets one field of a part, as ``keep=`` does. ``methods/registry.py`` collects what all files
provide, and ``methods/names.py`` resolves such names to recipes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from saccade.core.digits import read_digits
from saccade.core.errors import MethodError
from saccade.core.protocols import Shape, View
from saccade.drafting.ensemble import Weighting
from saccade.drafting.recipe import Parts, Recipe
from saccade.drafting.setup import MakeDrafter

# Characters that separate things where methods are written, as in "tabed/view=full+text".
NOT_IN_NAMES = frozenset("/=+, ")


class Axis(ABC):
    """One kind of overrides, such as all that begin with ``view=``."""

    @abstractmethod
    def choose(self, parts: Parts, value: str) -> Parts:
        """Returns the parts of a recipe after the override by this value. Raises MethodError for a
        value that is none of the axis's, or where the parts have nothing that it could change."""

    @abstractmethod
    def describe(self, recipe: Recipe) -> str | None:
        """Returns a recipe's value on this axis, as it is written after the "=" of an override.
        Returns None where it is the default."""

    @abstractmethod
    def options(self) -> list[str]:
        """Returns the possible values in words."""


@dataclass(frozen=True)
class Setting(Axis):
    """An axis that sets one field, such as ``keep`` of a view.

    The field belongs to an object of the class ``owner``. That is a part of the recipe (a view, a
    shape, a drafter), or an object in a field of a part, such as the weighting of an ensemble.
    """

    axis: str  # the name before the "=" of an override
    owner: type
    field: str  # the name of the field that is set
    parse: Callable[[str, str], Any]  # (axis, text) -> value; raises MethodError
    choices: str | tuple[str, ...]  # the possible values, as ``saccade methods`` shows them
    # If no part of a recipe has the field, the error is the axis's name and these words, such as
    # "needs view=pages".
    unmet_message: str = ""
    default: object = None  # A description of a recipe omits the axis if the field has this value.
    to_text: Callable[[Any], str] = str  # value -> its text in an override

    def __post_init__(self) -> None:
        """Raises MethodError for a field that no object of the class has."""
        if not is_dataclass(self.owner):
            return
        if self.field not in {each.name for each in fields(self.owner)}:
            raise MethodError(f"{self.owner.__name__} has no field {self.field!r} for {self.axis}=")

    def applies(self, owner: Any) -> bool:
        """Returns whether an override may set the field of this object, which is of the class
        ``self.owner``. By default it may for every such object."""
        return True

    def read(self, owner: Any) -> Any:
        """Returns the value of the field."""
        return vars(owner)[self.field]

    def write(self, owner: Any, value: Any) -> Any:
        """Returns the object with this value. Raises MethodError where it cannot have the value."""
        return replace(owner, **{self.field: value})

    def refusal(self, parts: Parts) -> str:
        """Returns why the axis means nothing to these parts."""
        return f"{self.axis} {self.unmet_message}"

    def choose(self, parts: Parts, value: str) -> Parts:
        # Only the first object that has the field is changed.
        for part_name, part in vars(parts).items():
            for field_name, owner in self._owners(part):
                changed = self.write(owner, self.parse(self.axis, value))
                is_part = field_name == ""
                changed_part = changed if is_part else replace(part, **{field_name: changed})
                return replace(parts, **{part_name: changed_part})
        raise MethodError(self.refusal(parts))

    def value(self, recipe: Recipe) -> Any:
        """Returns the field's value in a recipe; the default where no part has the field."""
        for part in vars(recipe.parts).values():
            for _, owner in self._owners(part):
                return self.read(owner)
        return self.default

    def describe(self, recipe: Recipe) -> str | None:
        value = self.value(recipe)
        return None if value == self.default else self.to_text(value)

    def options(self) -> list[str]:
        return [self.choices] if isinstance(self.choices, str) else [*self.choices]

    def _owners(self, part: object) -> Iterator[tuple[str, Any]]:
        """Yields the objects of the class ``owner`` to which the setting applies, each with a name:
        the part itself with the name "", and then objects in its fields, with the field's name."""
        for name, owner in (("", part), *vars(part).items()):
            if isinstance(owner, self.owner) and self.applies(owner):
                yield name, owner


@dataclass(frozen=True)
class ViewSetting(Setting):
    """A setting of a field that views of several classes have. It applies only to views whose
    ``settings``, the names of the fields that an override may set, contain the field's name."""

    def applies(self, owner: View) -> bool:
        return self.field in owner.settings


@dataclass(frozen=True)
class Provides:
    """What one file of methods provides.

    Everything here can be chosen by its name: a recipe as a method, all else by an override.
    ``docs/methods/a-sixth-method.md`` shows how to write a file.
    """

    recipes: tuple[Recipe, ...] = ()
    views: tuple[View, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # by the name in ``shape=``
    shape_families: tuple[type[Shape], ...] = ()  # shapes with a parameter, such as ``chain-5``
    drafters: Mapping[str, MakeDrafter] = field(default_factory=dict)  # by the name in ``drafter=``
    # The values of the axis ``weights``: rules by which an ensemble weighs its views. Each is a
    # function from a window to a rule. The window is how many of the last verified positions the
    # rule learns from; None stands for all.
    weights: Mapping[str, Callable[[int | None], Weighting]] = field(default_factory=dict)
    axes: Mapping[str, Axis] = field(default_factory=dict)  # more axes, for fields of these parts

    def __post_init__(self) -> None:
        """Raises MethodError for recipes, views or shape families that could not be chosen by their
        names. The names of shapes, drafters, weights and axes are not checked."""
        for field_name, kind in (("recipes", Recipe), ("views", View)):
            parts = getattr(self, field_name)
            if not isinstance(parts, tuple) or not all(isinstance(e, kind) for e in parts):
                raise MethodError(
                    f"{field_name}= is a tuple of {kind.__name__}s: ({kind.__name__}(...),)"
                )
        names = [recipe.name for recipe in self.recipes] + [view.name for view in self.views]
        for name in names:
            if not name or not NOT_IN_NAMES.isdisjoint(name):
                raise MethodError(
                    f"{name!r} is no name: it must not be empty or contain / = + , or a space"
                )
        for family in self.shape_families:
            _check_family(family)


def _check_family(family: type[Shape]) -> None:
    """Raises MethodError unless a family of shapes has all that it needs, and each of its examples
    is parsed to a shape that spells itself in the same way."""
    if not isinstance(family, type) or not issubclass(family, Shape):
        raise MethodError(
            f"shape_families= must be a tuple of subclasses of Shape, which {family!r} is not"
        )
    for attribute in ("family", "usage", "examples", "parse", "spelling"):
        if attribute not in vars(family):
            raise MethodError(
                f"{family.__name__} needs {attribute} of its own: it inherits another shape's"
            )
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
    number = read_digits(value)
    if number is None or (number == 0 and not zero):
        bound = "from 0" if zero else "above 0"
        raise MethodError(f"{axis}={value} is not a whole number {bound}")
    return number


def parse_share(axis: str, value: str) -> float:
    """Parses a number from 0 to 1. Raises MethodError."""
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise MethodError(f"{axis}={value} is not a share between 0 and 1")
    return number

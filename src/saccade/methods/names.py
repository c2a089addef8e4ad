"""Turns the name of a method into its recipe, and a recipe into words.

A name is written ``NAME/axis=value/...``, for example ``specvlm/shape=chain-7``. NAME is a
registered method, and each ``axis=value`` overrides one choice of it. An axis is one of the four
parts of a recipe (drafter, view, shape, schedule), or a setting of a part, such as ``keep``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, get_args

from saccade.core.capabilities import NO_CAPABILITIES
from saccade.core.digits import read_digits
from saccade.core.errors import MethodError, suggest
from saccade.core.protocols import View
from saccade.drafting.drafters import ModelDrafter
from saccade.drafting.ensemble import Ensemble, Weighting
from saccade.drafting.parallel.worker_drafter import WorkerDrafter
from saccade.drafting.provides import Axis, Setting, ViewSetting, parse_share
from saccade.drafting.recipe import Parts, Recipe
from saccade.drafting.setup import MakeDrafter
from saccade.drafting.views.basic import Early, Positions, Several
from saccade.methods.listing import Listing, split_name
from saccade.methods.registry import (
    DRAFTERS,
    METHOD_SETTINGS,
    METHODS,
    SCHEDULES,
    SHAPE_FAMILIES,
    SHAPES,
    VIEWS,
    WEIGHTINGS,
)

T = TypeVar("T")


def resolve(name: str) -> Recipe:
    """Returns the recipe that a method's name stands for. Raises MethodError naming what would
    work."""
    if not isinstance(name, str):
        raise MethodError(f"a method is a name or a Recipe, not {type(name).__name__}")
    base, chosen = split_name(name, METHODS, AXES)
    recipe = METHODS[base]
    if chosen and not recipe.drafts and "drafter" not in chosen:
        raise MethodError(f"{base!r} drafts nothing, so {name!r} overrides nothing")
    parts = recipe.parts
    # In AXES a drafter, view or shape comes before the settings of its fields. So in
    # "sd/keep=0.2/view=uniform" the setting ``keep`` changes the view that the same text chooses,
    # in whatever order they are written.
    for axis, kind in AXES.items():
        if axis in chosen:
            parts = kind.choose(parts, chosen[axis])
    parts = replace(parts, drafter=_fit_drafter(parts))
    study = "" if chosen else recipe.study  # Only the unchanged method was measured.
    return Recipe(name=name.strip(), about=recipe.about, study=study, **vars(parts))


def choices(recipe: Recipe) -> dict[str, str]:
    """Returns the value of each axis in a recipe, as an override writes it. Axes at their default
    are left out. A recipe that drafts nothing has the drafter "none" alone."""
    if not recipe.drafts:
        return {"drafter": "none"}
    values = {axis: kind.describe(recipe) for axis, kind in AXES.items()}
    return {axis: value for axis, value in values.items() if value is not None}


def axes() -> dict[str, list[str]]:
    """Returns the choices there are on each axis, in words."""
    return {axis: kind.options() for axis, kind in AXES.items()}


def listing() -> Listing:
    """Returns the listing of all methods and choices that were found when this was imported."""
    return Listing({name: describe(recipe) for name, recipe in METHODS.items()}, axes())


def describe(recipe: Recipe) -> dict[str, str]:
    """Returns a recipe in words: what it is about, why it is a study (if it is one), and the values
    of its axes."""
    study = {"study": recipe.study} if recipe.study else {}
    return {"about": recipe.about, **study, **choices(recipe)}


def _fit_drafter(parts: Parts) -> MakeDrafter:
    """Returns the drafter that runs a draft model as the view and the schedule need it: in the
    target's process (``ModelDrafter``), in a process of its own (``WorkerDrafter``), or as an
    ensemble that mixes the laws of several views. If none of the three fits, the drafter of
    ``parts`` is returned unchanged, and so is any other than ModelDrafter and WorkerDrafter."""
    if parts.drafter not in (ModelDrafter, WorkerDrafter):
        return parts.drafter
    candidates: tuple[MakeDrafter, ...] = (ModelDrafter, WorkerDrafter, DRAFTERS["ensemble"])
    # A need that no candidate offers, such as one that the engine meets, says nothing about which
    # candidate to choose, so it is left out.
    offered = NO_CAPABILITIES.union(*(each.offers for each in candidates))
    needs = (parts.view.needs | parts.schedule.needs) & offered
    return next((each for each in candidates if needs <= each.offers), parts.drafter)


# -- the parts ---------------------------------------------------------------------------------


class DrafterChoice(Axis):
    """Who drafts."""

    def choose(self, parts: Parts, value: str) -> Parts:
        return replace(parts, drafter=_pick(DRAFTERS, "drafter", value))

    def describe(self, recipe: Recipe) -> str:
        return _name(DRAFTERS, recipe.drafter, recipe.drafter.name)

    def options(self) -> list[str]:
        return [*DRAFTERS]


class ViewChoice(Axis):
    """What the draft sees."""

    def choose(self, parts: Parts, value: str) -> Parts:
        views = tuple(_pick(VIEWS, "view", name) for name in value.split("+"))
        return replace(parts, view=views[0] if len(views) == 1 else Several(views))

    def describe(self, recipe: Recipe) -> str:
        return recipe.view.name

    def options(self) -> list[str]:
        return [*VIEWS, "several joined by + for an ensemble"]


class ShapeChoice(Axis):
    """In what shape a draft grows: a named shape, or one of a family with its parameter."""

    def choose(self, parts: Parts, value: str) -> Parts:
        kind, _, text = value.partition("-")
        if value not in SHAPES and kind in SHAPE_FAMILIES:
            return replace(parts, shape=SHAPE_FAMILIES[kind].parse(text))
        also = ", ".join(family.usage for family in SHAPE_FAMILIES.values())
        return replace(parts, shape=_pick(SHAPES, "shape", value, also=also))

    def describe(self, recipe: Recipe) -> str:
        return _name(SHAPES, recipe.shape, recipe.shape.spelling)

    def options(self) -> list[str]:
        return [*(family.usage for family in SHAPE_FAMILIES.values()), *SHAPES]


class ScheduleChoice(Axis):
    """When target and draft work: in turns, or side by side."""

    def choose(self, parts: Parts, value: str) -> Parts:
        return replace(parts, schedule=_pick(SCHEDULES, "schedule", value))

    def describe(self, recipe: Recipe) -> str:
        return recipe.schedule.name

    def options(self) -> list[str]:
        return [*SCHEDULES]


# -- settings of several parts -----------------------------------------------------------------


@dataclass(frozen=True)
class CommonSetting(ViewSetting):
    """A setting that several registered views have, such as ``keep``. If it is given for another
    view, the error lists the views that have it."""

    def refusal(self, parts: Parts) -> str:
        # ``_owners`` yields nothing for a view that this setting does not apply to.
        able = ", ".join(name for name, view in VIEWS.items() if any(self._owners(view)))
        return f"{self.axis} needs another view than {parts.view.name}: one of {able}"


@dataclass(frozen=True)
class KeepSetting(CommonSetting):
    """The share of visual tokens to keep. Setting it clears the view's own share for images."""

    def write(self, owner: Any, value: float) -> Any:
        """Returns ``owner``, a view, with this share."""
        cleared = {"images": None} if "images" in owner.settings else {}
        return replace(owner, keep=value, **cleared)


@dataclass(frozen=True)
class WeightsSetting(Setting):
    """The rule by which an ensemble weighs its views.

    A rule is called by the name of the registered rule that it equals (``_spell_weights``). Fields
    that have an axis of their own are left out of this comparison: the axis ``tau`` sets the
    temperature of the rule ``inverse``, which has this name at every temperature. For this,
    :meth:`read` returns the ensemble's rule with default values in these fields.
    """

    def read(self, owner: Ensemble) -> Weighting:
        return owner.weighting.with_default_settings


def _parse_share_above_zero(axis: str, value: str) -> float:
    number = parse_share(axis, value)
    if number == 0:
        raise MethodError(f"{axis}={value} is not a share of {SHARE_OF[axis]} above 0 and up to 1")
    return number


def _parse_word(words: Sequence[str], axis: str, value: str) -> str:
    return _pick({word: word for word in words}, axis, value)


def _parse_weights(axis: str, value: str) -> Weighting:
    """Parses KIND, or KIND-N for a rule that learns from the last N verified positions alone."""
    # KIND may contain a "-": "inverse-tvd" has no window, and "inverse-tvd-8" one of 8 positions.
    kind, _, last = value.rpartition("-")
    window = read_digits(last) if kind else None
    if window == 0 or (window and kind == "equal"):
        raise MethodError(f"weights={value}: a window holds 1 position or more, and equal has none")
    make = _pick(WEIGHTINGS, axis, value if window is None else kind, also="each with -N")
    return make(window)


def _spell_weights(rule: Weighting) -> str:
    """Returns a rule as an override writes it: KIND or KIND-N."""
    name = next((name for name, make in WEIGHTINGS.items() if make(rule.window) == rule), None)
    if name is None:  # A recipe may have a rule that no word stands for.
        return type(rule).__name__.lower()
    return name if rule.window is None else f"{name}-{rule.window}"


def _pick(table: dict[str, T], axis: str, value: str, also: str = "") -> T:
    """Returns the value that a name stands for on an axis. Raises MethodError for an unknown name.

    The message lists the names in the table. ``also`` is added to the list: it describes values
    that are no names in the table, such as ``chain-N``.
    """
    if value not in table:
        names = ", ".join([*table, also] if also else table)
        raise MethodError(f"unknown {axis} {value!r}{suggest(value, table)}; known: {names}")
    return table[value]


def _name(table: dict[str, T], value: object, otherwise: str) -> str:
    """Returns the name of a value in a table, or ``otherwise`` if it has none."""
    return next((name for name, each in table.items() if each == value), otherwise)


# What each of these axes is a share of.
SHARE_OF = {"keep": "visual tokens", "images": "images' tokens"}

AXES: dict[str, Axis] = {
    "drafter": DrafterChoice(),
    "weights": WeightsSetting(
        axis="weights",
        owner=Ensemble,
        field="weighting",
        parse=_parse_weights,
        choices=(*WEIGHTINGS, "each with -N for the last N positions"),
        unmet_message="needs an ensemble: start from tabed, or drafter=ensemble",
        to_text=_spell_weights,
    ),
    "view": ViewChoice(),
    "keep": KeepSetting(
        axis="keep",
        owner=View,
        field="keep",
        parse=_parse_share_above_zero,
        choices=f"share of {SHARE_OF['keep']}, above 0 and up to 1",
        to_text="{:g}".format,
    ),
    "images": CommonSetting(
        axis="images",
        owner=View,
        field="images",
        parse=_parse_share_above_zero,
        choices=f"share of {SHARE_OF['images']}, above 0 and up to 1",
        to_text="{:g}".format,
    ),
    "positions": CommonSetting(
        axis="positions",
        owner=View,
        field="positions",
        parse=partial(_parse_word, get_args(Positions)),
        choices=get_args(Positions),
        default="original",
    ),
    "early": CommonSetting(
        axis="early",
        owner=View,
        field="early",
        parse=partial(_parse_word, get_args(Early)),
        choices=get_args(Early),
        default="wait",
    ),
    "shape": ShapeChoice(),
    "schedule": ScheduleChoice(),
    **METHOD_SETTINGS,
}

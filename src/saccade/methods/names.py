"""Names to recipes and back: ``NAME/axis=value/...``, for example ``specvlm/shape=chain-7``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast, get_args

from saccade.core.errors import MethodError, suggest
from saccade.core.protocols import Early, Positions, View
from saccade.drafting.drafters import ModelDrafter
from saccade.drafting.ensemble import Ensemble
from saccade.drafting.parallel.drafter import WorkerDrafter
from saccade.drafting.provides import Axis, Choices, parse_share
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import parallel
from saccade.drafting.setup import MakeDrafter
from saccade.drafting.views.basic import Several
from saccade.methods.listing import Listing, split_name
from saccade.methods.registry import (
    DRAFTERS,
    FAMILIES,
    SCHEDULES,
    SETTINGS,
    SHAPES,
    SYSTEMS,
    VIEWS,
    WEIGHTS,
)

T = TypeVar("T")


def resolve(name: str) -> Recipe:
    """The recipe a method's name stands for. Raises MethodError naming what would work."""
    if not isinstance(name, str):
        raise MethodError(f"a method is a name or a Recipe, not {type(name).__name__}")
    base, chosen = split_name(name, SYSTEMS, AXES)
    recipe = SYSTEMS[base]
    if chosen and not recipe.drafts and "drafter" not in chosen:
        raise MethodError(f"{base!r} drafts nothing, so {name!r} overrides nothing")
    choices: Choices = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    for axis, kind in AXES.items():  # in this order: settings after what they are of
        if axis in chosen:
            choices |= kind.choose(choices, chosen[axis])
    return Recipe(**{**choices, "drafter": _fit_drafter(choices), "name": name.strip()})


def choices(recipe: Recipe) -> dict[str, str]:
    """A recipe in the words of its axes."""
    if not recipe.drafts:
        return {"drafter": "none"}
    values = {axis: kind.describe(recipe) for axis, kind in AXES.items()}
    return {axis: value for axis, value in values.items() if value is not None}


def axes() -> dict[str, list[str]]:
    """The choices there are on each axis, in words."""
    return {axis: kind.options() for axis, kind in AXES.items()}


def listing() -> Listing:
    """Every method and choice there is here, by the files that bring them."""
    methods = {name: {"about": each.about, **choices(each)} for name, each in SYSTEMS.items()}
    return Listing(methods, axes())


def _fit_drafter(choices: Choices) -> MakeDrafter:
    """The drafter chosen, in the form the other choices need: several views, its own process."""
    drafter: MakeDrafter = choices["drafter"]
    if drafter is ModelDrafter and len(choices["view"].parts) > 1:
        return DRAFTERS["ensemble"]
    if drafter is ModelDrafter and choices["schedule"] is parallel:
        return WorkerDrafter
    if drafter is WorkerDrafter and choices["schedule"] is not parallel:
        return ModelDrafter
    return drafter


def _drafter_of(recipe: Recipe) -> str:
    if isinstance(recipe.drafter, Ensemble):
        return "ensemble"
    own = ModelDrafter if recipe.drafter is WorkerDrafter else recipe.drafter
    return _name(DRAFTERS, own)


# -- views -------------------------------------------------------------------------------------


def _view(choices: Choices, value: str) -> Choices:
    several = tuple(_pick(VIEWS, "view", name) for name in value.split("+"))
    return {"view": several[0] if len(several) == 1 else Several(several)}


def _setting(
    axis: str, usual: object, read: Callable[[str], object], write: str, options: Sequence[str]
) -> Axis:
    """An axis that is a field of some views. It is described where it is not ``usual``, by the
    format ``write``."""

    def choose(choices: Choices, value: str) -> Choices:
        view, setting = choices["view"], read(value)
        if not _has(view, axis):
            able = ", ".join(name for name, other in VIEWS.items() if _has(other, axis))
            raise MethodError(f"{axis} needs another view than {view.name}: one of {able}")
        # A share that is set holds for videos and images alike.
        images = {"images": None} if axis == "keep" and _has(view, "images") else {}
        return {"view": replace(cast(Any, view), **images, **{axis: setting})}

    def describe(recipe: Recipe) -> str | None:
        value = getattr(recipe.view, axis) if _has(recipe.view, axis) else usual
        return None if value == usual else format(value, write)

    return Axis(choose, describe, lambda: [*options])


def _word(axis: str, usual: str, words: Sequence[str]) -> Axis:
    """A view's setting that is one of a few words."""
    table = {word: word for word in words}
    return _setting(axis, usual, lambda value: _pick(table, axis, value), "", words)


def _has(view: View, setting: str) -> bool:
    """Whether a view has this setting. One that keeps all or nothing has only the setting of when
    it is read."""
    is_field = setting in {field.name for field in fields(cast(Any, view))}
    return is_field and (view.name not in ("full", "none") or setting == "early")


def _share(axis: str, of: str) -> Axis:
    """A view's setting that is a share."""

    def read(value: str) -> float:
        number = parse_share(axis, value)
        if number == 0:
            raise MethodError(f"{axis}={value} is not a share of {of} above 0 and up to 1")
        return number

    return _setting(axis, None, read, "g", [f"share of {of}, 0 to 1"])


# -- everything else ---------------------------------------------------------------------------


def _weights(choices: Choices, value: str) -> Choices:
    """KIND, or KIND-N for a window of the last N positions."""
    if not isinstance(choices["drafter"], Ensemble):
        raise MethodError(
            f"weights={value} needs an ensemble: start from tabed, or drafter=ensemble"
        )
    kind, _, last = value.rpartition("-")
    window = int(last) if kind and last.isascii() and last.isdigit() else None
    if window == 0 or (window and kind == "equal"):
        raise MethodError(f"weights={value}: a window holds 1 position or more, and equal has none")
    make = _pick(WEIGHTS, "weights", value if window is None else kind, also="each with -N")
    return {"drafter": Ensemble(make(window))}


def _weights_of(recipe: Recipe) -> str | None:
    if not isinstance(recipe.drafter, Ensemble):
        return None
    rule = recipe.drafter.weighting.usual
    name = next(name for name, make in WEIGHTS.items() if make(rule.window) == rule)
    return name if rule.window is None else f"{name}-{rule.window}"


def _shape(choices: Choices, value: str) -> Choices:
    kind, _, text = value.partition("-")
    if value not in SHAPES and kind in FAMILIES:
        return {"shape": FAMILIES[kind].parse(text)}
    also = ", ".join(family.usage for family in FAMILIES.values())
    return {"shape": _pick(SHAPES, "shape", value, also=also)}


def _shape_of(recipe: Recipe) -> str:
    names = (name for name, shape in SHAPES.items() if shape == recipe.shape)
    return next(names, recipe.shape.spelling)


def _pick(table: dict[str, T], axis: str, value: str, also: str = "") -> T:
    """What a name stands for. Raises MethodError saying what is known."""
    if value not in table:
        names = ", ".join([*table, also] if also else table)
        raise MethodError(f"unknown {axis} {value!r}{suggest(value, table)}; known: {names}")
    return table[value]


def _name(table: dict[str, T], value: object) -> str:
    return next((name for name, each in table.items() if each == value), str(value))


def _of(table: dict[str, T], axis: str, describe: Callable[[Recipe], str | None]) -> Axis:
    """An axis whose values are the names in a table."""

    def choose(choices: Choices, value: str) -> Choices:
        return {axis: _pick(table, axis, value)}

    return Axis(choose, describe, lambda: [*table])


AXES: dict[str, Axis] = {
    "drafter": _of(DRAFTERS, "drafter", _drafter_of),
    "weights": Axis(
        _weights, _weights_of, lambda: [*WEIGHTS, "each with -N for the last N positions"]
    ),
    "view": Axis(
        _view,
        lambda recipe: recipe.view.name,
        lambda: [*VIEWS, "several joined by + for an ensemble"],
    ),
    "keep": _share("keep", "visual tokens"),
    "images": _share("images", "images' tokens"),
    "positions": _word("positions", "original", get_args(Positions)),
    "early": _word("early", "wait", get_args(Early)),
    "shape": Axis(
        _shape, _shape_of, lambda: [*(each.usage for each in FAMILIES.values()), *SHAPES]
    ),
    "schedule": _of(SCHEDULES, "schedule", lambda recipe: _name(SCHEDULES, recipe.schedule)),
    **SETTINGS,
}

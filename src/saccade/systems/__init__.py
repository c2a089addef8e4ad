"""The named systems, and the choices on each axis. Everything else is an override:

``NAME/axis=value/...``, for example ``specvlm/shape=chain-7/keep=0.05``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from saccade import view
from saccade.cost import Fit
from saccade.draft import Drafter, EarlyExit, Lookup, ModelDraft, Nobody, SelfDraft
from saccade.errors import MethodError
from saccade.grow import Chain, Static
from saccade.recipe import Recipe
from saccade.schedule import serial
from saccade.systems import baselines, sage, specvlm, std
from saccade.systems.sage_live import SageLive
from saccade.types import Schedule, Shape, View
from saccade.view import Positions

SYSTEMS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        baselines.AR,
        baselines.SD,
        baselines.SD_TREE,
        specvlm.SPECVLM,
        specvlm.SPECVLM_SELF,
        std.STD,
        std.STREAMING,
        std.LAYERSKIP,
        sage.SAGE,
        baselines.LOOKUP,
    )
}

VIEWS: dict[str, View] = {
    known.name: known
    for known in (
        view.FULL,
        view.NONE,
        view.RANDOM,
        view.UNIFORM,
        view.ATTENTION,
        specvlm.VIEW,
        std.PerHead(),
        std.Streaming(),
    )
}

DRAFTERS: dict[str, Drafter] = {
    "model": ModelDraft,
    "self": SelfDraft,
    "early-exit": EarlyExit,
    "lookup": Lookup,
    "none": Nobody,
}

SHAPES: dict[str, Shape] = {
    "tree": Static(specvlm.TREE),
    "fit": Fit((specvlm.TREE,)),
    "sage": sage.Sage(),
    "sage-live": SageLive(),
}

SCHEDULES: dict[str, Schedule] = {"serial": serial}

LONGEST_CHAIN = 63
T = TypeVar("T")


def resolve(name: str) -> Recipe:
    """The recipe a method's name stands for. Raises MethodError naming what would work."""
    base, *overrides = name.strip().split("/")
    if base not in SYSTEMS:
        raise MethodError(f"unknown method {base!r}; known methods: {', '.join(SYSTEMS)}")
    chosen: dict[str, str] = {}
    for override in overrides:
        axis, equals, value = override.partition("=")
        if axis not in AXES or not equals:
            raise MethodError(
                f"cannot read {override!r} in {name!r}: write axis=value with an axis out of "
                f"{', '.join(AXES)}"
            )
        if axis in chosen:
            raise MethodError(f"axis {axis!r} is given twice in {name!r}")
        chosen[axis] = value
    recipe = SYSTEMS[base]
    if chosen and not recipe.drafts and "drafter" not in chosen:
        raise MethodError(f"{base!r} drafts nothing, so {name!r} overrides nothing")
    for axis, apply in AXES.items():  # in this order: a view's budget after the view
        if axis in chosen:
            recipe = apply(recipe, chosen[axis])
    return replace(recipe, name=name.strip())


def _view(recipe: Recipe, value: str) -> Recipe:
    return replace(recipe, view=_pick(VIEWS, "view", value))


def _keep(recipe: Recipe, value: str) -> Recipe:
    try:
        keep = float(value)
    except ValueError:
        keep = -1.0
    if not 0 < keep <= 1:
        raise MethodError(f"keep={value} is not a share of visual tokens above 0 and up to 1")
    return _with_view(recipe, keep=keep)


def _positions(recipe: Recipe, value: str) -> Recipe:
    kinds: dict[str, Positions] = {"original": "original", "repacked": "repacked"}
    chosen = _pick(kinds, "positions", value)
    return _with_view(recipe, positions=chosen)


def _with_view(recipe: Recipe, **change: Any) -> Recipe:
    """The recipe with its view's settings changed, where the view has such a setting."""
    (axis,) = change
    view: Any = recipe.view
    if view.name in ("full", "none") or axis not in {field.name for field in fields(view)}:
        able = [known for known in VIEWS if known not in ("full", "none")]
        able = [name for name in able if axis in {f.name for f in fields(cast(Any, VIEWS[name]))}]
        raise MethodError(f"{axis} needs another view than {view.name}: one of {', '.join(able)}")
    return replace(recipe, view=replace(view, **change))


def _drafter(recipe: Recipe, value: str) -> Recipe:
    return replace(recipe, drafter=_pick(DRAFTERS, "drafter", value))


def _shape(recipe: Recipe, value: str) -> Recipe:
    kind, _, length = value.partition("-")
    if kind == "chain":
        if not length.isdigit() or not 1 <= int(length) <= LONGEST_CHAIN:
            raise MethodError(f"shape={value}: write chain-N with N from 1 to {LONGEST_CHAIN}")
        return replace(recipe, shape=Chain(int(length)))
    return replace(recipe, shape=_pick(SHAPES, "shape", value, also="chain-N"))


def _schedule(recipe: Recipe, value: str) -> Recipe:
    return replace(recipe, schedule=_pick(SCHEDULES, "schedule", value))


def _pick(table: dict[str, T], axis: str, value: str, also: str = "") -> T:
    if value not in table:
        known = ", ".join([*table, also] if also else table)
        raise MethodError(f"unknown {axis} {value!r}; known: {known}")
    return table[value]


AXES: dict[str, Callable[[Recipe, str], Recipe]] = {
    "drafter": _drafter,
    "view": _view,
    "keep": _keep,
    "positions": _positions,
    "shape": _shape,
    "schedule": _schedule,
}

"""The named systems, and the choices on each axis. Everything else is an override:

``NAME/axis=value/...``, for example ``specvlm/shape=chain-7/keep=0.05``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

from saccade.core.errors import MethodError
from saccade.core.protocols import Schedule, Shape, View
from saccade.drafting import pruning
from saccade.drafting import views as view
from saccade.drafting.controller import Auto
from saccade.drafting.costs import Fit
from saccade.drafting.drafters import Drafter, EarlyExit, Lookup, ModelDraft, Nobody, SelfDraft
from saccade.drafting.ensemble import Ensemble, Weighting
from saccade.drafting.policies import Best, Chain, Paths, Static, check_paths
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import parallel, serial
from saccade.drafting.views import Early, Positions, Pruned, Several
from saccade.drafting.worker import WorkerDraft
from saccade.methods import auto, baselines, hippo, sage, specvlm, std, tabed
from saccade.methods.sage_live import SageLive

SYSTEMS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        baselines.AR,
        auto.AUTO,
        baselines.SD,
        baselines.SD_TREE,
        specvlm.SPECVLM,
        specvlm.SPECVLM_SELF,
        std.STD,
        std.STREAMING,
        std.LAYERSKIP,
        tabed.TABED,
        tabed.TABED_MT,
        tabed.TABED_MTCP,
        sage.SAGE,
        hippo.HIPPO,
        hippo.PEARL,
        hippo.PEARL_SYN,
        hippo.PEARL_SPECVLM,
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
        view.SCATTERED,
        view.AFFORDABLE,
        pruning.FRAMES,
        pruning.FRONT,
        pruning.MIDDLE,
        pruning.END,
        pruning.FASTVID,
        pruning.DYCOKE,
        view.ATTENTION,
        pruning.REST,
        specvlm.VIEW,
        hippo.VIEW,
        *hippo.WITHOUT,
        pruning.POOLED,
        view.TEXT,
        view.CAPTION,
        std.PerHead(),
        std.Streaming(),
    )
}

DRAFTERS: dict[str, Drafter] = {
    "model": ModelDraft,
    "self": SelfDraft,
    "early-exit": EarlyExit,
    "ensemble": Ensemble(tabed.Equal()),
    "lookup": Lookup,
    "none": Nobody,
}

WEIGHTS: dict[str, Callable[[int | None], Weighting]] = {
    "equal": lambda window: tabed.Equal(),
    "kl": lambda window: tabed.Grid("kl", window),
    "tvd": lambda window: tabed.Grid("tvd", window),
    "matches": lambda window: tabed.Grid("matches", window),
    "inverse": lambda window: tabed.Inverse("kl", window),
    "inverse-tvd": lambda window: tabed.Inverse("tvd", window),
}

SHAPES: dict[str, Shape] = {
    "tree": Static(specvlm.TREE),
    "fit": Fit((specvlm.TREE,)),
    "auto": Auto(),
    "auto-chain": Auto(runners=0),
    "sage": sage.Sage(),
    "sage-live": SageLive(),
}


@dataclass(frozen=True)
class Family:
    """Shapes of one kind that differ by what is written behind ``NAME-``."""

    read: Callable[[str], Shape]  # raises MethodError
    form: str  # how it is written
    examples: tuple[str, ...]  # of what is written there; the law tests run each


FAMILIES: dict[str, Family] = {
    "chain": Family(lambda size: Chain(_size("chain", size, 63)), "chain-N", ("1", "4")),
    "best": Family(lambda size: Best(_size("best", size, LARGEST)), "best-N", ("1", "5")),
    "paths": Family(
        lambda paths: Static(_paths(paths)), "paths-0,1,0.0,0.1", ("0,2,0.1,2.0,0.1.0", "2")
    ),
}

SCHEDULES: dict[str, Schedule] = {"serial": serial, "parallel": parallel}

LARGEST = 64  # nodes of a tree a user writes
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
    choices: Choices = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    for axis, choose in AXES.items():  # in this order: a view's budget after the view
        if axis in chosen:
            choices |= choose(choices, chosen[axis])
    return Recipe(**{**choices, "drafter": _fitting(choices), "name": name.strip()})


def choices(recipe: Recipe) -> dict[str, str]:
    """A recipe in the words of its axes."""
    if not recipe.drafts:
        return {"drafter": "none"}
    view, drafter = recipe.view, recipe.drafter
    found = {"drafter": _name(DRAFTERS, ModelDraft if drafter is WorkerDraft else drafter)}
    if isinstance(drafter, Ensemble):
        found |= {"drafter": "ensemble", "weights": _rule(drafter.weighting)}
    found["view"] = view.name
    if view.keep is not None and view.name not in ("full", "none", "pooled"):
        found["keep"] = f"{view.keep:g}"
    if isinstance(view, Pruned):
        if isinstance(view.select, specvlm.TwoStage):
            found["lambda"] = f"{view.select.share:g}"
        if view.positions != "original":
            found["positions"] = view.positions
        if view.early != "wait":
            found["early"] = view.early
    return found | {"shape": _form(recipe.shape), "schedule": _name(SCHEDULES, recipe.schedule)}


def _rule(rule: Weighting) -> str:
    window = rule.window if isinstance(rule, tabed.Grid | tabed.Inverse) else None
    name = next(name for name, make in WEIGHTS.items() if make(window) == rule)
    return name if window is None else f"{name}-{window}"


def _form(shape: Shape) -> str:
    if isinstance(shape, Chain):
        return f"chain-{shape.length}"
    if isinstance(shape, Best):
        return f"best-{shape.nodes}"
    if isinstance(shape, Static) and shape not in SHAPES.values():
        return "paths-" + ",".join(".".join(map(str, path)) for path in shape.paths)
    return _name(SHAPES, shape)


def axes() -> dict[str, list[str]]:
    """The choices there are on each axis, in words."""
    return {
        "view": [*VIEWS, "several joined by + for an ensemble"],
        "keep": ["share of visual tokens, 0 to 1"],
        "lambda": ["SpecVLM's share of attention mass, 0 to 1"],
        "positions": ["original", "repacked"],
        "early": ["wait", "superset", "all"],
        "drafter": list(DRAFTERS),
        "weights": [*WEIGHTS, "each with -N for the last N positions"],
        "shape": [*(family.form for family in FAMILIES.values()), *SHAPES],
        "schedule": list(SCHEDULES),
    }


def _name(table: dict[str, T], value: T) -> str:
    return next((name for name, known in table.items() if known == value), type(value).__name__)


Choices = dict[str, Any]
"""A recipe's fields while they are being chosen: together they may not make sense yet."""


def _fitting(choices: Choices) -> Drafter:
    """The drafter chosen, in the form the other choices need: several views, its own process."""
    drafter: Drafter = choices["drafter"]
    if drafter is ModelDraft and isinstance(choices["view"], Several):
        return Ensemble(tabed.Equal())
    if drafter is ModelDraft and choices["schedule"] is parallel:
        return WorkerDraft
    if drafter is WorkerDraft and choices["schedule"] is not parallel:
        return ModelDraft
    return drafter


def _view(choices: Choices, value: str) -> Choices:
    several = tuple(_pick(VIEWS, "view", name) for name in value.split("+"))
    return {"view": several[0] if len(several) == 1 else Several(several)}


def _keep(choices: Choices, value: str) -> Choices:
    keep = _share("keep", value)
    if keep == 0:
        raise MethodError(f"keep={value} is not a share of visual tokens above 0 and up to 1")
    return _with_view(choices, keep=keep)


def _lambda(choices: Choices, value: str) -> Choices:
    view = choices["view"]
    if not isinstance(view, Pruned) or not isinstance(view.select, specvlm.TwoStage):
        raise MethodError("lambda is SpecVLM's: it needs view=specvlm")
    return {"view": replace(view, select=replace(view.select, share=_share("lambda", value)))}


def _share(axis: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise MethodError(f"{axis}={value} is not a share between 0 and 1")
    return share


def _positions(choices: Choices, value: str) -> Choices:
    kinds: dict[str, Positions] = {"original": "original", "repacked": "repacked"}
    return _with_view(choices, positions=_pick(kinds, "positions", value))


def _early(choices: Choices, value: str) -> Choices:
    kinds: dict[str, Early] = {"wait": "wait", "superset": "superset", "all": "all"}
    early = _pick(kinds, "early", value)
    if not isinstance(choices["view"], Pruned):
        raise MethodError(f"early={value} needs a view that prunes, not {choices['view'].name}")
    return {"view": replace(choices["view"], early=early)}


def _with_view(choices: Choices, **change: Any) -> Choices:
    """The view's settings changed, where the view has such a setting."""
    (axis,) = change
    view: Any = choices["view"]
    if view.name in ("full", "none") or axis not in {field.name for field in fields(view)}:
        able = [known for known in VIEWS if known not in ("full", "none")]
        able = [name for name in able if axis in {f.name for f in fields(cast(Any, VIEWS[name]))}]
        raise MethodError(f"{axis} needs another view than {view.name}: one of {', '.join(able)}")
    return {"view": replace(view, **change)}


def _drafter(choices: Choices, value: str) -> Choices:
    return {"drafter": _pick(DRAFTERS, "drafter", value)}


def _weights(choices: Choices, value: str) -> Choices:
    """KIND, or KIND-N for a window of the last N positions."""
    if not isinstance(choices["drafter"], Ensemble):
        raise MethodError(
            f"weights={value} needs an ensemble: start from tabed, or drafter=ensemble"
        )
    kind, _, last = value.rpartition("-")
    window = _number(last) if kind else None
    if window == 0 or (window and kind == "equal"):
        raise MethodError(f"weights={value}: a window holds 1 position or more, and equal has none")
    make = _pick(WEIGHTS, "weights", value if window is None else kind, also="each with -N")
    return {"drafter": Ensemble(make(window))}


def _shape(choices: Choices, value: str) -> Choices:
    kind, _, size = value.partition("-")
    if kind in FAMILIES:
        return {"shape": FAMILIES[kind].read(size)}
    also = ", ".join(family.form for family in FAMILIES.values())
    return {"shape": _pick(SHAPES, "shape", value, also=also)}


def _size(kind: str, text: str, largest: int) -> int:
    count = _number(text)
    if count is None or not 1 <= count <= largest:
        raise MethodError(f"shape={kind}-{text}: write {kind}-N with N from 1 to {largest}")
    return count


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _paths(text: str) -> Paths:
    """A user's own tree: paths of ranks, ``0,1,0.0,0.1`` for two first tokens and two after."""
    try:
        paths = tuple(tuple(int(rank) for rank in path.split(".")) for path in text.split(","))
        check_paths(paths)
    except ValueError as error:
        raise MethodError(
            f"cannot read the tree paths-{text}: write ranks joined by dots, as in "
            f"paths-0,1,0.0,0.1 ({error})"
        ) from error
    if len(set(paths)) > LARGEST:
        raise MethodError(f"a tree of {len(set(paths))} nodes is too large: {LARGEST} at most")
    return tuple(dict.fromkeys(sorted(paths, key=lambda path: (len(path), path))))


def _schedule(choices: Choices, value: str) -> Choices:
    return {"schedule": _pick(SCHEDULES, "schedule", value)}


def _pick(table: dict[str, T], axis: str, value: str, also: str = "") -> T:
    if value not in table:
        known = ", ".join([*table, also] if also else table)
        raise MethodError(f"unknown {axis} {value!r}; known: {known}")
    return table[value]


AXES: dict[str, Callable[[Choices, str], Choices]] = {
    "drafter": _drafter,
    "weights": _weights,
    "view": _view,
    "keep": _keep,
    "lambda": _lambda,
    "positions": _positions,
    "early": _early,
    "shape": _shape,
    "schedule": _schedule,
}

"""Recipes of methods: one choice per axis, frozen, without a model.

``plan`` completes what a recipe leaves open, for the models and the machine, before the first
request is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from saccade.core.errors import MethodError
from saccade.core.protocols import Schedule, Shape, View
from saccade.core.timing import Phase, ignore_phase
from saccade.drafting.drafters import EarlyExit, Lookup, ModelDrafter, NoDraft, SelfDrafter
from saccade.drafting.ensemble import Ensemble
from saccade.drafting.parallel.drafter import WorkerDrafter
from saccade.drafting.schedule import parallel, serial
from saccade.drafting.setup import MakeDrafter
from saccade.drafting.shapes import cost_measurement
from saccade.drafting.views.basic import FULL
from saccade.model import tensor_parallel
from saccade.model.backbone import Backbone
from saccade.model.batch_invariant import NEEDS_CHAINS, ROWS


@dataclass(frozen=True)
class Recipe:
    """Who drafts, what it sees, in which shape, on which schedule."""

    name: str
    about: str
    drafter: MakeDrafter
    shape: Shape
    schedule: Schedule = serial
    view: View = FULL

    def __post_init__(self) -> None:
        """Raises MethodError for choices that do not fit together."""
        for why in self._refusals():
            raise MethodError(f"{self.name}: {why}")

    def _refusals(self) -> Iterator[str]:
        """Yields the reasons why these choices do not fit together."""
        view, own = self.view, self.drafter in (SelfDrafter, EarlyExit)
        if own and view.positions == "repacked":
            # The cached keys are rotated to their positions already.
            yield (
                "the target's own keys cannot be re-packed; use positions=original, or "
                "drafter=model"
            )
        if own and not view.subset:
            yield f"view {view.name} is not a choice among the target's keys; use drafter=model"
        if view.own_keys and self.drafter is not SelfDrafter:
            yield f"view {view.name} picks among the target's own keys; use drafter=self"
        if view.refresh is not None and not view.attention:
            yield (
                f"view {view.name} does not ask what the target looks at, so nothing can refresh it"
            )
        if view.refresh is not None and self.drafter is not SelfDrafter:
            yield (
                "only the target drafting for itself has the keys of what comes anew; use "
                "drafter=self"
            )
        if self.drafter is Lookup and self.shape.reads_laws:
            yield "lookup drafts a chain; use shape=chain-N"
        if self.drafter is Lookup and view.name != "full":
            yield f"lookup reads the text alone; view {view.name} means nothing to it"
        if view.early != "wait" and self.schedule is not parallel:
            yield "an early start needs a draft that works beside the target; use schedule=parallel"
        if isinstance(self.drafter, Ensemble) != (len(view.parts) > 1):
            yield (
                f"view {view.name} and this drafter do not go together: an ensemble "
                "(drafter=ensemble) reads several views (view=full+text), any other drafter one"
            )
        if (self.schedule is parallel) != (self.drafter is WorkerDrafter):
            yield (
                "the parallel schedule needs a draft model in a process of its own, since the "
                "target's cache serves one at a time; use drafter=model, or schedule=serial"
            )
        if self.schedule is parallel and not self.shape.stepwise:
            yield (
                "the parallel schedule drafts a chain; use shape=chain-N, shape=fit or "
                "schedule=serial"
            )

    @property
    def drafts(self) -> bool:
        """Whether the method drafts at all."""
        return self.drafter is not NoDraft


def plan(
    recipe: Recipe,
    target: Backbone,
    draft: Backbone | None,
    context: int,
    exact: bool = False,
    phase: Phase = ignore_phase,
) -> Recipe:
    """Completes what a recipe leaves open by what forwards cost here: how much the draft reads, its
    shape, and for ``auto`` without a draft model whether to draft at all.

    ``context`` is the prompt's length in tokens. Costs that are not stored yet are measured, as the
    phase "costs".
    """
    view, shape = recipe.view, recipe.shape
    if draft is None and shape.optional and recipe.drafter is ModelDrafter:
        alone = plan(replace(recipe, drafter=SelfDrafter), target, None, context, exact, phase)
        return alone if alone.shape.pays() else replace(alone, drafter=NoDraft, view=FULL)
    drafting = target if recipe.drafter is SelfDrafter or draft is None else draft
    bucket = cost_measurement.context_bucket(context)
    if view.needs_costs:
        view = view.with_share(
            view.keep or cost_measurement.affordable_share(target, drafting, bucket, phase)
        )
    if shape.needs_costs and shape.costs is None:
        keep = 1.0 if view.keep is None else view.keep
        draft_context = cost_measurement.context_bucket(int(bucket * keep))
        costs = cost_measurement.measure_costs(
            target, drafting, context=bucket, draft_context=draft_context, phase=phase
        )
        shape = shape.with_costs(replace(costs, row_multiple=ROWS) if exact else costs)
    if recipe.schedule is parallel:
        shape = shape.for_parallel()
    if view is recipe.view and shape is recipe.shape:
        return recipe
    return replace(recipe, view=view, shape=shape)


def as_chains(recipe: Recipe) -> Recipe:
    """Returns the recipe with drafts that are chains. Raises MethodError if its shape branches."""
    shape = recipe.shape.as_chains()
    if recipe.drafts and shape.branches:
        raise MethodError(f"{recipe.name}: {NEEDS_CHAINS}")
    return replace(recipe, shape=shape)


def for_split_target(recipe: Recipe) -> Recipe:
    """Returns the recipe for a target that is split over processes, where rank 0 decides. Raises
    MethodError if the recipe depends on clocks, which differ between processes."""
    if recipe.schedule is parallel:
        raise MethodError(
            f"{recipe.name}: a target split over processes waits for its draft; use schedule=serial"
        )
    if recipe.view.needs_costs or recipe.shape.needs_costs:
        raise MethodError(
            f"{recipe.name} times its forwards, and processes that share a target would each "
            "find other times; name a method with a shape, as in --method specvlm or std"
        )
    return replace(recipe, schedule=tensor_parallel.agree_on_drafts(recipe.schedule))

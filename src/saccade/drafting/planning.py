"""A recipe settled for these models on this machine, before the first request is read."""

from __future__ import annotations

from dataclasses import replace

from saccade.core.errors import MethodError
from saccade.drafting.drafters import ModelDrafter, NoDraft, SelfDrafter
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import parallel
from saccade.drafting.shapes import costs as cost
from saccade.drafting.views.basic import FULL
from saccade.model import tensor_parallel
from saccade.model.backbone import Backbone
from saccade.model.batch_invariant import CHAINS, ROWS


def plan(
    recipe: Recipe, target: Backbone, draft: Backbone | None, context: int, exact: bool = False
) -> Recipe:
    """The recipe with what it leaves open settled by what forwards cost here: how much the draft
    sees, its shape, and for ``auto`` without a draft model whether to draft at all.

    ``context`` is the prompt's length in tokens. Costs are measured where none are remembered.
    """
    view, shape = recipe.view, recipe.shape
    if draft is None and shape.optional and recipe.drafter is ModelDrafter:
        alone = plan(replace(recipe, drafter=SelfDrafter), target, None, context, exact)
        return alone if alone.shape.pays() else replace(alone, drafter=NoDraft, view=FULL)
    drafting = target if recipe.drafter is SelfDrafter or draft is None else draft
    bucket = cost.bucket(context)
    if view.timed:
        view = view.settled(view.keep or cost.affordable(target, drafting, bucket))
    if shape.timed and shape.costs is None:
        keep = 1.0 if view.keep is None else view.keep
        costs = cost.measure(
            target, drafting, context=bucket, draft_context=cost.bucket(int(bucket * keep))
        )
        shape = shape.priced(replace(costs, multiple=ROWS) if exact else costs)
    settled = view is recipe.view and shape is recipe.shape
    return recipe if settled else replace(recipe, view=view, shape=shape)


def chained(recipe: Recipe) -> Recipe:
    """The recipe with drafts that are chains. Raises MethodError if its shape branches."""
    shape = recipe.shape.chained()
    if recipe.drafts and shape.branches:
        raise MethodError(f"{recipe.name}: {CHAINS}")
    return replace(recipe, shape=shape)


def split(recipe: Recipe) -> Recipe:
    """The recipe for a target split over processes: rank 0 decides. Raises MethodError if it leaves
    anything to the clocks of each."""
    if recipe.schedule is parallel:
        raise MethodError(
            f"{recipe.name}: a target split over processes waits for its draft; use schedule=serial"
        )
    if recipe.view.timed or recipe.shape.timed:
        raise MethodError(
            f"{recipe.name} times its forwards, and processes that share a target would each "
            "find other times; name a method with a shape, as in --method specvlm or std"
        )
    return replace(recipe, schedule=tensor_parallel.together(recipe.schedule))

"""Recipes of methods: one choice per axis, frozen, without a model.

``plan`` completes what a recipe leaves open, for the models and the machine, before the first
request is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from saccade.core.capabilities import Capability, find_unmet_needs
from saccade.core.costs import Costs
from saccade.core.errors import MethodError
from saccade.core.protocols import Schedule, Shape, View
from saccade.core.timing import Phase, ignore_phase
from saccade.drafting.drafters import NoDraft, SelfDrafter
from saccade.drafting.schedule import serial
from saccade.drafting.setup import MakeDrafter
from saccade.drafting.shapes import cost_measurement
from saccade.drafting.views.basic import FULL
from saccade.model import tensor_parallel
from saccade.model.backbone import Backbone
from saccade.model.batch_invariant import NEEDS_CHAINS, ROWS


@dataclass(frozen=True)
class Parts:
    """A recipe's choices while overrides change them; they may not fit together until the end."""

    drafter: MakeDrafter
    view: View
    shape: Shape
    schedule: Schedule


@dataclass(frozen=True)
class Recipe:
    """Who drafts, what it sees, in which shape, on which schedule.

    The choices fit together if and only if what each part needs is offered by another part or by
    the engine (``core/capabilities.py``). A method that was slower than plain decoding in every
    stored run is a study: ``study`` says why it was, and listings put it behind the others.
    """

    name: str
    about: str
    drafter: MakeDrafter
    shape: Shape
    schedule: Schedule = serial
    view: View = FULL
    study: str = ""

    def __post_init__(self) -> None:
        """Raises MethodError for choices that do not fit together."""
        parts = (
            (f"drafter {self.drafter.name}", self.drafter),
            (f"view {self.view.name}", self.view),
            (f"shape {self.shape.spelling}", self.shape),
            (f"the {self.schedule.name} schedule", self.schedule),
        )
        for why in find_unmet_needs(parts):
            raise MethodError(f"{self.name}: {why}")

    @property
    def parts(self) -> Parts:
        """The choice on each axis."""
        return Parts(self.drafter, self.view, self.shape, self.schedule)

    @property
    def needs_costs(self) -> bool:
        """Whether a part decides by what forwards cost here."""
        return Capability.COSTS in self.view.needs | self.shape.needs

    @property
    def drafts(self) -> bool:
        """Whether the method drafts at all."""
        return Capability.PLAIN_DECODING not in self.drafter.offers

    @property
    def records_attention(self) -> bool:
        """Whether the target's prefill has to record what the text attends to."""
        return self.drafts and Capability.ATTENTION in self.view.needs

    @property
    def drafts_beside_target(self) -> bool:
        """Whether the draft works in a process of its own while the target judges."""
        return Capability.BESIDE_TARGET in self.schedule.offers


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
    works_alone = Capability.NO_DRAFT_MODEL in shape.offers
    if draft is None and works_alone and Capability.DRAFT_MODEL in recipe.drafter.offers:
        alone = plan(replace(recipe, drafter=SelfDrafter), target, None, context, exact, phase)
        return alone if alone.shape.pays() else replace(alone, drafter=NoDraft, view=FULL)
    own_keys = Capability.TARGET_KEYS in recipe.drafter.offers
    drafting = target if own_keys or draft is None else draft
    bucket = cost_measurement.context_bucket(context)
    if Capability.COSTS in view.needs:
        view = view.with_share(
            view.keep or cost_measurement.affordable_share(target, drafting, bucket, phase)
        )
    keep = 1.0 if view.keep is None else view.keep

    def measure() -> Costs:
        draft_context = cost_measurement.context_bucket(int(bucket * keep))
        costs = cost_measurement.measure_costs(
            target, drafting, context=bucket, draft_context=draft_context, phase=phase
        )
        return replace(costs, row_multiple=ROWS) if exact else costs

    shape = shape.settle(measure, target.model.config.model_type)
    if recipe.drafts_beside_target:
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
    if recipe.drafts_beside_target:
        raise MethodError(
            f"{recipe.name}: a target split over processes waits for its draft; use schedule=serial"
        )
    if recipe.needs_costs:
        raise MethodError(
            f"{recipe.name} times its forwards, and processes that share a target would each "
            "find other times; name a method with a shape, as in --method specvlm or std"
        )
    return replace(recipe, schedule=tensor_parallel.agree_on_drafts(recipe.schedule))

"""Recipes of methods. A recipe has one choice on each axis: drafter, view, shape and schedule.

It is frozen and holds no model, so that it can be written down before any model is loaded.
``plan`` fills in what a recipe leaves open, once the models and the machine are known and before
the first request is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from saccade.core.capabilities import Capability, find_unmet_needs
from saccade.core.costs import Costs
from saccade.core.errors import MethodError
from saccade.core.protocols import CostedView, Schedule, Shape, View
from saccade.core.timing import Phase, ignore_phase
from saccade.drafting.drafters import Copies, HeadDrafter, NoDraft, SelfDrafter
from saccade.drafting.schedule import serial
from saccade.drafting.setup import MakeDrafter
from saccade.drafting.shapes import cost_measurement
from saccade.drafting.views.basic import FULL
from saccade.model import tensor_parallel
from saccade.model.backbone import Backbone
from saccade.model.batch_invariant import NEEDS_CHAINS, ROWS

DRAFT_MODEL_CAPABILITIES = frozenset(
    {Capability.DRAFT_MODEL, Capability.OWN_PROCESS, Capability.MIXTURE}
)
"""Every drafter that drafts with a second model offers one of these."""


@dataclass(frozen=True)
class Parts:
    """The choice on each axis, without a check that the choices fit together.

    Overrides change them one after another, and the parts may not fit together in between.
    """

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
        """Whether the drafter does more than plain decoding.

        ``Copies`` counts as plain decoding, although it proposes tokens where the text repeats.
        """
        return Capability.PLAIN_DECODING not in self.drafter.offers

    @property
    def records_attention(self) -> bool:
        """Whether the target's prefill has to record what the text attends to."""
        return self.drafts and Capability.ATTENTION in self.view.needs

    @property
    def needs_all_keys(self) -> bool:
        """Whether the target's layers with a sliding window must keep the keys behind it.

        The target itself never reads those keys again. A draft that starts from the target's keys
        needs them, and so does a view that chooses again during the answer.
        """
        refreshes_view = self.records_attention and self.view.key_updates.refresh is not None
        return refreshes_view or Capability.STARTS_FROM_TARGET_KEYS in self.drafter.offers

    @property
    def can_add_media(self) -> bool:
        """Whether the draft can continue a conversation whose next turn has new media.

        For this the view has to keep rows at their own positions, so that what it chose of earlier
        media can stay. Otherwise a new drafter reads the conversation from its beginning.
        """
        required = {Capability.PROMPT_ROWS, Capability.ORIGINAL_POSITIONS}
        return Capability.ADDS_MEDIA in self.drafter.offers and required <= self.view.offers

    @property
    def drafts_beside_target(self) -> bool:
        """Whether the draft works in a process of its own while the target judges."""
        return Capability.BESIDE_TARGET in self.schedule.offers


class AnswerOutlook(NamedTuple):
    """What is known of an answer before it begins."""

    # The most tokens that the answer may have. Costs are measured before the answer only if
    # measuring takes little of the answer's time. With None they are measured in any case.
    tokens: int | None = None
    # Whether tokens are sampled. Then the plan may not depend on the timing of earlier answers.
    samples: bool = True


ANY_ANSWER = AnswerOutlook()


def plan(
    recipe: Recipe,
    target: Backbone,
    draft: Backbone | None,
    context: int,
    exact: bool = False,
    phase: Phase = ignore_phase,
    answer: AnswerOutlook = ANY_ANSWER,
) -> Recipe:
    """Returns the recipe with everything decided that it leaves open, by what forwards cost here.

    A recipe may leave open how much of the prompt the draft reads, and the draft's shape. The
    method ``auto`` also leaves open whether to draft at all:

    * Without a draft model, the target drafts for itself if that is expected to pay.
    * With a draft model, that model drafts unless earlier answers have shown that it does not pay.
    * Where nobody drafts, ``auto`` only copies from the text, and no draft reads the prompt.

    A recipe that names a draft model also takes other drafts. If ``draft`` is a head of the target,
    it drafts as a head. If it is the target with rounded weights, it drafts from the target's keys,
    where the view and the schedule allow it.

    ``context`` is the prompt's length in tokens. With ``exact`` the costs are those of forwards
    whose rows are padded to a multiple of ``ROWS``. Costs that are not stored yet are measured, as
    the phase "costs", if that takes little of the time of the ``answer``. Otherwise they are
    estimated by the bytes that forwards read, and the rounds of greedy answers correct them.
    """
    # First the drafter is replaced if the draft is the target with rounded weights, or a head.
    is_rounded_target = draft is not None and draft.is_rounded_copy_of(target)
    if is_rounded_target and Capability.DRAFT_MODEL in recipe.drafter.offers:
        recipe = _draft_from_target_keys(recipe)
    is_head = draft is not None and bool(draft.hidden_layers)  # Only a head reads hidden states.
    if is_head and recipe.drafter.offers & DRAFT_MODEL_CAPABILITIES:
        recipe = replace(recipe, drafter=HeadDrafter)
    view, shape = recipe.view, recipe.shape
    names_draft_model = Capability.DRAFT_MODEL in recipe.drafter.offers
    works_without_model = Capability.WORKS_WITHOUT_DRAFT_MODEL in shape.offers
    if draft is None and names_draft_model and works_without_model:
        self_recipe = replace(recipe, drafter=SelfDrafter)
        self_plan = plan(
            self_recipe,
            target,
            draft=None,
            context=context,
            exact=exact,
            phase=phase,
            answer=answer,
        )
        return self_plan if self_plan.shape.is_expected_to_pay() else _without_drafts(self_plan)
    # The model that runs the steps of a draft, which is the target if it drafts for itself.
    reads_target_keys = Capability.STARTS_FROM_TARGET_KEYS in recipe.drafter.offers
    if draft is None or (reads_target_keys and not is_rounded_target):
        drafting_model = target
    else:
        drafting_model = draft
    # Then the view's share of the prompt is chosen by costs. Costs are measured at a few lengths
    # alone, so here ``context`` is rounded to a power of two.
    bucket = cost_measurement.context_bucket(context)
    if Capability.COSTS in view.needs:
        view = cast(CostedView, view).with_share(
            view.keep
            or cost_measurement.affordable_share(
                target,
                drafting_model,
                bucket,
                phase,
                answer.tokens,
                reads_target_keys=reads_target_keys,
            )
        )
    keep = 1.0 if view.keep is None else view.keep
    draft_context = cost_measurement.context_bucket(int(bucket * keep))

    def measure() -> Costs:
        costs = cost_measurement.measure_costs(
            target,
            drafting_model,
            context=bucket,
            draft_context=draft_context,
            phase=phase,
            answer_tokens=answer.tokens,
        )
        return replace(costs, row_multiple=ROWS) if exact else costs

    # Last, the shape gets its costs. ``memory`` has the costs as earlier answers have corrected
    # them. Where it is None or has none yet, the shape calls ``measure``. It is None for sampled
    # answers, which may not depend on the timing of earlier ones. It is also None with ``exact``:
    # the stored costs are those of forwards whose rows are not padded.
    memory = None
    if Capability.COSTS in shape.needs and not exact and not answer.samples:
        memory = cost_measurement.CorrectedCosts(target, drafting_model, bucket, draft_context)
    shape = shape.prepare(measure, memory, target.model.config.model_type)
    if recipe.drafts_beside_target:
        shape = shape.for_parallel()
    if view is recipe.view and shape is recipe.shape:
        return recipe
    planned = replace(recipe, view=view, shape=shape)
    has_model = draft is not None and names_draft_model
    # A draft of which earlier answers have shown nothing is tried, whatever is expected of it.
    if (
        has_model
        and works_without_model
        and shape.has_measured_draft
        and not shape.is_expected_to_pay()
    ):
        return _without_drafts(planned)
    return planned


def _without_drafts(recipe: Recipe) -> Recipe:
    """Returns the recipe for decoding without a model that drafts.

    It copies from the text if its shape can, and otherwise decodes plainly.
    """
    drafter = Copies if Capability.COPIES in recipe.shape.offers else NoDraft
    return replace(recipe, drafter=drafter, view=FULL)


def recorded_hidden_layers(recipe: Recipe, draft: Backbone | None) -> Sequence[int]:
    """Returns the target's layers whose hidden states have to be recorded for this draft.

    There are none unless the draft is a head of the target. A planned recipe then has a drafter
    that needs hidden states. Before ``plan`` has put that drafter into it, the recipe may have one
    that drafts with a second model, so the layers are returned for that too.
    """
    may_be_head = bool(
        Capability.HIDDEN_STATES in recipe.drafter.needs
        or recipe.drafter.offers & DRAFT_MODEL_CAPABILITIES
    )
    if draft is None or not may_be_head:
        return ()
    return draft.hidden_layers


def _draft_from_target_keys(recipe: Recipe) -> Recipe:
    """Returns the recipe with a draft that starts from the target's keys, without a prefill.

    The recipe stays as it is if its view or its schedule needs a draft model of its own. The draft
    then reads the prompt itself.
    """
    try:
        return replace(recipe, drafter=SelfDrafter)
    except MethodError:
        return recipe


def as_chains(recipe: Recipe) -> Recipe:
    """Returns the recipe with drafts that are chains. Raises MethodError for a recipe that drafts
    and whose shape can only draft trees."""
    shape = recipe.shape.as_chains()
    if recipe.drafts and shape.branches:
        raise MethodError(f"{recipe.name}: {NEEDS_CHAINS}")
    return replace(recipe, shape=shape)


def for_split_target(recipe: Recipe) -> Recipe:
    """Returns the recipe for a target that is split over processes, where rank 0 decides what is
    drafted. Raises MethodError if the recipe depends on clocks, which differ between processes, or
    if its draft works beside the target."""
    if recipe.drafts_beside_target:
        raise MethodError(
            f"{recipe.name}: a target split over processes cannot have a draft work beside it; "
            "use schedule=serial"
        )
    if recipe.needs_costs:
        raise MethodError(
            f"{recipe.name} times its forwards, and processes that share a target would each "
            "measure different times; name a method with a shape, as in --method specvlm or std"
        )
    return replace(recipe, schedule=tensor_parallel.agree_on_drafts(recipe.schedule))

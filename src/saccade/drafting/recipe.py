"""A method is a recipe: one choice per axis, frozen, with no model in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from saccade.core.errors import MethodError
from saccade.core.protocols import Draft, Schedule, Shape, View
from saccade.core.sampling import Sampling
from saccade.drafting import costs as cost
from saccade.drafting.controller import Auto
from saccade.drafting.drafters import (
    Drafter,
    EarlyExit,
    Lookup,
    ModelDraft,
    Nobody,
    SelfDraft,
    Team,
    Words,
)
from saccade.drafting.ensemble import Ensemble
from saccade.drafting.policies import Best, Chain, Static
from saccade.drafting.pruning import Merged, Pooled
from saccade.drafting.schedule import parallel
from saccade.drafting.views import FULL, Affordable, Pruned, Several, Worded
from saccade.drafting.worker import WorkerDraft
from saccade.model import tensor_parallel
from saccade.model.backbone import Backbone
from saccade.model.batch_invariant import CHAINS

NO_WORDS = Words()


@dataclass(frozen=True)
class Recipe:
    """Who drafts, what it sees, in which shape, on which schedule."""

    name: str
    about: str
    drafter: Drafter
    shape: Shape
    schedule: Schedule
    view: View = FULL

    def __post_init__(self) -> None:
        """Refuses what cannot be, in a sentence."""
        for impossible, why in self._rules():
            if impossible:
                raise MethodError(f"{self.name}: {why}")

    def _rules(self) -> Iterator[tuple[bool, str]]:
        view, own = self.view, self.drafter in (SelfDraft, EarlyExit)
        yield (
            # a cache holds keys already turned to their positions
            own and isinstance(view, Pruned) and view.positions == "repacked",
            "the target's own keys cannot be re-packed; use positions=original, or drafter=model",
        )
        yield (
            own and isinstance(view, Worded | Pooled | Merged),
            f"view {view.name} is not a choice among the target's keys; use drafter=model",
        )
        yield (
            view.own_keys and self.drafter is not SelfDraft,
            f"view {view.name} picks among the target's own keys; use drafter=self",
        )
        yield (
            self.drafter is Lookup and not isinstance(self.shape, Chain),
            "lookup drafts a chain; use shape=chain-N",
        )
        yield (
            self.drafter is Lookup and view.name != "full",
            f"lookup reads the text alone; view {view.name} means nothing to it",
        )
        yield (
            isinstance(view, Pruned) and view.early != "wait" and self.schedule is not parallel,
            "an early start needs a draft that works beside the target; use schedule=parallel",
        )
        yield (
            isinstance(self.drafter, Ensemble) != isinstance(view, Several),
            f"view {view.name} and this drafter do not go together: an ensemble "
            "(drafter=ensemble) reads several views (view=full+text), any other drafter one",
        )
        if isinstance(self.drafter, Ensemble) and isinstance(view, Several):
            most = self.drafter.weighting.views
            yield (
                most is not None and len(view.views) != most,
                f"these weights are for {most} views, not {view.name}; use weights=inverse",
            )
        yield (
            (self.schedule is parallel) != (self.drafter is WorkerDraft),
            "the parallel schedule needs a draft model in a process of its own, since the target's "
            "cache serves one at a time; use drafter=model, or schedule=serial",
        )
        yield (
            self.schedule is parallel and not isinstance(self.shape, Chain),
            "the parallel schedule drafts a chain; use shape=chain-N, or schedule=serial",
        )

    @property
    def drafts(self) -> bool:
        return self.drafter is not Nobody

    def chained(self) -> Recipe:
        """The recipe with drafts that are chains. Raises MethodError if its shape branches."""
        shape = self.shape
        if isinstance(shape, cost.Fit):
            shape = replace(shape, trees=())
        elif isinstance(shape, Auto):
            shape = replace(shape, runners=0)
        if self.drafts and not chains_only(shape):
            raise MethodError(f"{self.name}: {CHAINS}")
        return replace(self, shape=shape)

    def split(self) -> Recipe:
        """The recipe for a target split over processes: rank 0 decides. Raises MethodError if it
        leaves anything to the clocks of each."""
        if self.schedule is parallel:
            raise MethodError(
                f"{self.name}: a target split over processes waits for its draft; "
                "use schedule=serial"
            )
        if isinstance(self.view, Affordable) or isinstance(self.shape, cost.Fit | Auto):
            raise MethodError(
                f"{self.name} times its forwards, and processes that share a target would each "
                "find other times; name a method with a shape, as in --method specvlm or std"
            )
        return replace(self, schedule=tensor_parallel.together(self.schedule))

    def fit(
        self, target: Backbone, draft: Backbone | None, context: int, exact: bool = False
    ) -> Recipe:
        """The recipe settled by what forwards cost here, where it leaves anything open: how much
        the draft sees, its shape, and for ``auto`` without a draft model whether to draft at all.
        """
        if draft is None and isinstance(self.shape, Auto) and self.drafter is ModelDraft:
            alone = replace(self, drafter=SelfDraft).fit(target, None, context, exact)
            assert isinstance(alone.shape, Auto)
            return alone if alone.shape.pays() else replace(alone, drafter=Nobody, view=FULL)
        drafting = target if self.drafter is SelfDraft or draft is None else draft
        bucket, view, shape = cost.bucket(context), self.view, self.shape
        if isinstance(view, Affordable):
            view = view.settled(view.keep or cost.affordable(target, drafting, bucket))
        if isinstance(shape, cost.Fit | Auto) and shape.costs is None:
            keep = 1.0 if view.keep is None else view.keep
            costs = cost.measure(
                target, drafting, context=bucket, draft_context=cost.bucket(int(bucket * keep))
            )
            shape = replace(shape, costs=cost.padded(costs) if exact else costs)
        settled = view is self.view and shape is self.shape
        return self if settled else replace(self, view=view, shape=shape)

    def bind(
        self,
        target: Backbone,
        draft: Backbone | None,
        rules: Sequence[Sampling],
        room: int,
        words: Words = NO_WORDS,
    ) -> Draft:
        """The drafter of this recipe over these models."""
        return self.drafter(Team(target, draft, self.view, self.shape, rules, room, words))


def chains_only(shape: Shape) -> bool:
    """Whether no draft of this shape branches."""
    if isinstance(shape, cost.Fit):
        return not shape.trees
    if isinstance(shape, Auto):
        return not shape.runners
    if isinstance(shape, Static):
        return not any(map(any, shape.paths))
    return isinstance(shape, Chain) or shape == Best(1)

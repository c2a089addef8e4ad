"""A method is a recipe: one choice per axis, frozen, with no model in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from saccade.core.errors import MethodError
from saccade.core.protocols import Schedule, Shape, View
from saccade.drafting.drafters import EarlyExit, NoDraft, SelfDrafter
from saccade.drafting.ensemble import Ensemble
from saccade.drafting.lookup import Lookup
from saccade.drafting.parallel.drafter import WorkerDrafter
from saccade.drafting.schedule import parallel, serial
from saccade.drafting.setup import MakeDrafter
from saccade.drafting.views.basic import FULL


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
        """Refuses what cannot be, in a sentence."""
        for impossible, why in self._rules():
            if impossible:
                raise MethodError(f"{self.name}: {why}")

    def _rules(self) -> Iterator[tuple[bool, str]]:
        view, own = self.view, self.drafter in (SelfDrafter, EarlyExit)
        yield (
            # a cache holds keys already turned to their positions
            own and view.positions == "repacked",
            "the target's own keys cannot be re-packed; use positions=original, or drafter=model",
        )
        yield (
            own and not view.subset,
            f"view {view.name} is not a choice among the target's keys; use drafter=model",
        )
        yield (
            view.own_keys and self.drafter is not SelfDrafter,
            f"view {view.name} picks among the target's own keys; use drafter=self",
        )
        yield (
            self.drafter is Lookup and self.shape.reads_laws,
            "lookup drafts a chain; use shape=chain-N",
        )
        yield (
            self.drafter is Lookup and view.name != "full",
            f"lookup reads the text alone; view {view.name} means nothing to it",
        )
        yield (
            view.early != "wait" and self.schedule is not parallel,
            "an early start needs a draft that works beside the target; use schedule=parallel",
        )
        weighting = self.drafter.weighting if isinstance(self.drafter, Ensemble) else None
        yield (
            (weighting is not None) != (len(view.parts) > 1),
            f"view {view.name} and this drafter do not go together: an ensemble "
            "(drafter=ensemble) reads several views (view=full+text), any other drafter one",
        )
        yield (
            weighting is not None and weighting.views not in (None, len(view.parts)),
            f"these weights are for {weighting and weighting.views} views, not {view.name}; "
            "use weights=inverse",
        )
        yield (
            (self.schedule is parallel) != (self.drafter is WorkerDrafter),
            "the parallel schedule needs a draft model in a process of its own, since the target's "
            "cache serves one at a time; use drafter=model, or schedule=serial",
        )
        yield (
            self.schedule is parallel and not self.shape.stepwise,
            "the parallel schedule drafts a chain; use shape=chain-N, or schedule=serial",
        )

    @property
    def drafts(self) -> bool:
        return self.drafter is not NoDraft

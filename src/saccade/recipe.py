"""A method is a recipe: one choice per axis, frozen, with no model in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from saccade import cost
from saccade.backbone import Backbone
from saccade.draft import Drafter, EarlyExit, Lookup, Nobody, SelfDraft, Team
from saccade.errors import MethodError
from saccade.grow import Chain
from saccade.sampling import Sampling
from saccade.types import Draft, Schedule, Shape, View
from saccade.view import FULL, Pruned


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
        repacks = isinstance(self.view, Pruned) and self.view.positions == "repacked"
        if self.drafter in (SelfDraft, EarlyExit) and repacks:
            # a cache holds keys already turned to their positions
            raise MethodError(
                f"{self.name}: the target's own keys cannot be re-packed; "
                "use positions=original, or drafter=model"
            )
        if self.view.own_keys and self.drafter is not SelfDraft:
            raise MethodError(
                f"{self.name}: view {self.view.name} picks among the target's own keys; "
                "use drafter=self"
            )
        if self.drafter is Lookup and not isinstance(self.shape, Chain):
            raise MethodError(f"{self.name}: lookup drafts a chain; use shape=chain-N")

    @property
    def drafts(self) -> bool:
        return self.drafter is not Nobody

    def fit(self, target: Backbone, draft: Backbone | None, context: int) -> Recipe:
        """The recipe with a shape that knows what forwards cost here, where it wants to know."""
        if not isinstance(self.shape, cost.Fit) or self.shape.costs is not None:
            return self
        drafting = target if self.drafter is SelfDraft or draft is None else draft
        keep = 1.0 if self.view.keep is None else self.view.keep
        bucket = cost.bucket(context)
        costs = cost.measure(
            target, drafting, context=bucket, draft_context=cost.bucket(int(bucket * keep))
        )
        return replace(self, shape=replace(self.shape, costs=costs))

    def bind(
        self,
        target: Backbone,
        draft: Backbone | None,
        rules: Sequence[Sampling],
        room: int,
    ) -> Draft:
        """The drafter of this recipe over these models."""
        return self.drafter(Team(target, draft, self.view, self.shape, rules, room))

"""A method is a recipe: one choice per axis, frozen, with no model in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from saccade import cost
from saccade.backbone import Backbone
from saccade.draft import Drafter, Nobody, SelfDraft, Team
from saccade.errors import MethodError
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
        """Refuses what cannot be: a pruned cache holds keys already turned to their positions."""
        repacks = isinstance(self.view, Pruned) and self.view.positions == "repacked"
        if self.drafter is SelfDraft and repacks:
            raise MethodError(
                f"{self.name}: the target's own keys cannot be re-packed; "
                "use positions=original, or drafter=model"
            )

    @property
    def drafts(self) -> bool:
        return self.drafter is not Nobody

    def fit(self, target: Backbone, draft: Backbone | None, context: int) -> Recipe:
        """The recipe with a shape that knows what forwards cost here, where it wants to know."""
        if not isinstance(self.shape, cost.Fit) or self.shape.costs is not None:
            return self
        drafting = target if self.drafter is SelfDraft or draft is None else draft
        keep = self.view.keep if isinstance(self.view, Pruned) else 1.0
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

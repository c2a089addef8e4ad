"""A method of one's own: the tokens that move, in a chain that stops when the draft is unsure.

SACCADE_METHODS=examples/sixth_method.py uv run saccade compare VIDEO --methods ar,sd,motion-sure
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from saccade.core.errors import MethodError
from saccade.core.prompt import Prompt
from saccade.core.protocols import Shape
from saccade.core.sampling import Law, Scores
from saccade.drafting.drafters import ModelDrafter
from saccade.drafting.provides import Provides
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import serial
from saccade.drafting.shapes.policies import Chain, confidence
from saccade.drafting.views.basic import Pruned, TargetAttention
from saccade.drafting.views.saliency import normalise, temporal, top

KEEP = 0.1
LONGEST = 12
THRESHOLD = 0.4


def moving(prompt: Prompt, target_attention: TargetAttention, budget: int) -> Tensor:
    """The visual tokens that differ most from the same cell a frame before and a frame after."""
    change = temporal(normalise(prompt.embeds[prompt.visual]), prompt.grid)
    return top(change, budget)


@dataclass(frozen=True)
class Sure(Chain):
    """A chain of at most ``length`` tokens that stops where the draft is less sure than asked.

    The draft's confidence is known before a token is drawn, so no drawn token is ever taken back.
    """

    family: ClassVar[str] = "sure"
    usage: ClassVar[str] = "sure-T"
    examples: ClassVar[tuple[str, ...]] = ("0.4", "0.5")

    length: int = LONGEST
    threshold: float = THRESHOLD

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The shape written ``sure-text``. Raises MethodError where text is no threshold."""
        try:
            threshold = float(text)
        except ValueError:
            threshold = -1.0
        if not 0 <= threshold <= 1:
            raise MethodError(f"shape=sure-{text}: write sure-T with a threshold T from 0 to 1")
        return cls(threshold=threshold)

    @property
    def spelling(self) -> str:
        """How an override writes this shape."""
        return f"sure-{self.threshold}"

    def goes_on(self, scores: Scores, node: int, law: Law | None) -> bool:
        """Whether the draft is at least as sure as the threshold of the token after ``node``."""
        return confidence(scores, node, law) >= self.threshold


MOTION = Pruned("motion", moving, keep=KEEP)

PROVIDES = Provides(
    recipes=(
        Recipe(
            name="motion-sure",
            about="the tokens that move most, in a chain that stops when the draft is unsure",
            drafter=ModelDrafter,
            view=MOTION,
            shape=Sure(),
            schedule=serial,
        ),
    ),
    views=(MOTION,),
    shape_families=(Sure,),
)

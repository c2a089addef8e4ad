"""SpecVLM: Enhancing Speculative Decoding of Video LLMs via Verifier-Guided Token Pruning.

Ji et al., 2025. The draft sees a tenth of the video: what the target's text
attends to (stage I), and an even sample of the rest (stage II). It drafts a static tree.

    a_j = mean over layers, heads and text queries i of Attention(Q_L, K_V)_ij     (Eq. 4-5)
    V_R = the smallest top set with  sum a_j >= lambda sum_V a_j                   (Eq. 6)
    V_U = tokens of V \\ V_R at a fixed interval I = |V \\ V_R| / budget left      (Eq. 7)

Eq. 7 as printed spreads (1 - r)|V| tokens *beyond* V_R, while the text says that the cache shrinks
to 1 - r of its size. We spread what V_R leaves of that budget; ``literal=True`` is the equation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from saccade.core.errors import MethodError
from saccade.core.prompt import Prompt
from saccade.drafting.drafters import ModelDrafter, SelfDrafter
from saccade.drafting.provides import Axis, Choices, Provides, share
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.fit import Fit
from saccade.drafting.shapes.policies import Paths, Static
from saccade.drafting.views import saliency
from saccade.drafting.views.basic import Guide, Pruned

LAMBDA = 0.5  # the paper's for Qwen2.5-VL; 0.4 for LLaVA-OneVision
KEEP = 0.1  # r = 90 %

# The paper's Fig. 9: 25 nodes as paths of top-k ranks, 4 / 8 / 8 / 3 / 2 by depth.
# fmt: off
TREE: Paths = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)
# fmt: on


@dataclass(frozen=True)
class TwoStage:
    """Stage I by attention mass, stage II evenly over the rest."""

    share: float = LAMBDA
    literal: bool = False

    def __call__(self, prompt: Prompt, guide: Guide, budget: int) -> Int[Tensor, " kept"]:
        assert guide is not None
        attended = saliency.top_mass(guide, self.share, budget)
        rest = saliency.rest(prompt.seen, attended)
        even = saliency.spread(rest, budget if self.literal else budget - len(attended))
        return torch.cat([attended, even]).sort().values


VIEW = Pruned("specvlm", TwoStage(), keep=KEEP, attention=True)

SPECVLM = Recipe(
    name="specvlm",
    about="SpecVLM: a draft on a tenth of the video, guided by what the target attends to",
    drafter=ModelDrafter,
    view=VIEW,
    shape=Static(TREE),
)

SPECVLM_SELF = replace(
    SPECVLM,
    name="specvlm-self",
    about="SpecVLM without a second model: the target drafts over a tenth of its own keys",
    drafter=SelfDrafter,
)


def _choose(choices: Choices, value: str) -> Choices:
    view = choices["view"]
    if not isinstance(view, Pruned) or not isinstance(view.select, TwoStage):
        raise MethodError("lambda is SpecVLM's: it needs view=specvlm")
    return {"view": replace(view, select=replace(view.select, share=share("lambda", value)))}


def _told(recipe: Recipe) -> str | None:
    view = recipe.view
    if not isinstance(view, Pruned) or not isinstance(view.select, TwoStage):
        return None
    return f"{view.select.share:g}"


PROVIDES = Provides(
    recipes=(SPECVLM, SPECVLM_SELF),
    views=(VIEW,),
    shapes={"tree": Static(TREE), "fit": Fit((TREE,))},
    axes={"lambda": Axis(_choose, _told, lambda: ["SpecVLM's share of attention mass, 0 to 1"])},
)

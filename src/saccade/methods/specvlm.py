"""SpecVLM: Enhancing Speculative Decoding of Video LLMs via Verifier-Guided Token Pruning.

Ji et al., 2025. The draft reads a tenth of the video: the tokens that the target's text attends to
(stage I), and an even sample of the rest (stage II). It drafts a static tree.

    a_j = mean over layers, heads and text queries i of Attention(Q_L, K_V)_ij     (Eq. 4-5)
    V_R = the smallest top set with  sum a_j >= lambda sum_V a_j                   (Eq. 6)
    V_U = tokens of V \\ V_R at a fixed interval I = |V \\ V_R| / budget left      (Eq. 7)

V are the video's tokens, K_V their keys, and Q_L the queries of the text. V_R is what stage I
keeps, and V_U what stage II adds. r is the share of the video that is pruned, 90 %.

Eq. 7 as printed spreads (1 - r)|V| tokens *in addition to* V_R, while the text says that the cache
shrinks to 1 - r of its size. By default both stages share a budget of (1 - r)|V| tokens, and stage
II gets what stage I leaves, as in the published code. The view ``specvlm-literal`` follows the
equations as printed: stage I takes V_R whatever its size, and stage II adds (1 - r)|V| tokens.
``specvlm-official`` is the published code's choice (``utils/utils.py``): lambda .4, the budget
rounded down, and a stage II that includes the first and the last of the tokens that stage I left
out. That code also renumbers the positions of the kept tokens from 0, for which
``positions=repacked`` has to be added.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache

import torch
from jaxtyping import Int
from torch import Tensor

from saccade.core.prompt import Prompt
from saccade.drafting.drafters import ModelDrafter, SelfDrafter
from saccade.drafting.provides import Provides, Setting, parse_share
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.fit import Fit
from saccade.drafting.shapes.policies import Paths, Static
from saccade.drafting.views import saliency
from saccade.drafting.views.basic import Pruned, TargetAttention

log = logging.getLogger(__name__)

LAMBDA = 0.5  # The paper's for Qwen2.5-VL. For LLaVA-OneVision it is 0.4.
KEEP = 0.1  # 1 - r

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
    """Selects the most attended visual tokens (stage I), and evenly spaced ones of the rest
    (stage II)."""

    # the share of the attention on all visual tokens that stage I's tokens get together
    share: float = LAMBDA
    # Whether stage I may take any number of tokens, and stage II adds the whole budget to them, as
    # in Eq. 6 and 7. Otherwise both stages share the budget.
    follows_printed_equations: bool = False
    includes_ends: bool = False  # whether stage II includes the first and the last of the rest

    def __call__(
        self, prompt: Prompt, target_attention: TargetAttention, budget: int
    ) -> Int[Tensor, " kept"]:
        assert target_attention is not None
        max_attended = prompt.visual_tokens if self.follows_printed_equations else budget
        attended = saliency.top_mass(target_attention, self.share, max_attended)
        unattended = saliency.unchosen(prompt.visual_tokens, attended)
        budget_left = budget if self.follows_printed_equations else budget - len(attended)
        # With a share of 1 stage I is meant to take the whole budget, so nothing is logged.
        if not budget_left and len(unattended) and self.share < 1:
            _warn_that_stage_two_is_idle(self.share)
        sample = sample_with_ends if self.includes_ends else saliency.sample_evenly
        return torch.cat([attended, sample(unattended, budget_left)]).sort().values


def sample_with_ends(items: Int[Tensor, " item"], count: int) -> Int[Tensor, " kept"]:
    """Returns ``count`` of the items, evenly spaced from the first to the last.

    Places are rounded down: if 3 of the items 0 to 7 are taken, they are 0, 3 and 7, since 3.5
    becomes 3. Rounding errors can make a place one smaller: if 39 of the items 0 to 42 are taken,
    the middle one is 20, because its place is computed as 20.999... and not as 21.
    """
    places = torch.linspace(0, len(items) - 1, min(count, len(items)), dtype=torch.long)
    return items[places.to(items.device)]


@cache
def _warn_that_stage_two_is_idle(share: float) -> None:
    """Logs, once for each lambda, that stage I takes the whole budget."""
    log.warning(
        "SpecVLM's stage I takes the whole budget at lambda %g: stage II never acts, and the "
        "choice is attention's alone. Calibrate a smaller lambda for this pair, as in "
        "specvlm/lambda=0.05",
        share,
    )


VIEW = Pruned("specvlm", TwoStage(), keep=KEEP, attention=True)
OFFICIAL = replace(
    VIEW,
    name="specvlm-official",
    select=TwoStage(share=0.4, includes_ends=True),
    rounding="down",
)
LITERAL = replace(VIEW, name="specvlm-literal", select=TwoStage(follows_printed_equations=True))

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
    # Why it was slower than plain decoding in every stored run.
    study="each draft step reads all of the target's weights",
)


SHARE = Setting(
    axis="lambda",
    owner=TwoStage,
    field="share",
    parse=parse_share,
    choices="SpecVLM's share of attention mass, 0 to 1",
    unmet_message="is SpecVLM's: it needs view=specvlm",
    to_text="{:g}".format,
)

PROVIDES = Provides(
    recipes=(SPECVLM, SPECVLM_SELF),
    views=(VIEW, OFFICIAL, LITERAL),
    shapes={"tree": Static(TREE), "fit": Fit((TREE,))},
    axes={"lambda": SHARE},
)

"""HIPPO: Accelerating Video LLM Inference via Holistic-aware Parallel Speculative Decoding.

2026. The draft keeps the tenth of the video with the highest sum of three scores. It works in
parallel with the target: while the target verifies one draft, the draft model drafts the tokens
after it. After a rejection the target verifies the first new token while the draft model drafts
the tokens after that one.

    s_attn = mean over layers, heads, text queries of softmax over video keys (Q K^T)    (Eq. 2)
    s_temp = 1 - mean cosine with the same cell in the frames before and after           (Eq. 3-4)
    s_spa  = variance of a token's cosines with all tokens of its 5x5 tile               (Eq. 5-6)
    s      = the sum of the three, each z-scored within its frame; the top 10 % stay     (Eq. 7)

In the paper both models prefill at the same time, *and* the choice of the tenth needs the target's
attention, which is not known before the target's prefill has ended. So the paper's draft reads the
whole video, and drops nine tenths of it afterwards (``hippo-paper``). The method ``hippo`` waits
for the attention, so its draft reads only the tenth. The view's field ``early`` sets this: with
"all" the draft reads every visual token beside the target's prefill, with "superset" twice the
tenth, and with "wait", the default, none. Baselines of Table 3: PEARL with the whole video
(``pearl``), with overlapped prefill (``pearl-syn``), and with SpecVLM's view (``pearl-specvlm``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.costs import Costs
from saccade.core.prompt import Prompt
from saccade.core.protocols import CostMemory, Shape
from saccade.drafting.parallel.worker_drafter import WorkerDrafter
from saccade.drafting.provides import Provides
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import parallel
from saccade.drafting.shapes.policies import Chain
from saccade.drafting.views import saliency
from saccade.drafting.views.basic import FULL, Pruned, TargetAttention
from saccade.methods import specvlm

KEEP = 0.1  # The share of the visual tokens that the draft keeps.
CROP = 5  # The side of the tiles into which s_spa divides a frame, in visual tokens.
# How many tokens a draft has. The paper uses 5 for video-SALMONN2+ and Qwen2.5-VL, and it is used
# here also for families that the paper did not try.
GAMMA = 5
GAMMAS = {"llava_onevision": 7, "qwen3_vl": 3, "qwen3_vl_moe": 3}  # By the target's model_type.


@dataclass(frozen=True)
class Holistic:
    """Chooses visual tokens by the holistic saliency s of Eq. 7. For the ablations of Fig. 6 a part
    of the sum can be left out."""

    attn: bool = True  # whether s_attn is a part
    temp: bool = True  # whether s_temp is a part
    spa: bool = True  # whether s_spa is a part

    def saliency_without_target(self, prompt: Prompt) -> Float[Tensor, " visual"]:
        """Returns the part of the saliency that needs no target: s_temp and s_spa."""
        grid = prompt.grid
        total = torch.zeros(len(grid), dtype=torch.double, device=grid.device)
        if self.temp or self.spa:
            unit = saliency.normalise(prompt.embeds[prompt.visual])
        if self.temp:
            total += saliency.per_frame(saliency.temporal(unit, grid), grid)
        if self.spa:
            total += saliency.per_frame(saliency.spatial(unit, grid, CROP), grid)
        return total

    def saliency_with_target(
        self,
        prompt: Prompt,
        target_attention: TargetAttention,
        without_target: Float[Tensor, " visual"] | None = None,
    ) -> Float[Tensor, " visual"]:
        """Returns the whole saliency. ``without_target`` is the result of
        :meth:`saliency_without_target` if it is known already."""
        total = self.saliency_without_target(prompt) if without_target is None else without_target
        if self.attn and target_attention is not None:
            return total + saliency.per_frame(target_attention.to(total.device), prompt.grid)
        return total

    def __call__(
        self, prompt: Prompt, target_attention: TargetAttention, budget: int
    ) -> Int[Tensor, " kept"]:
        """Returns the ``budget`` most salient visual tokens."""
        return saliency.top(self.saliency_with_target(prompt, target_attention), budget)


# The view calls ``measure`` with the target's prefill, and gets s_attn for the target's visual
# tokens. Transferred to the draft's visual tokens, it is the ``target_attention`` of ``Holistic``.
VIEW = Pruned(
    "holistic", Holistic(), keep=KEEP, attention=True, measure=saliency.attention_over_visual_keys
)
ABLATIONS = (
    replace(VIEW, name="holistic-no-attn", select=Holistic(attn=False), attention=False),
    replace(VIEW, name="holistic-no-temp", select=Holistic(temp=False)),
    replace(VIEW, name="holistic-no-spa", select=Holistic(spa=False)),
)

HIPPO = Recipe(
    name="hippo",
    about="HIPPO: drafts in parallel with the target, from the most salient tenth of the video",
    drafter=WorkerDrafter,
    view=VIEW,
    shape=Chain(GAMMA),
    schedule=parallel,
)


@dataclass(frozen=True)
class FamilyChain(Chain):
    """A chain as long as the paper sets it for the target's family (App. B)."""

    # The family of shapes is the first part of names such as ``chain-5``. This shape has a fixed
    # name, and belongs to none.
    family: ClassVar[str] = ""
    length: int = GAMMA

    @property
    def spelling(self) -> str:
        return "hippo-gamma"

    def prepare(
        self,
        measure: Callable[[], Costs],
        memory: CostMemory | None = None,
        target_family: str = "",
    ) -> Shape:
        return Chain(GAMMAS.get(target_family, GAMMA))


HIPPO_PAPER = replace(
    HIPPO,
    name="hippo-paper",
    about="HIPPO as published: both prefills start together; gamma depends on the model family",
    view=replace(VIEW, early="all"),
    shape=FamilyChain(),
)

PEARL = replace(
    HIPPO,
    name="pearl",
    about="PEARL: a draft that sees the whole video works in parallel, after the target's prefill",
    view=FULL,
)

PEARL_SYN = replace(
    PEARL,
    name="pearl-syn",
    about="PEARL with the draft's prefill beside the target's",
    view=replace(FULL, early="all"),
)

PEARL_SPECVLM = replace(
    PEARL,
    name="pearl-specvlm",
    about="PEARL with SpecVLM's choice of a tenth of the video",
    view=specvlm.VIEW,
)

PROVIDES = Provides(
    recipes=(HIPPO, HIPPO_PAPER, PEARL, PEARL_SYN, PEARL_SPECVLM),
    views=(VIEW, *ABLATIONS),
    shapes={FamilyChain().spelling: FamilyChain()},
)

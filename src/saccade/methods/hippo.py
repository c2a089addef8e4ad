"""HIPPO: Accelerating Video LLM Inference via Holistic-aware Parallel Speculative Decoding.

2026. The draft keeps the tenth of the video that three scores prefer together, and works in
parallel with the target: it drafts on while its last tokens are judged, and after a refusal the
target judges the first new token while the rest is drafted.

    s_attn = mean over layers, heads, text queries of softmax over video keys (Q K^T)    (Eq. 2)
    s_temp = 1 - mean cosine with the same cell in the frames before and after           (Eq. 3-4)
    s_spa  = variance of a token's cosines inside its 5x5 crop                           (Eq. 5-6)
    s      = the sum of the three, each z-scored within its frame; the top 10 % stay     (Eq. 7)

The paper overlaps the prefills *and* prunes by the target's attention: see ``early`` of ``Pruned``.
Baselines of Table 3: PEARL with the whole video (``pearl``), with overlapped prefill
(``pearl-syn``), with SpecVLM's view.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.prompt import Prompt
from saccade.drafting.parallel.drafter import WorkerDrafter
from saccade.drafting.provides import Provides
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import parallel
from saccade.drafting.shapes.policies import Chain
from saccade.drafting.views import saliency
from saccade.drafting.views.basic import FULL, Guide, Pruned
from saccade.methods import specvlm

KEEP = 0.1
CROP = 5
GAMMA = 5  # 5 / 5 / 7 / 3 for video-SALMONN2+, Qwen2.5-VL, LLaVA-OneVision, Qwen3-VL


@dataclass(frozen=True)
class Holistic:
    """The holistic saliency; without one of its parts for the ablations of Fig. 6."""

    attn: bool = True
    temp: bool = True
    spa: bool = True

    def saliency(self, prompt: Prompt, guide: Guide) -> Float[Tensor, " visual"]:
        grid, embeds = prompt.grid, prompt.embeds[prompt.visual]
        total = torch.zeros(len(grid), dtype=torch.double, device=grid.device)
        if self.attn and guide is not None:
            total += saliency.per_frame(guide.to(grid.device), grid)
        if self.temp:
            total += saliency.per_frame(saliency.temporal(embeds, grid), grid)
        if self.spa:
            total += saliency.per_frame(saliency.spatial(embeds, grid, CROP), grid)
        return total

    def __call__(self, prompt: Prompt, guide: Guide, budget: int) -> Int[Tensor, " kept"]:
        return saliency.top(self.saliency(prompt, guide), budget)


VIEW = Pruned("holistic", Holistic(), keep=KEEP, attention=True, guide=saliency.relevant)
WITHOUT = (
    replace(VIEW, name="holistic-no-attn", select=Holistic(attn=False), attention=False),
    replace(VIEW, name="holistic-no-temp", select=Holistic(temp=False)),
    replace(VIEW, name="holistic-no-spa", select=Holistic(spa=False)),
)

HIPPO = Recipe(
    name="hippo",
    about="HIPPO: a draft on a tenth of the video, chosen holistically, beside the target",
    drafter=WorkerDrafter,
    view=VIEW,
    shape=Chain(GAMMA),
    schedule=parallel,
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

PROVIDES = Provides(recipes=(HIPPO, PEARL, PEARL_SYN, PEARL_SPECVLM), views=(VIEW, *WITHOUT))

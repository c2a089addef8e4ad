"""Sparse-to-Dense: A Free Lunch for Lossless Acceleration of Video Understanding in LLMs.

Zhang, Du et al., 2025. The target drafts for itself, reading per layer and per KV head only the K
visual keys its text attends to most; all text keys stay. Chosen once, at prefill (Sec. 3):

    K_{l,h} = top-K_j  mean over text queries i, summed over the heads of a group, of A_{l,h}[i, j]
    m_t + K = 1024,  gamma = 9

A prompt with less video than that budget was made for keeps an eighth of it. Baselines of Table 1:
``streaming`` (attention sinks and a window, of the same size) and tuning-free ``layerskip``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from saccade.core.prompt import Prefill, Prompt
from saccade.core.protocols import Refresh, View
from saccade.drafting.drafters import EarlyExit, SelfDrafter
from saccade.drafting.provides import Provides
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.policies import Chain
from saccade.drafting.views import saliency

TOTAL = 1024  # m_t + K
GAMMA = 9
SINKS = 4
SHARE = 8  # short prompts keep one visual token in eight


def visual_budget(prompt: Prompt, keep: float | None) -> int:
    """K: the paper's 1024 - m_t, less where the video is short; or a share of it."""
    if keep is not None:
        return saliency.budget(prompt.seen, keep)
    text = len(prompt) - prompt.seen
    return min(prompt.seen, max(1, min(TOTAL - text, prompt.seen // SHARE)))


@dataclass(frozen=True)
class PerHead(View):
    """Per layer and KV head, the most attended visual keys; text always."""

    name: str = "per-head"
    keep: float | None = None
    attention: bool = True
    own_keys: bool = True
    refresh: Refresh | None = None

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        assert prefill.mass is not None
        count = visual_budget(prompt, self.keep)
        order = torch.sort(prefill.mass, dim=-1, descending=True, stable=True).indices
        visual = prompt.index[prompt.visual][order[..., :count]]
        text = prompt.index[~prompt.visual].expand(*visual.shape[:2], -1)
        return replace(prompt, heads=torch.cat([text, visual], -1).sort(-1).values)


@dataclass(frozen=True)
class Streaming(View):
    """The first few tokens of the prompt and the last ones, as many in all as ``PerHead`` keeps."""

    name: str = "streaming"
    keep: float | None = None

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        count = len(prompt) - prompt.seen + visual_budget(prompt, self.keep)
        row = torch.arange(len(prompt), device=prompt.visual.device)
        return prompt.rows((row < SINKS) | (row >= len(prompt) - count + SINKS))


STD = Recipe(
    name="std",
    about="Sparse-to-Dense: the target drafts on each head's own most attended visual keys",
    drafter=SelfDrafter,
    view=PerHead(),
    shape=Chain(GAMMA),
)

STREAMING = replace(
    STD,
    name="streaming",
    about="the target drafts on attention sinks and a window of recent tokens",
    view=Streaming(),
)

LAYERSKIP = Recipe(
    name="layerskip",
    about="the target's first half drafts for the whole, without tuning",
    drafter=EarlyExit,
    shape=Chain(GAMMA),
)

PROVIDES = Provides(recipes=(STD, STREAMING, LAYERSKIP), views=(PerHead(), Streaming()))

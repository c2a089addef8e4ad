"""What the draft sees: a function from (what the target revealed, its whole prompt) to its prompt.

Most views keep a budget of the visual tokens; each kind is one pure selector. Text is always kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade import score
from saccade.types import Prefill, Prompt

Positions = Literal["original", "repacked"]

Guide = Float[Tensor, " seen"] | None
"""Attention per visual token of the draft's prompt, for the selectors that ask for it."""

Select = Callable[[Prompt, Guide, int], Int[Tensor, " kept"]]
"""(the draft's whole prompt, guide, budget) -> kept visual tokens."""


@dataclass(frozen=True)
class Pruned:
    """Keeps a share ``keep`` of the visual tokens, the ones ``select`` chooses.

    ``positions``: "original" leaves each token where it stood; "repacked" counts the kept tokens
    from 0 as if nothing had been cut (one number on every axis).
    """

    name: str
    select: Select
    keep: float = 0.1
    attention: bool = False
    positions: Positions = "original"
    own_keys: bool = False

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        guide = None
        if self.attention:
            assert prefill.mass is not None, f"view {self.name} needs recorded attention"
            scores = score.attention(prefill.mass)
            guide = score.transfer(scores, prefill.prompt.grid, prompt.grid)
        kept = self.select(prompt, guide, score.budget(prompt.seen, self.keep))
        pruned = prompt.select(kept)
        return repacked(pruned) if self.positions == "repacked" else pruned


def repacked(prompt: Prompt) -> Prompt:
    """The same rows at positions 0, 1, 2, ... on every axis."""
    row = torch.arange(len(prompt), device=prompt.positions.device)
    return replace(
        prompt,
        positions=row.expand(prompt.positions.shape[0], -1),
        next_position=len(prompt),
    )


def everything(prompt: Prompt, guide: Guide, budget: int) -> Int[Tensor, " kept"]:
    return torch.arange(prompt.seen, device=prompt.visual.device)


def nothing(prompt: Prompt, guide: Guide, budget: int) -> Int[Tensor, " kept"]:
    return torch.arange(0, device=prompt.visual.device)


def random(prompt: Prompt, guide: Guide, budget: int) -> Int[Tensor, " kept"]:
    """SpecVLM's SD-Rand. The draw depends on the prompt's length alone, so it reproduces."""
    generator = torch.Generator().manual_seed(prompt.seen)
    order = torch.randperm(prompt.seen, generator=generator)
    return order[:budget].sort().values.to(prompt.visual.device)


def uniform(prompt: Prompt, guide: Guide, budget: int) -> Int[Tensor, " kept"]:
    """Evenly spaced in prompt order."""
    return score.spread(torch.arange(prompt.seen, device=prompt.visual.device), budget)


def attended(prompt: Prompt, guide: Guide, budget: int) -> Int[Tensor, " kept"]:
    """The most attended tokens: SpecVLM's stage I alone."""
    assert guide is not None
    return score.top(guide, budget)


FULL = Pruned("full", everything, keep=1.0)
NONE = Pruned("none", nothing, keep=0.0)
RANDOM = Pruned("random", random)
UNIFORM = Pruned("uniform", uniform)
ATTENTION = Pruned("attention", attended, attention=True)

"""The other ways to cut a video down that the papers compare themselves with.

Baselines of SpecVLM (Sec. 4.3-4.4) and HIPPO (Sec. 6.4), and TABED's pooled view (Sec. 6.1). All
selectors keep exactly the budget, so that methods are compared at equal cost. A *frame* is one
(medium, t) of the grid; several media share the budget by their frames or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cosine_similarity

from saccade.core.prompt import Prefill, Prompt
from saccade.core.protocols import View
from saccade.drafting.views import saliency
from saccade.drafting.views.basic import Guide, Pruned, Select, repack, uniform

GROUP = 4  # frames DyCoke merges among each other


def frames(prompt: Prompt, guide: Guide, budget: int) -> Int[Tensor, " kept"]:
    """SD-Frame: whole frames at a regular interval, as few as fill the budget."""
    parts = _frames(prompt)
    chosen: list[Tensor] = []
    for count in range(len(parts) + 1):
        chosen = [
            parts[i] for i in saliency.sample_evenly(torch.arange(len(parts)), count).tolist()
        ]
        if sum(len(part) for part in chosen) >= budget:
            break
    return _fill(prompt, chosen, budget)


@dataclass(frozen=True)
class Window:
    """Tokens in a row; of what they leave out, ``halves`` halves stand before them: 0 for the first
    tokens, 1 for the middle (one fewer before than after, where it is odd), 2 for the last."""

    halves: int

    def __call__(self, prompt: Prompt, guide: Guide, budget: int) -> Int[Tensor, " kept"]:
        count = min(budget, prompt.visual_tokens)
        start = (prompt.visual_tokens - count) * self.halves // 2
        return torch.arange(start, start + count, device=prompt.grid.device)


def fastvid(prompt: Prompt, guide: Guide, budget: int) -> Int[Tensor, " kept"]:
    """SD-FastVID: whole frames, first those least like the frame before them.

    A frame is the mean of its embeddings. The first of a medium has none before it and comes first.
    """
    parts = _frames(prompt)
    if not parts:
        return _fill(prompt, parts, budget)
    rows = prompt.embeds[prompt.visual]
    means = torch.stack([rows[part].float().mean(0) for part in parts])
    medium = torch.stack([prompt.grid[part[0], 0] for part in parts])
    alike = means.new_full((len(parts),), -torch.inf)
    cosine = cosine_similarity(means[1:], means[:-1], dim=-1)
    alike[1:] = cosine.masked_fill(medium[1:] != medium[:-1], -torch.inf)
    order = torch.sort(alike, stable=True).indices
    return _fill(prompt, [parts[i] for i in order.tolist()], budget)


def dycoke(prompt: Prompt, guide: Guide, budget: int) -> Int[Tensor, " kept"]:
    """SD-DyCoke: what is left when tokens merge into the same cell of a frame of their group.

    In each group of four frames, tokens of the second may merge into the first, of the fourth into
    the third, and of the third into the first; the most similar go first. That leaves a quarter.
    For a smaller budget the first frames of the groups are grouped by four in turn, and so on; once
    each medium has a single frame, nothing temporal is left and its tokens are sampled evenly.
    """
    grid, time = prompt.grid, prompt.grid[:, 1]
    first = (time == 0).nonzero().squeeze(-1)
    if min(budget, prompt.visual_tokens) <= len(first):
        return saliency.sample_evenly(first, budget)
    key, order = torch.sort(saliency.through_time(grid))
    # Clearing the lowest bit of a frame's number leads from it to the one it merges into, in
    # groups of four, in groups of sixteen, ...
    wanted = saliency.through_time(grid) - (time & -time)
    at = torch.searchsorted(key, wanted).clamp(max=len(key) - 1)
    into = order[at]
    rows = prompt.embeds[prompt.visual]
    alike = torch.empty(prompt.visual_tokens, device=grid.device)
    for part in _frames(prompt):  # frame by frame, to hold no second copy of a long video
        alike[part] = cosine_similarity(rows[part].float(), rows[into[part]].float(), dim=-1)
    alike[key[at] != wanted] = -torch.inf
    level, stride = torch.zeros_like(time), 1
    while stride <= int(time.max()):
        stride *= GROUP
        level += time % stride == 0
    ranked = torch.sort(alike, stable=True).indices
    ranked = ranked[torch.sort(level[ranked], descending=True, stable=True).indices]
    return ranked[:budget].sort().values


@dataclass(frozen=True)
class Merged(View):
    """Like ``Pruned``, with what was dropped averaged into what stays.

    Each dropped token joins the nearest earlier kept token of its cell, which becomes the mean of
    all that joined it and stays where it stood. A token with none is lost.
    """

    subset: ClassVar[bool] = False

    name: str
    select: Select
    keep: float = 0.1

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        grid = prompt.grid
        kept = Pruned(self.name, self.select, self.keep).choose(prefill, prompt)
        if len(kept) in (0, prompt.visual_tokens):
            return prompt.select(kept)
        key = saliency.through_time(grid)
        earlier, order = torch.sort(key[kept])
        at = torch.searchsorted(earlier, key, right=True) - 1
        leader = kept[order[at.clamp(min=0)]]
        same = (grid[leader] == grid)[:, [0, 2, 3]].all(-1)
        leader = leader.masked_fill(~same | (at < 0), -1)
        return _averaged(prompt, leader, grid[:, 1])


@dataclass(frozen=True)
class Pooled(View):
    """TABED's P: 2x2 average pooling of each frame; edges average the members they have.

    With ``coarse``, as in the paper: *before* the projector, the rows that are left counted from
    0. Where a prompt has no such rows (Qwen's merger already joins 2x2 patches there) or nobody
    asks for them, the language model's rows, *after* it, each standing where its top-left member
    stood. A row of tokens without a grid pools in pairs.
    """

    keep: ClassVar[float] = 0.25  # nearly: ragged edges leave more
    subset: ClassVar[bool] = False

    name: str
    coarse: bool = False

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        if not prompt.visual_tokens:
            return prompt
        if self.coarse and prompt.coarse is not None:  # rows of a block are equal there
            embeds = prompt.embeds.clone()
            embeds[prompt.visual] = prompt.coarse
            return repack(self(prefill, replace(prompt, embeds=embeds, coarse=None)))
        grid = prompt.grid
        block = torch.cat([grid[:, :2], grid[:, 2:] // 2], 1)
        group = torch.unique(block, dim=0, return_inverse=True)[1]
        row = torch.arange(prompt.visual_tokens, device=grid.device)
        leader = row.new_full((int(group.max()) + 1,), prompt.visual_tokens)
        leader = leader.scatter_reduce(0, group, row, "amin")[group]
        corner = grid[:, 2] % 2 * 2 + grid[:, 3] % 2
        return replace(_averaged(prompt, leader, corner), grid=block[leader == row])


def _frames(prompt: Prompt) -> list[Int[Tensor, " _tokens"]]:
    """The visual tokens of each frame, in prompt order."""
    _, frame = torch.unique(prompt.grid[:, :2], dim=0, return_inverse=True)
    order = torch.sort(frame, stable=True).indices
    return list(order.split(torch.bincount(frame).tolist()))


def _fill(
    prompt: Prompt, parts: Sequence[Int[Tensor, " _tokens"]], budget: int
) -> Int[Tensor, " kept"]:
    """Parts in the order given while they fit, then an even sample of the next."""
    kept = [torch.arange(0, device=prompt.grid.device)]
    for part in parts:
        kept.append(saliency.sample_evenly(part, budget))
        budget -= len(kept[-1])
    return torch.cat(kept).sort().values


def _averaged(
    prompt: Prompt, leader: Int[Tensor, " visual"], turn: Int[Tensor, " visual"]
) -> Prompt:
    """The prompt of the visual rows that lead themselves, each the mean of the rows it leads.

    -1 leads nowhere. Rows are added turn by turn and no two of a turn share a leader, so that no
    sum depends on which thread comes first.
    """
    kept = (leader == torch.arange(len(leader), device=leader.device)).nonzero().squeeze(-1)
    number = torch.searchsorted(kept, leader)
    turns = [((turn == now) & (leader >= 0)).nonzero().squeeze(-1) for now in turn.unique()]
    count = torch.bincount(number[leader >= 0], minlength=len(kept))

    def mean(rows: Float[Tensor, "visual dim"]) -> Float[Tensor, "kept dim"]:
        exact = torch.promote_types(rows.dtype, torch.float32)
        total = torch.zeros(len(kept), rows.shape[1], dtype=exact, device=rows.device)
        for part in turns:
            total.index_add_(0, number[part], rows[part].to(exact))
        return (total / count[:, None]).to(rows.dtype)

    pruned = prompt.select(kept)
    embeds = pruned.embeds.clone()
    embeds[pruned.visual] = mean(prompt.embeds[prompt.visual])
    return replace(pruned, embeds=embeds, deepstack=tuple(map(mean, prompt.deepstack)))


DYCOKE = Merged("dycoke", dycoke)
POOLED = Pooled("pooled", coarse=True)
POOLED_AFTER = Pooled("pooled-after")
VIEWS = (
    Pruned("frames", frames),
    Pruned("window-front", Window(0)),
    Pruned("window-middle", Window(1)),
    Pruned("window-end", Window(2)),
    Pruned("fastvid", fastvid),
    DYCOKE,
    # SpecVLM without stage I. The ablation asks no attention at all: V_R is empty, Eq. 7 spreads
    # over *all* tokens, and this is ``uniform`` by the name the paper's tables give it.
    Pruned("rest", uniform),
)

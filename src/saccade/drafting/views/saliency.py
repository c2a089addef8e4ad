"""The saliency of visual tokens, and selectors that turn it into a kept set. Pure functions.

A selector returns indices of visual tokens, increasing. Ties go to the lower index everywhere.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.prompt import Prefill

DECIMALS = 12  # decimals: what equals up to rounding must not be scaled up as if it differed


Rounding = Literal["nearest", "down"]


def budget(seen: int, keep: float, rounding: Rounding = "nearest") -> int:
    """How many of ``seen`` visual tokens a share ``keep`` leaves: max(1, round), 0 for none.

    Rounded "down" it is the product SpecVLM's published code truncates, seen (1 - r) with r = .9 a
    float: 195 of 1,960.
    """
    if not 0 <= keep <= 1:
        raise ValueError(f"keep is a share between 0 and 1, not {keep}")
    whole = int(seen * (1 - (1 - keep)) if rounding == "down" else seen * keep + 0.5)
    return min(seen, max(1, whole)) if keep > 0 else 0


def top(saliency: Float[Tensor, " visual"], count: int) -> Int[Tensor, " kept"]:
    """The ``count`` most salient tokens."""
    order = torch.sort(saliency, descending=True, stable=True).indices
    return order[:count].sort().values


def top_mass(saliency: Float[Tensor, " visual"], share: float, most: int) -> Int[Tensor, " kept"]:
    """The smallest top set whose saliency sums to ``share`` of the total, at most ``most``; none
    reaches nothing."""
    ranked, order = torch.sort(saliency.double(), descending=True, stable=True)
    wanted = share * saliency.double().sum()
    before = torch.nn.functional.pad(ranked.cumsum(0), (1, 0))[:-1]  # by those ranked above it
    count = int((before < wanted).sum())
    return order[: min(count, most)].sort().values


def sample_evenly(items: Int[Tensor, " item"], count: int) -> Int[Tensor, " kept"]:
    """``count`` of the items, evenly spaced in the order given."""
    count = min(count, len(items))
    if count == 0:
        return items[:0]
    at = ((torch.arange(count) * 2 + 1) * len(items)) // (2 * count)
    return items[at.to(items.device)]


def rest(seen: int, kept: Int[Tensor, " kept"]) -> Int[Tensor, " left"]:
    """The indices below ``seen`` that are not in ``kept``."""
    left = torch.ones(seen, dtype=torch.bool, device=kept.device)
    left[kept] = False
    return left.nonzero().squeeze(-1)


def attention(mass: Float[Tensor, "layer kv_head visual"]) -> Float[Tensor, " visual"]:
    """SpecVLM's a_j (Eq. 5): mean over layers, heads and text queries of the attention on j."""
    return mass.mean((0, 1))


def transfer(
    saliency: Float[Tensor, " visual"], grid: Int[Tensor, "visual 4"], other: Int[Tensor, "cell 4"]
) -> Float[Tensor, " cell"]:
    """Saliency of one model's visual tokens, looked up for another model's finer or coarser grid.

    Each cell of ``other`` takes that of the cell at the same relative (t, h, w) of its medium.
    Where the media differ (tiles, or no grid at all), of the cell as far along in the prompt.
    """
    if torch.equal(grid, other):
        return saliency
    if not len(grid):
        return torch.zeros(len(other), device=grid.device)
    if not _alike(grid, other):
        along = (torch.arange(len(other), device=grid.device) * 2 + 1) * len(grid)
        return saliency[along // (2 * len(other))]
    moved = torch.empty(len(other), dtype=saliency.dtype, device=saliency.device)
    for medium in other[:, 0].unique().tolist():
        here, there = grid[:, 0] == medium, other[:, 0] == medium
        size = grid[here, 1:].amax(0) + 1
        target = other[there, 1:]
        cell = (target * 2 + 1) * size // (2 * (target.amax(0) + 1))
        flat = (cell[:, 0] * size[1] + cell[:, 1]) * size[2] + cell[:, 2]
        moved[there] = saliency[here][flat]
    return moved


def _alike(grid: Int[Tensor, "visual 4"], other: Int[Tensor, "cell 4"]) -> bool:
    """Whether both show the same media, each a full lattice on the side that is looked up."""
    media = grid[:, 0].unique()
    if not torch.equal(media, other[:, 0].unique()):
        return False
    parts = [grid[grid[:, 0] == medium, 1:] for medium in media]
    return all(len(part) == int((part.amax(0) + 1).prod()) for part in parts)


def attended(prefill: Prefill) -> Float[Tensor, " visual"]:
    """How much the target's text attends to each visual token, among all it attends to."""
    assert prefill.mass is not None, "the view did not ask for attention"
    return attention(prefill.mass)


def relevant(prefill: Prefill) -> Float[Tensor, " visual"]:
    """HIPPO's s_attn (Eq. 2): how much it attends to each, among the visual tokens alone."""
    assert prefill.relevance is not None, "the view did not ask for attention"
    return attention(prefill.relevance)


def temporal(embeds: Float[Tensor, "visual dim"], grid: Int[Tensor, "visual 4"]) -> Tensor:
    """HIPPO's s_temp (Eq. 3-4), [seen]: 1 - mean cosine with this cell a frame before and after.

    A cell without neighbours has 1.
    """
    if not len(grid):
        return torch.zeros(0, device=grid.device)
    unit = torch.nn.functional.normalize(embeds.double(), dim=-1)
    total = torch.zeros(len(grid), dtype=torch.double, device=grid.device)
    count = torch.zeros_like(total)
    cell, order = torch.sort(through_time(grid))
    for step in (1, -1):
        wanted = through_time(grid) + step
        at = torch.searchsorted(cell, wanted).clamp(max=len(cell) - 1)
        there = cell[at] == wanted
        cosine = (unit * unit[order[at]]).sum(-1)
        total += cosine.where(there, torch.zeros_like(cosine))
        count += there
    return (1 - total / count.clamp(min=1)).round(decimals=DECIMALS)


def spatial(
    embeds: Float[Tensor, "visual dim"], grid: Int[Tensor, "visual 4"], side: int
) -> Tensor:
    """HIPPO's s_spa (Eq. 5-6), [seen]: variance of a token's cosines within its crop, itself too.

    Crops tile a frame from its top left; ragged ones hold what members they have.
    """
    if not len(grid):
        return torch.zeros(0, device=grid.device)
    unit = torch.nn.functional.normalize(embeds.double(), dim=-1)
    crop = torch.cat([grid[:, :2], grid[:, 2:] // side], 1)
    _, number = torch.unique(crop, dim=0, return_inverse=True)
    order = torch.sort(number, stable=True).indices
    counts = torch.bincount(number)
    slot = torch.arange(len(grid), device=grid.device)
    slot -= (counts.cumsum(0) - counts)[number[order]]
    members = unit.new_zeros(len(counts), int(counts.max()), unit.shape[1])
    members[number[order], slot] = unit[order]
    cosine = members @ members.transpose(1, 2)  # absent members give 0
    size = counts[:, None]
    variance = cosine.pow(2).sum(-1) / size - (cosine.sum(-1) / size).pow(2)
    saliency = torch.empty(len(grid), dtype=torch.double, device=grid.device)
    saliency[order] = variance[number[order], slot].clamp(min=0)
    return saliency.round(decimals=DECIMALS)


def per_frame(saliency: Float[Tensor, " visual"], grid: Int[Tensor, "visual 4"]) -> Tensor:
    """Each frame's saliency with mean 0 and standard deviation 1; all 0 where they do not vary."""
    _, frame = torch.unique(grid[:, :2], dim=0, return_inverse=True)
    saliency = saliency.double()
    if not len(saliency):
        return saliency
    size = torch.bincount(frame).double()
    mean = torch.zeros_like(size).index_add_(0, frame, saliency) / size
    centred = saliency - mean[frame]
    spread = (torch.zeros_like(size).index_add_(0, frame, centred.pow(2)) / size).sqrt()[frame]
    varies = spread > 1e-9 * saliency.abs().max().clamp(min=1e-30)
    return torch.where(varies, centred / spread, torch.zeros_like(centred))


def through_time(grid: Int[Tensor, "visual 4"]) -> Int[Tensor, " visual"]:
    """A number per token that sorts by medium and cell, then counts up with t; the one before a
    cell's first frame and the one after its last are nobody's."""
    medium, t, h, w = grid.unbind(1)
    _, times, height, width = (grid.amax(0) + 1).unbind()
    return ((medium * height + h) * width + w) * (times + 1) + t

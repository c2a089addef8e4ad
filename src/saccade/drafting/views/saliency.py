"""Scores visual tokens by saliency, and selects the tokens to keep. Pure functions.

Views use these to choose the part of a video that a draft sees. A token's saliency says how much it
matters: by the attention that the target paid to it in its prefill (``Prefill.mass``, or
``Prefill.relevance`` with the softmax over the visual keys alone), or by how much it differs from
its neighbours in time and space. A selector returns increasing indices of visual tokens. Ties go to
the lower index. A ``grid`` has a row for each visual token: the number of its medium, and its t, h
and w there.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.prompt import Prefill

# The results of ``temporal`` are rounded to COSINE_DECIMALS. In ``spatial`` the cosines are rounded
# to COSINE_DECIMALS, and their variances to VARIANCE_DECIMALS. So z-scores do not magnify the
# rounding errors of float32.
COSINE_DECIMALS = 6
VARIANCE_DECIMALS = 12
# Selecting rows by index copies them, so only this many rows, or the rows of this many crops, are
# selected at once.
ROWS_AT_ONCE = 2048
CROPS_AT_ONCE = 64


Rounding = Literal["nearest", "down"]


def budget(tokens: int, keep: float, rounding: Rounding = "nearest") -> int:
    """Returns how many of ``tokens`` visual tokens a share ``keep`` leaves.

    A share of zero leaves none. Any other share leaves at least 1, if there are any tokens.
    "down" truncates tokens x (1 - r), r = 1 - keep, as SpecVLM's published code does. For 1,960
    tokens and keep = 0.1 the error of floats makes that 195 and not 196.
    """
    if not 0 <= keep <= 1:
        raise ValueError(f"keep is a share between 0 and 1, not {keep}")
    if keep == 0:
        return 0
    count = int(tokens * (1 - (1 - keep)) if rounding == "down" else tokens * keep + 0.5)
    return min(tokens, max(1, count))


def top(saliency: Float[Tensor, " visual"], count: int) -> Int[Tensor, " kept"]:
    """Returns the ``count`` most salient tokens."""
    order = torch.sort(saliency, descending=True, stable=True).indices
    return order[:count].sort().values


def top_mass(saliency: Float[Tensor, " visual"], share: float, most: int) -> Int[Tensor, " kept"]:
    """Returns the most salient tokens, as few as together have at least ``share`` of all saliency.

    If these are more than ``most`` tokens, only the ``most`` most salient ones are returned. For a
    share of zero there are none.
    """
    ranked, order = torch.sort(saliency.double(), descending=True, stable=True)
    threshold = share * saliency.double().sum()
    before = torch.nn.functional.pad(ranked.cumsum(0), (1, 0))[:-1]  # the sum of those ranked above
    count = int((before < threshold).sum())
    return order[: min(count, most)].sort().values


def sample_evenly(items: Int[Tensor, " item"], count: int) -> Int[Tensor, " kept"]:
    """Returns ``count`` of the items, evenly spaced in their order.

    The items are divided into ``count`` equal parts, and the middle of each part is taken: items 2
    and 6 of items 0 to 7, if ``count`` is 2.
    """
    count = min(count, len(items))
    if count == 0:
        return items[:0]
    middles = ((torch.arange(count) * 2 + 1) * len(items)) // (2 * count)
    return items[middles.to(items.device)]


def unchosen(tokens: int, chosen: Int[Tensor, " chosen"]) -> Int[Tensor, " rest"]:
    """Returns the indices below ``tokens`` that are not ``chosen``."""
    mask = torch.ones(tokens, dtype=torch.bool, device=chosen.device)
    mask[chosen] = False
    return mask.nonzero().squeeze(-1)


def attention(mass: Float[Tensor, "layer kv_head visual"]) -> Float[Tensor, " visual"]:
    """Returns SpecVLM's a_j (Eq. 5): the attention on each visual token j, averaged over layers and
    heads. ``mass`` is averaged over the text queries already."""
    return mass.mean((0, 1))


def transfer(
    saliency: Float[Tensor, " visual"],
    grid: Int[Tensor, "visual 4"],
    other_grid: Int[Tensor, "cell 4"],
) -> Float[Tensor, " cell"]:
    """Transfers the saliency of one model's visual tokens to another model's finer or coarser grid.

    Each cell of ``other_grid`` gets the saliency of the cell at the same relative (t, h, w) of its
    medium. The rows of ``grid`` have to be in the order of t, h and w within a medium. Where the
    grids have different media (because of tiles), or ``grid`` lacks cells of a medium, the visual
    tokens are matched by their order alone: the cell halfway through ``other_grid`` gets the
    saliency of the token halfway through ``grid``.
    """
    if torch.equal(grid, other_grid):
        return saliency
    if not len(grid):
        return torch.zeros(len(other_grid), device=grid.device)
    if not _have_same_media(grid, other_grid):
        # The middle of each cell's place in the order. For 8 cells and 4 tokens, the cells get the
        # tokens 0, 0, 1, 1, 2, 2, 3 and 3.
        twice_middle = torch.arange(len(other_grid), device=grid.device) * 2 + 1
        return saliency[twice_middle * len(grid) // (2 * len(other_grid))]
    transferred = torch.empty(len(other_grid), dtype=saliency.dtype, device=saliency.device)
    for medium in other_grid[:, 0].unique().tolist():
        medium_rows = grid[:, 0] == medium
        other_medium_rows = other_grid[:, 0] == medium
        size = grid[medium_rows, 1:].amax(0) + 1
        other_cell = other_grid[other_medium_rows, 1:]
        # The middle of each cell of the other grid lies in this cell (t, h, w) of the grid.
        cell = (other_cell * 2 + 1) * size // (2 * (other_cell.amax(0) + 1))
        flat = (cell[:, 0] * size[1] + cell[:, 1]) * size[2] + cell[:, 2]  # (t H + h) W + w
        transferred[other_medium_rows] = saliency[medium_rows][flat]
    return transferred


def _have_same_media(grid: Int[Tensor, "visual 4"], other_grid: Int[Tensor, "cell 4"]) -> bool:
    """Returns whether both grids have the same media, and ``grid`` has every cell of each."""
    media = grid[:, 0].unique()
    if not torch.equal(media, other_grid[:, 0].unique()):
        return False
    parts = [grid[grid[:, 0] == medium, 1:] for medium in media]
    return all(len(part) == int((part.amax(0) + 1).prod()) for part in parts)


def attention_over_all_keys(prefill: Prefill) -> Float[Tensor, " visual"]:
    """Returns the target's attention from text to each visual token, with a softmax over all
    keys."""
    assert prefill.mass is not None, "the view did not ask for attention"
    return attention(prefill.mass)


def attention_over_visual_keys(prefill: Prefill) -> Float[Tensor, " visual"]:
    """Returns HIPPO's s_attn (Eq. 2): the attention with a softmax over the visual keys alone."""
    assert prefill.relevance is not None, "the view did not ask for attention"
    return attention(prefill.relevance)


def normalise(embeds: Float[Tensor, "visual dim"]) -> Float[Tensor, "visual dim"]:
    """Returns the rows in float32, scaled to length 1, as :func:`temporal` and :func:`spatial` read
    them."""
    return torch.nn.functional.normalize(embeds.float(), dim=-1)


def temporal(unit: Float[Tensor, "visual dim"], grid: Int[Tensor, "visual 4"]) -> Tensor:
    """Returns HIPPO's s_temp (Eq. 3-4), [visual]: 1 - mean cosine with the same cell in the frames
    before and after.

    A cell without such neighbours has 1. The rows of ``unit`` have length 1 (:func:`normalise`).
    """
    if not len(grid):
        return torch.zeros(0, device=grid.device)
    key, order = torch.sort(time_ordered_numbers(grid))
    # Consecutive keys are the same cell in consecutive frames.
    follows = (key[1:] == key[:-1] + 1).nonzero().squeeze(-1)
    before = order[follows]
    after = order[follows + 1]
    pairs = zip(before.split(ROWS_AT_ONCE), after.split(ROWS_AT_ONCE), strict=True)
    cosine = torch.cat([torch.linalg.vecdot(unit[first], unit[second]) for first, second in pairs])
    total = unit.new_zeros(len(grid))
    count = unit.new_zeros(len(grid))
    for row in (before, after):
        total.index_add_(0, row, cosine)
        count.index_add_(0, row, torch.ones_like(cosine))
    return (1 - total / count.clamp(min=1)).round(decimals=COSINE_DECIMALS)


def spatial(unit: Float[Tensor, "visual dim"], grid: Int[Tensor, "visual 4"], side: int) -> Tensor:
    """Returns HIPPO's s_spa (Eq. 5-6), [visual]: the variance of a token's cosines with all tokens
    of its crop, itself included.

    Crops of ``side`` x ``side`` tokens tile a frame from its top left. Those at the edges may have
    fewer tokens. The rows of ``unit`` have length 1 (:func:`normalise`).
    """
    if not len(grid):
        return torch.zeros(0, device=grid.device)
    crop_grid = torch.cat([grid[:, :2], grid[:, 2:] // side], 1)
    _, crop_numbers = torch.unique(crop_grid, dim=0, return_inverse=True)
    # ``order`` has the tokens crop by crop, and ``crops`` the number of each one's crop.
    order = torch.sort(crop_numbers, stable=True).indices
    crops = crop_numbers[order]
    # A token's slot is its place within its crop, from 0 on.
    sizes = torch.bincount(crop_numbers)
    starts = sizes.cumsum(0) - sizes
    slots = torch.arange(len(grid), device=grid.device) - starts[crops]
    # The tokens of each crop are a row [slot], so that crops of any size are computed together.
    # The slots that a smaller crop leaves over repeat token 0 and are not counted.
    tokens = torch.zeros(len(sizes), int(sizes.max()), dtype=torch.long, device=grid.device)
    tokens[crops, slots] = order
    are_members = torch.arange(tokens.shape[1], device=grid.device) < sizes[:, None]
    variances = []
    for crop_tokens, is_member in zip(
        tokens.split(CROPS_AT_ONCE), are_members.split(CROPS_AT_ONCE), strict=True
    ):
        rows = unit[crop_tokens]
        is_counted = is_member[:, None, :]
        cosine = (rows @ rows.transpose(1, 2)).double().round(decimals=COSINE_DECIMALS)
        size = is_member.sum(1)[:, None]
        mean = (cosine * is_counted).sum(-1) / size
        deviation = (cosine - mean[..., None]) * is_counted
        variances.append(deviation.square().sum(-1) / size)
    saliency = torch.empty(len(grid), dtype=torch.double, device=grid.device)
    saliency[order] = torch.cat(variances)[crops, slots]
    return saliency.round(decimals=VARIANCE_DECIMALS)


def per_frame(saliency: Float[Tensor, " visual"], grid: Int[Tensor, "visual 4"]) -> Tensor:
    """Returns the saliency z-scored within each frame; 0 where it does not vary in a frame."""
    _, frame = torch.unique(grid[:, :2], dim=0, return_inverse=True)
    saliency = saliency.double()
    if not len(saliency):
        return saliency
    size = torch.bincount(frame).double()
    mean = torch.zeros_like(size).index_add_(0, frame, saliency) / size
    centred = saliency - mean[frame]
    variance = torch.zeros_like(size).index_add_(0, frame, centred.pow(2)) / size
    deviation = variance.sqrt()[frame]
    # A deviation as small as this may be a rounding error of equal values.
    varies = deviation > 1e-9 * saliency.abs().max().clamp(min=1e-30)
    return torch.where(varies, centred / deviation, torch.zeros_like(centred))


def time_ordered_numbers(grid: Int[Tensor, "visual 4"]) -> Int[Tensor, " visual"]:
    """Returns a number per token that sorts by medium and cell, then by t.

    Consecutive numbers are one cell in consecutive frames. Between the last frame of a cell and the
    first of the next, at least one number is left out.
    """
    medium, t, h, w = grid.unbind(1)
    _, times, height, width = (grid.amax(0) + 1).unbind()
    return ((medium * height + h) * width + w) * (times + 1) + t

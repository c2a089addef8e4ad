"""Scores of visual tokens, and selectors that turn scores into a kept set. Pure functions.

A selector returns indices of visual tokens, increasing. Ties go to the lower index everywhere.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def budget(seen: int, keep: float) -> int:
    """How many of ``seen`` visual tokens a share ``keep`` leaves: max(1, round), 0 for none."""
    if not 0 <= keep <= 1:
        raise ValueError(f"keep is a share between 0 and 1, not {keep}")
    return min(seen, max(1, int(seen * keep + 0.5))) if keep > 0 else 0


def top(scores: Float[Tensor, " seen"], count: int) -> Int[Tensor, " kept"]:
    """The ``count`` highest scores."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count].sort().values


def top_mass(scores: Float[Tensor, " seen"], share: float, most: int) -> Int[Tensor, " kept"]:
    """The smallest top set whose scores sum to ``share`` of the total, at most ``most``."""
    ranked, order = torch.sort(scores.double(), descending=True, stable=True)
    reached = ranked.cumsum(0) >= share * scores.double().sum()
    count = int(reached.double().argmax()) + 1 if bool(reached.any()) else len(order)
    return order[: min(count, most)].sort().values


def spread(items: Int[Tensor, " item"], count: int) -> Int[Tensor, " kept"]:
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


def attention(mass: Float[Tensor, "layer kv_head seen"]) -> Float[Tensor, " seen"]:
    """SpecVLM's a_j (Eq. 5): mean over layers, heads and text queries of the attention on j."""
    return mass.mean((0, 1))


def transfer(
    scores: Float[Tensor, " seen"], grid: Int[Tensor, "seen 4"], other: Int[Tensor, "cell 4"]
) -> Float[Tensor, " cell"]:
    """Scores on one model's visual tokens, looked up for another model's finer or coarser grid.

    Each cell of ``other`` takes the score of the cell at the same relative (t, h, w) of its medium.
    """
    if torch.equal(grid, other):
        return scores
    moved = torch.empty(len(other), dtype=scores.dtype, device=scores.device)
    for medium in other[:, 0].unique().tolist():
        here, there = grid[:, 0] == medium, other[:, 0] == medium
        size = grid[here, 1:].amax(0) + 1
        target = other[there, 1:]
        cell = (target * 2 + 1) * size // (2 * (target.amax(0) + 1))
        flat = (cell[:, 0] * size[1] + cell[:, 1]) * size[2] + cell[:, 2]
        moved[there] = scores[here][flat]
    return moved

"""Views that prune a video in ways that the papers compare themselves with.

They are baselines of SpecVLM (Sec. 4.3-4.4) and HIPPO (Sec. 6.4), and TABED's pooled view
(Sec. 6.1). A selector chooses exactly ``budget`` of the prompt's visual tokens, or all where there
are fewer, so that methods are compared at equal cost. The budget is for all media of the prompt
together. A *frame* is one (medium, t) of the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cosine_similarity

from saccade.core.capabilities import Capabilities, Capability, capabilities_that_hold
from saccade.core.prompt import Prefill, Prompt
from saccade.core.protocols import View
from saccade.drafting.views import saliency
from saccade.drafting.views.basic import Pruned, Select, TargetAttention, repack, uniform

GROUP_FRAMES = 4  # DyCoke merges tokens within groups of this many frames.


def frames(prompt: Prompt, target_attention: TargetAttention, budget: int) -> Int[Tensor, " kept"]:
    """Returns SD-Frame's choice: whole frames at a regular interval, as few as fill the budget.

    Of the last of these frames an even sample is taken if the whole frame exceeds the budget.
    """
    parts = _tokens_by_frame(prompt)
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
    """Selects consecutive tokens: the first, the middle or the last ones.

    In the middle, if the number of unselected tokens is odd, one fewer comes before the window than
    after it.
    """

    halves_before: int  # how many halves of the unselected tokens come before the window: 0, 1 or 2

    def __call__(
        self, prompt: Prompt, target_attention: TargetAttention, budget: int
    ) -> Int[Tensor, " kept"]:
        count = min(budget, prompt.visual_tokens)
        start = (prompt.visual_tokens - count) * self.halves_before // 2
        return torch.arange(start, start + count, device=prompt.grid.device)


def fastvid(prompt: Prompt, target_attention: TargetAttention, budget: int) -> Int[Tensor, " kept"]:
    """Returns SD-FastVID's choice: whole frames, first those least similar to the frame before.

    A frame is compared by the mean of its embeddings. The first frame of a medium comes first. Of
    the frame that exceeds the budget an even sample is taken.
    """
    parts = _tokens_by_frame(prompt)
    if not parts:
        return _fill(prompt, parts, budget)
    rows = prompt.embeds[prompt.visual]
    means = torch.stack([rows[part].float().mean(0) for part in parts])
    medium = torch.stack([prompt.grid[part[0], 0] for part in parts])
    similarity = means.new_full((len(parts),), -torch.inf)
    cosine = cosine_similarity(means[1:], means[:-1], dim=-1)
    similarity[1:] = cosine.masked_fill(medium[1:] != medium[:-1], -torch.inf)
    order = torch.sort(similarity, stable=True).indices
    return _fill(prompt, [parts[i] for i in order.tolist()], budget)


def dycoke(prompt: Prompt, target_attention: TargetAttention, budget: int) -> Int[Tensor, " kept"]:
    """Returns SD-DyCoke's choice: the tokens that remain after the most similar ones have merged
    into the token of the same cell of an earlier frame of their group.

    In each group of four frames, tokens of the second frame may merge into the first, those of the
    fourth into the third, and those of the third into the first. The most similar merge first. That
    leaves a quarter. For a smaller budget the first frames of the groups are grouped by four again,
    and so on. Once each medium has a single frame, its tokens are sampled evenly.
    """
    grid = prompt.grid
    time = prompt.grid[:, 1]
    first = (time == 0).nonzero().squeeze(-1)
    if min(budget, prompt.visual_tokens) <= len(first):
        return saliency.sample_evenly(first, budget)
    key, order = torch.sort(saliency.time_ordered_numbers(grid))
    # A frame merges into the frame whose number lacks its lowest set bit, in groups of four, of
    # sixteen, and so on: frame 1 merges into 0, 3 into 2, 2 into 0, and 12 into 8. The number that
    # ``time_ordered_numbers`` gives a cell grows by 1 from frame to frame. So subtracting the bit
    # from a token's number gives that of the same cell in the frame that it merges into.
    lowest_bit = time & -time
    partner_key = saliency.time_ordered_numbers(grid) - lowest_bit
    place = torch.searchsorted(key, partner_key).clamp(max=len(key) - 1)
    into = order[place]
    rows = prompt.embeds[prompt.visual]
    similarity = torch.empty(prompt.visual_tokens, device=grid.device)
    # The frames are compared one by one, to make no second copy of a long video.
    for part in _tokens_by_frame(prompt):
        similarity[part] = cosine_similarity(rows[part].float(), rows[into[part]].float(), dim=-1)
    similarity[key[place] != partner_key] = -torch.inf  # There is no token to merge into.
    # A frame's level is how many sizes of groups (4, 16, ... frames) have a group that begins with
    # it: 0 for frame 5, 1 for frame 4, 2 for frame 16. Tokens of a lower level merge first.
    level = torch.zeros_like(time)
    stride = 1
    while stride <= int(time.max()):
        stride *= GROUP_FRAMES
        level += time % stride == 0
    # The tokens that merge last come first: those of the highest level, and of equal levels those
    # least similar to the token that they would merge into.
    by_similarity = torch.sort(similarity, stable=True).indices
    by_level = torch.sort(level[by_similarity], descending=True, stable=True).indices
    return by_similarity[by_level][:budget].sort().values


@dataclass(frozen=True)
class Merged(View):
    """Prunes like ``Pruned`` and averages the dropped tokens into those that stay.

    Each dropped token joins the nearest earlier token of the same cell that stays. That token
    becomes the mean of itself and all that joined it, at its own position. A dropped token without
    such a partner is lost.
    """

    name: str
    select: Select
    keep: float = 0.1

    @property
    def offers(self) -> Capabilities:
        return frozenset({Capability.ORIGINAL_POSITIONS, Capability.AVERAGED_ROWS})

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        grid = prompt.grid
        chosen = Pruned(self.name, self.select, self.keep).choose(prefill, prompt)
        if len(chosen) in (0, prompt.visual_tokens):
            return prompt.select(chosen)
        # The key sorts by medium and cell, then by time. A token's leader is the chosen token with
        # the largest key that is not above the token's own: the token itself, or the latest chosen
        # one of the same cell. If the chosen token so found is of another cell, there is no leader.
        key = saliency.time_ordered_numbers(grid)
        chosen_keys, order = torch.sort(key[chosen])
        place = torch.searchsorted(chosen_keys, key, right=True) - 1
        leader = chosen[order[place.clamp(min=0)]]
        is_same_cell = (grid[leader] == grid)[:, [0, 2, 3]].all(-1)  # medium, h and w; not t
        leader = leader.masked_fill(~is_same_cell | (place < 0), -1)
        return _averaged(prompt, leader, grid[:, 1])


@dataclass(frozen=True)
class Pooled(View):
    """TABED's P: 2x2 average pooling of each frame; blocks at the edges have fewer members.

    With ``before_projector`` the rows are those that were averaged *before* the projector when the
    prompt was read (``Media.averaged_rows``), as in the paper. All rows of the prompt, text
    included, are then at the positions 0, 1, 2 and so on.

    Without it, the language model's rows are pooled *after* the projector, and each has the
    position of its block's top-left member. The same happens where a prompt has no averaged rows,
    as with Qwen, whose merger joins 2x2 patches already. Frames that are one cell high are pooled
    in pairs of tokens.
    """

    keep: ClassVar[float] = 0.25  # approximately, since smaller blocks at the edges leave more

    name: str
    before_projector: bool = False

    @property
    def needs(self) -> Capabilities:
        return capabilities_that_hold({Capability.AVERAGES_BEFORE_PROJECTOR: self.before_projector})

    @property
    def offers(self) -> Capabilities:
        return frozenset({Capability.AVERAGED_ROWS})

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        if not prompt.visual_tokens:
            return prompt
        if self.before_projector and prompt.media.averaged_rows is not None:
            # Each member of a block has the block's average in ``averaged_rows``. Pooling these
            # equal rows leaves one of them for each block.
            embeds = prompt.embeds.clone()
            embeds[prompt.visual] = prompt.media.averaged_rows
            pooled_media = replace(prompt.media, averaged_rows=None)
            averaged_prompt = replace(prompt, embeds=embeds, media=pooled_media)
            return repack(self(prefill, averaged_prompt))
        grid = prompt.grid
        block = torch.cat([grid[:, :2], grid[:, 2:] // 2], 1)
        group = torch.unique(block, dim=0, return_inverse=True)[1]
        row = torch.arange(prompt.visual_tokens, device=grid.device)
        # The leader of a block is its row with the smallest number. ``first_row`` begins with a
        # number that is larger than any row's, so that "amin" replaces it.
        first_row = row.new_full((int(group.max()) + 1,), prompt.visual_tokens)
        first_row = first_row.scatter_reduce(0, group, row, "amin")
        leader = first_row[group]
        corner = grid[:, 2] % 2 * 2 + grid[:, 3] % 2  # 0 to 3: a member's place in its block
        return replace(_averaged(prompt, leader, corner), grid=block[leader == row])


def _tokens_by_frame(prompt: Prompt) -> list[Int[Tensor, " _tokens"]]:
    """Returns the visual tokens of each frame, in prompt order."""
    _, frame = torch.unique(prompt.grid[:, :2], dim=0, return_inverse=True)
    order = torch.sort(frame, stable=True).indices
    return list(order.split(torch.bincount(frame).tolist()))


def _fill(
    prompt: Prompt, parts: Sequence[Int[Tensor, " _tokens"]], budget: int
) -> Int[Tensor, " kept"]:
    """Returns the tokens that fill the budget, in prompt order.

    Whole parts are taken, the first one first, and an even sample of the first part that does not
    fit.
    """
    chosen = [torch.arange(0, device=prompt.grid.device)]
    for part in parts:
        # A part that fits is taken whole, and once the budget is used up nothing is taken.
        chosen.append(saliency.sample_evenly(part, budget))
        budget -= len(chosen[-1])
    return torch.cat(chosen).sort().values


def _averaged(
    prompt: Prompt, leader: Int[Tensor, " visual"], member: Int[Tensor, " visual"]
) -> Prompt:
    """Returns the prompt with each group of visual rows replaced by the group's mean. ``leader``
    has, for each row, the row that stands for its group: a row that is its own leader stays, and
    one whose leader is -1 is dropped.

    ``member`` has a number for each row, and no two rows of a group have the same. First the rows
    with the smallest number are added to their groups' sums, then those with the next, and so on.
    So a step adds at most one row to each sum, and no sum depends on the order in which threads
    add.
    """
    leaders = (leader == torch.arange(len(leader), device=leader.device)).nonzero().squeeze(-1)
    group = torch.searchsorted(leaders, leader)
    rows_by_step = [
        ((member == number) & (leader >= 0)).nonzero().squeeze(-1) for number in member.unique()
    ]
    count = torch.bincount(group[leader >= 0], minlength=len(leaders))

    def mean(rows: Float[Tensor, "visual dim"]) -> Float[Tensor, "leader dim"]:
        exact = torch.promote_types(rows.dtype, torch.float32)
        total = torch.zeros(len(leaders), rows.shape[1], dtype=exact, device=rows.device)
        for step_rows in rows_by_step:
            total.index_add_(0, group[step_rows], rows[step_rows].to(exact))
        return (total / count[:, None]).to(rows.dtype)

    pruned = prompt.select(leaders)
    embeds = pruned.embeds.clone()
    embeds[pruned.visual] = mean(prompt.embeds[prompt.visual])
    media = replace(pruned.media, deepstack=tuple(map(mean, prompt.media.deepstack)))
    return replace(pruned, embeds=embeds, media=media)


DYCOKE = Merged("dycoke", dycoke)
POOLED = Pooled("pooled", before_projector=True)
POOLED_AFTER = Pooled("pooled-after")
VIEWS = (
    Pruned("frames", frames),
    Pruned("window-front", Window(0)),
    Pruned("window-middle", Window(1)),
    Pruned("window-end", Window(2)),
    Pruned("fastvid", fastvid),
    DYCOKE,
    # This is SpecVLM without stage I, by its name in the paper's tables. Stage I chooses V_R by
    # attention. Without it V_R is empty and Eq. 7 samples *all* tokens evenly, as ``uniform`` does.
    Pruned("rest", uniform),
)

"""Finds which visual tokens of a clip the draft reads, for the pictures of ``saccade ui``.

The draft's view decides this, perhaps differently for each attention head, so each token gets the
share of heads that read it. Drafters do not record it. So the target prefills the prompt once more,
and the view is applied to that prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.core.capabilities import Capability
from saccade.core.prompt import Inputs, Prefill, Prompt
from saccade.core.protocols import EarlyView, View
from saccade.core.sampling import Sampling
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import Setup, TextMaker
from saccade.drafting.views.basic import views_to_read
from saccade.model.backbone import Backbone
from saccade.model.session import Session


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The visual tokens that one view kept.

    ``share[t, h, w]`` is the share of heads that kept the token of the first medium at that time,
    row and column. ``kept_count`` is how many of the ``total_count`` visual tokens of all media a
    head reads. ``are_means`` says whether each kept token is the mean of several.
    """

    view: str
    share: Float[Tensor, "t h w"]
    kept_count: int
    total_count: int
    are_means: bool = False


def measure_kept_tokens(
    target: Backbone,
    draft: Backbone | None,
    recipe: Recipe,
    inputs: Inputs,
    draft_inputs: Inputs | None,
    text_maker: TextMaker,
) -> tuple[KeptTokens, ...]:
    """Returns what each view of the draft kept: several for an ensemble, none if the draft reads no
    visual tokens or the prompt has none.

    A method may leave open how much the draft reads, and planning decides it. So ``recipe`` must be
    planned, such as the ``recipe`` of a stream that has started. ``draft_inputs`` are those of the
    draft's own processor; None if the draft gets the target's. A call costs a prefill of the target
    and one run of the draft's vision tower.
    """
    view = recipe.view
    offers = recipe.drafter.offers
    starts_from_target_keys = Capability.STARTS_FROM_TARGET_KEYS in offers
    if Capability.READS_VIEW not in offers:
        return ()
    if draft is None and not starts_from_target_keys:
        return ()
    # No answer is started, so room for one token is enough.
    setup = Setup(target, draft, view, recipe.shape, [Sampling()], room=1, text_maker=text_maker)
    session = Session(target, setup.rules)
    (prefill,) = session.prefill(target.prompts(inputs), record=recipe.records_attention)
    # Some views put words (a newline, a caption) in the place of videos and images.
    (texts,) = text_maker.replacement_texts(view, inputs)  # There is one request.
    prefill = replace(prefill, replacement_texts=texts)
    prompt = (
        prefill.prompt
        if starts_from_target_keys
        else _draft_prompt(setup, prefill, draft_inputs or inputs)
    )
    if not prompt.visual_tokens:
        return ()
    return tuple(_measure_view(each, prefill, prompt) for each in views_to_read(view))


def _draft_prompt(setup: Setup, prefill: Prefill, inputs: Inputs) -> Prompt:
    """Returns the draft's own prompt before the view drops anything."""
    drafting = setup.draft_model()
    if drafting.shares_rows_with(setup.target):
        return drafting.adopt(prefill.prompt)
    return drafting.prompts(setup.draft_inputs(inputs))[0]


def _measure_view(view: View, prefill: Prefill, prompt: Prompt) -> KeptTokens:
    """Applies one view and returns what it kept."""
    if Capability.BESIDE_TARGET in view.needs:
        # A draft beside the target reads an early choice of tokens before the target's prefill has
        # ended. After the prefill the view chooses, among these, the tokens that the draft keeps.
        early_view = cast(EarlyView, view)
        early_choice = early_view.choose_early(prompt)
        pruned = prompt.select(early_view.choose(prefill, prompt, early_choice))
    else:
        pruned = view(prefill, prompt)
    shares = on_grid(prompt, kept_share(prompt, pruned))
    are_means = Capability.AVERAGED_ROWS in view.offers
    return KeptTokens(view.name, shares, pruned.visual_tokens, prompt.visual_tokens, are_means)


def kept_share(prompt: Prompt, pruned: Prompt) -> Float[Tensor, " visual"]:
    """Returns, for each visual token of a prompt, the share of heads that keep it in a pruned one.

    The share is 0 or 1 where all heads keep the same tokens. Some views divide tokens into pages,
    and each step of the draft reads the few pages that suit it. Every token in a page then gets the
    share of pages that one step reads: 0.25 if a step reads 2 of 8 pages.
    """
    share = torch.zeros(len(prompt))
    heads, paged = pruned.reading.heads, pruned.reading.paged
    # Rows are numbered as in the whole prompt. ``heads`` [layer, kv_head, kept] has the rows that
    # each head keeps. It is None where all heads keep the same rows, which are then in ``places``.
    # ``rows_by_head`` has one entry for each head of each layer, or a single one for all.
    if heads is None:
        rows_by_head = [pruned.places[pruned.visual]]
    else:
        rows_by_head = [*heads.flatten(0, 1)]
    for rows in rows_by_head:
        share[rows.cpu()] += 1 / len(rows_by_head)
    if paged is not None:
        page_count = len(paged.rows)  # ``paged.rows`` is [page, row of the page].
        share[paged.rows.cpu()] = paged.pages_per_step / page_count
    return share[prompt.visual.cpu()]


def on_grid(prompt: Prompt, values: Float[Tensor, " visual"]) -> Float[Tensor, "t h w"]:
    """Arranges the values of the first medium's visual tokens by time, row and column.

    The medium's smallest time, row and column become index 0. Cells without a token are NaN.
    """
    grid = prompt.grid.cpu()  # Each visual token's (medium, time, row, column).
    in_first_medium = grid[:, 0] == grid[0, 0]
    places = grid[in_first_medium, 1:]
    t, h, w = (places - places.amin(0)).unbind(1)
    cells = torch.full((int(t.max()) + 1, int(h.max()) + 1, int(w.max()) + 1), float("nan"))
    cells[t, h, w] = values[in_first_medium]
    return cells

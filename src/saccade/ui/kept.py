"""What the draft saw of a clip: the share of heads that kept each visual token.

Drafts keep no note of it, so the view is applied once more, to a prefill of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.core.prompt import Inputs, Prefill, Prompt
from saccade.core.protocols import View
from saccade.core.sampling import Sampling
from saccade.drafting.drafters import EarlyExit, Lookup, SelfDrafter
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import Setup, Words
from saccade.drafting.views.pruning import Merged, Pooled
from saccade.model.backbone import Backbone
from saccade.model.session import Session


@dataclass(frozen=True, eq=False)
class KeptClips:
    """One view of the clip. ``share`` is of each token, in the order of time, row, column."""

    view: str
    share: Float[Tensor, "t h w"]
    count: int  # tokens that a head reads
    whole: int  # of so many
    means: bool = False  # whether each stands for several, as their mean


def kept(
    target: Backbone,
    draft: Backbone | None,
    recipe: Recipe,
    inputs: Inputs,
    draft_inputs: Inputs | None,
    words: Words,
) -> tuple[KeptClips, ...]:
    """Each view of the draft's, several for an ensemble; none where the draft does not look.

    ``recipe`` as a stream has settled it. Costs a prefill of the target, and of the draft's vision.
    """
    view = recipe.view
    own = recipe.drafter in (SelfDrafter, EarlyExit)
    looks = recipe.drafts and recipe.drafter is not Lookup and (own or draft is not None)
    if not looks:
        return ()
    setup = Setup(target, draft, view, recipe.shape, [Sampling()], 1, words)
    session = Session(target, setup.rules)
    (prefill,) = session.prefill(target.prompts(inputs), record=view.attention)
    prefill = replace(prefill, words=words.replacement_texts(view, inputs)[0])
    prompt = prefill.prompt if own else _read(setup, prefill, draft_inputs or inputs)
    if not prompt.visual_tokens:
        return ()
    return tuple(_seen(each, prefill, prompt) for each in view.parts)


def _read(setup: Setup, prefill: Prefill, inputs: Inputs) -> Prompt:
    """The draft's own whole prompt."""
    draft = setup.draft_model()
    if draft.shares_rows_with(setup.target):
        return draft.adopt(prefill.prompt)
    return draft.prompts(setup.draft_inputs(inputs))[0]


def _seen(view: View, prefill: Prefill, prompt: Prompt) -> KeptClips:
    held = view.early_tokens(prompt)  # as a draft that started early chose it
    if held is None:
        pruned = view(prefill, prompt)
    else:
        pruned = prompt.select(view.choose(prefill, prompt, held))
    cells = on_grid(prompt, share(prompt, pruned))
    means = isinstance(view, Pooled | Merged)
    return KeptClips(view.name, cells, pruned.visual_tokens, prompt.visual_tokens, means)


def share(prompt: Prompt, pruned: Prompt) -> Float[Tensor, " seen"]:
    """The share of heads that keep each visual token: 0 or 1 where all keep the same. Of what is
    read page by page, the share of it that a step reads."""
    rows = torch.zeros(len(prompt))
    lists = [pruned.index[pruned.visual]] if pruned.heads is None else pruned.heads.flatten(0, 1)
    for own in lists:
        rows[own.cpu()] += 1 / len(lists)
    if pruned.paged is not None:
        rows[pruned.paged.rows.cpu()] = pruned.paged.pages_per_step / len(pruned.paged.rows)
    return rows[prompt.visual.cpu()]


def on_grid(prompt: Prompt, values: Float[Tensor, " seen"]) -> Float[Tensor, "t h w"]:
    """Values of the first medium's tokens at their cells; NaN where there is no token."""
    grid = prompt.grid.cpu()
    first = grid[:, 0] == grid[0, 0]
    t, h, w = (grid[first, 1:] - grid[first, 1:].amin(0)).unbind(1)
    found = torch.full((int(t.max()) + 1, int(h.max()) + 1, int(w.max()) + 1), float("nan"))
    found[t, h, w] = values[first]
    return found

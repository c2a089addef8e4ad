"""Lets the draft answer by itself under a view, as in HIPPO's Fig. 3 and TABED's Table 9.

It shows whether a view keeps what matters for the question: the draft's own answers become wrong
when too much is dropped, perhaps before its acceptance rate falls. ``saccade bench`` runs it as a
method named ``draft/view=...``.
"""

from __future__ import annotations

from collections.abc import Sequence

from saccade.core.capabilities import Capability
from saccade.core.errors import OptionError
from saccade.core.prompt import Inputs
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, Tree
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import NEEDS_TOKENIZER, Setup
from saccade.inputs import Loaded
from saccade.methods import resolve
from saccade.model.session import Session

PREFIX = "draft"


def is_draft_only(name: str) -> bool:
    """Returns whether a method's name means the draft alone: ``draft`` or ``draft/view=...``."""
    return name == PREFIX or name.startswith(PREFIX + "/")


def draft_only_recipe(name: str) -> Recipe:
    """Returns the recipe whose view the draft answers under.

    Raises OptionError for a view that puts words in the place of pixels, or that needs costs, and
    for a name that chooses anything but a view. Raises MethodError for a name that ``resolve`` does
    not know.
    """
    # "draft/view=uniform" has the view of "sd/view=uniform". All other parts must be those of "sd".
    recipe = resolve("sd" + name.removeprefix(PREFIX))
    plain = resolve("sd")
    other_parts = (recipe.drafter, recipe.shape, recipe.schedule)
    if other_parts != (plain.drafter, plain.shape, plain.schedule):
        raise OptionError(
            f"{name}: the draft model answers by itself, so only one view and its settings can be "
            f"chosen, as in {PREFIX}/view=uniform/keep=0.1"
        )
    # A view needs a tokenizer where it writes words, such as a caption, in the place of pixels.
    if not recipe.view.needs.isdisjoint(NEEDS_TOKENIZER):
        raise OptionError(
            f"{name}: a draft answers by itself under one view of the pixels, not under words in "
            "their place; choose another view"
        )
    # Some views keep a share of the visual tokens that is computed from the costs of the target and
    # the draft. That is done when a recipe is planned. Here the target does not answer, so there is
    # no plan and no share.
    if Capability.COSTS in recipe.view.needs:
        raise OptionError(f"{name}: that view needs a target that answers; choose another view")
    return recipe


def draft_answer(
    target: Loaded,
    draft: Loaded,
    inputs: Inputs,
    draft_inputs: Inputs | None,
    recipe: Recipe,
    *,
    max_new_tokens: int,
    end_ids: Sequence[int],
) -> list[int]:
    """Returns the draft's greedy answer over the visual tokens that the recipe's view keeps, as
    token ids. The answer ends with the first token that is in ``end_ids``, or after
    ``max_new_tokens`` tokens.

    The target reads its prompt too, because a view may choose by what the target attends to. It
    judges nothing. ``inputs`` are the target's, and ``draft_inputs`` the draft's if it has a
    processor of its own. Raises OptionError for a draft that is a head, which cannot answer alone:
    it reads the target's hidden states.
    """
    if draft.backbone.hidden_layers:
        raise OptionError(f"{PREFIX} needs a draft model, and {draft.name} is a head: leave it out")
    setup = Setup(
        target.backbone, draft.backbone, recipe.view, recipe.shape, [Sampling()], max_new_tokens
    )
    common, banned = setup.shared_vocabulary()
    # The target reads its prompt, and records its attention if the view chooses by it.
    target_prompts = target.backbone.prompts(inputs)
    target_prefills = Session(target.backbone, [Sampling()]).prefill(
        target_prompts, record=recipe.records_attention
    )
    # The draft reads what the view keeps of its own prompt.
    readable_inputs = setup.draft_inputs(inputs if draft_inputs is None else draft_inputs)
    prompts = draft.backbone.prompts(readable_inputs, with_averaged_rows=setup.needs_averaged_rows)
    session = Session(
        draft.backbone, [Sampling()], vocab=common, banned=banned, room=max_new_tokens
    )
    target_prefill = target_prefills[0].to(draft.backbone.device)
    session.prefill([recipe.view(target_prefill, prompts[0])])
    # Each forward without a drafted tree gives one more token.
    ids: list[int] = []
    while len(ids) < max_new_tokens and not (ids and ids[-1] in end_ids):
        token = session.score({0: Tree()})[0].law(ROOT)
        assert isinstance(token, int), "a greedy law is one token"
        ids.append(token)
        session.commit({0: [token]})
    return ids

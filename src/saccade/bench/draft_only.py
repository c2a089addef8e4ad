"""What the draft answers by itself under a view: HIPPO's Fig. 3 and TABED's Table 9.

A view that keeps what matters leaves the draft's own answers right; one that does not, shows here
before it shows in the acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence

from saccade.core.errors import OptionError
from saccade.core.prompt import Inputs
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import Setup
from saccade.drafting.views.basic import TextView
from saccade.inputs import Loaded
from saccade.methods import resolve
from saccade.model.session import Session

PREFIX = "draft"


def is_draft_only(name: str) -> bool:
    """Whether a name means the draft by itself: ``draft`` or ``draft/view=...``."""
    return name == PREFIX or name.startswith(PREFIX + "/")


def recipe(name: str) -> Recipe:
    """The recipe whose view the draft is to answer under. Raises OptionError for views of words."""
    found = resolve("sd" + name.removeprefix(PREFIX))
    if isinstance(found.view, TextView):
        raise OptionError(f"{name}: a draft answers by itself under one view of the pixels")
    return found


def answer(
    target: Loaded,
    draft: Loaded,
    inputs: Inputs,
    own: Inputs | None,
    view: Recipe,
    *,
    tokens: int,
    ends: Sequence[int],
) -> list[int]:
    """The draft's greedy answer over the visual tokens that the view keeps of its prompt."""
    setup = Setup(target.backbone, draft.backbone, view.view, view.shape, [Sampling()], tokens)
    common, banned = setup.shared_vocabulary()
    prompts = target.backbone.prompts(inputs)
    guide = Session(target.backbone, [Sampling()]).prefill(prompts, record=view.view.attention)
    readable = setup.draft_inputs(inputs if own is None else own)
    read = draft.backbone.prompts(readable, coarse=setup.coarse)
    session = Session(draft.backbone, [Sampling()], vocab=common, banned=banned, room=tokens)
    session.prefill([view.view(guide[0], read[0])])
    found: list[int] = []
    while len(found) < tokens and not (found and found[-1] in ends):
        law = session.score({0: Tree()})[0].law(-1)
        assert isinstance(law, int), "greedy"
        found.append(law)
        session.commit({0: [law]})
    return found

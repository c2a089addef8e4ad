"""``head``: the head that a model brings along, or a published one, drafts for it.

A head is a decoder layer, or a few, that read the target's hidden states (``model/heads``). It is a
drafter like others: its view is a choice among the prompt's rows, at the target's positions, and it
grows in any shape.

Sources: multi-token prediction of DeepSeek-V3 (arXiv:2412.19437, section 2.2), EAGLE-3
(arXiv:2503.01840) and DFlash (arXiv:2602.06036). A deviation: the first MTP layer drafts every
token, as in vLLM. Published numbers of drafted tokens differ, and a chain of 3 is the default here.
"""

from __future__ import annotations

from saccade.drafting.drafters import HeadDrafter
from saccade.drafting.provides import Provides
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.policies import Chain

HEAD = Recipe(
    name="head",
    about="a chain of 3 by the head that the model brings along, or by a published one",
    drafter=HeadDrafter,
    shape=Chain(3),
)

PROVIDES = Provides(recipes=(HEAD,), drafters={"head": HeadDrafter})

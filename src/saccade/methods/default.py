"""``auto``: Saccade's own method, and the default. It drafts on an even sample of the video, or on
the beginning of a document, as far as that pays.

The shape decides in every round (see ``drafting/shapes/auto.py``). The view's budget is set once by
what a step of the draft costs here: as much as the draft reads without getting slower
(``recipe.plan``).
"""

from __future__ import annotations

from saccade.drafting.drafters import ModelDrafter
from saccade.drafting.provides import Provides
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.auto import Auto
from saccade.drafting.views.basic import AFFORDABLE

AUTO = Recipe(
    name="auto",
    about="an even sample of the video or the beginning of a text, drafted on as far as it pays",
    drafter=ModelDrafter,
    view=AFFORDABLE,
    shape=Auto(),
)

PROVIDES = Provides(
    recipes=(AUTO,),
    shapes={
        "auto": Auto(),
        "auto-chain": Auto(runners_up=0),
        "auto-model": Auto(copies=False),
    },
)

"""``auto``: our own, and the default. An even sample of the video, drafted on as far as it pays.

The shape is settled round by round (see ``controller``); the view's budget once, by what a step of
the draft costs here: as much of the video as it reads without getting slower (``recipe.plan``).
"""

from __future__ import annotations

from saccade.drafting.drafters import ModelDrafter
from saccade.drafting.provides import Provides
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.auto import Auto
from saccade.drafting.views.basic import AFFORDABLE

AUTO = Recipe(
    name="auto",
    about="an even sample of the video, drafted on as far as it pays; plain decoding where not",
    drafter=ModelDrafter,
    view=AFFORDABLE,
    shape=Auto(),
)

PROVIDES = Provides(recipes=(AUTO,), shapes={"auto": Auto(), "auto-chain": Auto(runners=0)})

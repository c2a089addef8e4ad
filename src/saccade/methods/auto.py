"""``auto``: our own, and the default. An even sample of the video, drafted on as far as it pays.

The shape is settled round by round (see ``control``); the view's budget once, by what the draft's
step costs here: as much of the video as it reads without getting slower (``Recipe.fit``).
"""

from __future__ import annotations

from saccade.drafting.controller import Auto
from saccade.drafting.drafters import ModelDraft
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import serial
from saccade.drafting.views import AFFORDABLE

AUTO = Recipe(
    name="auto",
    about="an even sample of the video, drafted on as far as it pays; plain decoding where not",
    drafter=ModelDraft,
    view=AFFORDABLE,
    shape=Auto(),
    schedule=serial,
)

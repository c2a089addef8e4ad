"""The plain methods that every paper compares with, and the simplest views, shapes and drafters.

Views, shapes and drafters can be put into any method by an override, such as ``sd/view=random``.
"""

from __future__ import annotations

from functools import partial

from saccade.drafting.drafters import Copies, EarlyExit, Lookup, ModelDrafter, NoDraft, SelfDrafter
from saccade.drafting.provides import Provides, Setting, parse_whole
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.policies import Best, Chain, Static
from saccade.drafting.views import baseline_pruning, basic
from saccade.methods.specvlm import TREE

AR = Recipe(
    name="ar",
    about="plain decoding: one token per target forward",
    drafter=NoDraft,
    shape=Chain(0),
)

SD = Recipe(
    name="sd",
    about="speculative decoding, a chain of 5 by a draft that sees the whole video",
    drafter=ModelDrafter,
    shape=Chain(5),
)

LOOKUP = Recipe(
    name="lookup",
    about="prompt lookup: n-grams of the text, no draft model",
    drafter=Lookup,
    shape=Chain(10),
)

SD_TREE = Recipe(
    name="sd-tree",
    about="speculative decoding, a static tree by a draft that sees the whole video",
    drafter=ModelDrafter,
    shape=Static(TREE),
)

# ``draw`` in an override such as ``sd/view=random/draw=3``. For each number, the view ``random``
# makes another random choice.
DRAW = Setting(
    axis="draw",
    owner=basic.Random,
    field="draw",
    parse=partial(parse_whole, zero=True),
    choices="which of view=random's draws, from 0",
    unmet_message="is the random view's: it needs view=random",
    default=0,
)

PROVIDES = Provides(
    recipes=(AR, SD, SD_TREE, LOOKUP),
    views=(*basic.VIEWS, *baseline_pruning.VIEWS),
    shape_families=(Chain, Best, Static),
    drafters={
        "model": ModelDrafter,
        "self": SelfDrafter,
        "early-exit": EarlyExit,
        "lookup": Lookup,
        "copies": Copies,
        "none": NoDraft,
    },
    axes={"draw": DRAW},
)

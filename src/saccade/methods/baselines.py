"""The plain methods every paper compares with."""

from __future__ import annotations

from saccade.drafting.drafters import EarlyExit, ModelDrafter, NoDraft, SelfDrafter
from saccade.drafting.lookup import Lookup
from saccade.drafting.provides import Provides
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import serial
from saccade.drafting.shapes.policies import Best, Chain, Static
from saccade.drafting.views import basic as views
from saccade.drafting.views import pruning
from saccade.drafting.views.basic import FULL
from saccade.methods.specvlm import TREE

AR = Recipe(
    name="ar",
    about="plain decoding: one token per target forward",
    drafter=NoDraft,
    view=FULL,
    shape=Chain(0),
    schedule=serial,
)

SD = Recipe(
    name="sd",
    about="speculative decoding, a chain of 5 by a draft that sees the whole video",
    drafter=ModelDrafter,
    view=FULL,
    shape=Chain(5),
    schedule=serial,
)

LOOKUP = Recipe(
    name="lookup",
    about="prompt lookup: n-grams of the text, no draft model",
    drafter=Lookup,
    view=FULL,
    shape=Chain(10),
    schedule=serial,
)

SD_TREE = Recipe(
    name="sd-tree",
    about="speculative decoding, a static tree by a draft that sees the whole video",
    drafter=ModelDrafter,
    view=FULL,
    shape=Static(TREE),
    schedule=serial,
)

PROVIDES = Provides(
    recipes=(AR, SD, SD_TREE, LOOKUP),
    views=(
        views.FULL,
        views.NONE,
        views.RANDOM,
        views.UNIFORM,
        views.SCATTERED,
        views.AFFORDABLE,
        views.ATTENTION,
        pruning.FRAMES,
        pruning.FRONT,
        pruning.MIDDLE,
        pruning.END,
        pruning.FASTVID,
        pruning.DYCOKE,
        pruning.REST,
    ),
    families=(Chain, Best, Static),
    drafters={
        "model": ModelDrafter,
        "self": SelfDrafter,
        "early-exit": EarlyExit,
        "lookup": Lookup,
        "none": NoDraft,
    },
)

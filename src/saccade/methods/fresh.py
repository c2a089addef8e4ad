"""Fresh: Sparse-to-Dense's sets, chosen again round by round. Saccade's own.

What a head attends to moves with the answer: on real weights the keys chosen at prefill hold .65 of
the mass that the head's own top keys of the moment would, and drafts end early. Verification asks
every judged row's queries anyway; with those of the last R rows, before every n-th round,

    K_{l,h} = top-K_j  (1 + hold [j in K_{l,h}])  mean over the last R judged rows i, summed over
              the heads of a group, of A_{l,h}[i, j]

The target's rows never depend on it, so the answer does not (see ``docs/lossless.md``).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, cast

from saccade.core.errors import MethodError
from saccade.core.protocols import Refresh
from saccade.drafting.provides import Axis, Choices, Provides
from saccade.drafting.recipe import Recipe
from saccade.methods.std import STD, PerHead

FRESH = replace(
    STD,
    name="fresh",
    about="std with each head's keys chosen again every round, by what the target looks at now",
    view=PerHead(refresh=Refresh()),
)


def _choose(choices: Choices, value: str) -> Choices:
    view: Any = choices["view"]
    every = int(value) if value.isascii() and value.isdigit() else -1
    if every < 0:
        raise MethodError(f"refresh={value} is not a number of rounds; 0 never chooses anew")
    if not view.attention or "refresh" not in {field.name for field in fields(cast(Any, view))}:
        raise MethodError(f"refresh needs a view by attention, not {view.name}: as in std, fresh")
    return {"view": replace(view, refresh=Refresh(every) if every else None)}


def _told(recipe: Recipe) -> str | None:
    return None if recipe.view.refresh is None else str(recipe.view.refresh.every)


PROVIDES = Provides(
    recipes=(FRESH,),
    axes={"refresh": Axis(_choose, _told, lambda: ["rounds after which a view chooses anew"])},
)

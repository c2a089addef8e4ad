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
    refresh = _read(value)
    if not view.attention or "refresh" not in {field.name for field in fields(cast(Any, view))}:
        raise MethodError(f"refresh needs a view by attention, not {view.name}: as in std, fresh")
    return {"view": replace(view, refresh=refresh if refresh.every else None)}


def _read(value: str) -> Refresh:
    """``N``, ``N-ROWS`` or ``N-ROWS-HOLD``. Raises MethodError."""
    parts = value.split("-")
    every, rows, hold, *more = [*parts, *_told_of(Refresh())[len(parts) :]]
    if not every.isascii() or not every.isdigit():
        raise MethodError(f"refresh={value} is not a number of rounds; 0 never chooses anew")
    try:
        found = Refresh(int(every), int(rows), float(hold))
    except ValueError:
        found = None
    if more or found is None or found.rows < 1 or not 0 <= found.hold < float("inf"):
        raise MethodError(
            f"refresh={value}: N, N-ROWS or N-ROWS-HOLD, as in 1-8-0.25: every round, by the last "
            "8 rows, what is held counting a quarter more"
        )
    return found


def _told_of(refresh: Refresh) -> tuple[str, str, str]:
    return str(refresh.every), str(refresh.rows), f"{refresh.hold:g}"


def _told(recipe: Recipe) -> str | None:
    if recipe.view.refresh is None:
        return None
    own, usual = _told_of(recipe.view.refresh), _told_of(Refresh())
    said = max([1, *(place + 1 for place in (1, 2) if own[place] != usual[place])])
    return "-".join(own[:said])


PROVIDES = Provides(
    recipes=(FRESH,),
    axes={"refresh": Axis(_choose, _told, lambda: ["N, N-ROWS or N-ROWS-HOLD rounds"])},
)

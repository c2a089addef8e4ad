"""TABED: Test-Time Adaptive Ensemble Drafting for Robust Speculative Decoding in LVLMs.

Lee et al., 2025. One draft model reads the prompt in several ways ("views") at once: M, all of it;
T, its text, with a newline for each video or image; C, its text, with a caption for each video or
image; P, all of it, with its visual tokens pooled 2x2. What it drafts follows the weighted average
of the views' laws q_i:

    q(. ; w) = sum_i w_i q_i,   w fixed for a draft of gamma = 5 tokens                  (Alg. 1)
    MT*      w* = argmin of  sum_t D(p_t || q_t(. ; w)),   over all w in tenths that sum to 1
    MTCP*    w  = softmax([1/e_1, ..., 1/e_m]; tau),   e_i = sum_t D(p_t || q_t,i)     (App. B.2)

All weights are equal in the first draft. t runs over the token positions verified so far, or over
the last h of them (a window). The bonus token's position is not among them, because no view has a
law there. D is the KL divergence, the total variation distance (TVD), or a miss: 1 where the
arg-max of q is not the target's and else 0. Weights that miss equally often are compared by their
KL, as in the published runs of MT*. Both p and q are the models' own laws, before any sampling
rule. From round to round no laws are kept, only the sums of D and, with a window, D at each
position in it.

MTCP*'s published code takes softmax(log(1/e) / tau), so w is proportional to 1/e at tau = 1. Only
the ratios of the errors count. With the equation as printed, the weights become equal as the sums
e_i grow, because every 1/e_i goes to 0. We do as the code does; ``weights=softmax`` is the equation
as printed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.drafting.ensemble import Ensemble, LogLaw, Weighting
from saccade.drafting.provides import Provides, Setting, parse_positive
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes.policies import Chain
from saccade.drafting.views.baseline_pruning import POOLED, POOLED_AFTER
from saccade.drafting.views.basic import CAPTION, FULL, TEXT, Several

GAMMA = 5  # tokens of a draft
LEAST_ERROR = 1e-11  # The published code replaces smaller errors by this one.
GRID_STEPS = 10  # The weights of MT* are multiples of a tenth.
CANDIDATES_AT_ONCE = 16  # candidates whose mixtures are in memory at once

Distance = Literal["kl", "tvd", "matches"]


def kl(p: LogLaw, q: LogLaw) -> Tensor:
    """Returns D(p || q); ids of zero mass under p add nothing."""
    return (p.exp() * (p - q)).where(p.exp() > 0, torch.zeros_like(p)).sum(-1)


def tvd(p: LogLaw, q: LogLaw) -> Tensor:
    """Returns half the L1 distance."""
    return (p.exp() - q.exp()).abs().sum(-1) / 2


def misses(p: LogLaw, q: LogLaw) -> Tensor:
    """Returns 1 where the likeliest tokens differ, else 0."""
    return (p.argmax(-1) != q.argmax(-1)).double()


# Where there are two functions, the second decides between candidates that tie by the first. All
# are smaller for a better candidate: "matches" counts the tokens that do not match.
DISTANCES: dict[Distance, tuple[Callable[[LogLaw, LogLaw], Tensor], ...]] = {
    "kl": (kl,),
    "tvd": (tvd,),
    "matches": (misses, kl),
}


@dataclass(frozen=True)
class History:
    """How far each candidate's laws have been from the target's.

    A candidate is a view, or for ``Grid`` a mixture of views. A column has the distances by one of
    the functions in ``DISTANCES``.
    """

    total: Float[Tensor, "candidate column"]  # the distances, summed over positions
    # With a window, the distances at each position within it.
    recent: tuple[Float[Tensor, "candidate column"], ...] = ()
    position_count: int = 0  # how many positions were added so far
    view_count: int = 0  # for ``Grid``, how many views a candidate mixes

    def add(self, new: Float[Tensor, "position candidate column"], window: int | None) -> History:
        """Returns the history with the distances of new positions. With a ``window`` only the last
        so many positions count."""
        recent: tuple[Tensor, ...] = ()
        if window is None:
            total = self.total + new.sum(0)
        else:
            recent = (*self.recent, *new)[-window:]
            total = torch.stack(recent).sum(0)
        return History(total, recent, self.position_count + len(new), self.view_count)


def distances(p: LogLaw, q: Float[Tensor, "candidate position vocab"], name: Distance) -> Tensor:
    """Returns the distances of each candidate from p [position, vocab], as [position, candidate,
    column]."""
    p_for_each = p.expand_as(q)
    columns = [distance(p_for_each, q) for distance in DISTANCES[name]]
    return torch.stack(columns, -1).transpose(0, 1)


@dataclass(frozen=True)
class Equal(Weighting):
    """Equal weights of all views: MT and MTCP. Its state is the number of views."""

    def start(self, views: int) -> int:
        return views

    def weights(self, state: int) -> tuple[float, ...]:
        return (1 / state,) * state

    def fold(self, state: int, p: LogLaw, q: LogLaw) -> int:
        return state


@cache
def grid(views: int) -> tuple[tuple[float, ...], ...]:
    """Returns every way to share ten tenths among views, the first view's share falling: eleven for
    two views, 66 for three, 286 for four."""
    # Stars and bars: ten tenths, and a bar between each view and the next, fill a row of places.
    # The tenths between two bars, or between a bar and an end of the row, are one view's share. For
    # two views there is one bar, and eleven places. A bar at place 3, counted from 0, has three
    # tenths before it and seven after it, so the shares are .3 and .7.
    places = GRID_STEPS + views - 1
    shares = []
    for bars in combinations(range(places), views - 1):
        borders = pairwise((-1, *bars, places))
        shares.append(tuple((right - left - 1) / GRID_STEPS for left, right in borders))
    return tuple(reversed(shares))


@dataclass(frozen=True)
class Grid(Weighting):
    """MT*: the weights of a grid that were best so far, for any number of views."""

    distance: Distance = "kl"
    window: int | None = None

    def start(self, views: int) -> History:
        columns = len(DISTANCES[self.distance])
        return History(torch.zeros(len(grid(views)), columns, dtype=torch.double), view_count=views)

    def weights(self, state: History) -> tuple[float, ...]:
        if not state.position_count:
            return (1 / state.view_count,) * state.view_count
        # Lists are compared by their first number, and by the second where the first ones tie.
        best = min(range(len(state.total)), key=lambda place: state.total[place].tolist())
        return grid(state.view_count)[best]

    def fold(self, state: History, p: LogLaw, q: LogLaw) -> History:
        shares = torch.tensor(grid(state.view_count), device=q.device, dtype=q.dtype)
        # The mixtures [candidate position vocab] are computed for a few candidates at a time, each
        # as a product [candidate view] x [view position vocab].
        parts = shares.split(CANDIDATES_AT_ONCE)
        mixtures = (torch.tensordot(part, q.exp(), 1).log() for part in parts)
        new = torch.cat([distances(p, each, self.distance).cpu() for each in mixtures], 1)
        return state.add(new, self.window)


@dataclass(frozen=True)
class Inverse(Weighting):
    """MTCP*: views that were closer to the target count more, for any number of views.

    ``tau`` is the softmax's temperature. ``as_printed`` takes the softmax of 1/e, not of log(1/e).
    """

    distance: Distance = "kl"
    window: int | None = None
    tau: float = 1.0
    as_printed: bool = False

    @property
    def with_default_settings(self) -> Inverse:
        """This rule at the default temperature, for finding its name, such as ``inverse``.

        The name is found by comparing the rule with those of ``PROVIDES.weights``, which all have
        the default temperature. The temperature is no part of the name: it is written apart, as in
        ``weights=inverse/tau=0.5``.
        """
        return replace(self, tau=1.0)

    def start(self, views: int) -> History:
        return History(torch.zeros(views, len(DISTANCES[self.distance]), dtype=torch.double))

    def weights(self, state: History) -> tuple[float, ...]:
        # Column 0 has the distances by the first function of ``DISTANCES``, which is the error.
        inverse = 1 / state.total[:, 0].clamp(min=LEAST_ERROR)
        closeness = inverse if self.as_printed else inverse.log()
        return tuple(torch.softmax(closeness / self.tau, 0).tolist())

    def fold(self, state: History, p: LogLaw, q: LogLaw) -> History:
        return state.add(distances(p, q, self.distance).cpu(), self.window)


TABED = Recipe(
    name="tabed",
    about="TABED's MT*: mixes drafts over full video and text alone, by their fit to the target",
    drafter=Ensemble(Grid()),
    view=Several((FULL, TEXT)),
    shape=Chain(GAMMA),
)

TABED_MT = replace(
    TABED,
    name="tabed-mt",
    about="full video and text alone drafted together, weighted equally",
    drafter=Ensemble(Equal()),
)

TABED_MTCP = replace(
    TABED,
    name="tabed-mtcp",
    about="TABED's MTCP*: mixes full, text, caption and pooled views, by their fit to the target",
    drafter=Ensemble(Inverse()),
    view=Several((FULL, TEXT, CAPTION, POOLED)),
)


TAU = Setting(
    axis="tau",
    owner=Inverse,
    field="tau",
    parse=parse_positive,
    choices="temperature of MTCP*'s weights, above 0",
    unmet_message="is MTCP*'s: it needs weights=inverse or weights=softmax",
    default=1.0,
    to_text="{:g}".format,
)

PROVIDES = Provides(
    recipes=(TABED, TABED_MT, TABED_MTCP),
    views=(TEXT, CAPTION, POOLED, POOLED_AFTER),
    drafters={"ensemble": Ensemble(Equal())},
    # Each function makes a rule. It gets the number of last positions that the rule learns from,
    # or None for all.
    weights={
        "equal": lambda window: Equal(),
        "kl": lambda window: Grid("kl", window),
        "tvd": lambda window: Grid("tvd", window),
        "matches": lambda window: Grid("matches", window),
        "inverse": lambda window: Inverse("kl", window),
        "inverse-tvd": lambda window: Inverse("tvd", window),
        "softmax": lambda window: Inverse("kl", window, as_printed=True),
        "softmax-tvd": lambda window: Inverse("tvd", window, as_printed=True),
    },
    axes={"tau": TAU},
)

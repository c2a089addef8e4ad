"""Fresh: Sparse-to-Dense's keys, chosen again in every round. Saccade's own method.

A head's attention moves with the answer. On real weights the keys that were chosen at prefill get
.65 of the attention mass that the head's current top keys get, so drafts end early. Verification
computes every judged row's queries anyway. Before every n-th round a key's score is its mean
attention over the last R judged rows i, summed over the heads of a group, and times (1 + hold) if
the draft has the key already. The K keys with the highest scores are kept:

    K_{l,h} = top-K_j  (1 + hold [j in K_{l,h}])  mean_i  sum_{h in group}  A_{l,h}[i, j]

The target's rows never depend on it, so the answer does not (see ``docs/lossless.md``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal

from saccade.core.capabilities import Capability
from saccade.core.digits import read_digits
from saccade.core.errors import MethodError
from saccade.core.protocols import Refresh, View
from saccade.drafting.provides import Provides, ViewSetting
from saccade.drafting.recipe import Parts
from saccade.methods.std import STD, PerHead

FRESH = replace(
    STD,
    name="fresh",
    about="std with each head's keys chosen again every round, by what the target looks at now",
    view=PerHead(refresh=Refresh()),
    # It was slower than plain decoding in every stored run, for this reason.
    study="each draft step reads all of the target's weights",
)


@dataclass(frozen=True)
class RefreshSetting(ViewSetting):
    """Sets how often a view by attention chooses again."""

    def applies(self, owner: View) -> bool:
        return super().applies(owner) and Capability.ATTENTION in owner.needs

    def refusal(self, parts: Parts) -> str:
        return f"refresh needs a view by attention, not {parts.view.name}: as in std, fresh"


def _parse(axis: str, value: str) -> Refresh | None:
    """Parses ``N``, ``N-ROWS`` or ``N-ROWS-HOLD``; returns None for ``0``. Raises MethodError."""
    parts = value.split("-")
    # Parts that are left out have their defaults.
    every, rows, hold, *surplus = [*parts, *_spell_parts(Refresh())[len(parts) :]]
    rounds = read_digits(every)
    if rounds is None:
        raise MethodError(f"refresh={value} is not a number of rounds; 0 never chooses anew")
    try:
        refresh = Refresh(rounds, int(rows), float(hold))
    except ValueError:
        refresh = None
    if surplus or refresh is None or refresh.rows < 1 or not 0 <= refresh.hold < float("inf"):
        raise MethodError(
            f"refresh={value} must be N, N-ROWS or N-ROWS-HOLD; 1-8-0.25 chooses keys every round "
            "by the last 8 verified rows, and counts keys that the draft already has a quarter more"
        )
    return refresh if refresh.every else None


def _spell_parts(refresh: Refresh) -> tuple[str, str, str]:
    """Returns the parts of the axis's value: N, ROWS and HOLD."""
    # A number with an exponent would have a "-" of its own.
    hold = format(Decimal(repr(refresh.hold)).normalize(), "f")
    return str(refresh.every), str(refresh.rows), hold


def _spell(refresh: Refresh) -> str:
    """Returns the axis's value, without the parts at the end that are the default."""
    parts, default = _spell_parts(refresh), _spell_parts(Refresh())
    count = max([1, *(place + 1 for place in (1, 2) if parts[place] != default[place])])
    return "-".join(parts[:count])


PROVIDES = Provides(
    recipes=(FRESH,),
    axes={
        "refresh": RefreshSetting(
            axis="refresh",
            owner=View,
            field="refresh",
            parse=_parse,
            words="N, N-ROWS or N-ROWS-HOLD rounds",
            spell=_spell,
        )
    },
)

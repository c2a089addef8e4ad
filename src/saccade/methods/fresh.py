"""Fresh: Sparse-to-Dense's keys, chosen again in every round. This is Saccade's own method.

In Sparse-to-Dense (``methods/std.py``) the target drafts for itself. While it drafts, each key head
reads only those K visual keys that it attended to most at prefill. But a head's attention moves as
the answer goes on. On real weights the keys chosen at prefill later get .65 of the attention that
the K keys with the most attention get at that time, so drafts end early.

The target computes the queries of every verified row anyway when it verifies. So before every n-th
round each visual key j gets a score: the attention A to it, averaged over the last R verified rows
i and summed over the query heads of a group. If the draft reads the key already, the score is
raised by the share ``hold``, so that small differences do not replace keys. The draft then reads
the K keys with the highest scores:

    K'_{l,h} = top-K_j  (1 + hold [j in K_{l,h}])  mean_i  sum_{g in group h}  A_{l,g}[i, j]

K_{l,h} are the keys of layer l and key head h that the draft reads so far, and K'_{l,h} those that
it reads next. g are the query heads that share h. ``Refresh`` has n, R and hold.

The target's rows do not depend on which keys the draft reads, so the answer does not either (see
``docs/lossless.md``).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from decimal import Decimal

from saccade.core.capabilities import Capability
from saccade.core.digits import read_digits
from saccade.core.errors import MethodError
from saccade.core.protocols import Refresh, View
from saccade.drafting.provides import Provides, ViewSetting
from saccade.drafting.recipe import Parts
from saccade.methods.std import STD, PerHead

DECIMAL_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+", re.ASCII)  # such as 1, 0.25 or .25

FRESH = replace(
    STD,
    name="fresh",
    about="std with each head's keys chosen again every round, by what the target looks at now",
    view=PerHead(refresh=Refresh()),
    # This is why it was slower than plain decoding in every stored run.
    study="each draft step reads all of the target's weights",
)


@dataclass(frozen=True)
class RefreshSetting(ViewSetting):
    """The axis ``refresh``: how often a view chooses its keys again during an answer, and by what.

    Only views that choose by the target's attention have it.
    """

    def applies(self, owner: View) -> bool:
        return super().applies(owner) and Capability.ATTENTION in owner.needs

    def refusal(self, parts: Parts) -> str:
        return f"refresh needs a view by attention, not {parts.view.name}: as in std, fresh"


def _parse(axis: str, value: str) -> Refresh | None:
    """Parses ``N``, ``N-ROWS`` or ``N-ROWS-HOLD``; returns None if N is 0. Raises MethodError."""
    given = value.split("-")
    defaults = _spell_parts(Refresh())
    # A part that is left out has its default: "2" is read as 2-8-0.25.
    every, rows, hold, *surplus = [*given, *defaults[len(given) :]]
    rounds = read_digits(every)
    row_count = read_digits(rows)
    if rounds is None:
        raise MethodError(f"refresh={value} is not a number of rounds; 0 never chooses anew")
    is_hold = DECIMAL_NUMBER.fullmatch(hold) is not None and math.isfinite(float(hold))
    if surplus or not row_count or not is_hold:
        raise MethodError(
            f"refresh={value} must be N, N-ROWS or N-ROWS-HOLD; 1-8-0.25 chooses keys every round "
            "by the last 8 verified rows; keys that the draft already has count a quarter more"
        )
    return Refresh(rounds, row_count, float(hold)) if rounds else None


def _spell_parts(refresh: Refresh) -> tuple[str, str, str]:
    """Returns the parts of the axis's value: N, ROWS and HOLD."""
    # An exponent (1e-05) would add a "-", which is what separates the parts.
    hold = format(Decimal(repr(refresh.hold)).normalize(), "f")
    return str(refresh.every), str(refresh.rows), hold


def _to_text(refresh: Refresh) -> str:
    """Returns the axis's value, without the parts at the end that are the default."""
    parts = _spell_parts(refresh)
    default = _spell_parts(Refresh())
    count = len(parts)
    while count > 1 and parts[count - 1] == default[count - 1]:
        count -= 1
    return "-".join(parts[:count])


PROVIDES = Provides(
    recipes=(FRESH,),
    axes={
        "refresh": RefreshSetting(
            axis="refresh",
            owner=View,
            field="refresh",
            parse=_parse,
            choices="N, N-ROWS or N-ROWS-HOLD rounds",
            to_text=_to_text,
        )
    },
)

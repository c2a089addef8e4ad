"""How often a target alone changes its mind with the number of rows: the limit of low precision.

No draft is involved. Along one answer of plain decoding, each token's arg-max is taken from
forwards of one row and again from forwards of several, as a verification would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from saccade.core.prompt import Inputs
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, chain
from saccade.engine.generate import run
from saccade.model.backbone import Backbone
from saccade.model.batch_invariant import BatchInvariantSession
from saccade.model.session import Session


@dataclass(frozen=True)
class Flips:
    """Of ``compared`` tokens, how many have another arg-max, and how many logits of other bits."""

    compared: int
    flips: int
    unlike: int


def flips(
    target: Backbone, inputs: Inputs, *, rows: int = 8, tokens: int = 128, exact: bool = False
) -> Flips:
    """One against ``rows`` rows, along the target's own greedy answer to one request."""
    ids = run(target, inputs, method="ar", exact=exact, max_new_tokens=tokens, do_sample=False).ids
    found = []
    for size in (1, rows):
        session = (BatchInvariantSession if exact else Session)(target, [Sampling()])
        session.prefill(target.prompts(inputs))
        found.append(_along(session, ids, size))
    unlike = sum(not one.equal(other) for one, other in zip(*found, strict=True))
    flipped = sum(int(one.argmax() != other.argmax()) for one, other in zip(*found, strict=True))
    return Flips(len(ids), flipped, unlike)


def _along(session: Session, ids: Sequence[int], rows: int) -> list[Tensor]:
    """Logits at every token of a text, ``rows`` of it a forward."""
    found = []
    for start in range(0, len(ids), rows):
        part = ids[start : start + rows]
        scores = session.score({0: chain(part[:-1])})[0]
        found += [scores.raw(node) for node in range(ROOT, len(part) - 1)]
        session.commit({0: list(part)})
    return found

"""Counts how often a target's arg-max depends on the number of rows of a forward.

In low precision it does, and this limits how exact any verification can be. No draft is involved:
along one answer of plain decoding, each token's arg-max is computed by forwards of one row and
again by forwards of several rows, like those of a verification.
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
    """The numbers of tokens whose arg-max or whose logits depend on the number of rows."""

    compared: int  # All tokens that were compared.
    flips: int  # Those with another arg-max.
    unlike: int  # Those whose logits differ in at least one bit.


def count_flips(
    target: Backbone, inputs: Inputs, *, rows: int = 8, tokens: int = 128, exact: bool = False
) -> Flips:
    """Compares forwards of 1 and of ``rows`` rows along the target's greedy answer to a prompt.

    The answer has ``tokens`` tokens at most. With ``exact``, all forwards are those of
    ``BatchInvariantSession``, whose logits should not depend on the number of rows.
    """
    ids = run(target, inputs, method="ar", exact=exact, max_new_tokens=tokens, do_sample=False).ids
    logits = []
    for size in (1, rows):
        session = (BatchInvariantSession if exact else Session)(target, [Sampling()])
        session.prefill(target.prompts(inputs))
        logits.append(_logits_along(session, ids, size))
    unlike = sum(not one.equal(other) for one, other in zip(*logits, strict=True))
    flipped = sum(int(one.argmax() != other.argmax()) for one, other in zip(*logits, strict=True))
    return Flips(len(ids), flipped, unlike)


def _logits_along(session: Session, ids: Sequence[int], rows: int) -> list[Tensor]:
    """Returns for each token of the text ``ids`` the logits that predict it.

    ``session`` has read the prompt. Each forward computes up to ``rows`` of them.
    """
    logits = []
    for start in range(0, len(ids), rows):
        part = ids[start : start + rows]
        scores = session.score({0: chain(part[:-1])})[0]
        logits += [scores.raw_logits(node) for node in range(ROOT, len(part) - 1)]
        session.commit({0: list(part)})
    return logits

"""The oracle that says of a divergence in low precision whether rounding explains it.

Two answers to one prompt part at some token. Teacher-forced along the plain one, the target's
logits there have a gap between the two tokens; and the same logits, from forwards of other numbers
of rows over the same text, differ by what this target's rounding amounts to. A gap within twice
that (each of the two logits may move by it) is a near-tie; a wider one is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.core.prompt import Inputs
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, chain
from saccade.model.backbone import Backbone
from saccade.model.session import Session

ROWS = (2, 5, 8)  # rows of a forward, beside one


@dataclass(frozen=True)
class Parting:
    """Where an answer first differs from the plain one."""

    at: int
    gap: float  # between the logits of the two tokens, one row a forward
    noise: float  # the most any logit of this answer moved with the number of rows

    @property
    def near_tie(self) -> bool:
        return self.gap <= 2 * self.noise


def parting(
    target: Backbone, inputs: Inputs, plain: Sequence[int], other: Sequence[int]
) -> Parting | None:
    """The first difference of two answers of one length, judged; None where there is none."""
    assert len(plain) == len(other), "answers that end apart differ in more than a token"
    apart = [i for i, (a, b) in enumerate(zip(plain, other, strict=True)) if a != b]
    if not apart:
        return None
    at = apart[0]
    one = along(target, inputs, plain, 1)
    noise = max(float((along(target, inputs, plain, rows) - one).abs().max()) for rows in ROWS)
    return Parting(at, float(one[at].max() - one[at, other[at]]), noise)


def along(target: Backbone, inputs: Inputs, ids: Sequence[int], rows: int) -> Tensor:
    """Logits [token vocab] at every token of an answer, ``rows`` of it a forward, in fp32."""
    session = Session(target, [Sampling()])
    session.prefill(target.prompts(inputs))
    logits = []
    for start in range(0, len(ids), rows):
        part = list(ids[start : start + rows])
        scores = session.score({0: chain(part[:-1])})[0]
        logits += [scores.logits(node).float() for node in range(ROOT, len(part) - 1)]
        session.commit({0: part})
    return torch.stack(logits)

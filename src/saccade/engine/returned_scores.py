"""Collects what ``generate`` returns beside ids: the target's logits and scores of each token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from saccade.core.result import Round
from saccade.core.tree import ROOT

Rows = dict[int, list[Float[Tensor, " vocab"]]]
"""By request, the logits or scores of each token of its answer."""


class ReturnedScores:
    """Collects the logits and scores of every emitted token, round by round.

    ``returned`` says which of the two are wanted: "output_logits" and "output_scores", as
    ``generate`` calls these options. The logits are the target's own, in float32. The scores are
    the logits after all rules of sampling.
    """

    def __init__(self, returned: frozenset[str]) -> None:
        self._returned = returned
        self._logits: Rows = defaultdict(list)
        self._scores: Rows = defaultdict(list)

    def add(self, round: Round) -> None:
        """Collects the rows of the tokens that a round emitted, before the next round begins."""
        # The target's row at a node is for the token after that node. So the row of the first token
        # is at the root, that of the second at the path's first node, and so on. The last node's
        # row is not used where the target added no token of its own.
        for _, node in zip(round.emitted, (ROOT, *round.verdict.path), strict=False):
            # The rows may lie in memory that the next forward writes to, so they are copied.
            if "output_logits" in self._returned:
                self._logits[round.request].append(round.p.raw_logits(node).float().clone())
            if "output_scores" in self._returned:
                self._scores[round.request].append(round.p.logits(node).float().clone())

    def output(
        self, sequences: Int[Tensor, "batch len"], order: Sequence[int]
    ) -> GenerateDecoderOnlyOutput:
        """Returns the output in transformers' form; ``order`` has the request of each row of
        ``sequences``."""
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self._steps(self._scores, order, "output_scores"),
            logits=self._steps(self._logits, order, "output_logits"),
        )

    def _steps(
        self, rows: Rows, order: Sequence[int], name: str
    ) -> tuple[Float[Tensor, "batch vocab"], ...] | None:
        """Returns the rows of all answers for each step; an answer that has ended has zeros. None
        where ``name``, one of the two options, is not wanted."""
        if name not in self._returned:
            return None
        longest_answer = max(rows.values(), key=len, default=[])
        if not longest_answer:  # No token could be drawn, from NaN for example.
            return ()
        padding = torch.zeros_like(longest_answer[0])
        return tuple(
            torch.stack([rows[n][step] if step < len(rows[n]) else padding for n in order])
            for step in range(len(longest_answer))
        )

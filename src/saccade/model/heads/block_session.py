"""A DFlash head at work on a batch of requests: ``score`` trees, ``commit`` tokens.

A DFlash head drafts a block: one forward over the last committed token and masks after it predicts
the next tokens, all at once. So a round needs one forward, however deep its tree is. All nodes of
one depth have the same logits, because no token of a block is known when the others are predicted.
Nodes deeper than the block get a uniform distribution.

A token's keys are computed from the target's hidden state of that token, which is not known yet for
the last committed token. So the head's cache ends one token earlier, as with other heads, and the
last committed token is the first row of the block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from saccade.core import tree as trees_
from saccade.core.prompt import Prompt
from saccade.core.sampling import Scores
from saccade.core.tree import Tree
from saccade.model.heads.dflash import BlockHead
from saccade.model.heads.head_session import HeadRequest, HeadSession
from saccade.model.session import Rules, Session, session_of


@dataclass
class BlockRequest(HeadRequest):
    """The state of one request of a DFlash head."""

    block_logits: Tensor | None = None
    """[level, vocab]: the logits of the block after the text, of which level 0 predicts the next
    token. They are out of date while ``root_logits`` is None."""


class BlockSession(HeadSession):
    """Scores and commits with a DFlash head."""

    request_kind = BlockRequest

    @property
    def block_head(self) -> BlockHead:
        return cast(BlockHead, self.head)

    def request(self, number: int) -> BlockRequest:
        return cast(BlockRequest, self.requests[number])

    def rewind_for_timing(self, context: int) -> None:
        super().rewind_for_timing(context)
        # A block is drafted only where ``root_logits`` is None. So the next score drafts one, and
        # its time is measured.
        for number in self.requests:
            self.request(number).root_logits = None

    def append_keys(self, request: HeadRequest, full_prompt: Prompt, rows: Tensor) -> None:
        self.block_head.write_text(
            [request.cache], [request.target_hidden(rows)], [request.positions(rows)]
        )

    def make_scores(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        for number, tree in trees.items():
            request = self.request(number)
            assert request.block_logits is not None
            depths = trees_.depths(tree.parents)  # 1 for a child of the root.
            # Level d predicts the token after d drafted ones, so it is for the nodes of depth d.
            levels = [*request.block_logits]
            missing = max(depths, default=0) + 1 - len(levels)
            if missing > 0:
                # All ids that may be drafted get equal logits, and `_keep_draftable_ids` gives
                # banned ids -inf.
                uniform = self._keep_draftable_ids(torch.zeros_like(levels[0])[None])[0]
                levels += [uniform] * missing
            request.node_logits = [levels[depth] for depth in depths]
        return super().make_scores(trees)

    @staticmethod
    @torch.no_grad()
    def score_batches(
        batches: Sequence[tuple[Session, Mapping[int, Tree]]],
    ) -> list[dict[int, Scores]]:
        """Returns each session's scores of its trees. All sessions are of the same head.

        First the keys of newly committed text are written. Then one forward computes the blocks of
        the requests whose text has grown since their last block.
        """
        sessions = [(cast(BlockSession, session), trees) for session, trees in batches]
        first_session = sessions[0][0]
        head = first_session.block_head
        for session, trees in sessions:
            session.set_trees(trees)
        requests = [session.request(number) for session, trees in sessions for number in trees]
        # The text of these requests has rows without keys, because it has grown.
        grown = [each for each in requests if each.waiting_rows > 0]
        if grown:
            rows = [
                torch.arange(each.row_count, each.row_count + each.waiting_rows, device=head.device)
                for each in grown
            ]
            with_rows = [*zip(grown, rows, strict=True)]
            head.write_text(
                [each.cache for each in grown],
                [each.target_hidden(new_rows) for each, new_rows in with_rows],
                [each.positions(new_rows) for each, new_rows in with_rows],
            )
        # A block is out of date when its text has changed, which sets ``root_logits`` to None.
        outdated = [each for each in requests if each.root_logits is None]
        if outdated:
            # ``row_count`` counts the rows of the text that have keys or were left out by the view.
            # By now these are all rows but that of the last committed token, where the block
            # begins. Rows are numbered from 0, so ``row_count`` is the number of that row.
            block_offsets = torch.arange(head.settings.size, device=head.device)
            logits = head.draft_blocks(
                [each.cache for each in outdated],
                [each.context[-1] for each in outdated],
                [each.positions(each.row_count + block_offsets) for each in outdated],
            )
            for each, block_logits in zip(outdated, logits, strict=True):
                each.block_logits = first_session._keep_draftable_ids(block_logits)
                each.root_logits = each.block_logits[0]
        return [session.make_scores(trees) for session, trees in sessions]


@session_of.register
def _(model: BlockHead, rules: Rules, *, cuda_graphs: bool | None = None) -> Session:
    return BlockSession(model, rules)

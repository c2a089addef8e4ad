"""A draft head at work on a batch of requests: ``score`` trees, ``commit`` tokens.

A head is a small module that drafts from the target's hidden states. It computes one row for each
place of the text, which in this file is the prompt and what follows it. Row i reads the target's
hidden state at place i and the token at place i + 1, and predicts token i + 2. So committed text of
n tokens has n - 1 rows, and the last of them predicts the next token. The keys of these rows are
computed from the target's hidden states. The row of a tree node reads the head's output in its
parent's row instead, and its keys are dropped when the round has been verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor

from saccade.core import tree as trees_
from saccade.core.prompt import Prefill, Prompt, Turn
from saccade.core.sampling import Scores
from saccade.core.tree import ROOT, Tree
from saccade.model.cache import Cache
from saccade.model.heads.head import Head
from saccade.model.heads.modules import Hidden
from saccade.model.segments import Segment
from saccade.model.session import RequestState, Rules, Session, chunk_ends, session_of


@dataclass
class HeadRequest(RequestState):
    """The state of one request of a head."""

    target_cache: Cache | None = None  # of the target's request, with its hidden states
    prompt: Prompt | None = None  # the whole prompt, not the part that a view chose
    read_rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """The numbers of the prompt's rows that the view kept. These rows have keys."""
    read_length: int = 0
    """The view has chosen among the prompt's first rows, this many. Those of them that are not in
    ``read_rows`` were left out and get no keys. All later rows of the text get keys."""
    root_output: Tensor | None = None  # the head's output in the last row of the text
    node_outputs: list[Tensor] = field(default_factory=list)  # the head's output in each node's row

    @property
    def skipped_rows(self) -> int:
        """How many rows of the text the view left out."""
        return self.read_length - len(self.read_rows)

    @property
    def row_count(self) -> int:
        """How many rows of the text have keys or were left out."""
        return self.cache.length + self.skipped_rows

    @property
    def waiting_rows(self) -> int:
        """How many rows of the text have no keys yet, although the token after them is known."""
        return len(self.context) - 1 - self.row_count

    def positions(self, rows: Int[Tensor, " row"]) -> Int[Tensor, "axes row"]:
        """Returns the target's positions of rows of the text, in the prompt and after it."""
        prompt = self.prompt
        assert prompt is not None
        length = len(prompt)
        within = prompt.positions[:, rows.clamp(max=length - 1)]
        return torch.where(rows < length, within, prompt.next_position + rows - length)

    def target_hidden(self, rows: Int[Tensor, " row"] | slice) -> Tensor:
        """Returns the target's hidden states in rows of the text."""
        assert self.target_cache is not None and self.target_cache.hidden is not None
        return self.target_cache.hidden.read(rows)

    def cut_prompt(self, length: int) -> None:
        """Lowers ``read_length`` to ``length`` if it is larger, and drops the rows after that from
        ``read_rows``."""
        self.read_length = min(self.read_length, length)
        self.read_rows = self.read_rows[self.read_rows < self.read_length]

    def forget_tree(self) -> None:
        """Drops the tree that was scored last."""
        self.tree = Tree()
        self.node_logits, self.node_outputs = [], []


@dataclass
class _Rows:
    """The rows of one forward of a head, request after request."""

    segments: list[Segment] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)
    positions: list[Int[Tensor, "axes row"]] = field(default_factory=list)
    scored: list[tuple[HeadRequest, int, int]] = field(default_factory=list)
    """(request, start, stop) for each segment: the rows ``start:stop`` of the forward need logits.
    They are the last row of the request's text, or all of the segment's tree nodes."""

    def add(
        self,
        request: HeadRequest,
        ids: Sequence[int],
        hidden: Hidden,
        positions: Int[Tensor, "axes row"],
        segment: Segment,
        needed: int,
    ) -> None:
        """Adds a request's rows, of which the last ``needed`` need logits."""
        self.ids += ids
        self.hidden.append(hidden)
        self.positions.append(positions)
        self.segments.append(segment)
        self.scored.append((request, len(self.ids) - needed, len(self.ids)))


class HeadSession(Session):
    """Scores and commits with a head, which reads the hidden states of the target's session."""

    request_kind = HeadRequest  # The class of a request's state. A derived session may change it.

    def __init__(
        self, head: Head, rules: Rules, *, banned: Sequence[int] = (), room: int = 512
    ) -> None:
        super().__init__(head, rules, banned=banned, room=room, cuda_graphs=False)
        self.head = head

    def request(self, number: int) -> HeadRequest:
        return cast(HeadRequest, self.requests[number])

    @torch.no_grad()
    def read(self, number: int, prefill: Prefill, prompt: Prompt) -> None:
        """Starts a request: reads the rows of a prompt that a view kept, at the target's positions.

        ``prefill`` is the target's, of the whole prompt. Its cache later receives the hidden states
        of the answer. ``prompt`` is the part of the prompt that the view kept.
        """
        full_prompt = prefill.prompt
        # The prompt's last token has no row yet, because the token after it is not known.
        row_count = len(full_prompt) - 1
        rows = prompt.places[prompt.places < row_count]
        request = self.requests[number] = self.request_kind(
            self.new_cache(len(rows) + self._room),
            full_prompt.full_ids.tolist(),
            full_prompt.next_position,
            noise_number=number,
            target_cache=prefill.cache,
            prompt=full_prompt,
            read_rows=rows,
            read_length=row_count,
        )
        self.compute_keys(request, full_prompt, rows)

    def compute_keys(
        self, request: HeadRequest, full_prompt: Prompt, rows: Int[Tensor, " row"]
    ) -> None:
        """Computes the keys of rows of a whole prompt, in order, into an empty cache."""
        for start, stop in pairwise(chunk_ends(0, len(rows), self.chunk)):
            if start < stop:
                self.append_keys(request, full_prompt, rows[start:stop])

    def append_keys(
        self, request: HeadRequest, full_prompt: Prompt, rows: Int[Tensor, " row"]
    ) -> None:
        """Appends the keys of rows of a whole prompt to the cache, by one forward."""
        count = len(rows)
        segment = Segment(
            request.cache, start=0, stop=count, first_key=request.cache.length, committed_rows=count
        )
        self.head.step(
            self.head.embed_next(full_prompt, rows),
            self.head.module.project(request.target_hidden(rows)),
            request.positions(rows),
            [segment],
        )
        request.cache.advance(count)

    def start_turn(self, turns: Mapping[int, Turn], rules: Rules) -> None:
        """Continues conversations: drops the last tokens and appends the next question's."""
        self.rules = rules
        for number, turn in turns.items():
            request = self.request(number)
            kept_tokens = len(request.context) - turn.drop
            request.context[kept_tokens:] = turn.ids
            # Row i reads token i + 1 too. If 10 tokens are kept, rows 0 to 8 have read kept tokens
            # alone and stay, and row 9 is computed again. The last row of the whole text is always
            # computed, for the logits of the next token.
            last_row = len(request.context) - 2
            kept_rows = max(0, min(kept_tokens - 1, last_row))
            request.cut_prompt(kept_rows)
            request.cache.truncate(min(request.cache.length, kept_rows - request.skipped_rows))
            request.answer_length = 0
            request.root_logits = None
            request.forget_tree()

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Appends tokens. Their rows are computed by the next score, from the target's hidden
        states. What was computed for the drafted tree is dropped."""
        for number, new in tokens.items():
            request = self.request(number)
            request.context += new
            request.answer_length += len(new)
            if new:
                request.root_logits = None
            request.forget_tree()

    def fill_for_timing(self, number: int, context: int, room: int) -> None:
        """Starts a request of ``context`` meaningless keys and hidden states, to time forwards."""
        head, target = self.head, self.head.target
        # A text of n tokens has n - 1 rows. ``context`` of them have keys, and one more waits for
        # the next score, as after a commit.
        length = context + 2
        prompt = Prompt(
            full_ids=torch.zeros(length, dtype=torch.long, device=head.device),
            embeds=torch.empty(length, 0, device=head.device),
            positions=torch.arange(length, device=head.device).expand(target.axes, -1),
            visual=torch.zeros(length, dtype=torch.bool, device=head.device),
            fixed=torch.zeros(length, dtype=torch.bool, device=head.device),
            grid=torch.zeros(0, 4, dtype=torch.long, device=head.device),
            places=torch.arange(length, device=head.device),
            next_position=length,
        )
        target_cache = Cache([], 1)  # It needs no keys, because a head reads only hidden states.
        target_cache.hidden = target.hidden_states(head.hidden_layers, length)
        target_cache.hidden.read(slice(None)).fill_(1)
        self.requests[number] = self.request_kind(
            self._filled_cache(context, room),
            prompt.full_ids.tolist(),
            prompt.next_position,
            target_cache=target_cache,
            prompt=prompt,
        )

    def rewind_for_timing(self, context: int) -> None:
        for number in self.requests:
            request = self.request(number)
            request.forget_tree()
            request.cache.length = context

    # -- one forward ---------------------------------------------------------------------------

    def set_trees(self, trees: Mapping[int, Tree]) -> None:
        """Takes the trees to score, and keeps the scores of leading nodes that the previous trees
        had too."""
        for number, tree in trees.items():
            request = self.request(number)
            shared = trees_.count_shared_nodes(request.tree, tree)
            del request.node_logits[shared:], request.node_outputs[shared:]
            request.tree = tree

    def add_rows(self, trees: Mapping[int, Tree], rows: _Rows) -> None:
        """Adds each request's rows that the next forward can compute.

        They are the rows of committed text that have no keys yet. Where there are none, they are
        the next nodes whose parents were computed.
        """
        for number, tree in trees.items():
            request = self.request(number)
            if request.waiting_rows > 0:
                self._add_text(request, rows)
            elif len(request.node_outputs) < len(tree):
                self._add_nodes(request, tree, rows)

    def _add_text(self, request: HeadRequest, rows: _Rows) -> None:
        """Adds the rows of committed text that have no keys yet."""
        first, waiting = request.row_count, request.waiting_rows
        text_rows = torch.arange(first, first + waiting, device=self.head.device)
        hidden = request.target_hidden(slice(first, first + waiting)).to(self.head.device)
        start = len(rows.ids)
        first_key = request.cache.length
        rows.add(
            request,
            request.context[first + 1 :],
            self.head.module.project(hidden),
            request.positions(text_rows),
            Segment(request.cache, start, start + waiting, first_key, committed_rows=waiting),
            needed=1,
        )

    def _add_nodes(self, request: HeadRequest, tree: Tree, rows: _Rows) -> None:
        """Adds the rows of the next nodes whose parents were computed.

        A node of depth d stands d places after the last row of the text.
        """
        # The new nodes are ``first:stop``. They end before the first node whose parent is new too.
        first = stop = len(request.node_outputs)
        while stop < len(tree) and tree.parents[stop] < first:
            stop += 1
        computed = trees_.prefix(tree, stop)
        mask = None
        if not trees_.is_chain(computed):
            # Nodes are computed only when all committed tokens have keys, so none is pending.
            mask = trees_.tree_mask(computed, cached_count=first, pending_count=0)
        parents = tree.parents[first:stop]
        assert request.root_output is not None
        outputs = {ROOT: request.root_output, **dict(enumerate(request.node_outputs))}
        depths = torch.tensor(trees_.depths(tree.parents)[first:stop], device=self.head.device)
        start = len(rows.ids)
        first_key = request.cache.length + first
        rows.add(
            request,
            tree.tokens[first:stop],
            torch.stack([outputs[parent] for parent in parents]),
            request.positions(request.row_count - 1 + depths),
            Segment(
                request.cache, start, start + stop - first, first_key, mask, scored_nodes=first
            ),
            needed=stop - first,
        )

    def make_scores(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        """Returns the scores of trees, all of whose nodes were computed."""
        scores = {}
        for number, tree in trees.items():
            request = self.request(number)
            assert request.root_logits is not None
            scores[number] = Scores(
                tree,
                [request.root_logits, *request.node_logits],
                self.rules[number],
                request.context,
                request.answer_length,
                request.noise_number,
            )
        return scores

    @staticmethod
    @torch.no_grad()
    def score_batches(
        batches: Sequence[tuple[Session, Mapping[int, Tree]]],
    ) -> list[dict[int, Scores]]:
        """Returns each session's scores of its trees. All sessions are of the same head.

        It takes one forward for waiting rows of text and one for each level of new nodes, since a
        node reads its parent's output.
        """
        heads = [(cast(HeadSession, session), trees) for session, trees in batches]
        first_session = heads[0][0]
        head = first_session.head
        for session, trees in heads:
            session.set_trees(trees)
        while True:
            rows = _Rows()
            for session, trees in heads:
                session.add_rows(trees, rows)
            if not rows.segments:
                return [session.make_scores(trees) for session, trees in heads]
            outputs = head.step(
                head.embed(rows.ids),
                torch.cat(rows.hidden),
                torch.cat(rows.positions, 1),
                rows.segments,
            )
            # Logits are computed for the rows that need them, and then given to their requests.
            needed = [row for _, start, stop in rows.scored for row in range(start, stop)]
            logits = first_session._keep_draftable_ids(head.logits(outputs[needed]))
            logits_by_row = dict(zip(needed, logits, strict=True))
            for (request, start, stop), segment in zip(rows.scored, rows.segments, strict=True):
                if segment.committed_rows:
                    request.cache.advance(segment.committed_rows)
                    request.root_logits = logits_by_row[stop - 1]
                    request.root_output = outputs[stop - 1]
                    continue
                request.node_logits += [logits_by_row[row] for row in range(start, stop)]
                request.node_outputs += [outputs[row] for row in range(start, stop)]


@session_of.register
def _(model: Head, rules: Rules, *, cuda_graphs: bool | None = None) -> Session:
    """Returns a session of a head. It never uses CUDA graphs, whatever ``cuda_graphs`` says."""
    return HeadSession(model, rules)

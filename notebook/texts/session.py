"""A model at work on a batch of requests: ``score`` trees, ``commit`` tokens.

``score`` is a pure function of (prompt, committed text, tree); the cache only makes it fast. Plain
decoding is an empty tree, and a draft that grows is a tree scored again with more nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saccade.core import tree as trees_
from saccade.core.errors import ModelError
from saccade.core.prompt import Prefill, Prompt, Turn
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import ROOT, Tree
from saccade.model.attention import Asked, JudgedRow, Recent, Segment, Step, attended
from saccade.model.backbone import Backbone
from saccade.model.cache import Cache
from saccade.model.cuda_graphs import CudaGraphs, automatic
from saccade.model.kept import Beginnings

CHUNK = 2048  # prompt tokens a forward: what a prefill needs beside weights and keys
Rules = Sequence[Sampling] | Mapping[int, Sampling]
ROOM = 64  # rows for drafted tokens beyond the answer's
LONG = 2048  # a longer answer's cache grows on the way


@dataclass
class RequestState:
    """Where one request stands. The cache holds the prompt and the text except ``pending``.

    The text is what follows the prompt: answers, and in a conversation the later questions too.
    """

    cache: Cache
    context: list[int]
    first_position: int  # of the first token of the text
    length: int = 0  # of the text
    generated: int = 0  # in this turn: what the noise of sampling counts
    pending: list[int] = field(default_factory=list)
    root: Tensor | None = None  # logits at the end of the text; None while tokens are pending
    source: Cache | None = None  # where a fork takes the keys of committed text from
    prompt_rows: tuple[int, int] = (0, 0)  # of the prompt: here, and in the source
    copied: int = 0  # tokens of the text whose keys are the source's
    tree: Tree = Tree()  # last scored; its keys follow the committed ones in the cache
    rows: list[Tensor] = field(default_factory=list)  # its logits
    reused: int = 0  # of the prompt's rows, read for an earlier request
    place: int = 0  # among those it was asked with: names its noise
    recent: Recent | None = None  # the rows judged last, where a view follows them
    asked: list[tuple[Asked, int]] = field(default_factory=list)  # queries of the tree's nodes
    held: Tensor | None = None  # [layer, kv_head, kept]: a fork's rows of its source, by place


class Rows(NamedTuple):
    """The tokens of one forward: those of one request after another's, a segment each."""

    segments: list[Segment]
    ids: list[int]
    positions: list[int]
    wanted: list[int]  # the rows whose laws are asked for


class Session:
    """Scores and commits over a cache, one :class:`RequestState` per prompt.

    ``vocab`` clips the laws to the ids draft and target share; ``banned`` ids are never proposed
    (placeholders of images and videos). ``cuda_graphs`` runs single requests in steps of fixed
    shape: None where they pay (on GPUs). So many prompts are ``views`` of one request.
    """

    def __init__(
        self,
        backbone: Backbone,
        rules: Rules,
        *,
        vocab: int | None = None,
        banned: Sequence[int] = (),
        room: int = 512,
        chunk: int = CHUNK,
        cuda_graphs: bool | None = None,
        views: int = 1,
    ) -> None:
        self.backbone = backbone
        self.rules = rules
        self.requests: dict[int, RequestState] = {}
        self._vocab, self._views = vocab, views
        self._banned = torch.tensor(list(banned), dtype=torch.long, device=backbone.device)
        self._room, self._chunk = min(room, LONG) + ROOM, chunk
        fixed = automatic(backbone) if cuda_graphs is None else cuda_graphs
        self.cuda_graphs = CudaGraphs(backbone) if fixed else None
        self._beginnings = None if backbone.kept is None else Beginnings(backbone.kept, backbone)

    # -- starting ------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Prompt], *, record: bool = False) -> list[Prefill]:
        """Reads the prompts; ``record`` writes down what the text attends to in the visual."""
        return [
            prefill
            for number, prompt in enumerate(prompts)
            for prefill in self.reading(number, prompt, record=record, place=number)
            if prefill is not None
        ]

    def reading(
        self,
        number: int,
        prompt: Prompt,
        *,
        record: bool = False,
        follow: int = 0,
        place: int = 0,
    ) -> Iterator[Prefill | None]:
        """One prompt's prefill, a chunk at a time, so that others may be scored in between: None
        after each but the last, which gives the whole.

        ``follow``: of how many rows judged last ``Prefill.again`` is to tell the attention.
        """
        model = self.backbone
        if model.fused is not None:
            model.fused.refresh()
        cache = model.cache(len(prompt) + self._room)
        columns = prompt.visual.nonzero().squeeze(-1)
        text = prompt.text_after()
        noted = len(columns) if record else 0
        both = torch.zeros(model.layers, model.kv_heads, 2, noted, device=model.device).float()
        hidden = prompt.embeds[:0]
        reused, whose = 0, None
        if self._beginnings is not None:
            # the law after the prompt is computed anew, and with it what is written down
            last = int(text[0]) if noted and len(text) else len(prompt)
            most = max(0, min(last, len(prompt) - max(1, follow)))
            reused, whose = self._beginnings.lend(prompt, cache, most)
        for start, stop in pairwise(_ends(reused, len(prompt), self._chunk)):
            rows = text[(text >= start) & (text < stop)].cpu()
            note = Asked(stop - int(rows[0])) if noted and len(rows) else None
            asked = Asked(follow) if follow and stop == len(prompt) else None
            segment = Segment(cache, 0, stop - start, start, noted=note, asked=asked)
            hidden = self._read(prompt, segment)
            if note is not None:
                both += attended(cache, note.of(rows - rows[0]), rows + 1, columns)
            if stop < len(prompt):
                yield None
        with torch.no_grad():
            logits = self._clip(model.logits(hidden[-1:]))[0]
        if self._beginnings is not None:
            self._beginnings.keep(prompt, cache, whose)
        request = self.requests[number] = RequestState(
            cache,
            prompt.context.tolist(),
            prompt.next_position,
            root=logits,
            prompt_rows=(cache.length, cache.length),
            reused=reused,
            place=place,
            recent=Recent(follow) if follow else None,
        )
        every = model.shares.every_head
        if not record:
            yield Prefill(prompt, cache, logits)
            return
        both /= max(1, len(text)) * (model.heads // model.kv_heads)
        found = Prefill(prompt, cache, logits, every(both[:, :, 0]), every(both[:, :, 1]))
        if request.recent is not None and asked is not None:
            kept = min(follow, stop - start)
            for row in range(kept):
                request.recent.add(JudgedRow(asked, row, cache.length - kept + row + 1))
            found = replace(found, again=partial(self._again, number, found, columns))
        yield found

    @torch.no_grad()  # there and not on the generator: between its pieces others compute
    def _read(self, prompt: Prompt, segment: Segment) -> Float[Tensor, "rows dim"]:
        """The last hidden states of a prompt's rows; their keys and values are written."""
        model, step = self.backbone, self._step([segment])
        start, stop = segment.at, segment.at + segment.stop
        rows = prompt.embeds[start:stop], prompt.positions[:, start:stop]
        hidden = model.forward(*rows, step, prompt.deepstack_of(start, stop), segment.wanted)
        if step.calls != model.layers:
            raise ModelError(
                f"{type(model.model).__name__} computes its attention in a way of its own, "
                "which Saccade cannot follow"
            )
        segment.cache.advance(stop - start)
        return hidden

    def _again(self, number: int, prefill: Prefill, columns: Int[Tensor, " seen"]) -> Prefill:
        """What a prefill revealed, with the attention of the rows judged last."""
        request = self.requests[number]
        if not request.recent:
            return prefill
        both = request.recent.attended(request.cache, columns)
        every = self.backbone.shares.every_head
        return replace(prefill, mass=every(both[:, :, 0]), relevance=every(both[:, :, 1]))

    def fork(
        self, prefills: Sequence[Prefill], prompts: Sequence[Prompt], *, renewed: bool = False
    ) -> None:
        """Starts from another session's caches, keeping the rows these prompts kept of them.

        From then on the keys of committed text are copied from there too: exact, and for free.
        ``renewed``: what is kept may change by :meth:`reselect`.
        """
        for number, (prefill, prompt) in enumerate(zip(prefills, prompts, strict=True)):
            source = prefill.cache
            assert source is not None
            rows = self._kept(prompt) if renewed or prompt.heads is not None else prompt.index
            cache = source.select(rows, self._room, self.backbone.layers)
            self.requests[number] = RequestState(
                cache,
                prompt.context.tolist(),
                prompt.next_position,
                root=self._clip(prefill.logits[None])[0],
                source=source,
                prompt_rows=(cache.length, source.length),
                place=number,
                held=rows if renewed else None,
            )

    def reselect(self, number: int, prompt: Prompt) -> None:
        """Changes which rows of its source's prompt a fork keeps; as many as before."""
        request = self.requests[number]
        assert request.held is not None and request.source is not None
        request.held = request.cache.exchange(request.source, request.held, self._kept(prompt))

    def _kept(self, prompt: Prompt) -> Int[Tensor, "layer kv_head kept"]:
        """The rows each head of this process keeps."""
        model = self.backbone
        if prompt.heads is not None:
            return model.shares.own_heads(prompt.heads)
        return prompt.index.expand(model.layers, model.kv_heads, -1).contiguous()

    def turn(self, turns: Mapping[int, Turn], rules: Rules) -> None:
        """Goes on with a conversation: forgets the last tokens, appends the next question's.

        Keys of all that stays are kept; the new tokens wait for the next score.
        """
        self.rules = rules
        for number, turn in turns.items():
            request = self.requests[number]
            shorter = max(0, turn.drop - request.length)  # of the prompt's own last tokens
            if shorter:
                here, there = request.prompt_rows
                request.prompt_rows = max(0, here - shorter), there - shorter
                request.first_position -= shorter
            request.context[len(request.context) - turn.drop :] = turn.ids
            stays = max(0, request.length - turn.drop)
            request.length = stays + len(turn.ids)
            request.generated = 0
            if request.recent is not None:
                request.recent.clear()
            request.tree, request.rows, request.root = Tree(), [], None
            # at least one token waits: the law after it has yet to be computed
            held = min(request.cache.length - request.prompt_rows[0], stays, request.length - 1)
            request.cache.truncate(request.prompt_rows[0] + held)
            request.copied = max(0, min(request.copied, held))
            request.pending = request.context[len(request.context) - request.length + held :]
            if request.source is not None and request.length:
                _catch_up(request)

    def narrow(self, number: int, rows: Int[Tensor, " kept"]) -> None:
        """Forgets all of a prompt but these rows of it; what was scored since stays scored."""
        request = self.requests[number]
        cache, size = request.cache, request.prompt_rows[0]
        scored = torch.arange(size, cache.length + len(request.rows), device=rows.device)
        after = cache.length - size
        request.cache = cache.select(torch.cat([rows, scored]), self._room)
        request.cache.truncate(len(rows) + after)
        request.prompt_rows = len(rows), len(rows)

    def end(self, request: int) -> None:
        """Frees a finished request's cache."""
        self.requests.pop(request, None)
        if self.cuda_graphs is not None:
            self.cuda_graphs.forget()

    # -- the two verbs -------------------------------------------------------------------------

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        """Raw logits at the end of the text and at every node, in one forward for all requests.

        Nodes that led the previous tree too are not computed again.
        """
        (found,) = score_together([(self, trees)])
        return found

    def _ask(self, trees: Mapping[int, Tree], into: Rows) -> None:
        """The tokens that are not computed yet, as rows of a forward."""
        for number, tree in trees.items():
            request = self.requests[number]
            known = trees_.shared(request.tree, tree)
            del request.rows[known:]
            nodes = tree.tokens[known:]
            start, waiting = len(into.ids), len(request.pending)
            if not waiting and not nodes:
                continue
            into.ids.extend((*request.pending, *nodes))
            end = request.first_position + request.length
            into.positions.extend(range(end - waiting, end))
            depths = trees_.depths(tree.parents)[known:]
            into.positions.extend(end - 1 + depth for depth in depths)
            # of the pending tokens only the last one's law is asked for
            into.wanted.extend(range(start + max(waiting - 1, 0), len(into.ids)))
            at = request.cache.length + known
            block = None if trees_.is_chain(tree) else _block(tree, known, waiting)
            asked = None if request.recent is None else Asked()
            stop = len(into.ids)
            into.segments.append(Segment(request.cache, start, stop, at, block, asked=asked))
            if asked is not None:
                _note(request, asked, waiting, known, len(nodes))

    def _told(self, trees: Mapping[int, Tree], laws: Tensor) -> dict[int, Scores]:
        """Scores, given the laws of the rows that were wanted."""
        rows = list(self._clip(laws))
        found = {}
        for number, tree in trees.items():
            request = self.requests[number]
            if request.pending:
                request.cache.advance(len(request.pending))
                request.pending = []
                request.root = rows.pop(0)
            fresh = len(tree) - len(request.rows)
            request.rows += rows[:fresh]
            del rows[:fresh]
            request.tree = tree
            assert request.root is not None
            found[number] = Scores(
                tree,
                [request.root, *request.rows],
                self.rules[number],
                request.context,
                request.generated,
                request.place,
            )
        return found

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Appends what was emitted; what the last tree already held of it stays in the cache."""
        for number, new in tokens.items():
            request = self.requests[number]
            forked = request.source is not None
            path = [] if request.pending or forked else trees_.follow(request.tree, new)
            request.cache.keep(path)
            if path:
                request.root = request.rows[path[-1]]
            if request.recent is not None:
                seen = request.prompt_rows[0] + request.length
                for depth, node in enumerate(path):
                    request.recent.add(JudgedRow(*request.asked[node], seen + depth + 1))
            request.pending += new[len(path) :]
            # what follows on a chain that was not judged to its end keeps its keys
            ahead = len(path) if path and len(path) == len(new) else len(request.tree)
            ahead = ahead if trees_.is_chain(request.tree) else len(request.tree)
            request.tree, request.rows = trees_.after(request.tree, ahead), request.rows[ahead:]
            request.asked = request.asked[ahead:]
            request.context += new
            request.length += len(new)
            request.generated += len(new)
            if forked:
                _catch_up(request)
            if request.pending:
                request.root = None

    # -- one forward ---------------------------------------------------------------------------

    def _forward(self, rows: Rows, *, alone: bool) -> Float[Tensor, "wanted vocab"]:
        """Logits of the wanted rows; keys and values of all are written. ``alone``: they are all
        of one request of this session."""
        model, (segments, ids, positions, wanted) = self.backbone, rows

        def ordinary() -> Float[Tensor, "wanted vocab"]:
            hidden = model.forward(model.embed(ids), positions, self._step(segments))
            if len(wanted) < len(ids):
                hidden = hidden[torch.tensor(wanted, device=hidden.device)]
            return model.logits(hidden)

        followed = any(segment.asked is not None for segment in segments)
        if self.cuda_graphs is None or not alone or followed:
            return ordinary()
        return self.cuda_graphs.logits(segments, ids, positions, wanted, ordinary)

    def _step(self, segments: list[Segment]) -> Step:
        model = self.backbone
        return Step(segments, model.heads // model.kv_heads, model.dtype, model.ways)

    def _clip(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows clipped"]:
        logits = logits[:, : self._vocab]
        if len(self._banned):
            logits = logits.index_fill(1, self._banned, float("-inf"))
        return logits


@torch.no_grad()
def score_together(asked: Sequence[tuple[Session, Mapping[int, Tree]]]) -> list[dict[int, Scores]]:
    """What :meth:`Session.score` gives, for several sessions over one model, in one forward."""
    rows, ends = Rows([], [], [], []), [0]
    for session, trees in asked:
        session._ask(trees, rows)
        ends.append(len(rows.wanted))
    first = asked[0][0]
    laws = torch.empty(0, first.backbone.vocab, device=first.backbone.device)
    if rows.segments:
        one = len(rows.segments) == len(first.requests) <= first._views
        laws = first._forward(rows, alone=len(asked) == 1 and one)
    return [
        session._told(trees, laws[start:stop])
        for (session, trees), (start, stop) in zip(asked, pairwise(ends), strict=True)
    ]


def _ends(start: int, stop: int, chunk: int) -> list[int]:
    """Where pieces of a prompt end; a last one of few rows, which would cost a forward's fixed
    share, is read with the one before."""
    return [*range(start, max(start + 1, stop - chunk // 4), chunk), stop]


def _note(request: RequestState, asked: Asked, waiting: int, known: int, nodes: int) -> None:
    """Pending tokens are committed already; which of the nodes will be is told by ``commit``."""
    assert request.recent is not None
    committed = request.prompt_rows[0] + request.length
    for row in range(waiting):
        request.recent.add(JudgedRow(asked, row, committed - waiting + row + 1))
    request.asked[known:] = [(asked, waiting + node) for node in range(nodes)]


def _catch_up(request: RequestState) -> None:
    """Copies the keys of committed text that the source has by now; the rest stays pending."""
    assert request.source is not None
    here, there = request.prompt_rows
    # the last one stays pending even so: the law after it has yet to be computed
    ready = max(0, min(request.source.length - there, request.length - 1))
    # of a turn that adds nothing, the prompt's own last token may have waited
    copied = min(request.copied, request.cache.length - here)
    request.cache.truncate(here + copied)
    request.cache.extend(request.source, there + copied, there + ready)
    request.copied = ready
    request.pending = request.context[len(request.context) - request.length + ready :]


def _block(tree: Tree, known: int, waiting: int) -> Bool[Tensor, "new last"]:
    """Who sees whom among the pending tokens and the tree's nodes, for the rows not yet scored."""
    # the pending tokens are a chain, and what hangs from the text hangs from the last of them
    line = range(ROOT, ROOT + waiting)
    return trees_.ancestors((*line, *(parent + waiting for parent in tree.parents)))[known:]

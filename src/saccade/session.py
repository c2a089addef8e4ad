"""A model at work on a batch of requests: ``score`` trees, ``commit`` tokens.

``score`` is a pure function of (prompt, committed text, tree); the cache only makes it fast, and
``commit`` reconciles it. So plain decoding is an empty tree, a draft that grows is a tree scored
again with more nodes, and catching up with what was accepted is nobody's special case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from saccade import tree as trees_
from saccade.attention import Record, Segment, Step
from saccade.backbone import Backbone
from saccade.cache import Cache
from saccade.sampling import Sampling, Scores
from saccade.types import Prefill, Prompt, Tree

CHUNK = 4096  # prompt tokens a forward
ROOM = 64  # rows for drafted tokens beyond the answer's
LONG = 2048  # a longer answer's cache grows on the way


@dataclass
class Request:
    """Where one request stands. The cache holds the prompt and the text except ``pending``."""

    cache: Cache
    context: list[int]
    first_position: int  # of the first generated token
    generated: int = 0
    pending: list[int] = field(default_factory=list)
    tip: Tensor | None = None  # logits at the end of the text; None while tokens are pending
    source: Cache | None = None  # where a fork takes the keys of committed text from
    prompt_rows: tuple[int, int] = (0, 0)  # of the prompt: here, and in the source
    copied: int = 0  # generated tokens whose keys are the source's
    tree: Tree = Tree()  # last scored; its keys follow the committed ones in the cache
    rows: list[Tensor] = field(default_factory=list)  # its logits


class Session:
    """Scores and commits over a cache, one :class:`Request` per prompt.

    ``vocab`` clips the laws to the ids draft and target share; ``banned`` ids are never proposed
    (placeholders of images and videos).
    """

    def __init__(
        self,
        backbone: Backbone,
        rules: Sequence[Sampling],
        *,
        vocab: int | None = None,
        banned: Sequence[int] = (),
        room: int = 512,
        chunk: int = CHUNK,
    ) -> None:
        self.backbone = backbone
        self.rules = rules
        self.requests: dict[int, Request] = {}
        self._vocab = vocab
        self._banned = torch.tensor(list(banned), dtype=torch.long, device=backbone.device)
        self._room = min(room, LONG) + ROOM
        self._chunk = chunk

    # -- starting ------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt], *, record: bool = False) -> list[Prefill]:
        """Reads the prompts; ``record`` writes down what the text attends to in the visual."""
        return [self._prefill(i, prompt, record) for i, prompt in enumerate(prompts)]

    def _prefill(self, number: int, prompt: Prompt, record: bool) -> Prefill:
        model = self.backbone
        cache = Cache(
            model.layers,
            model.kv_heads,
            model.head_dim,
            len(prompt) + self._room,
            dtype=prompt.embeds.dtype,
            device=model.device,
        )
        columns = prompt.visual.nonzero().squeeze(-1)
        text = _after(prompt)
        mass = torch.zeros(model.layers, model.kv_heads, len(columns), device=model.device)
        hidden = prompt.embeds[:0]
        for start in range(0, len(prompt), self._chunk):
            stop = min(start + self._chunk, len(prompt))
            rows = text[(text >= start) & (text < stop)] - start
            note = None
            if record and len(rows) and len(columns):
                note = Record(rows=rows, columns=columns, queries=len(text), mass=mass)
            step = self._step([Segment(cache, 0, stop - start, start, record=note)])
            hidden = model.forward(
                prompt.embeds[start:stop],
                prompt.positions[:, start:stop],
                step,
                _deepstack(prompt, start, stop),
            )
            cache.advance(stop - start)
        tip = self._laws(hidden[-1:])[0]
        self.requests[number] = Request(
            cache, prompt.context.tolist(), prompt.next_position, tip=tip
        )
        return Prefill(prompt, cache, tip, mass if record else None)

    def fork(self, prefills: Sequence[Prefill], prompts: Sequence[Prompt]) -> None:
        """Starts from another session's caches, keeping the rows these prompts kept of them.

        From then on the keys of committed text are copied from there too: exact, and for free.
        """
        for number, (prefill, prompt) in enumerate(zip(prefills, prompts, strict=True)):
            source = prefill.cache
            assert source is not None
            rows = prompt.index if prompt.heads is None else prompt.heads
            cache = source.select(rows, self._room, self.backbone.layers)
            self.requests[number] = Request(
                cache,
                prompt.context.tolist(),
                prompt.next_position,
                tip=self._clip(prefill.tip[None])[0],
                source=source,
                prompt_rows=(cache.length, source.length),
            )

    def end(self, request: int) -> None:
        """Frees a finished request's cache."""
        self.requests.pop(request, None)

    # -- the two verbs -------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        """Raw logits at the end of the text and at every node, in one forward for all requests.

        Nodes that led the previous tree too are not computed again.
        """
        segments: list[Segment] = []
        ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for number, tree in trees.items():
            request = self.requests[number]
            known = trees_.shared(request.tree, tree)
            del request.rows[known:]
            nodes = tree.tokens[known:]
            start, waiting = len(ids), len(request.pending)
            if not waiting and not nodes:
                continue
            ids += [*request.pending, *nodes]
            end = request.first_position + request.generated
            positions += range(end - waiting, end)
            positions += [end - 1 + depth for depth in trees_.depths(tree)[known:]]
            # of the pending tokens only the last one's law is asked for
            wanted += range(start + max(waiting - 1, 0), len(ids))
            at = request.cache.length + known
            block = None if trees_.is_chain(tree) else _block(tree, known, waiting)
            segments.append(Segment(request.cache, start, len(ids), at, block))
        if segments:
            self._run(trees, segments, ids, positions, wanted)
        found = {}
        for number, tree in trees.items():
            request = self.requests[number]
            request.tree = tree
            assert request.tip is not None
            found[number] = Scores(
                tree,
                [request.tip, *request.rows],
                self.rules[number],
                request.context,
                request.generated,
                number,
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
                request.tip = request.rows[path[-1]]
            request.pending += new[len(path) :]
            request.tree, request.rows = Tree(), []
            request.context += new
            request.generated += len(new)
            if forked:
                _catch_up(request)
            if request.pending:
                request.tip = None

    # -- one forward ---------------------------------------------------------------------------

    def _run(
        self,
        trees: Mapping[int, Tree],
        segments: list[Segment],
        ids: list[int],
        positions: list[int],
        wanted: list[int],
    ) -> None:
        model = self.backbone
        where = torch.tensor(positions, device=model.device).expand(model.axes, -1)
        hidden = model.forward(model.embed(ids), where, self._step(segments))
        if len(wanted) < len(ids):
            hidden = hidden[torch.tensor(wanted, device=model.device)]
        rows = list(self._laws(hidden))
        for number, tree in trees.items():
            request = self.requests[number]
            if request.pending:
                request.cache.advance(len(request.pending))
                request.pending = []
                request.tip = rows.pop(0)
            fresh = len(tree) - len(request.rows)
            request.rows += rows[:fresh]
            del rows[:fresh]

    def _step(self, segments: list[Segment]) -> Step:
        model = self.backbone
        return Step(segments, model.heads // model.kv_heads, model.dtype)

    def _laws(self, hidden: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows clipped"]:
        return self._clip(self.backbone.logits(hidden))

    def _clip(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows clipped"]:
        logits = logits[:, : self._vocab]
        if len(self._banned):
            logits = logits.index_fill(1, self._banned, float("-inf"))
        return logits


def _catch_up(request: Request) -> None:
    """Copies the keys of committed text that the source has by now; the rest stays pending."""
    assert request.source is not None
    here, there = request.prompt_rows
    # the last one stays pending even so: the law after it has yet to be computed
    ready = max(0, min(request.source.length - there, request.generated - 1))
    request.cache.truncate(here + request.copied)
    request.cache.extend(request.source, there + request.copied, there + ready)
    request.copied = ready
    request.pending = request.context[len(request.context) - request.generated + ready :]


def _block(tree: Tree, known: int, waiting: int) -> Bool[Tensor, "new last"]:
    """Who sees whom among the pending tokens and the tree's nodes, for the rows not yet scored."""
    above = trees_.ancestors(tree.parents)[known:]
    if not waiting:
        return above
    block = torch.zeros(waiting + len(above), waiting + len(tree), dtype=torch.bool)
    block[:waiting, :waiting] = torch.ones(waiting, waiting, dtype=torch.bool).tril_()
    block[waiting:, :waiting] = True
    block[waiting:, waiting:] = above
    return block


def _after(prompt: Prompt) -> Tensor:
    """Text rows after the last visual one (all text where nothing is visual)."""
    rows = torch.arange(len(prompt), device=prompt.visual.device)
    seen = rows[prompt.visual]
    return rows[rows > (seen[-1] if len(seen) else -1)]


def _deepstack(prompt: Prompt, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
    if not prompt.deepstack:
        return None
    before = int(prompt.visual[:start].sum())
    mask = prompt.visual[start:stop]
    rows = slice(before, before + int(mask.sum()))
    return mask, torch.stack([layer[rows] for layer in prompt.deepstack])

"""A model at work on a batch of requests: ``score`` trees, ``commit`` tokens.

The target has a session, and so has each draft that is a model. ``score`` is a pure function of
(prompt, committed text, tree); the cache only makes it fast. Plain decoding is an empty tree. A
draft that grows is a tree that is scored again with more nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, singledispatch
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core import tree as trees_
from saccade.core.errors import ModelError
from saccade.core.prompt import Prefill, Prompt, Turn
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import Tree
from saccade.model.attention import Step
from saccade.model.backbone import Backbone
from saccade.model.cache import Cache, Pages, send_to_device
from saccade.model.capture_choice import graphs_of, is_capturing_worthwhile
from saccade.model.cuda_graphs import (
    CudaGraphs,
    ReadTop,
    RowLogits,
    Rows,
)
from saccade.model.kernels.attention_mass import CommittedRow, MassRecorder, RecentRows, RowQueries
from saccade.model.likeliest import Vocabulary
from saccade.model.prefix_cache import ModelPrefixes, common_rows
from saccade.model.segments import Segment

PREFILL_CHUNK_TOKENS = 2048  # of a prompt in one forward, which bounds the memory of a prefill
DRAFT_ROOM_TOKENS = 64  # rows of a cache for drafted tokens, beyond those for the answer
# A new cache has room for at most this many tokens of an answer. It grows if the answer is longer.
MAX_RESERVED_ANSWER_TOKENS = 2048
# Recurrent layers, and layers that evict keys, can be cut back only to lengths that were stored.
# One of these lengths is this many tokens before the prompt's end, or the end of the prompt's
# pictures if that is later (``_lengths_to_store``).
REREAD_PROMPT_TOKENS = 32
Rules = Sequence[Sampling] | Mapping[int, Sampling]
"""Each request's sampling rules, by its number."""


@dataclass
class RequestState:
    """The state of one request. The cache holds the prompt and the text except ``pending``.

    The text is what follows the prompt: answers, and in a conversation the later questions too.
    If a turn dropped the whole text, ``pending`` may begin with the last tokens of the prompt.
    """

    cache: Cache
    context: list[int]  # token ids of the prompt and the text
    first_position: int  # the position of the text's first token
    text_length: int = 0  # in tokens
    answer_length: int = 0  # tokens of this turn's answer so far
    pending: list[int] = field(default_factory=list)  # last tokens of the text, without keys yet
    root_logits: Tensor | None = None  # at the end of the text; None while tokens are pending
    # A function without arguments that returns the two likeliest tokens at the end of the text and
    # their probabilities. None unless a captured forward (a replayed CUDA graph) computes them.
    root_top_reader: ReadTop | None = None
    source: Cache | None = None  # of a fork: the cache it copies the keys of committed text from
    prompt_rows: tuple[int, int] = (0, 0)  # the prompt's number of rows here, and in the source
    copied_tokens: int = 0  # how many tokens of the text have keys that were copied from the source
    tree: Tree = Tree()  # the tree scored last; its keys follow the committed ones in the cache
    node_logits: list[Tensor] = field(default_factory=list)  # after each node of the tree
    # For each node of the tree, what ``root_top_reader`` is for the end of the text.
    node_top_readers: list[ReadTop | None] = field(default_factory=list)
    reused_rows: int = 0  # how many rows of the prompt have keys that an earlier request computed
    # The request's number in the batch that the user passed, which selects its noise. It is 0 for
    # every request of a server, although their numbers in the session differ.
    noise_number: int = 0
    # The rows committed last, if their attention may be asked for (``follow_rows``).
    recent_rows: RecentRows | None = None
    # For each node of the tree, the queries of the forward that scored it, and its row there.
    node_queries: list[tuple[RowQueries, int]] = field(default_factory=list)
    # [layer, kv_head, kept]: which row of the source each row of a fork's prompt is a copy of. None
    # unless the fork may be reselected.
    source_rows: Tensor | None = None
    pages: Pages | None = None  # pages of the source, which are read into the cache's first rows


class Session:
    """Scores and commits over a KV cache, one :class:`RequestState` per prompt.

    ``rules`` are each request's sampling rules, which its scores apply. ``vocab`` clips the
    distributions to the ids that draft and target share. ``banned`` ids are never proposed
    (placeholders of images and videos). Both make up the session's ``vocabulary``. ``room`` is how
    many tokens an answer may have before its cache grows, and ``chunk`` how many tokens of a prompt
    a forward reads. ``cuda_graphs`` runs steps of fixed sizes, which are captured once per model;
    None runs them where that is faster (on GPUs).
    """

    def __init__(
        self,
        backbone: Backbone,
        rules: Rules,
        *,
        vocab: int | None = None,
        banned: Sequence[int] = (),
        room: int = 512,
        chunk: int = PREFILL_CHUNK_TOKENS,
        cuda_graphs: bool | None = None,
    ) -> None:
        self.backbone = backbone
        self.rules = rules
        self.requests: dict[int, RequestState] = {}
        self._vocab = vocab
        self.vocabulary = Vocabulary(vocab, tuple(banned))
        self._banned = torch.tensor(list(banned), dtype=torch.long, device=backbone.device)
        self._room = min(room, MAX_RESERVED_ANSWER_TOKENS) + DRAFT_ROOM_TOKENS
        self.chunk = chunk
        uses_graphs = is_capturing_worthwhile(backbone) if cuda_graphs is None else cuda_graphs
        self.cuda_graphs: CudaGraphs | None = graphs_of(backbone) if uses_graphs else None
        # Prompts can share keys only where keys do not depend on the length of the prompt.
        prefix_cache = None if backbone.rotates_by_length else backbone.prefix_cache
        self._prefixes = None if prefix_cache is None else ModelPrefixes(prefix_cache, backbone)

    # -- prefill and forks ---------------------------------------------------------------------

    def prefill(
        self, prompts: Sequence[Prompt], *, record: bool = False, keeps_all_keys: bool = True
    ) -> list[Prefill]:
        """Prefills the prompts. ``record`` also records the attention of the text after the last
        visual row on the visual rows. ``keeps_all_keys`` is that of :meth:`prefill_in_chunks`."""
        return [
            prefill
            for number, prompt in enumerate(prompts)
            for prefill in self.prefill_in_chunks(
                number,
                prompt,
                record=record,
                noise_number=number,
                keeps_all_keys=keeps_all_keys,
            )
            if prefill is not None
        ]

    def new_cache(self, capacity: int, *, keeps_all_keys: bool = True) -> Cache:
        """Returns an empty cache for a request, in the pool of captured forwards if there are any.

        Without ``keeps_all_keys``, layers with a window evict the keys behind it. In the pool all
        keys are kept in any case.
        """
        if self.cuda_graphs is not None:
            return self.cuda_graphs.new_cache(capacity)
        return self.backbone.new_cache(
            capacity, None if keeps_all_keys else forward_rows(self.chunk)
        )

    def prefill_in_chunks(
        self,
        number: int,
        prompt: Prompt,
        *,
        record: bool = False,
        follow_rows: int = 0,
        noise_number: int = 0,
        keeps_all_keys: bool = True,
        shared_rows: int = 0,
        hidden_layers: Sequence[int] = (),
    ) -> Iterator[Prefill | None]:
        """Prefills one prompt a chunk at a time, so that other requests can be scored in between.

        Yields None after each chunk but the last, and the ``Prefill`` after the last.

        Args:
            number: the request's number in this session.
            prompt: what is read.
            record: records the attention of the text after the last visual row on the visual rows.
            follow_rows: if not 0, the ``Prefill`` has a function ``with_latest_attention``. At each
                call it returns the ``Prefill`` with newer attention on the visual rows: that of the
                last rows committed by then, at most ``follow_rows``. This needs ``record``.
            noise_number: see :class:`RequestState`.
            keeps_all_keys: if False, layers with a window may evict the keys behind it
                (:meth:`new_cache`). Then no other session can start from this one's keys, and no
                rows can be followed.
            shared_rows: if not 0, the request exists already, and the prompt begins with this many
                rows of its prompt and text. They are not read again, as far as that is possible.
            hidden_layers: layers whose hidden states are stored too, for this prompt and all that
                follows. This has no effect with ``shared_rows``: the cache that exists is used.
        """
        model = self.backbone
        if model.fused is not None:
            model.fused.refresh()
        old = self.requests[number].cache if shared_rows else None
        cache = old
        if cache is None:
            cache = self.new_cache(len(prompt) + self._room, keeps_all_keys=keeps_all_keys)
        if hidden_layers and old is None:
            cache.hidden = model.hidden_states(hidden_layers, len(prompt) + self._room)
        # What is recorded: the attention of the ``text`` rows on the visual rows, the ``columns``.
        columns = prompt.visual.nonzero().squeeze(-1)
        text = prompt.text_after()
        recorded_columns = len(columns) if record else 0
        # The attention on each column, once with a softmax over all keys, and once over the visual
        # ones alone.
        attention = torch.zeros(
            model.key_layer_count, model.kv_heads, 2, recorded_columns, device=model.device
        ).float()
        hidden = prompt.embeds[:0]
        # As many leading rows as possible are reused: the request's own, or those of a prompt in
        # the prefix cache.
        reused_rows, prefix_key = 0, None
        # Rows whose logits or attention are needed must be computed, even if their keys are stored.
        # These are the rows of ``text`` if attention is recorded, and the followed rows at the
        # prompt's end. The last row is always among them, because its logits are needed.
        first_recorded = int(text[0]) if recorded_columns and len(text) else len(prompt)
        needed_at_end = max(1, follow_rows)
        max_reused = max(0, min(first_recorded, len(prompt) - needed_at_end))
        if old is not None:
            reused_rows = _cut_to_prompt(old, prompt, min(shared_rows, max_reused))
            # A layer that evicts keys gets the room that it needs in each forward. If room for the
            # whole prompt were made at once, its tensors would become about as long as the prompt.
            if not old.evicts_keys:
                old.reserve(len(prompt) + self._room)
        elif self._prefixes is not None:
            reused_rows, prefix_key = self._prefixes.copy_longest(prompt, cache, max_reused)
        # The other rows are read in chunks, whose borders are ``ends``.
        ends = chunk_ends(reused_rows, len(prompt), self.chunk)
        lengths_to_store = _lengths_to_store(prompt)
        # States can be stored only at the end of a chunk.
        state_lengths = lengths_to_store if cache.states is not None else set()
        ends = sorted({*ends, *(n for n in state_lengths if n > reused_rows)})
        # A chunk never ends within a picture that is read in both directions, but before it.
        begin = ends[0]
        cuts = {prompt.largest_cut(end) for end in ends[1:]}
        ends = [begin, *sorted(cut for cut in cuts if cut > begin)]
        last_visible_row = prompt.media.last_visible_row
        for start, stop in pairwise(ends):
            rows = text[(text >= start) & (text < stop)].cpu()
            is_recorded = recorded_columns > 0 and len(rows) > 0
            recorder = MassRecorder(rows, stop, columns, attention) if is_recorded else None
            queries = RowQueries(follow_rows) if follow_rows and stop == len(prompt) else None
            segment = Segment(
                cache,
                start=0,
                stop=stop - start,
                first_key=start,
                recorder=recorder,
                row_queries=queries,
                committed_rows=stop - start,
                last_visible_row=None if last_visible_row is None else last_visible_row[start:stop],
                sees_ahead_in_windows_only=prompt.media.sees_ahead_in_windows_only,
            )
            hidden = self._prefill_chunk(prompt, segment)
            if stop in state_lengths and cache.states is not None:
                # This may drop older snapshots, but none at these lengths.
                cache.states.snapshot(state_lengths)
            cache.save_windows([length for length in lengths_to_store if start < length <= stop])
            if recorder is not None:
                # The recorder takes a row to see its own key and those before it, in layers without
                # a window. If rows see ahead in such layers too, it is told how many keys they see.
                # All recorded rows are text, so none skips a key before its last visible row.
                key_counts = None
                if last_visible_row is not None and segment.needs_full_mask(window=None):
                    key_counts = last_visible_row.cpu()[rows] + 1
                recorder.finish(cache, visible_keys=key_counts)
            if stop < len(prompt):
                yield None
        # The windows that were saved for earlier prompts are dropped.
        cache.drop_saved_windows_except(lengths_to_store)
        with torch.no_grad():
            logits = self._keep_draftable_ids(model.logits(hidden[-1:]))[0]
        if self._prefixes is not None:
            self._prefixes.add(prompt, cache, prefix_key)
        request = self.requests[number] = RequestState(
            cache,
            prompt.full_ids.tolist(),
            prompt.next_position,
            root_logits=logits,
            prompt_rows=(cache.length, cache.length),
            reused_rows=reused_rows,
            noise_number=noise_number,
            recent_rows=RecentRows(maxlen=follow_rows) if follow_rows else None,
        )
        if not record:
            yield Prefill(prompt, cache, logits)
            return
        # The sum becomes a mean over the rows of text and the query heads of each KV head.
        query_heads_per_kv_head = model.heads // model.kv_heads
        attention /= max(1, len(text)) * query_heads_per_kv_head
        prefill = self._with_attention(Prefill(prompt, cache, logits), attention)
        if request.recent_rows is not None and queries is not None:
            followed = min(follow_rows, stop - start)
            for row in range(followed):
                visible_keys = cache.length - followed + row + 1
                request.recent_rows.append(CommittedRow(queries, row, visible_keys))
            prefill = replace(
                prefill,
                with_latest_attention=partial(
                    self._with_latest_attention, number, prefill, columns
                ),
            )
        yield prefill

    # The decorator is not on the generator, because its caller computes between the chunks.
    @torch.no_grad()
    def _prefill_chunk(self, prompt: Prompt, segment: Segment) -> Float[Tensor, "rows dim"]:
        """Writes the keys and values of some rows of a prompt, and returns hidden states after the
        last norm: that of the last row at least, and perhaps those of the rows before it."""
        model = self.backbone
        step = self._step([segment])
        start = segment.first_key
        stop = segment.first_key + segment.stop
        embeds = prompt.embeds[start:stop]
        positions = prompt.positions[:, start:stop]
        deepstack = prompt.deepstack_of(start, stop)
        length = int(prompt.positions.max()) + 1 if model.rotates_by_length else None
        row_arguments = {
            name: each[start:stop] for name, each in prompt.media.row_arguments.items()
        }
        hidden = model.forward(
            embeds,
            positions,
            step,
            deepstack,
            only_last_row=True,
            length=length,
            row_arguments=row_arguments,
        )
        # Each layer with keys must have called this step for its attention. Otherwise its keys are
        # not in the cache.
        if step.calls != model.key_layer_count:
            raise ModelError(
                f"{type(model.model).__name__} computes its attention in a way of its own, "
                "which Saccade cannot follow"
            )
        segment.cache.advance(stop - start)
        return hidden

    def _with_attention(
        self, prefill: Prefill, attention: Float[Tensor, "layer kv_head 2 visual"]
    ) -> Prefill:
        """Returns a prefill with this attention, gathered from the processes among which the heads
        are divided.

        Index 0 of the axis of length 2 has the attention by a softmax over all keys (``mass``), and
        index 1 that by a softmax over the visual keys alone (``relevance``).
        """
        gather_heads = self.backbone.shares.gather_heads
        mass = gather_heads(attention[:, :, 0])
        relevance = gather_heads(attention[:, :, 1])
        return replace(prefill, mass=mass, relevance=relevance)

    def _with_latest_attention(
        self, number: int, prefill: Prefill, columns: Int[Tensor, " visual"]
    ) -> Prefill:
        """Returns a prefill with the attention of the rows that were committed last on the visual
        rows, the ``columns``. If no such rows are stored, it returns the prefill as it is."""
        request = self.requests[number]
        if not request.recent_rows:
            return prefill
        model = self.backbone
        # As in the prefill, layers with a window or with another number of key heads are left out.
        recorded_layers = [
            layer
            for layer, shape in enumerate(model.head_shapes)
            if shape.kv_heads == model.kv_heads and not (model.windows and model.windows[layer])
        ]
        mass = request.recent_rows.attention_mass(
            request.cache, columns, recorded_layers, model.kv_heads
        )
        return self._with_attention(prefill, mass)

    def fork(
        self,
        prefills: Sequence[Prefill],
        prompts: Sequence[Prompt],
        *,
        can_reselect: bool = False,
    ) -> None:
        """Starts requests whose keys are copied from another session, the source.

        Such a request is a fork. A target that drafts for itself does so in forks, which mostly
        have only some of the target's keys. Each fork gets those rows of a prefill's cache that the
        fork's prompt names. Later, the keys of committed text are copied from the source too, which
        is exact and needs no forward. ``can_reselect`` allows :meth:`reselect` to change the rows
        of the prompt.
        """
        for number, (prefill, prompt) in enumerate(zip(prefills, prompts, strict=True)):
            source = prefill.cache
            assert source is not None
            rows = prompt.places
            if can_reselect or prompt.reading.heads is not None:
                rows = self._rows_by_head(prompt)
            if (paged := prompt.reading.paged) is not None:
                # The first ``slots`` rows only make room. Each step of the draft overwrites them
                # with the pages that it reads (:class:`Pages`).
                rows = torch.cat([paged.rows.flatten()[: paged.slots], rows])
            # This session's model may be only the first layers of the source's. Then the fork has
            # the keys of these layers alone, and the states of the recurrent ones among them
            # (``mixers``).
            cache = source.select(rows, self._room, self.backbone.key_layer_count)
            if cache.states is not None:
                cache.states = cache.states.first_layers(len(self.backbone.mixers))
            self.requests[number] = RequestState(
                cache,
                prompt.full_ids.tolist(),
                prompt.next_position,
                root_logits=self._keep_draftable_ids(prefill.logits[None])[0],
                source=source,
                prompt_rows=(cache.length, source.length),
                noise_number=number,
                source_rows=rows if can_reselect else None,
                pages=None
                if paged is None
                else Pages(source, paged, self.backbone.key_layer_count),
            )

    def reselect(self, number: int, prompt: Prompt) -> None:
        """Changes which rows of the source's prompt a fork has. Their number stays the same."""
        request = self.requests[number]
        assert request.source_rows is not None and request.source is not None
        request.source_rows = request.cache.exchange(
            request.source, request.source_rows, self._rows_by_head(prompt)
        )

    def _rows_by_head(self, prompt: Prompt) -> Int[Tensor, "layer kv_head kept"]:
        """Returns which rows of the whole prompt each head of this process reads."""
        model = self.backbone
        if prompt.reading.heads is not None:
            return model.shares.own_heads(prompt.reading.heads)
        return prompt.places.expand(model.key_layer_count, model.kv_heads, -1).contiguous()

    def start_turn(self, turns: Mapping[int, Turn], rules: Rules) -> None:
        """Continues conversations: drops the last tokens and appends the next question's.

        The keys of the tokens before those stay. Where the cache can only be cut back further, the
        text after the cut is read again. Of a long text that is to be read, all chunks but the last
        are read here. The rest is pending until the next score.
        """
        self.rules = rules
        for number, turn in turns.items():
            request = self.requests[number]
            # The text is dropped first. If more is to be dropped, the prompt's last tokens follow.
            dropped_from_prompt = max(0, turn.drop - request.text_length)
            if dropped_from_prompt:
                prompt_rows, source_prompt_rows = request.prompt_rows
                # A fork may have fewer of the prompt's rows than are dropped. The source has all.
                request.prompt_rows = (
                    max(0, prompt_rows - dropped_from_prompt),
                    source_prompt_rows - dropped_from_prompt,
                )
                request.first_position -= dropped_from_prompt
            request.context[len(request.context) - turn.drop :] = turn.ids
            kept_tokens = max(0, request.text_length - turn.drop)
            request.text_length = kept_tokens + len(turn.ids)
            request.answer_length = 0
            if request.recent_rows is not None:
                request.recent_rows.clear()
            request.tree = Tree()
            request.node_logits = []
            request.root_logits = None
            # At least one token is pending, so that the logits after it are computed.
            cached_tokens = min(
                request.cache.length - request.prompt_rows[0], kept_tokens, request.text_length - 1
            )
            # The cache can be cut back to a few lengths only, if layers have a state or evict keys.
            # The text after such a length is read again.
            length = request.cache.nearest_length(request.prompt_rows[0] + cached_tokens)
            cached_tokens = length - request.prompt_rows[0]
            request.cache.truncate(length)
            request.cache.save_windows_for_turn(length)
            request.copied_tokens = max(0, min(request.copied_tokens, cached_tokens))
            text_start = len(request.context) - request.text_length
            request.pending = request.context[text_start + cached_tokens :]
            # Without text there is nothing to copy, and the prompt's last token stays pending, so
            # that the logits after it are computed.
            if request.source is not None and request.text_length:
                _copy_committed_keys(request)
            self._read_all_but_last_chunk(number)

    def _read_all_but_last_chunk(self, number: int) -> None:
        """Reads a long turn's pending tokens a chunk at a time, so that the turn takes no more
        memory than a prompt of its length. The last chunk stays pending."""
        request = self.requests[number]
        pending, length = request.pending, request.text_length
        borders = chunk_ends(0, len(pending), self.chunk)[:-1]  # Without the last chunk's end.
        for start, stop in pairwise(borders):
            request.pending = pending[start:stop]
            # The positions of pending tokens are counted back from the end of the text. So while a
            # chunk is read, the text ends with it.
            request.text_length = length - len(pending) + stop
            self.score({number: Tree()})
            request.pending = pending[stop:]
            request.text_length = length
            request.root_logits = None

    def shared_rows(self, number: int, old: Prompt, new: Prompt) -> int:
        """Returns how many leading rows of a new prompt are those of a request's prompt and text:
        the same rows at the same positions."""
        request = self.requests[number]
        text_start = len(request.context) - request.text_length
        rows = min(common_rows(old, new), text_start)
        if rows < text_start:
            return new.largest_cut(rows)
        # The prompt is shared as a whole, so the text after it is compared too.
        text = request.context[text_start : len(new)]
        stop = text_start + len(text)
        device = new.positions.device
        ids = torch.tensor(text, dtype=torch.long, device=device)
        positions = request.first_position + torch.arange(len(text), device=device)
        is_plain_text = ~(new.visual | new.fixed)[text_start:stop]
        equal = (new.full_ids[text_start:stop] == ids) & is_plain_text
        equal &= (new.positions[:, text_start:stop] == positions).all(0)
        if new.media.last_visible_row is not None:
            # The text was decoded causally, so no row of it has seen a row after itself.
            own_rows = torch.arange(text_start, stop, device=device)
            equal &= new.media.last_visible_row[text_start:stop] == own_rows
        shared_text_rows = int(equal.long().cumprod(0).sum())  # up to the first difference
        return new.largest_cut(text_start + shared_text_rows)

    def keep_prompt_rows(self, number: int, rows: Int[Tensor, " kept"]) -> None:
        """Drops all rows of a prompt but these. The text and the tree after it stay scored."""
        request = self.requests[number]
        cache = request.cache
        old_rows = request.prompt_rows[0]
        scored_rows = torch.arange(
            old_rows, cache.length + len(request.node_logits), device=rows.device
        )
        text_rows = cache.length - old_rows
        request.cache = cache.select(torch.cat([rows, scored_rows]), self._room)
        request.cache.length = len(rows) + text_rows  # The tree's rows are not committed.
        request.prompt_rows = len(rows), len(rows)

    def end(self, request: int) -> None:
        """Frees the cache of a request that has ended."""
        self.requests.pop(request, None)

    # -- score and commit ----------------------------------------------------------------------

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        """Returns each request's scores, which hold the logits at the end of its text and at every
        node of its tree. One forward computes them for all requests.

        The logits are those before any sampling rule, over the ids that draft and target share,
        with -inf for banned ids.
        Leading nodes that the previous tree had too are not computed again.
        """
        (scores,) = score_together([(self, trees)])
        return scores

    @staticmethod
    @torch.no_grad()
    def score_batches(
        batches: Sequence[tuple[Session, Mapping[int, Tree]]],
    ) -> list[dict[int, Scores]]:
        """Returns each session's scores of its trees, from one forward for all sessions.

        All of them are sessions of this class over one model.
        """
        rows = Rows([], [], [], [])
        ends = [0]
        for session, trees in batches:
            session._add_new_rows(trees, rows)
            ends.append(len(rows.logit_rows))
        first_session = batches[0][0]
        if rows.segments:
            logits = first_session._forward(rows)
        else:
            backbone = first_session.backbone
            none = torch.empty(0, backbone.vocab, device=backbone.device)
            logits = RowLogits.of_ordinary(none)
        return [
            session._scores(trees, logits.part(start, stop))
            for (session, trees), (start, stop) in zip(batches, pairwise(ends), strict=True)
        ]

    def fill_for_timing(self, number: int, context: int, room: int) -> None:
        """Starts a request with ``context`` meaningless keys and room for ``room`` more, to time
        forwards."""
        self.requests[number] = RequestState(self._filled_cache(context, room), [], context)

    def _filled_cache(self, context: int, room: int) -> Cache:
        """Returns a cache of ``context`` meaningless keys, with room for ``room`` more."""
        cache = self.new_cache(context + room)
        for tensor in (*cache.keys, *cache.values):
            # A forward over random numbers would take as long, and they would take longer to make.
            tensor.fill_(1)
        cache.advance(context)
        if cache.states is not None:
            cache.states.snapshot()  # Steps are timed from here, again and again.
        return cache

    def rewind_for_timing(self, context: int) -> None:
        """Sets every request back to ``context`` keys with one token pending."""
        for request in self.requests.values():
            request.pending = [0]
            request.tree = Tree()
            request.node_logits = []
            request.cache.length = context
            if request.cache.states is not None:
                request.cache.states.truncate(context)

    def _add_new_rows(self, trees: Mapping[int, Tree], forward: Rows) -> None:
        """Adds the pending tokens, and the nodes that were not scored yet, to the rows of a
        forward."""
        for number, tree in trees.items():
            request = self.requests[number]
            old_nodes = trees_.count_shared_nodes(request.tree, tree)
            del request.node_logits[old_nodes:]
            del request.node_top_readers[old_nodes:]
            nodes = tree.tokens[old_nodes:]
            start = len(forward.ids)
            pending_count = len(request.pending)
            if not pending_count and not nodes:
                continue
            forward.ids.extend((*request.pending, *nodes))
            # The position of the token after the text, which is that of nodes of depth 1.
            end = request.first_position + request.text_length
            forward.positions.extend(range(end - pending_count, end))
            depths = trees_.depths(tree.parents)[old_nodes:]
            forward.positions.extend(end - 1 + depth for depth in depths)
            # Of the pending tokens only the last one's logits are needed.
            forward.logit_rows.extend(range(start + max(pending_count - 1, 0), len(forward.ids)))
            first_key = request.cache.length + old_nodes
            mask = None
            if not trees_.is_chain(tree):
                mask = trees_.tree_mask(tree, old_nodes, pending_count)
            queries = None if request.recent_rows is None else RowQueries()
            stop = len(forward.ids)
            forward.segments.append(
                Segment(
                    request.cache,
                    start,
                    stop,
                    first_key,
                    recent_mask=mask,
                    row_queries=queries,
                    pages=request.pages,
                    committed_rows=pending_count,
                    scored_nodes=old_nodes,
                    vocabulary=self.vocabulary,
                )
            )
            if queries is not None:
                _store_queries(request, queries, pending_count, old_nodes, len(nodes))

    def _scores(self, trees: Mapping[int, Tree], rows: RowLogits) -> dict[int, Scores]:
        """Returns the scores of trees, from the logits of the rows that were added for them."""
        # Only a captured forward computes the likeliest tokens. It has also given banned ids the
        # logit -inf already.
        is_captured = None not in rows.top_readers
        new_logits = list(
            rows.logits[:, : self._vocab] if is_captured else self._keep_draftable_ids(rows.logits)
        )
        new_top_readers = [*rows.top_readers]
        scores = {}
        for number, tree in trees.items():
            request = self.requests[number]
            if request.pending:
                request.cache.advance(len(request.pending))
                request.pending = []
                request.root_logits = new_logits.pop(0)
                request.root_top_reader = new_top_readers.pop(0)
            new_nodes = len(tree) - len(request.node_logits)
            request.node_logits += new_logits[:new_nodes]
            request.node_top_readers += new_top_readers[:new_nodes]
            del new_logits[:new_nodes]
            del new_top_readers[:new_nodes]
            request.tree = tree
            assert request.root_logits is not None
            scores[number] = Scores(
                tree,
                [request.root_logits, *request.node_logits],
                self.rules[number],
                request.context,
                request.answer_length,
                request.noise_number,
                top_readers=[request.root_top_reader, *request.node_top_readers],
            )
        return scores

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Appends the tokens that a round emitted. Those on a path from the last tree's root keep
        their keys in the cache, and the others are pending. A fork copies keys from its source
        instead."""
        for number, new in tokens.items():
            request = self.requests[number]
            is_fork = request.source is not None
            # While tokens are pending, no tree has been scored after them, so no node has keys.
            path = [] if request.pending or is_fork else trees_.follow(request.tree, new)
            request.cache.commit_path(path)
            if path:
                request.root_logits = request.node_logits[path[-1]]
                request.root_top_reader = request.node_top_readers[path[-1]]
            if request.recent_rows is not None:
                committed_rows = request.prompt_rows[0] + request.text_length
                for depth, node in enumerate(path):
                    visible_keys = committed_rows + depth + 1
                    request.recent_rows.append(
                        CommittedRow(*request.node_queries[node], visible_keys)
                    )
            request.pending += new[len(path) :]
            dropped_nodes = len(request.tree)
            if trees_.is_chain(request.tree) and path and len(path) == len(new):
                # Every new token is a node of the chain, so the nodes after these still continue
                # the text. They stay, with their keys and logits.
                dropped_nodes = len(path)
            request.tree = trees_.chain_without_first(request.tree, dropped_nodes)
            request.node_logits = request.node_logits[dropped_nodes:]
            request.node_top_readers = request.node_top_readers[dropped_nodes:]
            request.node_queries = request.node_queries[dropped_nodes:]
            request.context += new
            request.text_length += len(new)
            request.answer_length += len(new)
            if is_fork:
                _copy_committed_keys(request)
            if request.pending:
                request.root_logits = None

    # -- one forward ---------------------------------------------------------------------------

    def _forward(self, rows: Rows) -> RowLogits:
        """Writes the keys and values of all rows and returns the logits that scores need."""
        # A captured forward can neither store queries nor read pages that queries choose. A model
        # whose logits need its own ``forward`` is not captured either, because that method may run
        # any Python code.
        is_unusual = any(segment.row_queries or segment.pages for segment in rows.segments)
        # A backbone that is a model's first layers gets its logits from the whole model's output
        # matrix, so the whole model says whether they need its ``forward``.
        full_backbone = self.backbone.full_backbone or self.backbone
        if self.cuda_graphs is None or is_unusual or full_backbone.needs_model_for_logits:
            return RowLogits.of_ordinary(self._ordinary_forward(rows))
        return self.cuda_graphs.logits(rows, self._ordinary_forward)

    def _ordinary_forward(self, rows: Rows) -> Float[Tensor, "logit_rows vocab"]:
        """Computes the logits of :meth:`_forward` without a captured forward."""
        model = self.backbone
        embeds = model.embed(rows.ids)
        step = self._step(rows.segments)
        forward = model.forward
        if row_arguments := model.row_arguments(rows.ids, embeds):
            forward = partial(forward, row_arguments=row_arguments)
        hidden = forward(embeds, rows.positions, step)
        if len(rows.logit_rows) < len(rows.ids):
            hidden = hidden[send_to_device(torch.tensor(rows.logit_rows), hidden.device)]
        return model.logits(hidden)

    def _step(self, segments: list[Segment]) -> Step:
        """Returns the attention of one forward over these segments."""
        model = self.backbone
        query_heads_per_kv_head = model.heads // model.kv_heads
        return Step(
            segments,
            query_heads_per_kv_head,
            model.dtype,
            model.attention_choice,
            model.key_layers,
            model.windows,
            model.has_uneven_heads,
        )

    def _keep_draftable_ids(
        self, logits: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows shared_vocab"]:
        """Returns logits of the shared vocabulary, where banned ids have probability 0."""
        logits = logits[:, : self._vocab]
        if len(self._banned):
            logits = logits.index_fill(1, self._banned, float("-inf"))
        return logits


def score_together(
    batches: Sequence[tuple[Session, Mapping[int, Tree]]],
) -> list[dict[int, Scores]]:
    """Returns what :meth:`Session.score` returns, for several sessions over one model, in one
    forward."""
    return type(batches[0][0]).score_batches(batches)


def forward_rows(chunk: int = PREFILL_CHUNK_TOKENS) -> int:
    """Returns how many rows a forward over a prompt has at most. The last chunk may be longer than
    the others by a quarter, see :func:`chunk_ends`."""
    return chunk + chunk // 4


@singledispatch
def session_of(model: Backbone, rules: Rules, *, cuda_graphs: bool | None = None) -> Session:
    """Returns an empty session of a model, of the kind that the model needs."""
    return Session(model, rules, cuda_graphs=cuda_graphs)


def chunk_ends(start: int, stop: int, chunk: int) -> list[int]:
    """Returns the borders of a prompt's chunks, ``start`` and ``stop`` included.

    A last chunk of at most a quarter of ``chunk`` is joined to the one before, because every
    forward has a fixed cost. With chunks of 2048, 4500 rows have the borders 0, 2048 and 4500.
    """
    return [*range(start, max(start + 1, stop - chunk // 4), chunk), stop]


def _cut_to_prompt(cache: Cache, prompt: Prompt, rows: int) -> int:
    """Cuts a cache back to a beginning of a prompt, and returns how many rows stay.

    The first ``rows`` rows of the cache are those of the prompt. Fewer may stay, because recurrent
    states are stored at a few lengths only, and because no cut is made within a picture that is
    read in both directions.
    """
    rows = min(rows, cache.length)
    # Each of the two rules may choose a length that the other does not allow.
    while True:
        length = prompt.largest_cut(cache.nearest_length(rows))
        if length == rows:
            break
        rows = length
    cache.truncate(rows)
    return rows


def _lengths_to_store(prompt: Prompt) -> set[int]:
    """Returns the lengths of a prompt to which a conversation may later be cut back. At each of
    them recurrent states are stored, and layers that evict keys save a copy of their window.

    A later turn cuts back to somewhere near the prompt's end, and another question about the same
    pictures to the end of the pictures.
    """
    text = prompt.text_after()
    pictures_end = int(text[0]) if len(text) else len(prompt)
    near_end = max(pictures_end, len(prompt) - REREAD_PROMPT_TOKENS)
    return {n for n in (pictures_end, near_end, len(prompt)) if 0 < n <= len(prompt)}


def _store_queries(
    request: RequestState, queries: RowQueries, pending_count: int, old_nodes: int, new_nodes: int
) -> None:
    """Stores the queries of a request's rows of a forward.

    The rows are those of the pending tokens and then those of new nodes. Pending tokens are
    committed already, so they are recent rows at once. Of the nodes, ``commit`` adds those that are
    accepted.
    """
    assert request.recent_rows is not None
    committed_rows = request.prompt_rows[0] + request.text_length
    for row in range(pending_count):
        visible_keys = committed_rows - pending_count + row + 1
        request.recent_rows.append(CommittedRow(queries, row, visible_keys))
    node_rows = range(pending_count, pending_count + new_nodes)
    request.node_queries[old_nodes:] = [(queries, row) for row in node_rows]


def _copy_committed_keys(request: RequestState) -> None:
    """Copies the keys of committed text that the source has by now. Text after them stays
    pending."""
    assert request.source is not None
    prompt_rows, source_prompt_rows = request.prompt_rows
    # ``ready`` is how many tokens of the text have keys that can be copied. The last token is
    # pending even if its keys could be copied, because the logits after it are needed.
    ready = max(0, min(request.source.length - source_prompt_rows, request.text_length - 1))
    # If a turn dropped the whole text, the last tokens of the prompt may be pending. Then the cache
    # has fewer rows than the prompt, and ``copied`` is below 0: that many rows of the prompt's
    # end are missing.
    copied = min(request.copied_tokens, request.cache.length - prompt_rows)
    # Recurrent layers have no keys. Their states can be copied only at lengths at which the source
    # knows them, so the number of tokens is lowered to such a length.
    ready = request.source.nearest_length(source_prompt_rows + ready) - source_prompt_rows
    if ready < copied:
        # More tokens were copied before than can be copied now, so nothing is copied. The tokens
        # whose keys the cache has are not pending. They may be more than were copied, because a
        # fork also computes keys itself when it scores.
        tokens_with_keys = request.cache.length - prompt_rows
    else:
        request.cache.extend(
            request.source,
            source_prompt_rows + copied,
            source_prompt_rows + ready,
            at=prompt_rows + copied,
        )
        request.copied_tokens = tokens_with_keys = ready
    text_start = len(request.context) - request.text_length
    request.pending = request.context[text_start + tokens_with_keys :]

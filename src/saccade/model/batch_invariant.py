"""Makes drafted answers equal plain decoding bit for bit in low precision too (``exact=True``).

A matrix product over n rows is rounded differently from one over a single row, and a sum over keys
is rounded differently when the keys are added in another order. So every forward over text has
``ROWS`` rows of one request, padded at its end. Attention adds up its keys in fp32, in blocks of
``BLOCK`` from the first key on, and each block is a product of one shape. In a tree the keys are in
another order than in plain decoding, so drafts must be chains.

A row's result must not depend on which of the ``ROWS`` places it has. Whether that is so depends on
the machine's kernels and on the number of threads, so it is tested once for each model and number
of threads. ``exact=True`` is refused where the test fails, and without a test for models whose
layers have no such form here (:func:`require_batch_invariance`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saccade.core.errors import MethodError, ModelError
from saccade.model.attention import Keys, Step
from saccade.model.backbone import Backbone
from saccade.model.cache import Cache
from saccade.model.cache_pool import CachePool
from saccade.model.cuda_graphs import (
    Attention,
    AttentionKind,
    FirstLayersAgree,
    RowLogits,
    Rows,
    StaticInputs,
    write_keys_and_values,
)
from saccade.model.kernels.attention_mass import Queries
from saccade.model.segments import Segment
from saccade.model.session import Session

ROWS = 16  # Rows of every forward over text; shorter ones are padded.
BLOCK = 256  # Attention sums are added up in blocks of this many keys.
Block = Float[Tensor, "kv_head block head_dim"]
"""``BLOCK`` keys or values, in fp32."""
NEEDS_CHAINS = "exact=True needs drafts that are chains: use shape=chain-N, fit or auto"

_trials: WeakKeyDictionary[Backbone, dict[tuple[object, ...], bool]] = WeakKeyDictionary()
"""Test results by model, and by what else they depend on: dtype, device, threads, and whether the
decoder is a fused one."""


class BatchInvariantSession(Session):
    """A session whose logits depend on the text alone, and not on which tokens share a forward.

    It splits each forward into forwards of one request and ``ROWS`` rows. The claim holds for
    models that pass :func:`require_batch_invariance`.
    """

    def _forward(self, rows: Rows) -> RowLogits:
        segments, ids, positions, logit_rows = rows
        logits = []
        top_readers = []  # For each row a function that reads its likeliest tokens, or None.
        for segment in segments:
            if segment.recent_mask is not None:
                raise MethodError(NEEDS_CHAINS)
            for start in range(segment.start, segment.stop, ROWS):
                stop = min(start + ROWS, segment.stop)
                first_key = segment.first_key + start - segment.start
                part = Segment(
                    segment.cache,
                    start=0,
                    stop=stop - start,
                    first_key=first_key,
                    row_queries=segment.row_queries,
                    vocabulary=segment.vocabulary,
                )
                chunk_logit_rows = [row - start for row in logit_rows if start <= row < stop]
                chunk = Rows([part], ids[start:stop], positions[start:stop], chunk_logit_rows)
                chunk_logits = self._logits_of_chunk(chunk)
                logits.append(chunk_logits.logits)
                top_readers += chunk_logits.top_readers
        return RowLogits(torch.cat(logits), top_readers)

    def _logits_of_chunk(self, rows: Rows) -> RowLogits:
        """Returns the logits of ``rows.logit_rows``.

        ``rows`` are at most ``ROWS`` rows of one request, and ``rows.logit_rows`` are the last of
        them.
        """
        (segment,) = rows.segments
        # Only an ordinary forward can store queries. A captured one could store hidden states, but
        # this session leaves that to ordinary forwards.
        must_be_ordinary = segment.row_queries is not None or segment.cache.hidden is not None
        if self.cuda_graphs is None or must_be_ordinary:
            return RowLogits.of_ordinary(self._ordinary_forward(rows))
        return self.cuda_graphs.logits(rows, self._ordinary_forward, BATCH_INVARIANT_ATTENTION)

    def _ordinary_forward(self, rows: Rows) -> Float[Tensor, "logit_rows vocab"]:
        model = self.backbone
        (segment,), ids, positions, logit_rows = rows
        # The padding repeats the last row. None of the real rows sees it.
        padding_rows = ROWS - (segment.stop - segment.start)
        padded_ids = ids + ids[-1:] * padding_rows
        padded_positions = positions + positions[-1:] * padding_rows
        padded = Segment(
            segment.cache,
            start=0,
            stop=ROWS,
            first_key=segment.first_key,
            row_queries=segment.row_queries,
        )
        embeds = model.embed(padded_ids)
        hidden = model.forward(embeds, padded_positions, BatchInvariantStep(padded))
        return model.logits(hidden)[segment.stop - len(logit_rows) : segment.stop]


class BatchInvariantStep(Step):
    """Attention of ``ROWS`` rows of one request over its keys, block after block.

    ``last`` has, for each row, the index of the last key that the row sees. If it is None, that is
    the row's own key.
    """

    def __init__(self, segment: Segment, last: Int[Tensor, " rows"] | None = None) -> None:
        # ``Step.__init__`` is not called, because it would make a mask as wide as the cache. The
        # attributes that ``Step.__call__`` reads are set here instead. ``_kernels`` has a kernel
        # and its mask for each segment. ``_choose(segment, 1)`` is called where only the last row's
        # attention is wanted, and returns a kernel and its mask for it. Here every kernel is
        # ``attend_in_order``. In place of a mask it gets the last key that each row sees.
        end = segment.end_key
        last_keys = torch.arange(segment.first_key, end) if last is None else last
        self.segments = [segment]
        self.calls = 0  # How often layers have called this step.
        self._choose = lambda segment, new: (attend_in_order, last_keys[-new:])
        self._kernels = [(attend_in_order, last_keys)]
        segment.cache.reserve(end)


def attend_in_order(
    q: Queries, k: Keys, v: Keys, last: Int[Tensor, " new"], scale: float
) -> Queries:
    """Returns softmax attention in fp32, whose sums over keys go block by block from key 0 on.

    The newest keys are the last ``new`` ones, as many as there are rows. ``last`` has the last key
    that each row sees: one of the newest keys, or the key right before them if the row sees none of
    them. Later keys add exactly 0 to the row's sums, so blocks of them change no bit.
    """
    heads, new, width = q.shape
    kv_heads, key_count, _ = k.shape
    grouped = (q.reshape(kv_heads, -1, width).float() * scale).contiguous()
    starts = range(0, key_count, BLOCK)
    column = torch.arange(BLOCK, device=q.device)

    def hidden_keys_of(start: int) -> Bool[Tensor, "new block"] | None:
        """Returns the mask of the block that begins at a key; None if it ends before the newest
        keys, because every row sees all of it then."""
        if start + BLOCK <= key_count - new:
            return None
        return column + start > last[:, None]

    hidden_keys = (hidden_keys_of(start) for start in starts)
    keys = (_block(k, start) for start in starts)
    values = (_block(v, start) for start in starts)
    return _add_blocks(grouped, keys, values, hidden_keys, new).view(heads, new, width).to(q.dtype)


def _add_blocks(
    grouped: Float[Tensor, "kv_head queries head_dim"],
    keys: Iterable[Block],
    values: Iterable[Block],
    hidden_keys: Iterable[Bool[Tensor, "new block"] | None],
    new: int,
) -> Float[Tensor, "kv_head queries head_dim"]:
    """Returns softmax attention in fp32, whose sums over keys all go block by block.

    ``grouped`` are the queries times the scale. Those of all query heads that share a KV head are
    together, and the ``new`` rows of each query head follow one another. ``hidden_keys`` has one
    mask for each block, True where one of the ``new`` rows must not see a key. None stands for a
    block of which every row sees every key.
    """
    scores = []
    for key, hidden in zip(keys, hidden_keys, strict=True):
        score = grouped @ key.transpose(1, 2)
        if hidden is not None:
            score.view(len(score), -1, new, BLOCK).masked_fill_(hidden, float("-inf"))
        scores.append(score)
    # A maximum does not depend on the order. It is finite, because every row sees some key.
    top = torch.stack([score.amax(-1) for score in scores]).amax(0)[..., None]
    total = torch.zeros_like(top)
    weighted = torch.zeros_like(grouped)
    for score, value in zip(scores, values, strict=True):
        weight = score.sub_(top).exp_()
        total += weight.sum(-1, keepdim=True)
        weighted += weight @ value
    return weighted / total


def _block(rows: Keys, start: int) -> Block:
    """Returns ``BLOCK`` rows as a tensor of their own, with zeros after the last row.

    Memory after the last row may hold NaN, and a kernel may round differently for another memory
    layout. So every block is a contiguous copy.
    """
    part = rows[:, start : start + BLOCK]
    block = torch.empty(
        (rows.shape[0], BLOCK, rows.shape[2]), dtype=torch.float32, device=rows.device
    )
    block[:, : part.shape[1]] = part
    block[:, part.shape[1] :] = 0
    return block


# -- captured forwards -------------------------------------------------------------------------


class BatchInvariantAttention(AttentionKind):
    """The attention of :func:`attend_in_order` in a captured forward.

    A forward is captured for a largest number of keys, ``inputs.size.keys``, and computes the same
    products over all blocks of so many. A block after a row's last key adds exactly 0 to its sums.
    """

    may_branch: ClassVar[bool] = False
    fixed_rows: ClassVar[int | None] = ROWS

    def attention(self, inputs: StaticInputs, pool: CachePool, groups: int) -> Attention:
        size = inputs.size
        # There is a single request. So the shape of ``places`` is [1, rows], and ``first_rows`` and
        # ``capacities`` have one number each.
        places = inputs.tokens[2]  # The place of each row's key in its cache.
        first_rows, capacities, _ = inputs.caches
        heads = torch.arange(pool.kv_heads, device=places.device)
        base = first_rows + heads * capacities  # The pool's row of each head's first key.
        column = torch.arange(size.keys, device=places.device).view(-1, 1, BLOCK)
        # The shape is [block, kv_head, key], so that each block is contiguous. Only keys after the
        # last row's own can be beyond the end of the pool. The pool's last row is read in their
        # place, and _attend_by_blocks replaces it by zeros.
        block_rows = (base[:, None] + column).clamp_(max=pool.rows - 1)
        past_last_row = (column > places[0, -1])[..., None]
        hidden_keys = column > places[0][:, None]
        new_rows = (base[:, None] + places).flatten()
        return partial(_attend_by_blocks, pool, new_rows, block_rows, past_last_row, hidden_keys)

    def agrees(
        self, captured: Tensor, ordinary: Tensor, first_layers_agree: FirstLayersAgree
    ) -> bool:
        """Returns whether the logits are equal bit for bit."""
        return torch.equal(captured, ordinary)


def _attend_by_blocks(
    pool: CachePool,
    new_rows: Int[Tensor, " place"],
    block_rows: Int[Tensor, "block_number kv_head block"],
    past_last_row: Bool[Tensor, "block_number 1 block 1"],
    hidden_keys: Bool[Tensor, "block_number new block"],
    layer: int,
    q: Queries,
    k: Keys,
    v: Keys,
    scale: float,
) -> Float[Tensor, "new out"]:
    """Writes a layer's new keys and values, and returns its attention, in a captured forward.

    ``new_rows`` are the pool's rows of the new keys, and ``block_rows`` those of each block's keys.
    ``past_last_row`` marks keys after the last row's own, whose memory may hold anything.
    ``hidden_keys`` are as in :func:`_add_blocks`.
    """
    heads, new, width = q.shape
    write_keys_and_values(pool.keys[layer], pool.values[layer], new_rows, k, v)
    grouped = (q.reshape(k.shape[0], -1, width).float() * scale).contiguous()
    keys, values = (
        torch.where(
            past_last_row,
            0,
            buffer.index_select(0, block_rows.flatten()).view(*block_rows.shape, width),
        )
        .float()
        .unbind()
        for buffer in (pool.keys[layer], pool.values[layer])
    )
    out = _add_blocks(grouped, keys, values, hidden_keys.unbind(), new)
    out = out.view(heads, new, width).to(q.dtype)
    return out.transpose(0, 1).reshape(new, -1)


BATCH_INVARIANT_ATTENTION = BatchInvariantAttention()


# -- what depends on the machine ---------------------------------------------------------------


def require_batch_invariance(model: Backbone) -> None:
    """Raises ModelError unless a row of this model has the same result at every place of a forward.

    The bits are compared, on this machine and with the threads in use. Models with experts, sliding
    windows, latent attention or recurrent layers are refused without a comparison.
    """
    if any("expert" in name and value for name, value in model.config.to_dict().items()):
        raise ModelError(
            "exact=True cannot be promised for a mixture of experts, where the tokens beside a "
            "token decide how many rows its experts multiply; leave exact out"
        )
    if model.windows or model.has_uneven_heads:
        raise ModelError(
            "exact=True cannot be promised for a model with sliding windows or latent attention, "
            "whose attention has no batch-invariant form here; leave exact out"
        )
    if model.mixers:
        raise ModelError(
            "exact=True cannot be promised for a model with recurrent layers, whose state is "
            "rounded differently if another number of tokens is read at once; leave exact out"
        )
    trials = _trials.setdefault(model, {})
    key = (model.dtype, str(model.device), torch.get_num_threads(), model.fused is None)
    if key not in trials:
        trials[key] = is_batch_invariant(model)
    if not trials[key]:
        dtype = str(model.dtype).removeprefix("torch.")
        raise ModelError(
            f"exact=True cannot be promised on this machine: in {dtype} on {model.device} with "
            f"{torch.get_num_threads()} threads a row's result depends on its place among others; "
            "use another number of threads, or float32 without exact"
        )


@torch.no_grad()
def is_batch_invariant(model: Backbone, tries: int = 2) -> bool:
    """Returns whether a row's logits are the same bits at each of the ``ROWS`` places.

    A row is a random token, and ``tries`` of them are tested one after another. The row is put at
    all places, then at the even ones with random rows at the others, then at the odd ones. All rows
    attend to the same random keys and not to each other.
    """
    random = torch.Generator().manual_seed(0)
    past = BLOCK + BLOCK // 3  # The keys fill one block and a part of another.
    cache = _random_cache(model, past, random)
    last = torch.full((ROWS,), past - 1)
    positions = torch.full((model.axes, ROWS), past, device=model.device)
    even = torch.arange(ROWS) % 2 == 0
    for _ in range(tries):
        row = torch.randint(model.vocab, (1,), generator=random)
        parts = []
        for has_row in (torch.ones_like(even), even, ~even):
            others = torch.randint(model.vocab, (ROWS,), generator=random)
            ids = torch.where(has_row, row, others).tolist()
            step = BatchInvariantStep(Segment(cache, start=0, stop=ROWS, first_key=past), last)
            hidden = model.forward(model.embed(ids), positions, step)
            parts.append(model.logits(hidden).cpu()[has_row])
        logits = torch.cat(parts)
        first = logits[:1].expand_as(logits)
        if not bool(logits.isfinite().all()) or not torch.equal(logits, first):
            return False
    return True


def _random_cache(model: Backbone, length: int, random: torch.Generator) -> Cache:
    cache = model.new_cache(length + ROWS)
    for tensor in (*cache.keys, *cache.values):
        shape = (tensor.shape[0], length, tensor.shape[2])
        tensor[:, :length] = torch.randn(shape, generator=random).to(tensor)
    cache.advance(length)
    return cache

"""Captures forwards of fixed sizes, which a GPU replays without being sent every kernel again.

A decoding step of one or several requests is padded to one of a few sizes. All that differs from
step to step is read from memory that stays where it is: ids, positions, where each request's keys
are, how many there are, and which row sees which key. The keys stay where they are too, since the
caches are rows of the model's :class:`CachePool`. So one CUDA graph for each size serves every
request of every answer. Graphs belong to a model, not to a session: an answer like an earlier one
captures nothing.

The first step of a new size is an ordinary forward. Between two rounds :func:`capture_new_sizes`
captures the size and compares it with an ordinary forward over the same keys. From then on it is
replayed. The time that a capture takes is in no round's seconds (``timing.stopped_clock``).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from saccade.core.errors import ModelError
from saccade.core.sampling import TopTokens
from saccade.core.timing import stopped_clock
from saccade.model.attention import AttentionOutput, NewKeys
from saccade.model.backbone import MAX_ROUNDING_DIFFERENCE, Backbone
from saccade.model.cache import Cache
from saccade.model.cache_pool import Buffer, CachePool, Lease
from saccade.model.decoder import FusedDecoder
from saccade.model.hidden_states import HiddenStates
from saccade.model.kernels.attention_mass import Queries
from saccade.model.kernels.few_rows import FewRowAttention, Kernels, abandon
from saccade.model.likeliest import (
    NUMBERS_PER_ROW,
    WHOLE_VOCABULARY,
    LikeliestTokens,
    VocabularyTable,
    top_tokens,
)
from saccade.model.segments import Segment

log = logging.getLogger(__name__)

ROW_SIZES = (1, 2, 4, 8, 16, 32, 64)  # Rows of each request; a longer step is an ordinary forward.
REQUEST_SIZES = (1, 2, 4, 8, 16, 32)
MAX_ROWS = 512  # The most rows of all requests of a step together.
MASKED_KEY_SIZES = (64, 128)  # How many of the last keys have a mask.
MIN_KEYS = 1024  # The fewest keys of a size. The next size has twice as many.
# The rotary table has at least so many rows, or all that the model has positions for, because
# captured forwards are dropped when it grows.
MIN_POSITIONS = 32768
MAX_GRAPHS = 64  # The most graphs of a model; the least recently used one is dropped first.
INTEGER_BYTES = torch.long.itemsize  # Of each integer that a step reads.
DEVICE_TYPES = ("cuda",)  # Where sessions use captured forwards unless they are told otherwise.
# Rounding errors add up from layer to layer. So where a captured forward's logits differ from an
# ordinary one's by more than is usual, but by at most this share of the largest logit, the hidden
# states after the first few layers decide whether the forwards agree.
MAX_DEEP_DIFFERENCE = 0.5
CHECKED_LAYERS = 2

Forward = Callable[[], Tensor]
"""Computes the logits of one step, whose inputs are in memory that stays where it is."""
Capture = Callable[[Forward], Forward]
"""Turns a forward into one that can be replayed, with the same memory for inputs and outputs."""


class Rows(NamedTuple):
    """The tokens of one forward: one segment for each request, one after another."""

    segments: list[Segment]
    ids: list[int]
    positions: list[int]
    logit_rows: list[int]  # The rows whose logits are needed.


OrdinaryForward = Callable[[Rows], Float[Tensor, "logit_rows vocab"]]
"""A forward that is sent kernel by kernel. Every captured forward is compared with one."""

FirstLayersAgree = Callable[[], bool]
"""Returns whether the hidden states after the first layers agree. A call runs two forwards."""

ReadTop = Callable[[], TopTokens]
"""Returns the likeliest tokens of a row. It may wait for the device."""


class RowLogits(NamedTuple):
    """The logits of the rows that need them, and the likeliest tokens of each."""

    logits: Float[Tensor, "logit_rows vocab"]
    """In those of captured forwards, ids that the session may not choose (``Vocabulary``) are -inf
    already. In those of ordinary forwards they are not."""
    top_readers: list[ReadTop | None]
    """For each row a function that reads its likeliest tokens, or None if an ordinary forward has
    computed the row."""

    @classmethod
    def of_ordinary(cls, logits: Float[Tensor, "logit_rows vocab"]) -> RowLogits:
        """Returns the logits of an ordinary forward, which computes no likeliest tokens."""
        return cls(logits, [None] * len(logits))

    def part(self, start: int, stop: int) -> RowLogits:
        """Returns the rows from ``start`` to ``stop``."""
        return RowLogits(self.logits[start:stop], self.top_readers[start:stop])


@dataclass(frozen=True)
class Size:
    """The size of a captured forward."""

    requests: int
    rows: int  # Of each request.
    masked_keys: int  # Last keys of each request that have a mask.
    keys: int  # Of each request, at most, the new rows' own included.
    # The hidden states that are written, by the numbers of ``HiddenStates``: n stands for the input
    # of layer n.
    hidden_layers: tuple[int, ...] = ()


@runtime_checkable
class Attention(Protocol):
    """One layer's attention in a captured forward: see ``attention.Attend``."""

    def __call__(
        self, layer: int, q: Queries, k: NewKeys, v: NewKeys, scale: float
    ) -> AttentionOutput: ...


@runtime_checkable
class AttentionKind(Protocol):
    """How the rows of a captured forward attend, and how its logits are checked."""

    may_branch: ClassVar[bool]
    """Whether the rows may be trees, in which a row need not see every row before it."""
    fixed_rows: ClassVar[int | None]
    """The number of rows of each request in every forward; None where it varies."""

    def attention(self, inputs: StaticInputs, pool: CachePool, groups: int) -> Attention:
        """Returns the layers' attention over these inputs; called while a forward is captured.

        ``groups`` is the number of query heads for each key head.
        """

    def few_rows(self, inputs: StaticInputs, pool: CachePool) -> FewRowAttention | None:
        """Returns kernels that attend, norm and rotate; None where :meth:`attention` is used."""
        return None

    def agrees(
        self, captured: Tensor, ordinary: Tensor, first_layers_agree: FirstLayersAgree
    ) -> bool:
        """Returns whether a captured forward's logits are those of an ordinary forward."""

    def replacement(self, reason: str) -> AttentionKind | None:
        """Gives this kind up, because it failed, and returns the one to use instead.

        Returns None where there is no other.
        """
        return None


class StaticInputs:
    """The numbers that a step of one size reads, filled in place by one copy before each replay.

    What the step writes beside its logits is here too.
    """

    def __init__(self, size: Size, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """``width`` and ``dtype`` are those of hidden states."""
        self.size = size
        # The shapes of ``tokens`` and of ``caches``, which :meth:`_parts` describes.
        self._shapes = (3, size.requests, size.rows), (3, size.requests)
        self._mask_shape = size.requests, size.rows, size.masked_keys
        self._memory = torch.zeros(self._bytes(), dtype=torch.uint8, device=device)
        self.tokens, self.caches, self.vocabularies, self.visible = self._parts(self._memory)
        self.likeliest: Float64[Tensor, "row 4"] = torch.zeros(
            size.requests * size.rows, NUMBERS_PER_ROW, dtype=torch.float64, device=device
        )
        """What a forward writes for each of its rows: the likeliest token, the runner-up, and the
        probabilities of both (``TopTokens``)."""
        self.hidden: dict[int, Float[Tensor, "row width"]] = {
            layer: torch.zeros(size.requests * size.rows, width, dtype=dtype, device=device)
            for layer in size.hidden_layers
        }
        """What a forward also writes: the hidden states of its rows, by layer."""

    def _integer_count(self) -> int:
        """Returns how many integers come before the mask: three for each row (its id, position and
        place), and four for each request (three about its cache, and its vocabulary's number)."""
        requests, rows, _ = self._mask_shape
        return 3 * requests * rows + 4 * requests

    def _bytes(self) -> int:
        return INTEGER_BYTES * self._integer_count() + prod(self._mask_shape)

    def _parts(
        self, flat: Tensor
    ) -> tuple[
        Int[Tensor, "3 request rows"],
        Int[Tensor, "3 request"],
        Int[Tensor, " request"],
        Bool[Tensor, "request rows masked_keys"],
    ]:
        """Returns four views of a flat buffer:

        - tokens: the id, the position and the place of each row. A place is the row of the
          request's cache that the row's key is written to.
        - caches: for each request, the first row of its cache in the pool, the rows that the cache
          has for each head, and how many of the first keys every row of the request sees.
        - vocabularies: the number of each request's vocabulary in the table of vocabularies.
        - visible: which rows see which of the keys after those that every row sees.
        """
        requests, rows, _ = self._mask_shape
        tokens_end = INTEGER_BYTES * 3 * requests * rows
        caches_end = tokens_end + INTEGER_BYTES * 3 * requests
        vocabularies_end = caches_end + INTEGER_BYTES * requests
        return (
            flat[:tokens_end].view(torch.long).view(self._shapes[0]),
            flat[tokens_end:caches_end].view(torch.long).view(self._shapes[1]),
            flat[caches_end:vocabularies_end].view(torch.long),
            flat[vocabularies_end:].view(torch.bool).view(self._mask_shape),
        )

    def write_hidden(self, layer: int, hidden: Float[Tensor, "row width"]) -> None:
        """Writes a layer's hidden states, if they are needed; called by a captured forward."""
        if layer in self.hidden:
            self.hidden[layer].copy_(hidden)

    def copy_hidden(self, segments: Sequence[Segment]) -> None:
        """Copies the hidden states of a forward that has run to the segments' caches."""
        for number, segment in enumerate(segments):
            if segment.cache.hidden is None:
                continue
            start = number * self.size.rows
            stop = start + segment.stop - segment.start
            for layer in segment.cache.hidden.layers:
                segment.cache.hidden.write(layer, segment.first_key, self.hidden[layer][start:stop])

    def fill(
        self, rows: Rows, leases: Sequence[Lease], spare: Lease, vocabularies: Sequence[int]
    ) -> None:
        """Writes a step's numbers.

        Rows that pad a request have the id and position of its last row. Their keys are written
        after that row's key, where nobody reads them. Requests that pad the step have the ids and
        positions of its first request, and their keys are written to the ``spare`` cache.
        ``vocabularies`` are the numbers of the segments' vocabularies.
        """
        size = self.size
        # NumPy writes few numbers several times as fast as torch, and this is done for every step.
        host = np.zeros(self._bytes(), np.uint8)
        mask_start = INTEGER_BYTES * self._integer_count()
        integers = host[:mask_start].view(np.int64)
        visible = host[mask_start:].view(np.bool_).reshape(self._mask_shape)
        count = 3 * size.requests * size.rows
        # All of these are views of ``host``, which :meth:`_parts` describes.
        ids, positions, places = integers[:count].reshape(self._shapes[0])
        caches = integers[count : count + 3 * size.requests].reshape(self._shapes[1])
        vocabulary_numbers = integers[count + 3 * size.requests :]
        for number, (segment, lease) in enumerate(zip(rows.segments, leases, strict=True)):
            segment_rows = slice(segment.start, segment.stop)
            new = segment.stop - segment.start
            for values, array in ((rows.ids, ids), (rows.positions, positions)):
                array[number, :new] = values[segment_rows]
                array[number, new:] = values[segment.stop - 1]
            places[number] = np.arange(segment.first_key, segment.first_key + size.rows)
            # ``Segment.mask`` is its ``recent_mask``, or a causal mask if that is None.
            mask = segment.mask.numpy()
            seen_by_all = segment.first_key + new - mask.shape[1]  # Keys before those of the mask.
            caches[:, number] = lease.start, lease.capacity, seen_by_all
            visible[number, :new, : mask.shape[1]] = mask
            visible[number, new:] = visible[number, new - 1]
        for number in range(len(leases), size.requests):
            ids[number] = ids[0]
            positions[number] = positions[0]
            places[number] = np.arange(size.rows)
            caches[:, number] = spare.start, spare.capacity, 0
            # Each row sees its own key only. The softmax of a row that sees no key would be NaN.
            visible[number, :, : size.rows] = np.eye(size.rows, dtype=np.bool_)
        vocabulary_numbers[: len(leases)] = vocabularies
        source = torch.from_numpy(host)
        if self._memory.device.type == "cuda":
            source = source.pin_memory()  # Torch does not free it before the copy is done.
        self._memory.copy_(source, non_blocking=True)


class GatheredAttention(AttentionKind):
    """Attention over the keys of several requests by torch's operators, which gather the keys."""

    may_branch: ClassVar[bool] = True
    fixed_rows: ClassVar[int | None] = None

    def attention(self, inputs: StaticInputs, pool: CachePool, groups: int) -> Attention:
        size = inputs.size
        kv_heads = pool.kv_heads
        places = inputs.tokens[2]
        first_rows, capacities, seen_by_all = inputs.caches
        heads = torch.arange(kv_heads, device=places.device)
        key_numbers = torch.arange(size.keys, device=places.device)
        # A cache has ``capacity`` rows of the pool for its first head, then as many for the next.
        # So key n of a head is in row first_row + head * capacity + n.
        # Keys are written as [kv_head, request, rows] and read as [request, kv_head, key].
        written = (first_rows + heads[:, None] * capacities)[..., None] + places
        base = first_rows[:, None] + heads * capacities[:, None]
        # A size may have more keys than the cache. Keys beyond it are read from anywhere in the
        # pool, because no row sees them.
        read = (base[..., None] + key_numbers).clamp_(max=pool.rows - 1).flatten()
        # Each key's column in the mask. Keys before the mask, which every row sees, have a negative
        # one, and keys after it, which no row sees, have one beyond its width. If every row sees
        # the keys 0 to 4, and the mask is about 3 keys, key 4 has the column -1 and key 8 has 3.
        mask_column = key_numbers - seen_by_all[:, None]
        is_before_mask = (mask_column < 0)[:, None]
        is_before_end = (mask_column < size.masked_keys)[:, None]
        read_column = mask_column.clamp(0, size.masked_keys - 1)[:, None].expand(-1, size.rows, -1)
        visible = inputs.visible.gather(2, read_column) & is_before_end
        visible |= is_before_mask
        return partial(
            _attend_gathered,
            pool,
            groups,
            written.flatten(),
            read,
            ~visible[:, None, None],
            visible.any(1)[:, None, :, None],  # Keys that some row of the request sees.
        )

    def agrees(
        self, captured: Tensor, ordinary: Tensor, first_layers_agree: FirstLayersAgree
    ) -> bool:
        share = difference_share(captured, ordinary)
        # Where a logit is NaN the share is too, and no comparison with it holds.
        if share <= MAX_ROUNDING_DIFFERENCE[captured.dtype]:
            return True
        is_rounded = captured.dtype in (torch.bfloat16, torch.float16)
        return is_rounded and share <= MAX_DEEP_DIFFERENCE and first_layers_agree()


def _attend_gathered(
    pool: CachePool,
    groups: int,
    written: Int[Tensor, " place"],
    read: Int[Tensor, " read"],
    is_masked: Bool[Tensor, "request 1 1 rows key"],
    is_used: Bool[Tensor, "request 1 key 1"],
    layer: int,
    q: Queries,
    k: NewKeys,
    v: NewKeys,
    scale: float,
) -> AttentionOutput:
    """Writes the new keys and values, then attends to those of each row's request.

    ``written`` are the rows of the pool that the new keys go to, ``read`` those of all keys.
    """
    keys = pool.keys[layer]
    values = pool.values[layer]
    write_keys_and_values(keys, values, written, k, v)
    requests, _, _, rows, count = is_masked.shape
    kv_heads = k.shape[0]
    width = k.shape[2]
    grouped = q.reshape(kv_heads, groups, requests, rows, width).permute(2, 0, 1, 3, 4)
    grouped = grouped.reshape(requests * kv_heads, groups * rows, width)
    read_keys = keys.index_select(0, read).view(requests * kv_heads, count, width)
    logits = torch.bmm(grouped.float(), read_keys.float().transpose(1, 2)) * scale
    by_head = logits.view(requests, kv_heads, groups, rows, count)
    by_head.masked_fill_(is_masked, float("-inf"))
    weights = torch.softmax(logits, -1).to(v.dtype)
    read_values = values.index_select(0, read).view(requests, kv_heads, count, width)
    # Values of keys that no row sees may be NaN, and 0 x NaN is NaN.
    read_values = torch.where(is_used, read_values, 0).view(requests * kv_heads, count, width)
    out = torch.bmm(weights, read_values).view(requests, kv_heads, groups, rows, width)
    return out.permute(0, 3, 1, 2, 4).reshape(requests * rows, -1)


def write_keys_and_values(
    keys: Buffer, values: Buffer, written: Int[Tensor, " place"], k: NewKeys, v: NewKeys
) -> None:
    """Writes the new keys and values into these rows of a layer's buffers."""
    keys.index_copy_(0, written, k.reshape(-1, k.shape[2]))
    values.index_copy_(0, written, v.reshape(-1, v.shape[2]))


GATHERED = GatheredAttention()


@dataclass(frozen=True)
class FewRowKernels(GatheredAttention):
    """Computes what `GatheredAttention` does, by our own kernels that read the keys in place."""

    kernels: Kernels

    def few_rows(self, inputs: StaticInputs, pool: CachePool) -> FewRowAttention:
        caches = inputs.caches
        places = inputs.tokens[2]
        return FewRowAttention(self.kernels, pool.keys, pool.values, caches, places, inputs.visible)

    def replacement(self, reason: str) -> AttentionKind:
        abandon(self.kernels, reason)
        return GATHERED


class CudaGraphs:
    """One model's captured forwards, by size.

    ``capture`` turns a forward into one that can be replayed. Captured forwards outlive sessions.
    Any thread may use them, one at a time.
    """

    def __init__(
        self, backbone: Backbone, capture: Capture | None = None, pool: CachePool | None = None
    ) -> None:
        self.refuse_unsupported(backbone)
        self._backbone, self._fused = backbone, backbone.fused
        self.pool = pool or CachePool(
            backbone.key_layer_count,
            backbone.kv_heads,
            backbone.head_dim,
            dtype=backbone.dtype,
            device=backbone.device,
        )
        self.pool.watch(self)
        if capture is None:
            on_gpu = backbone.device.type == "cuda"
            capture = cuda_graph_capture(backbone.device) if on_gpu else _capture_on_cpu
        self._capture: Capture | None = capture
        few_rows = backbone.few_row_kernels
        # The attention that is quickest here, which is used unless a caller asks for another kind.
        self._kind: AttentionKind = GATHERED if few_rows is None else FewRowKernels(few_rows)
        self._inputs: dict[Size, StaticInputs] = {}
        # Forwards that can be replayed, the least recently used one first.
        self._captured: OrderedDict[tuple[AttentionKind, Size], Forward] = OrderedDict()
        # Sizes whose captured forward gave other logits than an ordinary one.
        self._refused: set[tuple[AttentionKind, Size]] = set()
        # By each attention kind that failed, the kind that is used instead.
        self._replaced: dict[AttentionKind, AttentionKind] = {}
        self._new: dict[tuple[AttentionKind, Size], Probe] = {}  # sizes to be captured
        self._table: tuple[Tensor, Tensor] | None = None  # cos and sin of every position
        self._vocabularies = VocabularyTable(backbone.vocab, backbone.device)
        # The likeliest tokens of each size's last replay, while anybody may still read them.
        self._newest_tokens: dict[Size, weakref.ref[LikeliestTokens]] = {}
        self._spare: Cache | None = None  # Requests that only pad a step write their keys here.
        self._lock = threading.RLock()

    @staticmethod
    def refuse_unsupported(backbone: Backbone) -> None:
        """Raises ModelError for a model whose forwards cannot be captured."""
        if backbone.fused is None:
            raise ModelError(
                "captured steps need the fused decoder, which does not support this model"
            )

    def new_cache(self, capacity: int) -> Cache:
        """Returns room for the keys and values of a request, in the model's pool."""
        model = self._backbone
        return Cache(
            model.head_shapes,
            capacity,
            dtype=model.dtype,
            devices=model.devices,
            pool=self.pool,
            states=model.empty_states(),
        )

    def logits(
        self, rows: Rows, ordinary: OrdinaryForward, kind: AttentionKind | None = None
    ) -> RowLogits:
        """Writes the keys of all rows and returns the logits of ``rows.logit_rows``, which are the
        last rows of every segment.

        A captured forward computes them, or the ``ordinary`` one where the step's size is not
        captured yet. ``kind`` is None for the kind of attention that is quickest here.
        """
        kind = kind or self._kind
        with self._lock:
            size = self._fill_captured_size(rows, ordinary, kind)
            if size is not None:
                return self._replay(kind, size, rows)
        return RowLogits.of_ordinary(ordinary(rows))

    def _replay(self, kind: AttentionKind, size: Size, rows: Rows) -> RowLogits:
        """Runs the captured forward whose inputs are filled in already."""
        logits = _copy_logit_rows(rows, self._captured[kind, size](), size)
        self._inputs[size].copy_hidden(rows.segments)
        tokens = LikeliestTokens(self._inputs[size].likeliest)
        self._newest_tokens[size] = weakref.ref(tokens)
        spans = _logit_spans(rows, size)
        row_numbers = [row for start, stop in spans for row in range(start, stop)]
        return RowLogits(logits, [partial(tokens.read, row) for row in row_numbers])

    def drop_captured(self) -> None:
        """Drops all captured forwards and the reference to the rotary table.

        It is called when the pool's buffers or the table have moved, because captured forwards read
        the old place, and when capturing is given up.
        """
        self._captured.clear()
        self._table = None

    def _fill_captured_size(
        self, rows: Rows, ordinary: OrdinaryForward, kind: AttentionKind
    ) -> Size | None:
        """Fills in the inputs of the captured forward for these rows, and returns its size.

        Returns None where no such forward can be used, or where it is not captured yet. A size that
        appears for the first time is noted, for :meth:`capture_new` to capture it.
        """
        size = self._size(rows.segments, kind)
        if self._capture is None or size is None or (kind, size) in self._refused:
            return None
        leases = self._reserve(rows.segments, size)
        spare = self._spare_lease()
        if leases is None or spare is None:
            return None
        self._grow_table(max(rows.positions))
        if (kind, size) not in self._captured:
            if (kind, size) not in self._new:
                _graphs_with_new_sizes.add(self)
                self._new[kind, size] = Probe.of(rows, ordinary)
            return None
        vocabularies = self._vocabularies.row_numbers([each.vocabulary for each in rows.segments])
        if vocabularies is None:  # The segments have more different ones than the table has rows.
            return None
        self._captured.move_to_end((kind, size))
        self._fill(size, rows, leases, spare, vocabularies)
        return size

    def _fill(
        self,
        size: Size,
        rows: Rows,
        leases: Sequence[Lease],
        spare: Lease,
        vocabularies: Sequence[int],
    ) -> None:
        """Fills in the inputs of a size. If nobody has read the likeliest tokens of its last
        forward, they are copied first, because the next replay overwrites them."""
        newest = self._newest_tokens.pop(size, None)
        tokens = None if newest is None else newest()
        if tokens is not None:
            tokens.preserve()
        self._inputs[size].fill(rows, leases, spare, vocabularies)

    def _size(self, segments: Sequence[Segment], kind: AttentionKind) -> Size | None:
        """Returns the smallest size for these segments, or None where none is large enough."""
        new = max(segment.stop - segment.start for segment in segments)
        if len(segments) > REQUEST_SIZES[-1] or new > ROW_SIZES[-1]:
            return None
        rows = kind.fixed_rows or next(size for size in ROW_SIZES if size >= new)
        requests = next(size for size in REQUEST_SIZES if size >= len(segments))
        mask_width = max(rows, *(_mask_width(segment) for segment in segments))
        if requests * rows > MAX_ROWS or mask_width > MASKED_KEY_SIZES[-1]:
            return None
        masked_keys = next(size for size in MASKED_KEY_SIZES if size >= mask_width)
        keys = MIN_KEYS
        while keys < max(segment.first_key for segment in segments) + rows:
            keys *= 2
        states = [each.cache.hidden for each in segments if each.cache.hidden is not None]
        hidden_layers = tuple(sorted({layer for each in states for layer in each.layers}))
        return Size(requests, rows, masked_keys, keys, hidden_layers)

    def _reserve(self, segments: Sequence[Segment], size: Size) -> list[Lease] | None:
        """Makes room for a size's rows in each segment's cache, and returns the caches' leases.

        Returns None if a cache is not in the pool, or if two segments have the same cache.
        """
        for segment in segments:
            segment.cache.reserve(segment.first_key + size.rows)
        caches = [segment.cache for segment in segments if segment.cache.pool is self.pool]
        leases = [cache.lease for cache in caches if cache.lease is not None]
        return leases if len({id(lease) for lease in leases}) == len(segments) else None

    def _spare_lease(self) -> Lease | None:
        if self._spare is None:
            self._spare = self.new_cache(ROW_SIZES[-1])
            for layer in (*self._spare.keys, *self._spare.values):
                layer.zero_()
        return self._spare.lease

    def _grow_table(self, last: int) -> None:
        """Makes sure that the rotary table has all positions up to ``last``.

        If the table moves, all captured forwards are dropped.
        """
        assert self._fused is not None
        min_rows = min(MIN_POSITIONS, self._backbone.max_positions or MIN_POSITIONS)
        table = self._fused.table(max(last, min_rows - 1), example=self.pool.keys[0])
        if self._table is not None and table[0] is not self._table[0]:
            self.drop_captured()
        self._table = table

    # -- capturing -----------------------------------------------------------------------------

    def capture_new(self) -> None:
        """Captures the sizes that have appeared since the last time, and checks each."""
        with self._lock, torch.no_grad():
            new, self._new = self._new, {}
            for (old_kind, size), probe in new.items():
                kind = self._replaced.get(old_kind, old_kind)
                if self._capture is not None and (kind, size) not in self._captured:
                    self._capture_one(kind, size, probe)

    def _capture_with_replacement(
        self, kind: AttentionKind, size: Size, probe: Probe, reason: str
    ) -> bool:
        """Replaces an attention kind that failed: captures this size with its replacement, which
        all sizes use from now on.

        Returns False where there is no such kind.
        """
        replacement = kind.replacement(reason)
        if replacement is None:
            return False
        self._replaced[kind] = replacement
        if self._kind == kind:
            self._kind = replacement
        for key in [key for key in self._captured if key[0] == kind]:
            del self._captured[key]
        self._capture_one(replacement, size, probe)
        return True

    def _capture_one(self, kind: AttentionKind, size: Size, probe: Probe) -> None:
        """Captures a size, and keeps it if its logits for the probe's rows are those of an ordinary
        forward. If they are not, or the capture fails, the kind's replacement, if it has one, is
        captured instead. Without a replacement, this size stays uncaptured if its logits differ.
        If the capture fails, all forwards are ordinary ones from then on."""
        # The inputs of the size get the probe's rows.
        rows = probe.rows(size, self._backbone.embedding_count, kind.may_branch)
        leases = self._reserve(rows.segments, size)
        spare = self._spare_lease()
        if leases is None or spare is None or self._capture is None:
            return
        self._grow_table(max(rows.positions))
        if size not in self._inputs:
            self._inputs[size] = self._static_inputs(size)
        inputs = self._inputs[size]
        vocabularies = self._vocabularies.row_numbers([WHOLE_VOCABULARY] * len(leases))
        assert vocabularies is not None, "the table always has the whole vocabulary"
        self._fill(size, rows, leases, spare, vocabularies)
        # The captured forward and an ordinary one compute the logits of these rows.
        with restore_keys(rows.segments):
            try:
                replay = self._capture(partial(self._forward, kind, inputs))
                captured = _copy_logit_rows(rows, replay(), size)
            except Exception as error:  # Triton raises whatever its compiler and the driver raise.
                if self._capture_with_replacement(kind, size, probe, str(error)):
                    return
                if not isinstance(error, RuntimeError):
                    raise
                # Ordinary forwards are used from now on. If memory ran out, they raise that error
                # themselves.
                log.warning("forwards cannot be captured on %s: %s", self._backbone.device, error)
                self._capture = None
                self.drop_captured()
                return
            ordinary = probe.ordinary(rows)
            first_layers_agree = partial(self._first_layers_agree, kind, size, probe)
            agrees = kind.agrees(captured, ordinary, first_layers_agree)
        if not agrees:
            difference = float((captured.float() - ordinary.float()).abs().amax())
            reason = f"logits differ by {difference:.2g} from those of an ordinary forward"
            if self._capture_with_replacement(kind, size, probe, reason):
                return
            log.warning(
                "a captured forward is not used, because its logits differ by %.2g: %s",
                difference,
                size,
            )
            self._refused.add((kind, size))
            return
        self._captured[kind, size] = replay
        while len(self._captured) > MAX_GRAPHS:
            self._captured.popitem(last=False)

    def _first_layers_agree(self, kind: AttentionKind, size: Size, probe: Probe) -> bool:
        """Returns whether the hidden states after the first layers are those of an ordinary
        forward, to rounding. The layers run as in a captured forward, but without a capture."""
        assert self._fused is not None
        depth = min(CHECKED_LAYERS, len(self._fused.layers))
        rows = probe.rows(size, self._backbone.embedding_count, kind.may_branch)
        leases = self._reserve(rows.segments, size)
        spare = self._spare_lease()
        assert leases is not None and spare is not None, "the size was captured"
        # The input of layer ``depth`` is what the layers before it have computed.
        inputs = self._static_inputs(replace(size, hidden_layers=(depth,)))
        # No logits are computed here, so the vocabularies do not matter.
        inputs.fill(rows, leases, spare, [0] * len(leases))
        self._decode(self._fused.first_layers(depth), kind, inputs)
        with written_hidden_states(rows.segments, depth, self._backbone) as states:
            probe.ordinary(rows)
        limit = MAX_ROUNDING_DIFFERENCE[self._backbone.dtype]
        agreed = []
        for number, state in enumerate(states):
            assert state.written is not None, "an ordinary forward writes hidden states"
            start = number * size.rows
            count = len(state.written)
            captured_hidden = inputs.hidden[depth][start : start + count]
            agreed.append(difference_share(captured_hidden, state.written) <= limit)
        return all(agreed)

    def _static_inputs(self, size: Size) -> StaticInputs:
        model = self._backbone
        return StaticInputs(size, model.config.hidden_size, model.dtype, model.device)

    def _forward(self, kind: AttentionKind, inputs: StaticInputs) -> Float[Tensor, "row vocab"]:
        """Computes the forward of one size, which reads all its numbers from ``inputs``."""
        hidden = self._hidden_states(kind, inputs)
        logits = self._vocabularies.forbid_(self._backbone.logits(hidden), inputs.vocabularies)
        inputs.likeliest.copy_(top_tokens(logits))
        return logits

    def _hidden_states(self, kind: AttentionKind, inputs: StaticInputs) -> Float[Tensor, "row dim"]:
        """Computes the hidden states of the rows of :meth:`_forward`."""
        assert self._fused is not None
        return self._decode(self._fused, kind, inputs)

    def _decode(
        self, fused: FusedDecoder, kind: AttentionKind, inputs: StaticInputs
    ) -> Float[Tensor, "row dim"]:
        """Computes the hidden states of a forward, by all layers of the decoder or by some."""
        assert self._table is not None
        ids, positions = inputs.tokens[:2].flatten(1)
        cos, sin = (part.index_select(0, positions) for part in self._table)
        groups = self._backbone.heads // self._backbone.kv_heads
        few_rows = kind.few_rows(inputs, self.pool)
        attention = few_rows or kind.attention(inputs, self.pool, groups)
        embeds = self._backbone.embed(ids)
        write_hidden = inputs.write_hidden if inputs.hidden else None
        return fused.decode(
            embeds, (cos, sin), attention, few_rows=few_rows, write_hidden=write_hidden
        )


@dataclass(frozen=True)
class Probe:
    """What a new size is tried with, taken from the step in which it first appeared."""

    caches: list[Cache]  # One for each request.
    position: int  # The largest position of the step.
    ordinary: OrdinaryForward  # What the captured forward is compared with.

    @classmethod
    def of(cls, rows: Rows, ordinary: OrdinaryForward) -> Probe:
        """Returns a probe for the size of these rows."""
        return cls([each.cache for each in rows.segments], max(rows.positions), ordinary)

    def rows(self, size: Size, embeddings: int, may_branch: bool) -> Rows:
        """Returns the rows of a forward that tries the size: as many for each request as the size
        has. Their keys go to the end of the request's cache, or as near to it as they fit.

        Rows that may branch have a mask that is not the causal one.
        """
        block = torch.ones(size.rows, size.rows, dtype=torch.bool).tril_()
        # Row 2 does not see row 0, and the rows after it do not see row 1. So the mask is not the
        # causal one, and a forward that took it for that would differ.
        for row in range(2, size.rows):
            block[row, 0 if row == 2 else 1] = False
        segments = []
        for number, cache in enumerate(self.caches):
            start = number * size.rows
            # The cache may have more keys by now than when this size was chosen.
            at = min(cache.length, cache.capacity - size.rows, size.keys - size.rows)
            mask = block if may_branch else None
            segments.append(Segment(cache, start, start + size.rows, at, mask))
        row_numbers = range(size.rows * len(segments))
        # The factor is a prime, so the ids all differ unless the vocabulary is a multiple of it or
        # has fewer ids than there are rows.
        ids = [(7919 * (row + 1)) % embeddings for row in row_numbers]
        positions = [self.position + 1 + row % size.rows for row in row_numbers]
        return Rows(segments, ids, positions, [*row_numbers])


def difference_share(values: Tensor, reference: Tensor) -> float:
    """Returns the largest difference between two tensors of one shape, as a share of the largest
    absolute value in ``reference``; NaN if any number is NaN."""
    difference = (values.float() - reference.float()).abs().amax()
    return float(difference / reference.float().abs().amax())


class _LastWritten(HiddenStates):
    """Stands in for a cache's hidden states, and keeps only what was written last, of one layer."""

    def __init__(self, layer: int, model: Backbone) -> None:
        width = model.config.hidden_size
        super().__init__((layer,), width, capacity=0, dtype=model.dtype, device=model.device)
        self.written: Float[Tensor, "new width"] | None = None

    def write(self, layer: int, at: int, hidden: Float[Tensor, "new width"]) -> None:
        if layer in self.layers:
            self.written = hidden.clone()


@contextmanager
def written_hidden_states(
    segments: Sequence[Segment], layer: int, model: Backbone
) -> Iterator[list[_LastWritten]]:
    """Returns a context in which forwards do not write hidden states to the segments' caches.

    The context yields one object for each segment. Forwards write the input of ``layer`` to it,
    which is what the layers before ``layer`` have computed.
    """
    before = [segment.cache.hidden for segment in segments]
    states = [_LastWritten(layer, model) for _ in segments]
    try:
        for segment, state in zip(segments, states, strict=True):
            segment.cache.hidden = state
        yield states
    finally:
        for segment, old in zip(segments, before, strict=True):
            segment.cache.hidden = old


@contextmanager
def restore_keys(segments: Sequence[Segment]) -> Iterator[None]:
    """Restores the segments' rows when the context ends: keys, values and hidden states."""
    parts = [
        tensor[:, segment.first_key : segment.end_key]
        for segment in segments
        for tensor in (*segment.cache.keys, *segment.cache.values)
    ]
    before = [part.clone() for part in parts]
    # Hidden states may move to larger memory meanwhile, so they are found anew at the end.
    hidden_before = []
    for segment in segments:
        hidden = segment.cache.hidden
        if hidden is not None:
            rows = slice(segment.first_key, segment.end_key)
            hidden_before.append((hidden, segment.first_key, hidden.read(rows).clone()))
    try:
        yield
    finally:
        for part, old in zip(parts, before, strict=True):
            part.copy_(old)
        for hidden, at, old in hidden_before:
            hidden.read(slice(at, at + len(old))).copy_(old)


class _GraphsWithNewSizes(threading.local):
    """The models' graphs for which this thread has met new sizes."""

    def __init__(self) -> None:
        self._graphs: list[CudaGraphs] = []

    def add(self, graphs: CudaGraphs) -> None:
        if graphs not in self._graphs:
            self._graphs.append(graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    def take_all(self) -> list[CudaGraphs]:
        graphs, self._graphs = self._graphs, []
        return graphs


_graphs_with_new_sizes = _GraphsWithNewSizes()


def has_new_sizes() -> bool:
    """Returns whether this thread has met sizes that :func:`capture_new_sizes` would capture."""
    return len(_graphs_with_new_sizes) > 0


def capture_new_sizes() -> bool:
    """Captures the sizes that are new in this thread's forwards, and returns whether there are any.

    It has to be called between two rounds. The time that it takes is on no clock.
    """
    with_new_sizes = _graphs_with_new_sizes.take_all()
    for graphs in with_new_sizes:
        with stopped_clock():
            graphs.capture_new()
    return bool(with_new_sizes)


def unused_bytes(backbone: Backbone) -> int:
    """Returns the bytes of the model's pool that no request uses."""
    pools = {id(graphs.pool): graphs.pool for graphs in backbone.graphs.values()}
    return sum(pool.free_bytes for pool in pools.values())


def cuda_graph_capture(device: torch.device) -> Capture:
    """Returns a function that captures forwards as CUDA graphs.

    The graphs share one memory pool, so no two of them may run at once. A capture that fails may
    leave its pool unusable, so those after it share another.
    """
    pool = torch.cuda.graph_pool_handle()

    def capture(forward: Forward) -> Forward:
        nonlocal pool
        try:
            return capture_in_pool(forward)
        except Exception:
            pool = torch.cuda.graph_pool_handle()
            raise

    def capture_in_pool(forward: Forward) -> Forward:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            # The forward is run once before the capture, because libraries make their workspaces
            # and plans at first use, which must not be during the capture. The stream is made here,
            # because torch by itself would capture on a stream of the first device.
            stream = torch.cuda.Stream(device)
            current = torch.cuda.current_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                forward()
            current.wait_stream(stream)
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                out = forward()

        def replay() -> Tensor:
            with torch.cuda.device(device):
                graph.replay()
            return out

        return replay

    return capture


def _capture_on_cpu(forward: Forward) -> Forward:
    """Returns the forward itself, which runs anew each time."""
    return forward


def _mask_width(segment: Segment) -> int:
    """Returns how many of the last keys a segment's mask is about."""
    new = segment.stop - segment.start
    return new if segment.recent_mask is None else segment.recent_mask.shape[1]


def _copy_logit_rows(
    rows: Rows, logits: Float[Tensor, "row vocab"], size: Size
) -> Float[Tensor, "logit_rows vocab"]:
    """Returns a copy of the logits that are needed, because the next replay overwrites them."""
    return torch.cat([logits[start:stop] for start, stop in _logit_spans(rows, size)])


def _logit_spans(rows: Rows, size: Size) -> list[tuple[int, int]]:
    """Returns, for each segment, the range of a captured forward's rows whose logits are needed."""
    spans = []
    # These are the last of each segment's rows. A captured forward has rows after them that pad it.
    for number, segment in enumerate(rows.segments):
        count = sum(segment.start <= row < segment.stop for row in rows.logit_rows)
        end = number * size.rows + segment.stop - segment.start
        spans.append((end - count, end))
    return spans

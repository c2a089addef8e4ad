"""Forwards of fixed sizes, which a GPU repeats without being sent every kernel again.

A decoding step of one or several requests is padded to one of a few sizes. All its numbers (ids,
positions, where each request's keys lie, how many there are, who sees whom) are read from memory
that stays where it is. So are the keys, since the caches are rows of the model's
:class:`CachePool`. One CUDA graph a size then serves every request of every answer. Graphs belong
to a model, not to a session: an answer like an earlier one captures nothing.

The life of a size. The step in which it first appears is an ordinary forward. Between two rounds
:func:`capture_new_sizes` captures it, compares it with an ordinary forward over the same keys, and
from then on it is replayed. What that takes is in no round's seconds (``timing.stopped_clock``).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial as bind
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saccade.core.errors import ModelError
from saccade.core.timing import stopped_clock
from saccade.model.attention import Mixed, NewKeys, Segment
from saccade.model.backbone import APART, Backbone
from saccade.model.cache import Cache
from saccade.model.cache_pool import Buffer, CachePool, Lease
from saccade.model.kernels.attention_mass import Queries
from saccade.model.kernels.few_rows import FewRowAttention, Kernels

log = logging.getLogger(__name__)

ROW_SIZES = (1, 2, 4, 8, 16, 32, 64)  # of each request; a longer step is an ordinary forward
REQUEST_SIZES = (1, 2, 4, 8, 16, 32)
MAX_ROWS = 512  # of all requests of a step together
TAIL_SIZES = (64, 128)  # of the last keys, which not every row may see
MIN_KEYS = 1024  # the fewest keys a size is for; the others are powers of two
MIN_POSITIONS = 32768  # of the rotary table, which moves when it grows
MAX_GRAPHS = 64  # of a model; the one used least recently goes first
DEVICES = ("cuda",)  # where sessions use this by themselves

Work = Callable[[], Tensor]
Capture = Callable[[Work], Work]
"""Turns a forward into one that can be repeated: same memory in, same memory out."""


class Rows(NamedTuple):
    """The tokens of one forward: those of one request after another's, a segment each."""

    segments: list[Segment]
    ids: list[int]
    positions: list[int]
    wanted: list[int]  # the rows whose laws are asked for


Ordinary = Callable[[Rows], Float[Tensor, "wanted vocab"]]
"""A forward that is sent kernel by kernel: what every captured one is held against."""


@dataclass(frozen=True)
class Size:
    """What a captured forward is made for."""

    requests: int
    rows: int  # of each request
    tail: int  # last keys of each request that have a mask
    keys: int  # of each request, at most


@runtime_checkable
class Attention(Protocol):
    """One layer's attention of a captured forward: see ``attention.Attend``."""

    def __call__(self, layer: int, q: Queries, k: NewKeys, v: NewKeys, scale: float) -> Mixed: ...


@runtime_checkable
class Kind(Protocol):
    """How the rows of a captured forward attend, and how equal to ordinary ones their laws are."""

    branches: ClassVar[bool]  # whether a row may not see one before it
    rows: ClassVar[int | None]  # of every forward, where all have as many

    def attention(self, slots: Slots, pool: CachePool, groups: int) -> Attention:
        """The layers' attention over what ``slots`` say; called while the forward is captured."""

    def few_rows(self, slots: Slots, pool: CachePool) -> FewRowAttention | None:
        """Kernels that do so, and norm and rotate as well; None where :meth:`attention` serves."""
        return None

    def agree(self, captured: Tensor, ordinary: Tensor) -> bool:
        """Whether a captured forward's logits are those of an ordinary one."""


class Slots:
    """The numbers that a step of one size reads; filled in place, by one copy, before each run."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size = size
        self._shapes = (3, size.requests, size.rows), (3, size.requests)
        self._mask_shape = size.requests, size.rows, size.tail
        self._memory = torch.zeros(self._bytes(), dtype=torch.uint8, device=device)
        self.tokens, self.caches, self.visible = self._parts(self._memory)

    def _bytes(self) -> int:
        requests, rows, tail = self._mask_shape
        return 8 * (3 * requests * rows + 3 * requests) + requests * rows * tail

    def _parts(
        self, flat: Tensor
    ) -> tuple[
        Int[Tensor, "3 request rows"], Int[Tensor, "3 request"], Bool[Tensor, "request rows tail"]
    ]:
        """(ids, positions, where each key goes in its cache), (first row of each cache, its rows a
        head, how many keys every row sees), and who sees which of the keys after those."""
        requests, rows, _ = self._mask_shape
        first = 8 * 3 * requests * rows
        second = first + 8 * 3 * requests
        return (
            flat[:first].view(torch.long).view(self._shapes[0]),
            flat[first:second].view(torch.long).view(self._shapes[1]),
            flat[second:].view(torch.bool).view(self._mask_shape),
        )

    def fill(self, rows: Rows, leases: Sequence[Lease], spare: Lease) -> None:
        """Writes a step's numbers. Rows beyond a request's own repeat its last one, and requests
        beyond the step's own its first, over rows of their caches that nobody reads."""
        size = self.size
        host = torch.zeros(self._bytes(), dtype=torch.uint8)
        tokens, caches, visible = self._parts(host)
        ids, positions, places = [], [], []
        numbers = []
        for number, (segment, lease) in enumerate(zip(rows.segments, leases, strict=True)):
            own = slice(segment.start, segment.stop)
            new = segment.stop - segment.start
            more = size.rows - new
            ids.append([*rows.ids[own], *[rows.ids[segment.stop - 1]] * more])
            positions.append([*rows.positions[own], *[rows.positions[segment.stop - 1]] * more])
            places.append([*range(segment.at, segment.at + size.rows)])
            mask = segment.mask
            seen_by_all = segment.at + new - mask.shape[1]
            numbers.append((lease.start, lease.capacity, seen_by_all))
            visible[number, :new, : mask.shape[1]] = mask
            visible[number, new:] = visible[number, new - 1]
        for number in range(len(leases), size.requests):
            ids.append(ids[0])
            positions.append(positions[0])
            places.append([*range(size.rows)])
            numbers.append((spare.start, spare.capacity, 0))
            visible[number, :, : size.rows] = torch.eye(size.rows, dtype=torch.bool)
        tokens.copy_(torch.tensor([ids, positions, places]))
        caches.copy_(torch.tensor(numbers).t())
        if self._memory.device.type == "cuda":
            host = host.pin_memory()  # torch keeps it until the copy is done
        self._memory.copy_(host, non_blocking=True)


class Plain(Kind):
    """Attention over the keys of several requests in torch's own words: gathered, then softmax."""

    branches: ClassVar[bool] = True
    rows: ClassVar[int | None] = None

    def attention(self, slots: Slots, pool: CachePool, groups: int) -> Attention:
        size = slots.size
        kv_heads, places = pool.kv_heads, slots.tokens[2]
        first_rows, capacities, seen_by_all = slots.caches
        heads = torch.arange(kv_heads, device=places.device)
        column = torch.arange(size.keys, device=places.device)
        # [kv_head, request, rows] as the layers' keys lie; [request, kv_head, key] as they are read
        written = (first_rows + heads[:, None] * capacities)[..., None] + places
        base = first_rows[:, None] + heads * capacities[:, None]
        read = (base[..., None] + column).clamp_(max=pool.rows - 1).flatten()
        in_tail = column - seen_by_all[:, None]
        place = in_tail.clamp(0, size.tail - 1)[:, None].expand(-1, size.rows, -1)
        visible = slots.visible.gather(2, place) & (in_tail < size.tail)[:, None]
        visible |= (in_tail < 0)[:, None]
        return bind(
            _attend_gathered,
            pool,
            groups,
            written.flatten(),
            read,
            ~visible[:, None, None],
            visible.any(1)[:, None, :, None],
        )

    def agree(self, captured: Tensor, ordinary: Tensor) -> bool:
        apart = float((captured.float() - ordinary.float()).abs().amax())
        most = APART[captured.dtype] * float(ordinary.float().abs().amax())
        return apart <= most  # false of NaN


def _attend_gathered(
    pool: CachePool,
    groups: int,
    written: Int[Tensor, " place"],
    read: Int[Tensor, " read"],
    hidden: Bool[Tensor, "request 1 1 rows key"],
    used: Bool[Tensor, "request 1 key 1"],
    layer: int,
    q: Queries,
    k: NewKeys,
    v: NewKeys,
    scale: float,
) -> Mixed:
    """Writes the new keys and values, then attends to those of each row's request."""
    keys, values = pool.keys[layer], pool.values[layer]
    write(keys, values, written, k, v)
    requests, _, _, rows, count = hidden.shape
    kv_heads, width = k.shape[0], k.shape[2]
    grouped = q.reshape(kv_heads, groups, requests, rows, width).permute(2, 0, 1, 3, 4)
    grouped = grouped.reshape(requests * kv_heads, groups * rows, width)
    seen = keys.index_select(0, read).view(requests * kv_heads, count, width)
    logits = torch.bmm(grouped.float(), seen.float().transpose(1, 2)) * scale
    by_head = logits.view(requests, kv_heads, groups, rows, count)
    by_head.masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(logits, -1).to(v.dtype)
    held = values.index_select(0, read).view(requests, kv_heads, count, width)
    # Rows that hold nothing may hold NaN, and 0 x NaN is NaN.
    held = torch.where(used, held, 0).view(requests * kv_heads, count, width)
    out = torch.bmm(weights, held).view(requests, kv_heads, groups, rows, width)
    return out.permute(0, 3, 1, 2, 4).reshape(requests * rows, -1)


def write(
    keys: Buffer, values: Buffer, written: Int[Tensor, " place"], k: NewKeys, v: NewKeys
) -> None:
    """Puts the new keys and values into these rows of a layer's buffers."""
    keys.index_copy_(0, written, k.reshape(-1, k.shape[2]))
    values.index_copy_(0, written, v.reshape(-1, v.shape[2]))


PLAIN = Plain()


@dataclass(frozen=True)
class FewRows(Plain):
    """The same attention by kernels of our own, over the keys where they lie."""

    kernels: Kernels

    def few_rows(self, slots: Slots, pool: CachePool) -> FewRowAttention:
        caches, places = slots.caches, slots.tokens[2]
        return FewRowAttention(self.kernels, pool.keys, pool.values, caches, places, slots.visible)


class CudaGraphs:
    """One model's captured forwards, by size. ``capture`` makes them repeatable.

    They outlast sessions; any thread may use them, one at a time.
    """

    def __init__(
        self, backbone: Backbone, capture: Capture | None = None, pool: CachePool | None = None
    ) -> None:
        if backbone.fused is None:
            raise ModelError(
                "steps of fixed shape need the fused decoder, which this model has not"
            )
        self._backbone, self._fused = backbone, backbone.fused
        self.pool = pool or CachePool(
            backbone.layers,
            backbone.kv_heads,
            backbone.head_dim,
            dtype=backbone.dtype,
            device=backbone.device,
        )
        self.pool.watch(self)
        if capture is None:  # On a CPU the same forward is sent anew each time.
            gpu = backbone.device.type == "cuda"
            capture = captured_on(backbone.device) if gpu else lambda work: work
        self._capture: Capture | None = capture
        few_rows = backbone.few_rows
        self._kind: Kind = PLAIN if few_rows is None else FewRows(few_rows)
        self._slots: dict[Size, Slots] = {}
        self._runs: OrderedDict[tuple[Kind, Size], Work] = OrderedDict()
        self._refused: set[tuple[Kind, Size]] = set()
        self._new: dict[tuple[Kind, Size], Probe] = {}
        self._table: tuple[Tensor, Tensor] | None = None
        self._spare: Cache | None = None  # where requests that only fill a size up write
        self._lock = threading.RLock()

    def cache(self, capacity: int) -> Cache:
        """Room for the keys and values of a request, in the model's pool."""
        model = self._backbone
        return Cache(
            model.layers,
            model.kv_heads,
            model.head_dim,
            capacity,
            dtype=model.dtype,
            devices=model.devices,
            pool=self.pool,
        )

    def logits(
        self, rows: Rows, ordinary: Ordinary, kind: Kind | None = None
    ) -> Float[Tensor, "wanted vocab"]:
        """Logits of the wanted rows (the last ones of every segment), their keys written; those of
        the ``ordinary`` forward where this is no step of a size that is captured yet. ``kind``:
        None for the one that is quickest here."""
        kind = kind or self._kind
        with self._lock:
            size = self._ready(rows, ordinary, kind)
            if size is not None:
                return _wanted(rows, self._runs[kind, size](), size)
        return ordinary(rows)

    def forget(self) -> None:
        """Lets go of what was captured: the memory it was captured over has moved."""
        self._runs.clear()
        self._table = None

    def _ready(self, rows: Rows, ordinary: Ordinary, kind: Kind) -> Size | None:
        """The size of the captured step over these rows, whose numbers are filled in; None if there
        is none (yet)."""
        size = self._size(rows.segments, kind)
        if self._capture is None or size is None or (kind, size) in self._refused:
            return None
        leases = self._reserved(rows.segments, size)
        spare = self._spare_lease()
        if leases is None or spare is None:
            return None
        self._grow_table(max(rows.positions))
        if (kind, size) not in self._runs:
            if (kind, size) not in self._new:
                _waiting.add(self)
                self._new[kind, size] = Probe.of(rows, ordinary)
            return None
        self._runs.move_to_end((kind, size))
        self._slots[size].fill(rows, leases, spare)
        return size

    def _size(self, segments: Sequence[Segment], kind: Kind) -> Size | None:
        """The smallest size for these; None where none is large enough."""
        new = max(segment.stop - segment.start for segment in segments)
        if len(segments) > REQUEST_SIZES[-1] or new > ROW_SIZES[-1]:
            return None
        rows = kind.rows or next(size for size in ROW_SIZES if size >= new)
        requests = next(size for size in REQUEST_SIZES if size >= len(segments))
        masked = max(rows, *(_masked(segment) for segment in segments))
        if requests * rows > MAX_ROWS or masked > TAIL_SIZES[-1]:
            return None
        tail = next(size for size in TAIL_SIZES if size >= masked)
        keys = MIN_KEYS
        while keys < max(segment.at for segment in segments) + rows:
            keys *= 2
        return Size(requests, rows, tail, keys)

    def _reserved(self, segments: Sequence[Segment], size: Size) -> list[Lease] | None:
        """Where each segment's cache lies, with room for a size's rows; None if any is elsewhere
        than in the pool, or two are the same."""
        for segment in segments:
            segment.cache.reserve(segment.at + size.rows)
        leases = [segment.cache.lease for segment in segments if segment.cache.pool is self.pool]
        found = [lease for lease in leases if lease is not None]
        return found if len({id(lease) for lease in found}) == len(segments) else None

    def _spare_lease(self) -> Lease | None:
        if self._spare is None:
            self._spare = self.cache(ROW_SIZES[-1])
            for layer in (*self._spare.keys, *self._spare.values):
                layer.zero_()
        return self._spare.lease

    def _grow_table(self, last: int) -> None:
        """Makes sure of cos and sin at every position; where they move, nothing captured holds."""
        longest = max(last, min(MIN_POSITIONS, self._backbone.context or MIN_POSITIONS) - 1)
        table = self._fused.table(longest, self.pool.keys[0])
        if self._table is not None and table[0] is not self._table[0]:
            self.forget()
        self._table = table

    # -- capturing -----------------------------------------------------------------------------

    def capture_new(self) -> None:
        """Captures the sizes that have appeared since the last time, and checks each."""
        with self._lock, torch.no_grad():
            new, self._new = self._new, {}
            for (kind, size), probe in new.items():
                if self._capture is not None and (kind, size) not in self._runs:
                    self._capture_one(kind, size, probe)

    def _capture_one(self, kind: Kind, size: Size, probe: Probe) -> None:
        rows = probe.rows(size, self._backbone.embeddings, kind.branches)
        leases, spare = self._reserved(rows.segments, size), self._spare_lease()
        if leases is None or spare is None or self._capture is None:
            return
        self._grow_table(max(rows.positions))
        if size not in self._slots:
            self._slots[size] = Slots(size, self._backbone.device)
        slots = self._slots[size]
        slots.fill(rows, leases, spare)
        with _unchanged(rows.segments):
            try:
                run = self._capture(bind(self._forward, kind, slots))
                found = _wanted(rows, run(), size)
            except RuntimeError as error:
                # An ordinary forward gives the same answer; it will say so if memory ran out.
                log.warning("no steps of fixed shape on %s: %s", self._backbone.device, error)
                self._capture = None
                self.forget()
                return
            ordinary = probe.ordinary(rows)
        if not kind.agree(found, ordinary):
            apart = float((found.float() - ordinary.float()).abs().amax())
            log.warning("no step of fixed shape %s: its logits are %.2g apart", size, apart)
            self._refused.add((kind, size))
            return
        self._runs[kind, size] = run
        while len(self._runs) > MAX_GRAPHS:
            self._runs.popitem(last=False)

    def _forward(self, kind: Kind, slots: Slots) -> Float[Tensor, "row vocab"]:
        """The forward of one size, which reads all its numbers from ``slots``."""
        assert self._table is not None
        ids, positions = slots.tokens[:2].flatten(1)
        cos, sin = (part.index_select(0, positions) for part in self._table)
        groups = self._backbone.heads // self._backbone.kv_heads
        few_rows = kind.few_rows(slots, self.pool)
        attention = few_rows or kind.attention(slots, self.pool, groups)
        embeds = self._backbone.embed(ids)
        hidden = self._fused.decode(embeds, (cos, sin), attention, few_rows=few_rows)
        return self._backbone.logits(hidden)


@dataclass(frozen=True)
class Probe:
    """What a size is tried with: the caches it was first asked for."""

    caches: list[Cache]
    position: int
    ordinary: Ordinary

    @classmethod
    def of(cls, rows: Rows, ordinary: Ordinary) -> Probe:
        """A probe of the size of these rows."""
        return cls([each.cache for each in rows.segments], max(rows.positions), ordinary)

    def rows(self, size: Size, embeddings: int, branches: bool) -> Rows:
        """As many rows as the size has for each request, of ids all unlike; where they may branch,
        with a mask of which no two rows are alike."""
        block = torch.ones(size.rows, size.rows, dtype=torch.bool).tril_()
        for row in range(2, size.rows):
            block[row, row % (row - 1)] = False
        segments = []
        for number, cache in enumerate(self.caches):
            start, at = number * size.rows, min(cache.length, cache.capacity - size.rows)
            mask = block if branches else None
            segments.append(Segment(cache, start, start + size.rows, at, mask))
        count = range(size.rows * len(segments))
        ids = [(7919 * (row + 1)) % embeddings for row in count]
        positions = [self.position + 1 + row % size.rows for row in count]
        return Rows(segments, ids, positions, [*count])


@contextmanager
def _unchanged(segments: Sequence[Segment]) -> Iterator[None]:
    """What the segments' rows hold of keys and values now, they hold again after the block."""
    parts = [
        tensor[:, segment.at : segment.at + segment.stop - segment.start]
        for segment in segments
        for tensor in (*segment.cache.keys, *segment.cache.values)
    ]
    before = [part.clone() for part in parts]
    try:
        yield
    finally:
        for part, old in zip(parts, before, strict=True):
            part.copy_(old)


class _Waiting(threading.local):
    """Graphs for which this thread has met new sizes."""

    def __init__(self) -> None:
        self._graphs: list[CudaGraphs] = []

    def add(self, graphs: CudaGraphs) -> None:
        if graphs not in self._graphs:
            self._graphs.append(graphs)

    def take(self) -> list[CudaGraphs]:
        found, self._graphs = self._graphs, []
        return found


_waiting = _Waiting()


def capture_new_sizes() -> None:
    """Captures what this thread's forwards were the first of their size for. To be called between
    two rounds; it takes no time on any clock, and does nothing where nothing is new."""
    for graphs in _waiting.take():
        with stopped_clock():
            graphs.capture_new()


def pays(backbone: Backbone) -> bool:
    """Whether steps of fixed sizes pay: on a GPU, with the decoder we know every kernel of."""
    return backbone.fused is not None and backbone.device.type in DEVICES


def graphs_of(backbone: Backbone) -> CudaGraphs:
    """The captured forwards of a model, made at the first request.

    A model that is stopped early (``Backbone.first``) has its own over the whole model's pool,
    whichever of the two is asked first.
    """
    known = backbone.graphs
    if backbone.layers not in known:
        pool = None if backbone.whole is None else graphs_of(backbone.whole).pool
        known[backbone.layers] = CudaGraphs(backbone, pool=pool)
    return known[backbone.layers]


def unused_bytes(backbone: Backbone) -> int:
    """Bytes that the model's pool holds and no request uses."""
    pools = {id(graphs.pool): graphs.pool for graphs in backbone.graphs.values()}
    return sum(pool.free_bytes for pool in pools.values())


def captured_on(device: torch.device) -> Capture:
    """Captures forwards as CUDA graphs that share one pool: no two of them run at once."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            # What is made at first use (workspaces, plans) must not be made during capture. The
            # stream is this device's own: the one torch captures on by itself is the first's.
            stream, now = torch.cuda.Stream(device), torch.cuda.current_stream(device)
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                work()
            now.wait_stream(stream)
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                out = work()

        def replay() -> Tensor:
            with torch.cuda.device(device):
                graph.replay()
            return out

        return replay

    return capture


def _masked(segment: Segment) -> int:
    """Of how many of the last keys a segment's mask tells."""
    new = segment.stop - segment.start
    return new if segment.block is None else segment.block.shape[1]


def _wanted(
    rows: Rows, laws: Float[Tensor, "row vocab"], size: Size
) -> Float[Tensor, "wanted vocab"]:
    """A copy of the wanted rows: the next step writes its own to the same place."""
    parts = []
    for number, segment in enumerate(rows.segments):
        count = sum(segment.start <= row < segment.stop for row in rows.wanted)
        end = number * size.rows + segment.stop - segment.start
        parts.append(laws[end - count : end])
    return torch.cat(parts)

"""Forwards of fixed shape, which a GPU repeats without being told every kernel anew.

A step of n rows is padded to one of a few sizes and reads its numbers (ids, positions, where keys
go, who sees whom) from memory that stays where it is. One CUDA graph a size is then all it takes.
Several views of one request (TABED) ask for as many rows each: theirs are one step, and each view
attends to its own cache.

The keys before ``settled`` are seen by all rows: flash attention, without a mask. Those after it,
text and drafted nodes, are the *tail*: few, with a mask. One softmax takes both together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saccade.core.errors import ModelError
from saccade.model.attention import Attend, Mixed, NewKeys, Segment, partial
from saccade.model.backbone import APART, Backbone
from saccade.model.kernels.attended import Queries

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64)  # sizes of a view's step; a longer one is an ordinary forward
SHORTEST, LONGEST = 64, 1024  # tails: powers of two between them
DEVICES = ("cuda",)  # where sessions use this by themselves

Work = Callable[[], Tensor]
Capture = Callable[[Work], Work]
"""Turns a forward into one that can be repeated: same memory in, same memory out."""

_trusted: WeakSet[Backbone] = WeakSet()


def automatic(backbone: Backbone) -> bool:
    """Whether steps of fixed shape pay: on a GPU, with the decoder we know every kernel of."""
    return backbone.fused is not None and backbone.device.type in DEVICES


def captured(device: torch.device) -> Capture:
    """Captures forwards as CUDA graphs that share one pool: no two of them run at once."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            # what is made at first use (workspaces, plans) must not be made during capture
            stream, now = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                work()
            now.wait_stream(stream)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                out = work()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return capture


@dataclass(frozen=True)
class Slots:
    """The numbers a step of one size reads; filled in place before each run."""

    numbers: Int[Tensor, "3 view rows"]  # ids, positions, where each key goes in its cache
    visible: tuple[Bool[Tensor, "rows tail"], ...]  # of each view


@dataclass(frozen=True)
class Memory:
    """What captured steps point to. Held, so that none of it is freed while they exist."""

    keys: tuple[tuple[Tensor, ...], ...]  # of each view, by layer
    values: tuple[tuple[Tensor, ...], ...]
    table: tuple[Tensor, Tensor]  # cos and sin of every text position
    settled: tuple[int, ...]


class CudaGraphs:
    """One session's forwards, by size. ``capture`` makes them repeatable (on GPUs: CUDA graphs)."""

    def __init__(self, backbone: Backbone, capture: Capture | None = None) -> None:
        if backbone.fused is None:
            raise ModelError(
                "steps of fixed shape need the fused decoder, which this model has not"
            )
        self._backbone, self._fused = backbone, backbone.fused
        if capture is None:  # on a CPU the same forward, told anew each time
            gpu = backbone.device.type == "cuda"
            capture = captured(backbone.device) if gpu else lambda work: work
        self._capture: Capture | None = capture
        self._slots: dict[tuple[int, ...], Slots] = {}  # by rows and every view's tail
        self._runs: dict[tuple[int, ...], Work] = {}
        self._memory: Memory | None = None

    def logits(
        self,
        segments: Sequence[Segment],
        ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        ordinary: Work,
    ) -> Float[Tensor, "wanted vocab"]:
        """Logits of the ``wanted`` rows (the same run of every segment's), their keys written;
        those of the ``ordinary`` forward where this is no such step, or the GPU would not have it
        captured.

        A model's first step is held against an ordinary one: what captures and kernels do on a
        machine nobody tried this on is not taken on trust.
        """
        run = self._run(segments, ids, positions)
        if run is None:
            return ordinary()
        each = len(wanted) // len(segments)
        # a copy: the next step writes its own logits to the same place
        fixed = run().unflatten(0, (len(segments), -1))[:, wanted[0] : wanted[0] + each]
        fixed = fixed.flatten(0, 1).clone()
        if self._backbone in _trusted:
            return fixed
        truth = ordinary()
        apart = float((fixed.float() - truth.float()).abs().amax())
        if apart <= APART[fixed.dtype] * float(truth.float().abs().amax()):  # false of NaN
            _trusted.add(self._backbone)
        else:
            self._refuse(f"their logits are {apart:.2g} apart")
        return truth

    def forget(self) -> None:
        """Lets go of the cache and of what was captured over it."""
        self._runs.clear()
        self._memory = None

    def _refuse(self, why: object) -> None:
        log.warning("no steps of fixed shape: %s", why)
        self._capture = None
        self.forget()

    def _run(
        self, segments: Sequence[Segment], ids: Sequence[int], positions: Sequence[int]
    ) -> Work | None:
        """The step over these tokens, whose numbers are where it reads them."""
        new, *others = {segment.stop - segment.start for segment in segments}
        empty = not all(segment.cache.length for segment in segments)
        if self._capture is None or others or new > ROWS[-1] or empty:
            return None
        rows = next(size for size in ROWS if size >= new)
        memory, tails = self._place(segments, rows, max(positions))
        size = rows, *tails
        if size not in self._slots:
            device = self._backbone.device
            numbers = torch.zeros(3, len(tails), rows, dtype=torch.long, device=device)
            visible = (torch.zeros(rows, tail, dtype=torch.bool, device=device) for tail in tails)
            self._slots[size] = Slots(numbers, tuple(visible))
        slots = self._slots[size]
        _stage(slots, segments, ids, positions, memory.settled)
        if size not in self._runs:
            try:
                self._runs[size] = self._capture(self._work(memory, slots))
            except RuntimeError as error:
                # an ordinary forward gives the same answer; memory that ran out will say so there
                self._refuse(error)
                return None
        return self._runs[size]

    def _place(
        self, segments: Sequence[Segment], rows: int, last: int
    ) -> tuple[Memory, tuple[int, ...]]:
        """Where each tail begins and its length; what was captured is forgotten if memory moved."""
        for segment in segments:
            segment.cache.reserve(segment.at + rows)
        caches = [segment.cache for segment in segments]
        table = self._fused.table(last, caches[0].keys[0])
        known = self._memory
        if (
            known is None
            or known.table[0] is not table[0]
            or len(known.settled) != len(segments)
            or any(  # a cache moved, a conversation took back what is settled, a tail is long
                keys[0] is not s.cache.keys[0] or at > s.cache.length or s.at + rows - at > LONGEST
                for s, keys, at in zip(segments, known.keys, known.settled, strict=True)
            )
        ):
            self._runs.clear()
            keys = tuple(tuple(cache.keys) for cache in caches)
            values = tuple(tuple(cache.values) for cache in caches)
            settled = tuple(cache.length for cache in caches)
            known = self._memory = Memory(keys, values, table, settled)
        tails = []
        for segment, settled_at in zip(segments, known.settled, strict=True):
            tail = SHORTEST
            while tail < segment.at + rows - settled_at:
                tail *= 2
            tails.append(min(tail, segment.cache.capacity - settled_at))
        return known, tuple(tails)

    def _work(self, memory: Memory, slots: Slots) -> Work:
        def work() -> Tensor:
            ids, positions = slots.numbers[:2].flatten(1)
            cos, sin = (part.index_select(0, positions) for part in memory.table)
            groups = self._backbone.heads // self._backbone.kv_heads
            attention = _attention(memory, slots, groups)
            hidden = self._fused.decode(self._backbone.embed(ids), (cos, sin), attention)
            return self._backbone.logits(hidden)

        return work


def _stage(
    slots: Slots,
    segments: Sequence[Segment],
    ids: Sequence[int],
    positions: Sequence[int],
    settled: Sequence[int],
) -> None:
    """Writes a step's numbers; rows beyond it repeat the last one, at cache rows nobody reads."""
    rows = slots.numbers.shape[2]
    told: list[list[list[int]]] = [[], [], []]
    for segment in segments:
        own = slice(segment.start, segment.stop)
        spare = rows - (segment.stop - segment.start)
        told[0].append([*ids[own], *[ids[own][-1]] * spare])
        told[1].append([*positions[own], *[positions[own][-1]] * spare])
        told[2].append([*range(segment.at, segment.at + rows)])
    # copies that wait: the last step is done, since its logits have been read
    slots.numbers.copy_(torch.tensor(told))
    for segment, before, place in zip(segments, settled, slots.visible, strict=True):
        mask, new = segment.mask, segment.stop - segment.start
        visible, end = torch.zeros(place.shape, dtype=torch.bool), segment.at + new - before
        visible[:new, : end - mask.shape[1]] = True
        visible[:new, end - mask.shape[1] : end] = mask
        visible[new:] = visible[new - 1]
        place.copy_(visible)


def _attention(memory: Memory, slots: Slots, groups: int) -> Attend:
    """What the layers call: each view by itself, over its own cache."""
    views = [
        _view(*each, groups)
        for each in zip(
            memory.keys,
            memory.values,
            memory.settled,
            slots.visible,
            slots.numbers[2],
            strict=True,
        )
    ]

    def attend(layer: int, q: Queries, k: NewKeys, v: NewKeys, scale: float) -> Mixed:
        parts = (each.chunk(len(views), 1) for each in (q, k, v))
        mixed = [view(layer, *part, scale) for view, *part in zip(views, *parts, strict=True)]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    return attend


def _view(
    all_keys: Sequence[Tensor],
    all_values: Sequence[Tensor],
    settled: int,
    visible: Bool[Tensor, "rows tail"],
    where: Int[Tensor, " rows"],
    groups: int,
) -> Attend:
    """Writes the new keys at ``where``, then attends to prefix and tail.

    The prefix takes part in the tail's softmax as one more key: its logit is the log of its own
    softmax's sum, its value what it gave. That is the softmax over both, in few kernels.
    """
    tail = slice(settled, settled + visible.shape[1])
    used = visible.any(0)[:, None]
    hidden = ~visible.repeat(groups, 1)  # a group's heads are further queries of the same keys

    def attend(layer: int, q: Queries, k: NewKeys, v: NewKeys, scale: float) -> Mixed:
        keys, values = all_keys[layer], all_values[layer]
        keys.index_copy_(1, where, k)
        values.index_copy_(1, where, v)
        grouped = q.reshape(k.shape[0], -1, q.shape[2])
        before, sums = partial(grouped, keys[:, :settled], values[:, :settled], scale)
        logits = grouped.float() @ keys[:, tail].float().transpose(1, 2) * scale
        logits.masked_fill_(hidden, float("-inf"))
        weights = torch.cat([logits, sums[..., None]], -1).softmax(-1).to(v.dtype)
        # rows that hold nothing may hold NaN, and 0 x NaN is NaN
        held = torch.where(used, values[:, tail], 0)
        out = torch.addcmul(weights[..., :-1] @ held, weights[..., -1:], before)
        return out.view(q.shape).transpose(0, 1).reshape(q.shape[1], -1)

    return attend

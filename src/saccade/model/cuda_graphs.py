"""Forwards of fixed shape: what a GPU repeats without being told every kernel anew.

A round's forward is short on a GPU, and telling it what to do takes longer than doing it. So a
step of n rows is padded to one of a few sizes and reads its numbers (ids, positions, where keys go,
who sees whom) from memory that stays where it is. One CUDA graph a size is then all it takes.

The keys before ``settled`` are seen by all rows: flash attention, without a mask. Those after it,
text and drafted nodes, are the *tail*: few, with a mask. One softmax takes both together.
Sessions ask for ordinary forwards where :meth:`StaticSteps.logits` returns None.
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
from saccade.model.attention import Attend, Mixed, NewKeys, Queries, Segment, partial
from saccade.model.backbone import Backbone
from saccade.model.cache import Cache

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64)  # sizes of a step; a longer one is an ordinary forward
SHORTEST, LONGEST = 64, 1024  # tails: powers of two between them
DEVICES = ("cuda",)  # where sessions use this by themselves

APART = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05, torch.float64: 1e-6}
"""How far logits may be apart by rounding alone, as a share of the largest."""

Work = Callable[[], Tensor]
Capture = Callable[[Work], Work]
"""Turns a forward into one that can be repeated: same memory in, same memory out."""


_trusted: WeakSet[Backbone] = WeakSet()


def automatic(backbone: Backbone) -> bool:
    """Whether steps of fixed shape pay: on a GPU, with the decoder we know every kernel of."""
    return backbone.fused is not None and backbone.device.type in DEVICES


class Graphs:
    """Captures forwards as CUDA graphs that share one pool: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            # what is made at first use (workspaces, plans) must not be made during capture
            stream, now = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                work()
            now.wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = work()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def eagerly(work: Work) -> Work:
    """No capture: the same forward, told anew each time."""
    return work


@dataclass(frozen=True)
class Slots:
    """The numbers a step of one size reads; filled in place before each run."""

    numbers: Int[Tensor, "3 rows"]  # ids, positions, where each key goes in the cache
    visible: Bool[Tensor, "rows tail"]

    @staticmethod
    def make(rows: int, tail: int, device: torch.device, *, pinned: bool = False) -> Slots:
        return Slots(
            torch.zeros(3, rows, dtype=torch.long, device=device, pin_memory=pinned),
            torch.zeros(rows, tail, dtype=torch.bool, device=device, pin_memory=pinned),
        )


@dataclass(frozen=True)
class Memory:
    """What captured steps point to. Held, so that none of it is freed while they exist."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    table: tuple[Tensor, Tensor]  # cos and sin of every text position
    settled: int

    def same(self, cache: Cache, table: tuple[Tensor, Tensor]) -> bool:
        return cache.keys[0] is self.keys[0] and table[0] is self.table[0]


class StaticSteps:
    """One session's forwards, by size. ``capture`` makes them repeatable (on GPUs: CUDA graphs)."""

    def __init__(self, backbone: Backbone, capture: Capture | None = None) -> None:
        if backbone.fused is None:
            raise ModelError(
                "steps of fixed shape need the fused decoder, which this model has not"
            )
        self._backbone, self._fused = backbone, backbone.fused
        gpu = backbone.device.type == "cuda"
        self._capture: Capture | None = capture or (Graphs(backbone.device) if gpu else eagerly)
        self._sent = torch.cuda.Event() if gpu else None
        self._slots: dict[tuple[int, int], tuple[Slots, Slots]] = {}  # the device's, the host's
        self._runs: dict[tuple[int, int], Work] = {}
        self._memory: Memory | None = None

    @property
    def trusted(self) -> bool:
        """Whether such a step was once held against an ordinary forward of this model."""
        return self._backbone in _trusted

    def agrees(self, fixed: Float[Tensor, "rows _"], ordinary: Float[Tensor, "rows _"]) -> bool:
        """Compares the first step's logits with an ordinary forward's: what captures and kernels do
        on a machine nobody tried this on is not taken on trust. Logs where they differ."""
        apart = float((fixed.float() - ordinary.float()).abs().amax())
        if apart <= APART[fixed.dtype] * float(ordinary.float().abs().amax()):  # false of NaN
            _trusted.add(self._backbone)
            return True
        log.warning("no steps of fixed shape: their logits are %.2g apart", apart)
        return False

    def logits(
        self,
        segments: Sequence[Segment],
        ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
    ) -> Float[Tensor, "wanted vocab"] | None:
        """Logits of the ``wanted`` rows (a run of them), their keys written.

        None where this is no such step, or the GPU would not have it captured.
        """
        if len(segments) != 1 or len(ids) > ROWS[-1] or not segments[0].cache.length:
            return None
        (segment,) = segments
        rows = next(size for size in ROWS if size >= len(ids))
        memory, tail = self._place(segment, rows, max(positions))
        slots = self._fill(segment, ids, positions, memory.settled, (rows, tail))
        run = self._runs.get((rows, tail))
        if run is None:
            if self._capture is None:
                return None
            try:
                run = self._runs[rows, tail] = self._capture(self._work(memory, slots))
            except RuntimeError as error:
                # an ordinary forward gives the same answer; memory that ran out will say so there
                log.warning("no steps of fixed shape: %s", error)
                self._capture = None
                return None
        # a copy: the next step writes its own logits to the same place
        return run()[wanted[0] : wanted[-1] + 1].clone()

    def forget(self) -> None:
        """Lets go of the cache and of what was captured over it."""
        self._runs.clear()
        self._memory = None

    def _place(self, segment: Segment, rows: int, last: int) -> tuple[Memory, int]:
        """Where the tail begins and its length; what was captured is forgotten if memory moved."""
        cache, end = segment.cache, segment.at + rows
        cache.reserve(end)
        table = self._fused.table(last, self._fused.axes, cache.keys[0])
        known = self._memory
        if (
            known is None
            or not known.same(cache, table)
            or known.settled > cache.length  # a conversation took text back
            or end - known.settled > LONGEST
        ):
            self._runs.clear()
            keys, values = tuple(cache.keys), tuple(cache.values)
            known = self._memory = Memory(keys, values, table, cache.length)
        tail = SHORTEST
        while tail < end - known.settled:
            tail *= 2
        return known, min(tail, cache.capacity - known.settled)

    def _fill(
        self,
        segment: Segment,
        ids: Sequence[int],
        positions: Sequence[int],
        settled: int,
        size: tuple[int, int],
    ) -> Slots:
        """This step's numbers, at the place where a step of this size reads them."""
        device = self._backbone.device
        if size not in self._slots:
            host = Slots.make(*size, torch.device("cpu"), pinned=device.type == "cuda")
            self._slots[size] = Slots.make(*size, device), host
        slots, host = self._slots[size]
        if self._sent is not None:
            self._sent.synchronize()  # an earlier step's numbers must have left the host
        _stage(host, segment, ids, positions, settled)
        slots.numbers.copy_(host.numbers, non_blocking=True)
        slots.visible.copy_(host.visible, non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(device))
        return slots

    def _work(self, memory: Memory, slots: Slots) -> Work:
        groups = self._backbone.heads // self._backbone.kv_heads

        def work() -> Tensor:
            ids, positions, where = slots.numbers
            cos, sin = (part.index_select(0, positions) for part in memory.table)
            attention = _attention(memory, slots.visible, where, groups)
            hidden = self._fused.decode(self._backbone.embed(ids), (cos, sin), attention)
            return self._backbone.logits(hidden)

        return work


def _stage(
    staged: Slots, segment: Segment, ids: Sequence[int], positions: Sequence[int], settled: int
) -> None:
    """Writes a step's numbers; rows beyond it repeat the last one, at cache rows nobody reads."""
    rows, new = staged.numbers.shape[1], len(ids)
    spare = rows - new
    ahead = range(segment.at, segment.at + rows)
    numbers = [[*ids, *[ids[-1]] * spare], [*positions, *[positions[-1]] * spare], [*ahead]]
    staged.numbers.copy_(torch.tensor(numbers))
    visible, end = staged.visible, segment.at + new - settled
    block = segment.block
    if block is None:
        block = torch.ones(new, new, dtype=torch.bool).tril_()
    visible.zero_()
    visible[:new, : end - block.shape[1]] = True
    visible[:new, end - block.shape[1] : end] = block
    visible[new:] = visible[new - 1]


def _attention(
    memory: Memory, visible: Bool[Tensor, "rows tail"], where: Int[Tensor, " rows"], groups: int
) -> Attend:
    """What the layers call: writes the new keys at ``where``, then attends to prefix and tail.

    The prefix takes part in the tail's softmax as one more key: its logit is the log of its own
    softmax's sum, its value what it gave. That is the softmax over both, in few kernels.
    """
    settled, tail = memory.settled, slice(memory.settled, memory.settled + visible.shape[1])
    used = visible.any(0)[:, None]
    hidden = ~visible.repeat(groups, 1)  # a group's heads are further queries of the same keys

    def attend(layer: int, q: Queries, k: NewKeys, v: NewKeys, scale: float) -> Mixed:
        keys, values = memory.keys[layer], memory.values[layer]
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

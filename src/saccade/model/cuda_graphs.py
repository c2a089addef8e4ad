"""Forwards of fixed shape, which a GPU repeats without being told every kernel anew.

A step of n rows is padded to one of a few sizes and reads its numbers (ids, positions, where keys
go, who sees whom) from memory that stays where it is. One CUDA graph a size is then all it takes.

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
from saccade.model.attention import Attend, Mixed, NewKeys, Queries, Segment, partial
from saccade.model.backbone import Backbone

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

    numbers: Int[Tensor, "3 rows"]  # ids, positions, where each key goes in the cache
    visible: Bool[Tensor, "rows tail"]


@dataclass(frozen=True)
class Memory:
    """What captured steps point to. Held, so that none of it is freed while they exist."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    table: tuple[Tensor, Tensor]  # cos and sin of every text position
    settled: int


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
        self._slots: dict[tuple[int, int], Slots] = {}
        self._runs: dict[tuple[int, int], Work] = {}
        self._memory: Memory | None = None

    def logits(
        self,
        segment: Segment,
        ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        ordinary: Work,
    ) -> Float[Tensor, "wanted vocab"]:
        """Logits of the ``wanted`` rows (a run of them), their keys written; those of the
        ``ordinary`` forward where this is no such step, or the GPU would not have it captured.

        A model's first step is held against an ordinary one: what captures and kernels do on a
        machine nobody tried this on is not taken on trust.
        """
        run = self._run(segment, ids, positions)
        if run is None:
            return ordinary()
        # a copy: the next step writes its own logits to the same place
        fixed = run()[wanted[0] : wanted[-1] + 1].clone()
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

    def _run(self, segment: Segment, ids: Sequence[int], positions: Sequence[int]) -> Work | None:
        """The step over these tokens, whose numbers are where it reads them."""
        if self._capture is None or len(ids) > ROWS[-1] or not segment.cache.length:
            return None
        rows = next(size for size in ROWS if size >= len(ids))
        memory, tail = self._place(segment, rows, max(positions))
        size = rows, tail
        if size not in self._slots:
            numbers = torch.zeros(3, rows, dtype=torch.long, device=self._backbone.device)
            visible = torch.zeros(size, dtype=torch.bool, device=self._backbone.device)
            self._slots[size] = Slots(numbers, visible)
        slots = self._slots[size]
        _stage(slots, segment, ids, positions, memory.settled)
        if size not in self._runs:
            try:
                self._runs[size] = self._capture(self._work(memory, slots))
            except RuntimeError as error:
                # an ordinary forward gives the same answer; memory that ran out will say so there
                self._refuse(error)
                return None
        return self._runs[size]

    def _place(self, segment: Segment, rows: int, last: int) -> tuple[Memory, int]:
        """Where the tail begins and its length; what was captured is forgotten if memory moved."""
        cache, end = segment.cache, segment.at + rows
        cache.reserve(end)
        table = self._fused.table(last, cache.keys[0])
        known = self._memory
        if (
            known is None
            or known.keys[0] is not cache.keys[0]
            or known.table[0] is not table[0]
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

    def _work(self, memory: Memory, slots: Slots) -> Work:
        def work() -> Tensor:
            ids, positions, where = slots.numbers
            cos, sin = (part.index_select(0, positions) for part in memory.table)
            groups = self._backbone.heads // self._backbone.kv_heads
            attention = _attention(memory, slots.visible, where, groups)
            hidden = self._fused.decode(self._backbone.embed(ids), (cos, sin), attention)
            return self._backbone.logits(hidden)

        return work


def _stage(
    slots: Slots, segment: Segment, ids: Sequence[int], positions: Sequence[int], settled: int
) -> None:
    """Writes a step's numbers; rows beyond it repeat the last one, at cache rows nobody reads."""
    rows, new = slots.numbers.shape[1], len(ids)
    spare = rows - new
    ahead = range(segment.at, segment.at + rows)
    numbers = [[*ids, *[ids[-1]] * spare], [*positions, *[positions[-1]] * spare], [*ahead]]
    # copies that wait: the last step is done, since its logits have been read
    slots.numbers.copy_(torch.tensor(numbers))
    visible, end = torch.zeros(slots.visible.shape, dtype=torch.bool), segment.at + new - settled
    mask = segment.mask
    visible[:new, : end - mask.shape[1]] = True
    visible[:new, end - mask.shape[1] : end] = mask
    visible[new:] = visible[new - 1]
    slots.visible.copy_(visible)


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

"""``exact``: in low precision too, a drafted answer is bit for bit the answer of plain decoding.

A product over n rows rounds unlike one over a single row, and a sum over keys rounds by its order.
So every forward over text has ``ROWS`` rows of one request, padded at its end, and attention adds
up its keys in blocks of ``BLOCK`` from the first one on, each a product of one shape, in fp32. In a
tree keys lie in another order than in plain decoding, so drafts are chains.

That a row comes out the same at every place among the ``ROWS`` is left to the machine's kernels. It
is tried once for each model, and exactness refused where it fails.
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
from saccade.model.attention import Keys, Segment, Step
from saccade.model.backbone import Backbone
from saccade.model.cache import Cache
from saccade.model.cache_pool import CachePool
from saccade.model.cuda_graphs import Attention, Kind, Rows, Slots, write
from saccade.model.kernels.attention_mass import Queries
from saccade.model.session import Session

ROWS = 16
BLOCK = 256  # keys
Block = Float[Tensor, "kv_head block head_dim"]
"""``BLOCK`` keys or values, in fp32."""
CHAINS = "exact=True needs drafts that are chains: use shape=chain-N, fit or auto"

_tried: WeakKeyDictionary[Backbone, dict[tuple[object, ...], bool]] = WeakKeyDictionary()


class BatchInvariantSession(Session):
    """A session whose rows depend on the text alone, where :func:`check` lets the model pass."""

    def _forward(self, rows: Rows) -> Float[Tensor, "wanted vocab"]:
        segments, ids, positions, wanted = rows
        found = []
        for segment in segments:
            if segment.block is not None:
                raise MethodError(CHAINS)
            for start in range(segment.start, segment.stop, ROWS):
                stop = min(start + ROWS, segment.stop)
                at = segment.at + start - segment.start
                part = Segment(segment.cache, 0, stop - start, at, asked=segment.asked)
                own = [row - start for row in wanted if start <= row < stop]
                found.append(self._part(Rows([part], ids[start:stop], positions[start:stop], own)))
        return torch.cat(found)

    def _part(self, rows: Rows) -> Float[Tensor, "wanted vocab"]:
        """Logits of some of at most ``ROWS`` rows of one request, the last ones."""
        if self.cuda_graphs is None or rows.segments[0].asked is not None:
            return self._ordinary(rows)
        return self.cuda_graphs.logits(rows, self._ordinary, EXACT)

    def _ordinary(self, rows: Rows) -> Float[Tensor, "wanted vocab"]:
        model, ((segment,), ids, positions, wanted) = self.backbone, rows
        # The last row again, so that nothing new enters; none of the real rows sees it.
        spare = ROWS - (segment.stop - segment.start)
        tokens, places = ids + ids[-1:] * spare, positions + positions[-1:] * spare
        step = BatchInvariantStep(Segment(segment.cache, 0, ROWS, segment.at, asked=segment.asked))
        laws = model.logits(model.forward(model.embed(tokens), places, step))
        return laws[segment.stop - len(wanted) : segment.stop]


class BatchInvariantStep(Step):
    """Attention of ``ROWS`` rows of one request over its keys, block after block.

    ``last`` is the last key each row sees; itself when None.
    """

    def __init__(self, segment: Segment, last: Int[Tensor, " rows"] | None = None) -> None:
        # no mask is made here: the base's is as wide as the cache
        end = segment.at + segment.stop - segment.start
        ends = torch.arange(segment.at, end) if last is None else last
        self.segments, self.calls = [segment], 0
        self._choose = lambda segment, new: (ordered, ends[-new:])
        self._ways = [(ordered, ends)]
        segment.cache.reserve(end)


def ordered(q: Queries, k: Keys, v: Keys, last: Int[Tensor, " new"], scale: float) -> Queries:
    """Softmax attention in fp32, its sums over keys taken block by block from key 0 on.

    Keys after a row's ``last`` (one of the newest, or right before them) add exactly 0 to its sums,
    so blocks of them change no bit.
    """
    heads, new, width = q.shape
    kv_heads, seen, _ = k.shape
    grouped = (q.reshape(kv_heads, -1, width).float() * scale).contiguous()
    starts = range(0, seen, BLOCK)
    column = torch.arange(BLOCK, device=q.device)
    futures = (
        # elsewhere every row sees every key
        column + start > last[:, None] if start + BLOCK > seen - new else None
        for start in starts
    )
    keys, values = (_block(k, start) for start in starts), (_block(v, start) for start in starts)
    return _add_blocks(grouped, keys, values, futures, new).view(heads, new, width).to(q.dtype)


def _add_blocks(
    grouped: Float[Tensor, "kv_head queries head_dim"],
    keys: Iterable[Block],
    values: Iterable[Block],
    futures: Iterable[Bool[Tensor, "new block"] | None],
    new: int,
) -> Float[Tensor, "kv_head queries head_dim"]:
    """Softmax attention, in fp32, whose every sum over keys goes block by block.

    ``futures`` hide keys of a block from each of the ``new`` rows; None hides nothing.
    """
    scores = []
    for key, future in zip(keys, futures, strict=True):
        score = grouped @ key.transpose(1, 2)
        if future is not None:
            score.view(len(score), -1, new, BLOCK).masked_fill_(future, float("-inf"))
        scores.append(score)
    # a maximum is the same in whatever order it is taken, and never that of hidden keys alone
    top = torch.stack([score.amax(-1) for score in scores]).amax(0)[..., None]
    total, mixed = torch.zeros_like(top), torch.zeros_like(grouped)
    for score, value in zip(scores, values, strict=True):
        weight = score.sub_(top).exp_()
        total += weight.sum(-1, keepdim=True)
        mixed += weight @ value
    return mixed / total


def _block(rows: Keys, start: int) -> Block:
    """``BLOCK`` rows as a tensor of their own, zeros after the last: what lies there may be NaN,
    and kernels may round by how their input lies in memory."""
    part = rows[:, start : start + BLOCK]
    block = torch.empty(
        (rows.shape[0], BLOCK, rows.shape[2]), dtype=torch.float32, device=rows.device
    )
    block[:, : part.shape[1]] = part
    block[:, part.shape[1] :] = 0
    return block


# -- captured ----------------------------------------------------------------------------------


class Exact(Kind):
    """The attention of :func:`ordered` in a captured forward: the same products over as many blocks
    as the size has. Blocks after a row's last key change no bit."""

    branches: ClassVar[bool] = False
    rows: ClassVar[int | None] = ROWS

    def attention(self, slots: Slots, pool: CachePool, groups: int) -> Attention:
        size = slots.size
        places = slots.tokens[2]
        first_rows, capacities, _ = slots.caches
        heads = torch.arange(pool.kv_heads, device=places.device)
        base = first_rows + heads * capacities
        column = torch.arange(size.keys, device=places.device).view(-1, 1, BLOCK)
        # [block, kv_head, key]: each block lies by itself
        read = (base[:, None] + column).clamp_(max=pool.rows - 1)
        after = (column > places[0, -1])[..., None]
        futures = column.view(-1, 1, BLOCK) > places[0][:, None]
        written = base[:, None] + places
        return partial(_attend_by_blocks, pool, written.flatten(), read, after, futures)

    def agree(self, captured: Tensor, ordinary: Tensor) -> bool:
        """Bit for bit."""
        return torch.equal(captured, ordinary)


def _attend_by_blocks(
    pool: CachePool,
    written: Int[Tensor, " place"],
    read: Int[Tensor, "block_number kv_head block"],
    after: Bool[Tensor, "block_number 1 block 1"],
    futures: Bool[Tensor, "block_number new block"],
    layer: int,
    q: Queries,
    k: Keys,
    v: Keys,
    scale: float,
) -> Float[Tensor, "new out"]:
    heads, new, width = q.shape
    write(pool.keys[layer], pool.values[layer], written, k, v)
    grouped = (q.reshape(k.shape[0], -1, width).float() * scale).contiguous()
    keys, values = (
        torch.where(after, 0, buffer.index_select(0, read.flatten()).view(*read.shape, width))
        .float()
        .unbind()
        for buffer in (pool.keys[layer], pool.values[layer])
    )
    out = _add_blocks(grouped, keys, values, futures.unbind(), new)
    out = out.view(heads, new, width).to(q.dtype)
    return out.transpose(0, 1).reshape(new, -1)


EXACT = Exact()


# -- what is left to the machine ---------------------------------------------------------------


def check(model: Backbone) -> None:
    """Raises ModelError unless rows of this model come out the same at every place."""
    if any("expert" in name and value for name, value in model.config.to_dict().items()):
        raise ModelError(
            "exact=True cannot be promised for a mixture of experts, where the tokens beside a "
            "token decide how many rows its experts multiply; leave exact out"
        )
    tried = _tried.setdefault(model, {})
    key = (model.dtype, str(model.device), torch.get_num_threads(), model.fused is None)
    if key not in tried:
        tried[key] = is_batch_invariant(model)
    if not tried[key]:
        raise ModelError(
            f"exact=True cannot be promised on this machine: in {str(model.dtype)[6:]} on "
            f"{model.device} with {torch.get_num_threads()} threads a row's result depends on its "
            "place among others; use another number of threads, or float32 without exact"
        )


@torch.no_grad()
def is_batch_invariant(model: Backbone, tries: int = 2) -> bool:
    """Whether one row gives the same logits, bit for bit, at each of the ``ROWS`` places and with
    other rows beside it. The rows attend to the same random keys and not to each other."""
    random = torch.Generator().manual_seed(0)
    past = BLOCK + BLOCK // 3
    cache = _random_cache(model, past, random)
    last = torch.full((ROWS,), past - 1)
    where = torch.full((model.axes, ROWS), past, device=model.device)
    even = torch.arange(ROWS) % 2 == 0
    for _ in range(tries):
        row = torch.randint(model.vocab, (1,), generator=random)
        seen = []
        for mine in (torch.ones_like(even), even, ~even):
            others = torch.randint(model.vocab, (ROWS,), generator=random)
            ids = torch.where(mine, row, others).tolist()
            step = BatchInvariantStep(Segment(cache, 0, ROWS, past), last)
            seen.append(model.logits(model.forward(model.embed(ids), where, step)).cpu()[mine])
        found = torch.cat(seen)
        if not bool(found.isfinite().all()) or not torch.equal(found, found[:1].expand_as(found)):
            return False
    return True


def _random_cache(model: Backbone, length: int, random: torch.Generator) -> Cache:
    cache = model.cache(length + ROWS)
    for tensor in (*cache.keys, *cache.values):
        shape = (tensor.shape[0], length, tensor.shape[2])
        tensor[:, :length] = torch.randn(shape, generator=random).to(tensor)
    cache.advance(length)
    return cache

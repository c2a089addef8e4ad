"""The keys and values of one request. A batch is several of them, each with its own length.

Tensors are preallocated per layer, so appending n tokens moves n tokens, forgetting is an integer,
and keeping a path moves only the accepted nodes. Rows at ``length`` and beyond may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.prompt import Paged
from saccade.model.cache_pool import CachePool, Lease


class Cache:
    """Keys and values of every layer, ``[kv_head, capacity, head_dim]`` each."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        devices: Sequence[torch.device | str] = (),
        pool: CachePool | None = None,
    ) -> None:
        """``devices``: where each layer's tensors live; on the CPU by default. ``pool``: whose rows
        they are, of a model on one device, as long as it has memory."""
        self.length = 0
        self.pool = pool
        self.lease: Lease | None = None
        shape = (kv_heads, max(capacity, 1), head_dim)
        if pool is not None:
            self.lease = pool.lease(shape[1], layers)
        if self.lease is not None:
            self.keys, self.values = self.lease.keys, self.lease.values
            return
        places = devices or ["cpu"] * layers
        self.keys = [torch.empty(shape, dtype=dtype, device=place) for place in places]
        self.values = [torch.empty(shape, dtype=dtype, device=place) for place in places]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[1]

    @property
    def bytes(self) -> int:
        return 2 * len(self.keys) * self.keys[0].numel() * self.keys[0].element_size()

    def reserve(self, length: int) -> None:
        """Room for ``length`` tokens, growing by half as much again when there is not."""
        if length <= self.capacity:
            return
        capacity = max(length, self.capacity * 3 // 2)
        lease = None if self.pool is None else self.pool.lease(capacity, len(self.keys))
        if lease is not None:
            for old, new in zip(
                (*self.keys, *self.values), (*lease.keys, *lease.values), strict=True
            ):
                new[:, : old.shape[1]] = old
            self.lease, self.keys, self.values = lease, lease.keys, lease.values
            return
        if self.lease is not None:  # The pool may move, and these tensors do not follow any more.
            self.keys, self.values = [*self.keys], [*self.values]
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = torch.empty(
                    (old.shape[0], capacity, old.shape[2]), dtype=old.dtype, device=old.device
                )
                new[:, : old.shape[1]] = old
                tensors[layer] = new
        self.lease = None

    def write(
        self,
        layer: int,
        at: int,
        keys: Float[Tensor, "kv_head new head_dim"],
        values: Float[Tensor, "kv_head new head_dim"],
    ) -> None:
        """Puts new tokens at ``at``. The length changes only by :meth:`advance`."""
        end = at + keys.shape[1]
        self.keys[layer][:, at:end] = keys
        self.values[layer][:, at:end] = values

    def read(
        self, layer: int, end: int
    ) -> tuple[Float[Tensor, "kv_head end head_dim"], Float[Tensor, "kv_head end head_dim"]]:
        """The first ``end`` tokens, without a copy."""
        return self.keys[layer][:, :end], self.values[layer][:, :end]

    def advance(self, count: int) -> None:
        """Counts ``count`` tokens already written as committed."""
        self.length += count

    def keep(self, path: Sequence[int]) -> None:
        """Commits the tokens ``path`` places after the end (increasing) and forgets the others."""
        stay = sum(place == node for place, node in enumerate(path))  # the first of them
        start, self.length = self.length + stay, self.length + len(path)
        if start < self.length:
            rows = torch.tensor(path[stay:]) + start - stay
            # Each device is sent them once, not once a layer.
            rows_on = {device: send(rows, device) for device in {k.device for k in self.keys}}
            for layer in (*self.keys, *self.values):
                layer[:, start : self.length] = layer.index_select(1, rows_on[layer.device])

    def truncate(self, length: int) -> None:
        """Forgets everything from ``length`` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        self.length = length

    def forget(self, start: int, count: int) -> None:
        """Takes these rows out; those after them move up, in the same memory."""
        for layer in (*self.keys, *self.values):
            layer[:, start : self.length - count] = layer[:, start + count : self.length].clone()
        self.length -= count

    def select(
        self,
        rows: Int[Tensor, " kept"] | Int[Tensor, "layer kv_head kept"],
        room: int,
        layers: int | None = None,
        *,
        pooled: bool = True,
    ) -> Cache:
        """A new cache with copies of these rows, of the first ``layers``, and room for more.

        One set of rows for all heads, or one for each. ``pooled``: in this one's pool, if it has
        one; what is only to be copied from later is better off elsewhere.
        """
        heads, capacity, width = self.keys[0].shape
        depth = len(self.keys) if layers is None else layers
        new = Cache(
            depth,
            heads,
            width,
            rows.shape[-1] + room,
            dtype=self.keys[0].dtype,
            devices=[keys.device for keys in self.keys[:depth]],
            pool=self.pool if pooled else None,
        )
        # Flat rows and index_select: many times faster than torch.gather.
        start = torch.arange(heads, device=rows.device)[:, None] * capacity
        flat = (rows + start).expand(depth, heads, -1).reshape(depth, -1)
        for layer in range(depth):
            where = flat[layer].to(self.keys[layer].device)
            for old, copy in ((self.keys, new.keys), (self.values, new.values)):
                picked = old[layer].view(-1, width).index_select(0, where)
                copy[layer][:, : rows.shape[-1]] = picked.view(heads, -1, width)
        new.advance(rows.shape[-1])
        return new

    def exchange(
        self,
        other: Cache,
        held: Int[Tensor, "layer kv_head kept"],
        rows: Int[Tensor, "layer kv_head kept"],
    ) -> Int[Tensor, "layer kv_head kept"]:
        """Holds these rows of another cache in the places of ``held`` ones; only the difference
        moves. Returns which row stands in which place now: attention does not mind their order."""
        last = int(torch.maximum(held.max(), rows.max())) + 1
        wanted = torch.zeros(*held.shape[:2], last, dtype=torch.bool, device=held.device)
        there = wanted.clone().scatter_(-1, held, True)
        wanted.scatter_(-1, rows, True)
        layer, head, place = (~wanted.gather(-1, held)).nonzero(as_tuple=True)
        new = rows[~there.gather(-1, rows)]  # as many a head as leave, in the same order of heads
        for number, count in enumerate(torch.bincount(layer, minlength=len(held)).tolist()):
            at = (layer == number).nonzero().squeeze(-1) if count else layer[:0]
            device = self.keys[number].device
            to = head[at].to(device), place[at].to(device)
            origin = head[at].to(device), new[at].to(device)
            self.keys[number][to] = other.keys[number][origin]
            self.values[number][to] = other.values[number][origin]
        held = held.clone()
        held[layer, head, place] = new
        return held

    def extend(self, other: Cache, start: int, stop: int) -> None:
        """Appends copies of another cache's rows ``start:stop``, of the layers held here."""
        self.reserve(self.length + stop - start)
        for layer in range(len(self.keys)):
            keys, values = other.read(layer, stop)
            self.write(layer, self.length, keys[:, start:], values[:, start:])
        self.advance(stop - start)


def send(values: Tensor, device: torch.device) -> Tensor:
    """A copy of a few numbers of the CPU on a device: to a GPU from pinned memory, so that nobody
    waits for it."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def together(columns: Int[Tensor, " seen"]) -> slice | Int[Tensor, " seen"]:
    """Increasing columns as a slice where nothing lies between them: read without a copy."""
    if len(columns) and int(columns[-1] - columns[0]) + 1 == len(columns):
        return slice(int(columns[0]), int(columns[-1]) + 1)
    return columns


class Pages:
    """Rows of a cache in pages of a few, of which each step reads those that its queries point at:
    those whose mean keys they attend to the most."""

    def __init__(self, source: Cache, paged: Paged, layers: int) -> None:
        """``layers``: the first so many of the source's are read."""
        self._source, self._read = source, paged.read
        self._rows = [paged.rows.to(keys.device) for keys in source.keys[:layers]]
        self._means = [
            keys[:, rows].mean(2).transpose(1, 2).contiguous()
            for keys, rows in zip(source.keys, self._rows, strict=False)
        ]

    def attend(
        self,
        into: Cache,
        layer: int,
        way: Callable[..., Tensor],
        q: Float[Tensor, "head new head_dim"],
        keys: Float[Tensor, "kv_head seen head_dim"],
        values: Float[Tensor, "kv_head seen head_dim"],
        bias: Float[Tensor, "rows last"] | None,
        scale: float,
    ) -> Float[Tensor, "head new head_dim"]:
        """A way to attend of few rows, each on its own over the pages that it asks for."""
        new, found = q.shape[1], []
        for row in range(new):
            own = q[:, row : row + 1]
            self.open(into, layer, own * scale)
            found.append(way(own, keys, values, None if bias is None else bias[row::new], scale))
        return torch.cat(found, 1)

    def chosen(
        self, layer: int, q: Float[Tensor, "head one head_dim"]
    ) -> Int[Tensor, "kv_head read"]:
        """The pages for these scaled queries: of a group's heads together."""
        means = self._means[layer]
        logits = torch.bmm(q.reshape(len(means), -1, q.shape[-1]), means)
        return logits.float().softmax(-1).sum(1).topk(self._read).indices

    def open(self, into: Cache, layer: int, q: Float[Tensor, "head one head_dim"]) -> None:
        """Writes the keys and values of the chosen pages over the first rows of a cache."""
        kv_heads, capacity, width = self._source.keys[layer].shape
        rows = self._rows[layer][self.chosen(layer, q)].flatten(1)
        flat = (rows + torch.arange(kv_heads, device=rows.device)[:, None] * capacity).flatten()
        for theirs, own in ((self._source.keys, into.keys), (self._source.values, into.values)):
            picked = theirs[layer].view(-1, width).index_select(0, flat)
            own[layer][:, : rows.shape[1]] = picked.view(kv_heads, -1, width)

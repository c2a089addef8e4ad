"""The KV cache of one request. A batch is several of them, each with its own length.

Tensors are preallocated per layer. So appending n tokens writes n tokens, a rollback changes an
integer, and committing a path moves only the accepted nodes. Rows at ``length`` and beyond may hold
anything. Layers that have a state instead of keys keep it in ``states``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.prompt import Paged
from saccade.model.cache_pool import CachePool, Lease
from saccade.model.hidden_states import HiddenStates
from saccade.model.recurrent import LayerStates


@dataclass(frozen=True)
class HeadShape:
    """The shape of a layer's keys and values."""

    kv_heads: int
    key_dim: int
    value_dim: int


class Cache:
    """The keys and values of every layer, ``[kv_head, capacity, head_dim]`` each."""

    def __init__(
        self,
        shapes: Sequence[HeadShape],
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        devices: Sequence[torch.device | str] = (),
        pool: CachePool | None = None,
        states: LayerStates | None = None,
    ) -> None:
        """Allocates an empty cache for layers whose keys and values have these shapes.

        ``devices`` says where the tensors of each layer are; on the CPU by default. ``pool`` (of a
        model on one device) provides the rows, as long as it has memory. ``states`` are those of
        layers that have no keys.
        """
        self.length = 0
        self.states = states
        self.hidden: HiddenStates | None = None  # of a target whose draft is a head
        self.pool = pool
        self.lease: Lease | None = None
        self._initial_capacity = max(capacity, 1)
        self.shapes = [*shapes]
        self._dtype = dtype
        if pool is not None:
            self.lease = pool.lease(self._initial_capacity, len(shapes))
        if self.lease is not None:
            self.keys, self.values = self.lease.keys, self.lease.values
            return
        places = devices or ["cpu"] * len(shapes)
        self.keys, self.values = [], []
        for shape, place in zip(self.shapes, places, strict=True):
            for tensors, width in ((self.keys, shape.key_dim), (self.values, shape.value_dim)):
                size = shape.kv_heads, self._initial_capacity, width
                tensors.append(torch.empty(size, dtype=dtype, device=place))

    @property
    def capacity(self) -> int:
        # Of a model's first layers none may have keys.
        return self.keys[0].shape[1] if self.keys else self._initial_capacity

    @property
    def bytes(self) -> int:
        states = 0 if self.states is None else self.states.bytes
        hidden = 0 if self.hidden is None else self.hidden.bytes
        tensors = (*self.keys, *self.values)
        return states + hidden + sum(each.numel() * each.element_size() for each in tensors)

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` tokens. A cache that is too small grows by half at least."""
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
        if self.lease is not None:  # The pool replaces the views in the lease's own lists.
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
        """Writes new tokens from row ``at`` on. Only :meth:`advance` changes the length."""
        end = at + keys.shape[1]
        self.keys[layer][:, at:end] = keys
        self.values[layer][:, at:end] = values

    def read(
        self, layer: int, end: int
    ) -> tuple[Float[Tensor, "kv_head end head_dim"], Float[Tensor, "kv_head end head_dim"]]:
        """Returns the first ``end`` tokens, without a copy."""
        return self.keys[layer][:, :end], self.values[layer][:, :end]

    def advance(self, count: int) -> None:
        """Commits the next ``count`` tokens, which were written already."""
        self.length += count
        if self.states is not None:
            self.states.advance(count)

    def commit_path(self, path: Sequence[int]) -> None:
        """Commits the tokens at these places after the end (increasing) and drops the others."""
        if self.states is not None:
            self.states.keep(path)
        # The first tokens of the path are often in their places already.
        in_place = sum(place == node for place, node in enumerate(path))
        old_length = self.length
        start = old_length + in_place
        self.length = old_length + len(path)
        if start < self.length:
            rows = torch.tensor(path[in_place:]) + old_length
            # The rows are sent to each device once, not once a layer.
            devices = {keys.device for keys in self.keys}
            rows_on = {device: send_to_device(rows, device) for device in devices}
            for layer in (*self.keys, *self.values):
                layer[:, start : self.length] = layer.index_select(1, rows_on[layer.device])
            if self.hidden is not None:
                self.hidden.move(rows, start)

    def truncate(self, length: int) -> None:
        """Drops all tokens from ``length`` on. Raises ValueError where there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        if self.states is not None:
            self.states.truncate(self.states.length - (self.length - length))
        self.length = length

    def nearest_length(self, length: int) -> int:
        """Returns the largest length, up to this one, to which the cache can be truncated.

        Keys can be cut anywhere. The states of layers that have no keys are known at a few lengths.
        """
        if self.states is None:
            return length
        without_states = self.length - self.states.length  # rows that a view left out
        return max(0, without_states + self.states.nearest(length - without_states))

    def remove_rows(self, start: int, count: int) -> None:
        """Removes ``count`` rows; those after them move up, in the same memory."""
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
        """Returns a new cache with copies of these rows and room for ``room`` more.

        There is one set of rows for all heads, or one for each layer and head. ``layers`` takes the
        first layers only. ``pooled`` allocates it in this cache's pool, if there is one; a cache
        that is only copied from later does not need that.
        """
        depth = len(self.keys) if layers is None else layers
        new = Cache(
            self.shapes[:depth],
            rows.shape[-1] + room,
            dtype=self._dtype,
            devices=[keys.device for keys in self.keys[:depth]],
            pool=self.pool if pooled else None,
            states=None if self.states is None else self.states.copy(),
        )
        starts = {
            heads: torch.arange(heads, device=rows.device)[:, None] * self.capacity
            for heads in {shape.kv_heads for shape in new.shapes}
        }
        for layer, shape in enumerate(new.shapes):
            heads = shape.kv_heads
            own = rows[layer] if rows.ndim > 1 else rows
            where = (own + starts[heads]).flatten().to(self.keys[layer].device)
            # index_select over flat rows is many times faster than torch.gather.
            for old, copy in ((self.keys, new.keys), (self.values, new.values)):
                width = old[layer].shape[2]
                picked = old[layer].view(-1, width).index_select(0, where)
                copy[layer][:, : rows.shape[-1]] = picked.view(heads, -1, width)
        new.length = rows.shape[-1]
        return new

    def exchange(
        self,
        other: Cache,
        old_rows: Int[Tensor, "layer kv_head kept"],
        new_rows: Int[Tensor, "layer kv_head kept"],
    ) -> Int[Tensor, "layer kv_head kept"]:
        """Replaces copies of ``old_rows`` of another cache by copies of ``new_rows`` of it.

        Only rows that are not in both sets move, each to the place of one that leaves. Returns
        which row of the other cache is in each place now: attention does not depend on the order.
        """
        size = int(torch.maximum(old_rows.max(), new_rows.max())) + 1
        is_new = torch.zeros(*old_rows.shape[:2], size, dtype=torch.bool, device=old_rows.device)
        is_old = is_new.clone().scatter_(-1, old_rows, True)
        is_new.scatter_(-1, new_rows, True)
        layer, head, place = (~is_new.gather(-1, old_rows)).nonzero(as_tuple=True)
        # In each head as many rows arrive as leave, and both are in the same order of heads.
        arriving = new_rows[~is_old.gather(-1, new_rows)]
        for number, count in enumerate(torch.bincount(layer, minlength=len(old_rows)).tolist()):
            at = (layer == number).nonzero().squeeze(-1) if count else layer[:0]
            device = self.keys[number].device
            to = head[at].to(device), place[at].to(device)
            origin = head[at].to(device), arriving[at].to(device)
            self.keys[number][to] = other.keys[number][origin]
            self.values[number][to] = other.values[number][origin]
        rows_by_place = old_rows.clone()
        rows_by_place[layer, head, place] = arriving
        return rows_by_place

    def extend(self, other: Cache, start: int, stop: int, at: int | None = None) -> None:
        """Writes copies of rows ``start:stop`` of another cache, of as many layers as there are
        here, from row ``at`` on, and ends behind them. They are appended where ``at`` is None."""
        if at is not None:
            self.length = at  # The states that there were after so many rows are not needed.
        self.reserve(self.length + stop - start)
        for layer in range(len(self.keys)):
            keys, values = other.read(layer, stop)
            self.write(layer, self.length, keys[:, start:], values[:, start:])
        if self.hidden is not None and other.hidden is not None:
            self.hidden.extend(other.hidden, start, stop, self.length)
        self.length += stop - start
        if self.states is not None and other.states is not None:
            theirs = other.states.length - (other.length - stop)
            self.states.follow(other.states, theirs)


def send_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns numbers on a device.

    From the CPU to a GPU they go from pinned memory, so that the CPU does not wait for it.
    """
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def as_slice(columns: Int[Tensor, " column"]) -> slice | Int[Tensor, " column"]:
    """Returns increasing columns as a slice where they are adjacent, to be read without a copy."""
    if len(columns) and int(columns[-1] - columns[0]) + 1 == len(columns):
        return slice(int(columns[0]), int(columns[-1]) + 1)
    return columns


class Pages:
    """Rows of a cache in pages of a few rows. Each step of a draft reads the few pages whose mean
    keys its queries attend to the most."""

    def __init__(self, source: Cache, paged: Paged, layers: int) -> None:
        """Computes the mean keys of the pages, in the first ``layers`` of the source."""
        self._source = source
        self._pages_per_step = paged.pages_per_step
        self._rows = [paged.rows.to(keys.device) for keys in source.keys[:layers]]
        self._mean_keys = [
            keys[:, rows].mean(2).transpose(1, 2).contiguous()
            for keys, rows in zip(source.keys, self._rows, strict=False)
        ]

    def attend(
        self,
        cache: Cache,
        layer: int,
        attend_to_keys: Callable[..., Tensor],
        q: Float[Tensor, "head new head_dim"],
        keys: Float[Tensor, "kv_head key head_dim"],
        values: Float[Tensor, "kv_head key head_dim"],
        bias: Float[Tensor, "rows last"] | None,
        scale: float,
    ) -> Float[Tensor, "head new head_dim"]:
        """Attends with each of a few rows over the pages that its own queries choose.

        ``keys`` and ``values`` are those of ``cache``, whose first rows are the pages.
        """
        new = q.shape[1]
        outputs = []
        for row in range(new):
            row_q = q[:, row : row + 1]
            self.load(cache, layer, row_q * scale)
            row_bias = None if bias is None else bias[row::new]
            outputs.append(attend_to_keys(row_q, keys, values, row_bias, scale))
        return torch.cat(outputs, 1)

    def best_pages(
        self, layer: int, q: Float[Tensor, "head one head_dim"]
    ) -> Int[Tensor, "kv_head page"]:
        """Returns the pages that these scaled queries choose, one choice for a group of heads."""
        mean_keys = self._mean_keys[layer]
        logits = torch.bmm(q.reshape(len(mean_keys), -1, q.shape[-1]), mean_keys)
        return logits.float().softmax(-1).sum(1).topk(self._pages_per_step).indices

    def load(self, cache: Cache, layer: int, q: Float[Tensor, "head one head_dim"]) -> None:
        """Writes the keys and values of the chosen pages over the first rows of a cache."""
        kv_heads, capacity, width = self._source.keys[layer].shape
        rows = self._rows[layer][self.best_pages(layer, q)].flatten(1)
        flat = (rows + torch.arange(kv_heads, device=rows.device)[:, None] * capacity).flatten()
        for theirs, own in ((self._source.keys, cache.keys), (self._source.values, cache.values)):
            picked = theirs[layer].view(-1, width).index_select(0, flat)
            own[layer][:, : rows.shape[1]] = picked.view(kv_heads, -1, width)

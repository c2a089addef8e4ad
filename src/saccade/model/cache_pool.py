"""Memory for the keys and values of many requests, at addresses that stay.

A captured forward (``cuda_graphs``) reads and writes at addresses that were noted when it was
captured. So the caches of a model's requests are rows of one buffer a layer, and a forward is told
where a request's rows begin. A cache borrows rows and they come back when it is dropped; the next
request finds the same buffer, and what was captured over it still holds.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.model import memory

FIRST_TOKENS = 32768  # of a pool at first, so that it need not grow soon,
FIRST_SHARE = 0.1  # unless they would take more than this share of the memory there is

Buffer = Float[Tensor, "row head_dim"]


@dataclass(eq=False)
class Lease:
    """The rows that one cache has borrowed: those of its first head, then the next one's.

    ``keys`` and ``values`` are views of them by layer, replaced in place where the pool moves.
    """

    start: int
    capacity: int  # rows of each head
    keys: list[Float[Tensor, "kv_head capacity head_dim"]]
    values: list[Float[Tensor, "kv_head capacity head_dim"]]


class CachePool:
    """Buffers of keys and values, one pair a layer, of which caches borrow rows.

    The buffers grow to twice their size where all rows are taken; that moves them, so what was
    captured over them is forgotten (:meth:`watch`). Where there is no memory to grow, a cache gets
    memory of its own.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, self.kv_heads, self._head_dim = layers, kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self.keys: list[Buffer] = [self._empty(0) for _ in range(layers)]
        self.values: list[Buffer] = [self._empty(0) for _ in range(layers)]
        self._free: list[tuple[int, int]] = []  # (start, stop), increasing and never adjacent
        self._returned: list[tuple[int, int]] = []  # free too, and not yet among those
        self._lock = threading.RLock()
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._watchers: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def rows(self) -> int:
        """How many rows a layer's buffer has, borrowed or not."""
        return self.keys[0].shape[0]

    @property
    def free_bytes(self) -> int:
        """Bytes of the rows that no cache has borrowed."""
        return self._bytes(sum(stop - start for start, stop in (*self._free, *self._returned)))

    def watch(self, watcher: Any) -> None:
        """From now on ``watcher.forget()`` is called whenever the buffers have moved."""
        self._watchers.add(watcher)

    def lease(self, capacity: int, layers: int) -> Lease | None:
        """Rows for ``capacity`` tokens in the first ``layers``; None where there is no memory."""
        rows = self.kv_heads * capacity
        with self._lock:
            start = self._take(rows)
            if start is None and self._grow(rows):
                start = self._take(rows)
            if start is None:
                return None
            lease = Lease(start, capacity, [], [])
            self._point(lease, layers)
            self._leases.add(lease)
        # Garbage may be collected at any moment, also while the runs are being changed: so what
        # comes back is only noted.
        ending = weakref.finalize(lease, self._returned.append, (start, start + rows))
        ending.atexit = False
        return lease

    def release(self) -> None:
        """Frees the buffers, if no cache has borrowed anything."""
        with self._lock:
            if self.rows and not len(self._leases):
                self._free.clear()
                self._returned.clear()
                self._replace(0)

    def _point(self, lease: Lease, layers: int) -> None:
        """Makes a lease's tensors views of where its rows are now."""
        stop = lease.start + self.kv_heads * lease.capacity
        shape = self.kv_heads, lease.capacity, self._head_dim
        for views, buffers in ((lease.keys, self.keys), (lease.values, self.values)):
            views[:] = [buffer[lease.start : stop].view(shape) for buffer in buffers[:layers]]

    def _take(self, rows: int) -> int | None:
        """The start of the first free run of so many rows, which is free no more."""
        while self._returned:
            self._add_free(*self._returned.pop())
        for place, (start, stop) in enumerate(self._free):
            if stop - start >= rows:
                rest = [(start + rows, stop)] if stop - start > rows else []
                self._free[place : place + 1] = rest
                return start
        return None

    def _add_free(self, start: int, stop: int) -> None:
        runs: list[tuple[int, int]] = []
        for run in sorted([*self._free, (start, stop)]):
            if runs and runs[-1][1] == run[0]:
                runs[-1] = runs[-1][0], run[1]
            else:
                runs.append(run)
        self._free = runs

    def _grow(self, rows: int) -> bool:
        """Makes the buffers longer by ``rows`` at least; whether there was memory for it."""
        before, there = self.rows, memory.available_bytes(self._device)
        plenty = max(rows, before)
        if not before and self._bytes(self.kv_heads * FIRST_TOKENS) <= FIRST_SHARE * there:
            plenty = max(rows, self.kv_heads * FIRST_TOKENS)
        for more in sorted({rows, plenty}, reverse=True):
            # Each layer is copied by itself, so at most one of them is there twice.
            needed = self._bytes(more) + self._bytes(before) // self.layers
            if needed <= there * (1 - memory.SPARE_SHARE):
                try:
                    self._replace(before + more)
                except (RuntimeError, MemoryError) as error:
                    if not memory.is_out_of_memory(error):
                        raise
                    self._replace(before)  # Some layers may have grown.
                    return False
                self._add_free(before, before + more)
                return True
        return False

    def _replace(self, rows: int) -> None:
        """Moves every layer's rows to new buffers of this length; leases follow."""
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                if old.shape[0] == rows:
                    continue
                new = self._empty(rows)
                stays = min(rows, old.shape[0])
                new[:stays].copy_(old[:stays])
                buffers[layer] = new
                del old
        for lease in self._leases:
            self._point(lease, len(lease.keys))
        for watcher in self._watchers:
            watcher.forget()
        memory.return_unused_memory(self._device)

    def _empty(self, rows: int) -> Buffer:
        return torch.empty(rows, self._head_dim, dtype=self._dtype, device=self._device)

    def _bytes(self, rows: int) -> int:
        return 2 * self.layers * rows * self._head_dim * self._dtype.itemsize

"""Memory for the keys and values of many requests, at addresses that do not change.

A captured forward (``cuda_graphs``) reads and writes at the addresses of its capture. All caches of
a model's requests are therefore rows of one buffer a layer. The row at which each request's cache
begins is an input of the forward. A cache borrows rows, and returns them when it is dropped. The
next request gets rows of the same buffer, so that captured forwards stay valid.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.model import memory

INITIAL_TOKENS = 32768  # The size of a new pool, so that it need not grow soon.
# A new pool has INITIAL_TOKENS only if they take at most this share of the free memory. Otherwise
# it begins with the rows that its first cache needs.
MAX_INITIAL_SHARE = 0.1

Buffer = Float[Tensor, "row head_dim"]


@dataclass(eq=False)
class Lease:
    """The rows that one cache has borrowed, the same ones of every layer's buffer: ``capacity``
    rows for its first head, then as many for each of the others.

    ``keys`` and ``values`` have a view of the rows for each layer. When the buffers move, the pool
    replaces the views in these lists.
    """

    start: int  # the first of the rows
    capacity: int  # rows of each head
    keys: list[Float[Tensor, "kv_head capacity head_dim"]]
    values: list[Float[Tensor, "kv_head capacity head_dim"]]


class Watcher(Protocol):
    """What reads the buffers at fixed addresses."""

    def drop_captured(self) -> None:
        """Is called when the buffers have moved, so that what was captured over them is invalid."""


class CachePool:
    """Buffers of keys and values, one pair a layer, of which caches borrow rows.

    The buffers grow when no free run of rows is long enough: to twice their size where memory
    allows. They move then, which makes captured forwards invalid, so watchers are called
    (:meth:`watch`). Where there is no memory to grow, a cache gets memory of its own.
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
        self._free_runs: list[tuple[int, int]] = []  # (start, stop), increasing, never adjacent
        self._returned_runs: list[tuple[int, int]] = []  # free too, but not yet in _free_runs
        self._lock = threading.RLock()
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()

    @property
    def rows(self) -> int:
        """How many rows the buffer of a layer has, borrowed or not."""
        return self.keys[0].shape[0]

    @property
    def free_bytes(self) -> int:
        """Bytes of the rows that no cache has borrowed."""
        return self._bytes(
            sum(stop - start for start, stop in (*self._free_runs, *self._returned_runs))
        )

    def watch(self, watcher: Watcher) -> None:
        """Calls ``watcher.drop_captured`` whenever the pool's buffers have moved, until the watcher
        is garbage-collected."""
        self._watchers.add(watcher)

    def lease(self, capacity: int, layers: int) -> Lease | None:
        """Returns rows for ``capacity`` tokens in the first ``layers``; None without memory."""
        rows = self.kv_heads * capacity
        with self._lock:
            start = self._take_rows(rows)
            if start is None and self._grow(rows):
                start = self._take_rows(rows)
            if start is None:
                return None
            lease = Lease(start, capacity, [], [])
            self._set_views(lease, layers)
            self._leases.add(lease)
        # Garbage may be collected at any moment, even while the free runs are being changed. So
        # the finalizer only appends to a list, which the next lease reads.
        finalizer = weakref.finalize(lease, self._returned_runs.append, (start, start + rows))
        finalizer.atexit = False
        return lease

    def release(self) -> None:
        """Frees the buffers, unless a cache has borrowed rows."""
        with self._lock:
            if self.rows and not len(self._leases):
                self._free_runs.clear()
                self._returned_runs.clear()
                self._resize(0)

    def _set_views(self, lease: Lease, layers: int) -> None:
        """Makes the tensors of a lease views of its rows, wherever the buffers are now."""
        stop = lease.start + self.kv_heads * lease.capacity
        shape = self.kv_heads, lease.capacity, self._head_dim
        for views, buffers in ((lease.keys, self.keys), (lease.values, self.values)):
            views[:] = [buffer[lease.start : stop].view(shape) for buffer in buffers[:layers]]

    def _take_rows(self, rows: int) -> int | None:
        """Takes the first free run of so many rows and returns its start; None without one."""
        while self._returned_runs:
            self._add_free(*self._returned_runs.pop())
        for place, (start, stop) in enumerate(self._free_runs):
            if stop - start >= rows:
                rest = [(start + rows, stop)] if stop - start > rows else []
                self._free_runs[place : place + 1] = rest
                return start
        return None

    def _add_free(self, start: int, stop: int) -> None:
        """Adds a run to the free ones and joins those that are adjacent."""
        runs: list[tuple[int, int]] = []
        for run in sorted([*self._free_runs, (start, stop)]):
            if runs and runs[-1][1] == run[0]:
                runs[-1] = runs[-1][0], run[1]
            else:
                runs.append(run)
        self._free_runs = runs

    def _grow(self, rows: int) -> bool:
        """Adds at least ``rows`` rows to the buffers. Returns whether there was memory for it.

        First it tries to add as many rows as the buffers have, or to a new pool the rows of
        ``INITIAL_TOKENS`` tokens if these take at most ``MAX_INITIAL_SHARE``. If there is no memory
        for that, it tries to add ``rows``.
        """
        old_rows = self.rows
        free_bytes = memory.available_bytes(self._device)
        initial_rows = self.kv_heads * INITIAL_TOKENS
        generous_rows = max(rows, old_rows)
        if not old_rows and self._bytes(initial_rows) <= MAX_INITIAL_SHARE * free_bytes:
            generous_rows = max(rows, initial_rows)
        for added_rows in sorted({rows, generous_rows}, reverse=True):
            # Layers are moved one by one, so at most one of them exists twice.
            needed_bytes = self._bytes(added_rows) + self._bytes(old_rows) // self.layers
            if needed_bytes <= free_bytes * (1 - memory.SPARE_SHARE):
                try:
                    self._resize(old_rows + added_rows)
                except (RuntimeError, MemoryError) as error:
                    if not memory.is_out_of_memory(error):
                        raise
                    self._cut(old_rows)
                    continue
                self._add_free(old_rows, old_rows + added_rows)
                return True
        return False

    def _resize(self, rows: int) -> None:
        """Moves every layer to a new buffer of this many rows. Leases follow."""
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                if old.shape[0] == rows:
                    continue
                new = self._empty(rows)
                copied_rows = min(rows, old.shape[0])
                new[:copied_rows].copy_(old[:copied_rows])
                buffers[layer] = new
                # The views of leases hold the old buffer, so they move before the next layer does.
                self._move_leases()
                del old
        self._announce_move()

    def _cut(self, rows: int) -> None:
        """Cuts every layer back to this many rows, after some had grown and one could not.

        The buffers become views of their first rows, because there is no memory for new buffers.
        The memory of the other rows stays in use until the buffers move again.
        """
        for buffers in (self.keys, self.values):
            buffers[:] = [buffer[:rows] for buffer in buffers]
        self._move_leases()
        self._announce_move()

    def _announce_move(self) -> None:
        """Calls the watchers, and frees the memory where the buffers were."""
        for watcher in self._watchers:
            watcher.drop_captured()
        memory.return_unused_memory(self._device)

    def _move_leases(self) -> None:
        """Makes the tensors of all leases views of where the buffers are now."""
        for lease in self._leases:
            self._set_views(lease, len(lease.keys))

    def _empty(self, rows: int) -> Buffer:
        return torch.empty(rows, self._head_dim, dtype=self._dtype, device=self._device)

    def _bytes(self, rows: int) -> int:
        """Returns the bytes of so many rows in all layers, keys and values."""
        return 2 * self.layers * rows * self._head_dim * self._dtype.itemsize

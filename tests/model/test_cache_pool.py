"""Claims about the memory that captured forwards point to: rows that are borrowed and come back."""

from __future__ import annotations

import weakref

import pytest
import torch

from saccade.model import cache_pool, memory
from saccade.model.cache import Cache, HeadShape
from saccade.model.cache_pool import CachePool

LAYERS, HEADS, WIDTH = 3, 2, 4


@pytest.fixture
def pool(monkeypatch) -> CachePool:
    monkeypatch.setattr(cache_pool, "INITIAL_TOKENS", 0)
    return CachePool(LAYERS, HEADS, WIDTH, dtype=torch.float32, device=torch.device("cpu"))


def _cache(pool: CachePool, capacity: int, layers: int = LAYERS) -> Cache:
    """A cache of the pool whose every row says whose it is."""
    cache = Cache([HeadShape(HEADS, WIDTH, WIDTH)] * layers, capacity, pool=pool)
    for number, tensor in enumerate((*cache.keys, *cache.values)):
        tensor[:] = 100 * capacity + number
    cache.advance(capacity)
    return cache


def _holds(cache: Cache, capacity: int) -> bool:
    return all(
        bool((tensor[:, :capacity] == 100 * capacity + number).all())
        for number, tensor in enumerate((*cache.keys, *cache.values))
    )


def test_what_is_dropped_is_borrowed_again(pool):
    """Claim: rows of a dropped cache are the next one's, at the same addresses, and neighbours that
    were dropped in any order are one run again. Fails if rows are lost, or lent twice."""
    caches = [_cache(pool, size) for size in (5, 6, 7)]
    rows, places = pool.rows, [cache.keys[0].data_ptr() for cache in caches]
    assert all(_holds(cache, size) for cache, size in zip(caches, (5, 6, 7), strict=True))
    for _ in range(3):
        first = caches.pop(0)
        assert first.lease is not None
        del first
        caches.insert(0, _cache(pool, 5))
        assert caches[0].keys[0].data_ptr() == places[0] and pool.rows == rows
    while caches:
        caches.pop(len(caches) // 2)
    whole = _cache(pool, rows // HEADS)
    assert pool.rows == rows and pool.free_bytes == 0 and whole.keys[0].data_ptr() == places[0]


def test_a_pool_that_moves_takes_its_caches_along(pool):
    """Claim: when the buffers grow, every cache finds its rows in them, also one of fewer layers,
    and whoever watches is told. Fails if a cache goes on in memory that is the pool's no more."""
    row_counts: list[int] = []

    class Watcher:
        def drop_captured(self) -> None:
            row_counts.append(pool.rows)

    watcher = Watcher()
    pool.watch(watcher)
    caches = [_cache(pool, 5), _cache(pool, 6, layers=2)]
    before = len(row_counts)
    caches.append(_cache(pool, 300))
    assert len(row_counts) == before + 1
    for cache, size in zip(caches, (5, 6, 300), strict=True):
        assert _holds(cache, size)
        assert cache.lease is not None
        start = cache.lease.start * WIDTH * 4
        assert cache.keys[1].data_ptr() == pool.keys[1].data_ptr() + start
    caches[0].reserve(40)
    assert _holds(caches[0], 5) and caches[0].capacity >= 40 and caches[0].lease is not None


def test_without_memory_a_cache_has_its_own(pool, monkeypatch):
    """Claim: where there is no memory for the pool to grow a cache gets memory of its own, which
    the pool's later moves leave alone; with memory again it may come back."""
    first = _cache(pool, 5)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 0)
    other = _cache(pool, 50)
    first.reserve(60)
    assert other.lease is None and first.lease is None and _holds(first, 5) and _holds(other, 50)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**40)
    _cache(pool, 500)
    assert _holds(first, 5) and _holds(other, 50)
    other.reserve(70)
    assert other.lease is not None and _holds(other, 50)


def test_growing_frees_each_buffer_before_the_next_one_grows(pool, monkeypatch):
    """Claim: a pool that grows holds at most one buffer twice, whatever caches borrow from it.

    Fails if their views hold all old buffers until the last one has moved.
    """
    cache = _cache(pool, 5)
    old_buffers = [weakref.ref(buffer) for buffer in (*pool.keys, *pool.values)]
    new_buffer, alive_counts = pool._empty, []

    def count_old_buffers(rows: int) -> torch.Tensor:
        alive_counts.append(sum(buffer() is not None for buffer in old_buffers))
        return new_buffer(rows)

    monkeypatch.setattr(pool, "_empty", count_old_buffers)
    _cache(pool, 50)
    assert alive_counts == [2 * LAYERS - moved for moved in range(2 * LAYERS)]
    assert _holds(cache, 5)


@pytest.mark.parametrize("failing", range(2 * LAYERS))
def test_memory_that_runs_out_while_the_pool_grows(pool, monkeypatch, failing):
    """Claim: where memory ends while buffers move, the pool grows by as little as will do, without
    allocating anything to go back; where that fails too, the cache gets memory of its own. In both
    cases every cache holds what it held, and later ones borrow as ever."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**40)
    first = _cache(pool, 60)
    new_buffer, allocated = pool._empty, []

    def run_out(rows: int) -> torch.Tensor:
        allocated.append(rows)
        if len(allocated) - 1 in failures:
            raise MemoryError("out of memory")
        return new_buffer(rows)

    monkeypatch.setattr(pool, "_empty", run_out)
    rows, failures = pool.rows, {failing}
    second = _cache(pool, 7)
    assert second.lease is not None and pool.rows == rows + HEADS * 7
    assert allocated[failing + 1] == rows + HEADS * 7
    allocated.clear()
    rows, failures = pool.rows, {failing, 2 * failing + 1}
    third = _cache(pool, 8)
    assert third.lease is None and pool.rows == rows
    assert len({buffer.shape for buffer in (*pool.keys, *pool.values)}) == 1
    failures = set()
    fourth = _cache(pool, 9)
    assert fourth.lease is not None
    for cache, size in zip((first, second, third, fourth), (60, 7, 8, 9), strict=True):
        assert _holds(cache, size)


def test_an_unused_pool_can_be_freed(pool):
    """Claim: a pool that nobody borrows from gives its memory back. Fails if a used one does."""
    cache = _cache(pool, 5)
    pool.release()
    assert pool.rows and _holds(cache, 5)
    del cache
    pool.release()
    assert pool.rows == 0 and pool.free_bytes == 0
    assert _holds(_cache(pool, 6), 6)

"""Claims about the cache, against a plain Python list of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_integrity, poison

from saccade.model.cache import Cache, HeadShape

LAYERS, HEADS, WIDTH = 2, 3, 4

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["advance", "keep", "truncate"]),
        st.integers(0, 6),
        st.lists(st.booleans(), min_size=6, max_size=6),
    ),
    max_size=12,
)


def _rows(layer: int, stamp: int, count: int) -> torch.Tensor:
    """Rows that say who they are: their number, their head and their layer."""
    numbers = torch.arange(stamp, stamp + count, dtype=torch.float32)
    rows = numbers[None, :, None].expand(HEADS, count, WIDTH)
    return rows + 1000 * torch.arange(HEADS)[:, None, None] + 10_000 * layer


def _write(cache: Cache, at: int, stamp: int, count: int) -> None:
    for layer in range(LAYERS):
        rows = _rows(layer, stamp, count)
        cache.write(layer, at, rows, -rows)


def _contents(cache: Cache) -> list[float]:
    """The numbers of the committed rows, once every layer and head agrees on them."""
    numbers = cache.read(0, cache.length)[0][0, :, 0]
    for layer in range(LAYERS):
        keys, values = cache.read(layer, cache.length)
        own = 1000 * torch.arange(HEADS)[:, None, None] + 10_000 * layer
        assert torch.equal(keys - own, numbers[None, :, None].expand_as(keys))
        assert torch.equal(values, -keys)
    return numbers.tolist()


@settings(max_examples=80)
@given(STEPS)
def test_any_history_equals_a_list(steps):
    """Claim: writing, committing a path, forgetting and growing do to rows what they do to a list.

    Rows carry their own number in every layer and head, so a row moved wrongly or lost shows.
    """
    cache, model, stamp = Cache([HeadShape(HEADS, WIDTH, WIDTH)] * LAYERS, 2), [], 1
    for verb, count, mask in steps:
        if verb == "truncate":
            length = min(count, cache.length)
            cache.truncate(length)
            del model[length:]
        else:
            cache.reserve(cache.length + count)
            _write(cache, cache.length, stamp, count)
            if verb == "advance":
                cache.advance(count)
                model += range(stamp, stamp + count)
            else:
                path = [i for i in range(count) if mask[i]]
                cache.commit_path(path)
                model += [stamp + i for i in path]
            stamp += count
        assert cache.length == len(model)
        assert _contents(cache) == model
        check_integrity(cache)
        poison(cache)


def _filled(count: int, capacity: int = 8) -> Cache:
    cache = Cache([HeadShape(HEADS, WIDTH, WIDTH)] * LAYERS, capacity)
    _write(cache, 0, 0, count)
    cache.advance(count)
    return cache


def test_select_copies_rows_and_leaves_room():
    """Claim: select is a new cache with these rows. Fails if the two share memory or rows slip."""
    cache = _filled(6)
    chosen = cache.select(torch.tensor([1, 2, 5]), room=4)
    assert _contents(chosen) == [1, 2, 5] and chosen.capacity == 7
    chosen.keys[0].zero_()
    assert _contents(cache) == [0, 1, 2, 3, 4, 5]


def test_select_by_head_gives_each_head_its_own_rows():
    """Claim: rows [layer, head, kept] pick per layer and head; layers= takes the first of them.

    Fails if heads or layers share a selection, or if a head reads another head's memory.
    """
    rows = torch.tensor([[[0, 1], [2, 3], [4, 5]], [[5, 0], [1, 1], [3, 2]]])
    cache = _filled(6)
    chosen = cache.select(rows, room=1)
    for layer in range(LAYERS):
        keys, values = chosen.read(layer, 2)
        for head in range(HEADS):
            expected = rows[layer, head] + 1000 * head + 10_000 * layer
            assert keys[head, :, 0].tolist() == expected.tolist()
        assert torch.equal(values, -keys)
    first = cache.select(torch.tensor([3]), room=0, layers=1)
    assert len(first.keys) == 1 and first.read(0, 1)[0][2, 0, 0] == 2003


def test_extend_appends_another_caches_rows():
    """Claim: rows start:stop of the other, behind what there was, of the layers held here."""
    cache = _filled(3).select(torch.tensor([2]), room=0)
    cache.extend(_filled(6), 1, 5)
    assert _contents(cache) == [2, 1, 2, 3, 4]
    short = _filled(3).select(torch.tensor([0]), room=0, layers=1)
    short.extend(_filled(6), 5, 6)
    assert short.read(0, 2)[0][1, :, 0].tolist() == [1000, 1005]
    check_integrity(short)


def test_reserve_grows_by_half_and_keeps_what_there_was():
    """Claim: amortised growth, contents unmoved. Fails if growth loses or shifts a row."""
    cache = _filled(6)
    before = cache.bytes
    cache.reserve(8)
    assert cache.capacity == 8
    cache.reserve(9)
    assert cache.capacity == 12 and cache.bytes == before * 12 // 8
    cache.reserve(40)
    assert cache.capacity == 40
    assert _contents(cache) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("length", [-1, 7])
def test_truncate_refuses_what_it_does_not_hold(length):
    """Claim: a truncation to a negative or longer length is an error, not a silent no-op."""
    with pytest.raises(ValueError, match="cannot truncate 6"):
        _filled(6).truncate(length)


def test_integrity_fails_on_a_poisoned_committed_row():
    """Control: NaN in a committed row, a length past the end and ragged layers must be seen."""
    cache = _filled(4)
    check_integrity(cache)
    cache.values[1][0, 3, 0] = float("nan")
    with pytest.raises(AssertionError, match="values of layer 1"):
        check_integrity(cache)
    long = _filled(4)
    long.length = 9
    with pytest.raises(AssertionError, match="9 tokens in 8 rows"):
        check_integrity(long)
    ragged = _filled(4)
    ragged.keys[1] = ragged.keys[1][:, :5]
    with pytest.raises(AssertionError, match="another shape"):
        check_integrity(ragged)


def test_poison_spares_what_is_committed():
    """Claim: poison fills exactly the rows at length and beyond. Fails one row either way."""
    cache = _filled(4)
    poison(cache)
    check_integrity(cache)
    for tensor in (*cache.keys, *cache.values):
        assert bool(torch.isnan(tensor[:, 4:]).all())

"""A cache held to what it promises: rows that hold nothing are NaN here, and others never are."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from saccade.model.cache import Cache

around: Callable[[], AbstractContextManager[None]] = nullcontext
"""What every check runs inside. Tests that count what happens on a device set it."""


def poison(cache: Cache, spare: int = 0) -> None:
    """Fills every row past the committed and ``spare`` more with NaN, to show reads."""
    for tensors in (cache.keys, cache.values):
        for layer, start in zip(tensors, cache.starts, strict=True):
            layer[:, cache.length + spare - start :] = float("nan")


def check_integrity(cache: Cache) -> None:
    """Raises AssertionError unless all layers agree and every committed row is finite."""
    if cache.states is not None:
        for state in cache.states.states:
            tensors = [each for each in (state.window, state.memory) if each is not None]
            assert all(each.isfinite().all() for each in tensors), "a state holds NaN or infinity"
    if not cache.keys:  # No layer has keys, as among the first layers of a hybrid.
        return
    for keys, values, shape in zip(cache.keys, cache.values, cache.shapes, strict=True):
        expected_keys = shape.kv_heads, cache.capacity, shape.key_dim
        expected_values = shape.kv_heads, cache.capacity, shape.value_dim
        if cache.evicts_keys:  # Each layer has as many rows as its window needs.
            assert keys.shape[:2] == values.shape[:2], "other rows of keys than of values"
            continue
        assert (keys.shape, values.shape) == (expected_keys, expected_values), "another shape"
    for keys, start in zip(cache.keys, cache.starts, strict=True):
        rows = cache.length - start
        assert 0 <= rows <= keys.shape[1], f"{rows} tokens in {keys.shape[1]} rows"
    starts = [*cache.starts, *cache.starts]
    tensors = (*cache.keys, *cache.values)
    committed = [
        tensor[:, : cache.length - start] for tensor, start in zip(tensors, starts, strict=True)
    ]
    # a sum is finite where all it adds is, and a tenth of the work of asking each
    sums = torch.stack([rows.sum(dtype=torch.float32) for rows in committed])
    broken = [place for place, finite in enumerate(sums.isfinite().tolist()) if not finite]
    where = [divmod(place, len(cache.keys)) for place in broken]
    broken_parts = [f"{('keys', 'values')[kind]} of layer {layer}" for kind, layer in where]
    assert not broken_parts, f"{', '.join(broken_parts)} hold NaN or infinity"

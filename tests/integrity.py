"""A cache held to what it promises: rows that hold nothing are NaN here, and others never are."""

import torch

from saccade.model.cache import Cache


def poison(cache: Cache, spare: int = 0) -> None:
    """Fills every row past the committed and ``spare`` more with NaN, to show reads."""
    for tensors in (cache.keys, cache.values):
        for layer in tensors:
            layer[:, cache.length + spare :] = float("nan")


def check_integrity(cache: Cache) -> None:
    """Raises AssertionError unless all layers agree and every committed row is finite."""
    shapes = {tuple(t.shape) for t in (*cache.keys, *cache.values)}
    assert len(shapes) == 1, f"layers differ in shape: {shapes}"
    assert 0 <= cache.length <= cache.capacity, f"{cache.length} tokens in {cache.capacity} rows"
    for name, tensors in (("keys", cache.keys), ("values", cache.values)):
        for layer, tensor in enumerate(tensors):
            finite = torch.isfinite(tensor[:, : cache.length]).all()
            assert bool(finite), f"{name} of layer {layer} hold NaN or infinity"

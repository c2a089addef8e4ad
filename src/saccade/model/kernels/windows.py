"""Attention of vision and audio towers over all their windows in one call, on GPUs.

The towers of Qwen, GLM and VideoLLaMA look at windows or frames that do not see each other. By its
own SDPA path, transformers calls attention once a window: 1.75 calls a visual token in Qwen2.5-VL.
Flash attention of sequences of any lengths takes all of a layer's in one. transformers passes the
windows' borders (``cu_seq_lens_q``) to attention functions whose name has "flash" in it, in every
version that we work with; ours is such a one, over torch's own kernel.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache as remembered
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

log = logging.getLogger(__name__)

ATTENTION = "saccade_flash"  # "flash" is what transformers looks for
DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)  # of torch's kernel
CLOSE = 2e-2  # to attention window by window, for numbers of about 1
MULTIPLE = 8  # of a head's size, for torch's kernel

Packed = Float[Tensor, "token head head_dim"]


@dataclass(frozen=True)
class WindowedTower:
    """Modules whose attention is over windows; they share a config, which names the function."""

    config: Any
    like: Tensor  # a weight of theirs: its device and type are those of what they compute

    @property
    def is_served(self) -> bool:
        """Whether our attention is for this device and type."""
        return self.like.device.type in DEVICES and self.like.dtype in DTYPES


def towers_of(modules: Sequence[nn.Module]) -> list[WindowedTower]:
    """The towers among these modules: an attention over windows is told their borders."""
    found: dict[int, WindowedTower] = {}
    for module in modules:
        config = vars(module).get("config")
        weight = next(module.parameters(), None)
        if config is None or weight is None or id(config) in found:
            continue
        if "cu_seqlens" in inspect.signature(module.forward).parameters:
            found[id(config)] = WindowedTower(config, weight)
    return list(found.values())


@contextmanager
def attended_at_once(towers: Sequence[WindowedTower]) -> Iterator[None]:
    """While this lasts these towers attend by :func:`attend`, where it is for their device."""
    served = [tower.config for tower in towers if tower.is_served]
    before = [config._attn_implementation for config in served]
    for config in served:
        config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        for config, name in zip(served, before, strict=True):
            config._attn_implementation = name


def attend(
    module: nn.Module,
    query: Float[Tensor, "one head token head_dim"],
    key: Float[Tensor, "one kv_head token head_dim"],
    value: Float[Tensor, "one kv_head token head_dim"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: Int[Tensor, " windows+1"] | None = None,
    cu_seq_lens_k: Int[Tensor, " windows+1"] | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **named: Any,
) -> tuple[Float[Tensor, "one token head head_dim"], None]:
    """What a tower's layers call: (attention of every window over itself, None).

    ``cu_seq_lens_q`` are where windows begin, and the end of the last one.
    """
    if cu_seq_lens_q is None or dropout or attention_mask is not None or len(query) != 1:
        named |= {"scaling": scaling, "dropout": dropout, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    scale = q.shape[2] ** -0.5 if scaling is None else scaling
    borders = cu_seq_lens_q
    if q.dtype in DTYPES and is_right(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2]):
        longest = int((borders[1:] - borders[:-1]).max()) if max_length_q is None else max_length_q
        out = flash(q, k, v, borders.to(torch.int32), longest, scale, bool(is_causal))
    else:
        out = one_by_one(q, k, v, borders, scale, bool(is_causal))
    return out[None], None


AttentionInterface.register(ATTENTION, attend)


def flash(
    q: Packed,
    k: Packed,
    v: Packed,
    borders: Int[Tensor, " windows+1"],
    longest: int,
    scale: float,
    is_causal: bool,
) -> Packed:
    """Attention of every window in one kernel: torch's flash attention of any lengths."""
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, borders, borders, longest, longest, 0.0, is_causal, False, scale=scale
    )
    out: Tensor = found[0]
    return out


def one_by_one(
    q: Packed,
    k: Packed,
    v: Packed,
    borders: Int[Tensor, " windows+1"],
    scale: float,
    is_causal: bool,
) -> Packed:
    """Attention of one window after another: what :func:`flash` has to give."""
    sizes = (borders[1:] - borders[:-1]).tolist()
    parts = (each.transpose(0, 1).split(sizes, 1) for each in (q, k, v))
    windows = [
        scaled_dot_product_attention(
            *(each[None] for each in window), is_causal=is_causal, scale=scale, enable_gqa=True
        )[0]
        for window in zip(*parts, strict=True)
    ]
    return torch.cat(windows, 1).transpose(0, 1)


@remembered
def is_right(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> bool:
    """Whether torch's kernel gives what attention window by window gives on this device, for heads
    like these; tried once."""
    if head_dim % MULTIPLE:
        return False
    random = torch.Generator().manual_seed(0)
    borders = torch.tensor([0, 5, 6, 70, 110], dtype=torch.int32, device=device)
    q, k, v = (
        torch.randn(110, count, head_dim, generator=random).to(device, dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    scale = head_dim**-0.5
    try:
        found = flash(q, k, v, borders, 64, scale, False)
    except (RuntimeError, NotImplementedError) as error:
        log.warning("towers attend window by window on %s: %s", device, error)
        return False
    expected = one_by_one(q.float(), k.float(), v.float(), borders, scale, False)
    apart = float((found.float() - expected).abs().max())
    if not apart <= CLOSE:  # NaN is not close either
        log.warning(
            "towers attend window by window on %s: flash attention is %.2g apart", device, apart
        )
        return False
    return True

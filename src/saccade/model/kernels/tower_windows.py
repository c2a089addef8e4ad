"""Attention of vision and audio towers over all their windows in one call, on GPUs.

The towers of Qwen, GLM and VideoLLaMA look at windows or frames that do not see each other. With
SDPA, transformers calls attention once for each window in each layer. In the tower of Qwen2.5-VL a
window is 16 visual tokens, and 28 layers have windows. So there are 28 / 16 = 1.75 calls for each
visual token of a video. Flash attention over sequences of any lengths does all of a layer's windows
in one call. transformers passes the borders of the windows (``cu_seq_lens_q``) to attention
functions whose name contains "flash", in every version that we support. Ours is such a function,
over torch's own kernel.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

log = logging.getLogger(__name__)

ATTENTION = "saccade_flash"  # transformers looks for "flash" in the name.
DEVICE_TYPES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)  # Torch's flash kernel takes no others.
# The largest allowed difference from attention window by window in fp32, for values of about 1.
TOLERANCE = 2e-2
HEAD_DIM_MULTIPLE = 8  # Torch's flash kernel takes only such head sizes.

Packed = Float[Tensor, "token head head_dim"]


@dataclass(frozen=True)
class WindowedTower:
    """Modules that attend over windows and share a config, which names their attention function."""

    config: Any
    weight: Tensor
    """One of their weights. They compute on its device and in its type."""

    @property
    def is_supported(self) -> bool:
        """Whether our attention is for this device and type."""
        return self.weight.device.type in DEVICE_TYPES and self.weight.dtype in DTYPES


def windowed_towers(modules: Sequence[nn.Module]) -> list[WindowedTower]:
    """Returns the towers among these modules whose attention is passed the borders of windows."""
    towers: dict[int, WindowedTower] = {}
    for module in modules:
        config = vars(module).get("config")
        weight = next(module.parameters(), None)
        if config is None or weight is None or id(config) in towers:
            continue
        if "cu_seqlens" in inspect.signature(module.forward).parameters:
            towers[id(config)] = WindowedTower(config, weight)
    return list(towers.values())


@contextmanager
def attend_to_all_windows_at_once(towers: Sequence[WindowedTower]) -> Iterator[None]:
    """Makes these towers attend by :func:`attend` in this context. Towers that are not supported
    (``WindowedTower.is_supported``) stay as they are."""
    configs = [tower.config for tower in towers if tower.is_supported]
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
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
    """Returns (attention of every window over itself, None), as a tower's layers expect it.

    ``cu_seq_lens_q`` has the first token of each window, and the end of the last window. The keys'
    borders are the same, because every window attends to itself. A call without borders, or with
    a mask, dropout or a batch of several rows, is passed on to transformers' SDPA.
    """
    # Our attention takes neither a mask, nor dropout, nor a batch of more than one row. Without
    # borders there are no windows.
    if cu_seq_lens_q is None or dropout or attention_mask is not None or len(query) != 1:
        named |= {"scaling": scaling, "dropout": dropout, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    scale = q.shape[2] ** -0.5 if scaling is None else scaling
    borders = cu_seq_lens_q
    heads = q.shape[1]
    kv_heads = k.shape[1]
    head_dim = q.shape[2]
    if q.dtype in DTYPES and is_flash_correct(q.device, q.dtype, heads, kv_heads, head_dim):
        longest = int((borders[1:] - borders[:-1]).max()) if max_length_q is None else max_length_q
        out = attend_by_flash(q, k, v, borders.to(torch.int32), longest, scale, bool(is_causal))
    else:
        out = attend_window_by_window(q, k, v, borders, scale, bool(is_causal))
    return out[None], None


AttentionInterface.register(ATTENTION, attend)


def attend_by_flash(
    q: Packed,
    k: Packed,
    v: Packed,
    borders: Int[Tensor, " windows+1"],
    longest: int,
    scale: float,
    is_causal: bool,
) -> Packed:
    """Returns the attention of every window by one call of torch's flash kernel."""
    outputs = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        borders,  # of the queries
        borders,  # of the keys
        longest,
        longest,
        0.0,  # the dropout
        is_causal,
        False,  # whether to return a mask for debugging
        scale=scale,
    )
    out: Tensor = outputs[0]
    return out


def attend_window_by_window(
    q: Packed,
    k: Packed,
    v: Packed,
    borders: Int[Tensor, " windows+1"],
    scale: float,
    is_causal: bool,
) -> Packed:
    """Returns the attention of every window, by one call of torch's attention for each window."""
    sizes = (borders[1:] - borders[:-1]).tolist()
    parts = (each.transpose(0, 1).split(sizes, 1) for each in (q, k, v))
    windows = [
        scaled_dot_product_attention(
            *(each[None] for each in window), is_causal=is_causal, scale=scale, enable_gqa=True
        )[0]
        for window in zip(*parts, strict=True)
    ]
    return torch.cat(windows, 1).transpose(0, 1)


@cache
def is_flash_correct(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> bool:
    """Returns whether torch's flash kernel matches attention window by window for such heads.

    The kernel is tried once for each device, dtype, number of heads and head size.
    """
    if head_dim % HEAD_DIM_MULTIPLE:
        return False
    random = torch.Generator().manual_seed(0)
    # Windows of 5, 1, 64 and 40 tokens, 110 in all.
    borders = torch.tensor([0, 5, 6, 70, 110], dtype=torch.int32, device=device)
    q, k, v = (
        torch.randn(110, count, head_dim, generator=random).to(device, dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    scale = head_dim**-0.5
    try:
        out = attend_by_flash(q, k, v, borders, longest=64, scale=scale, is_causal=False)
    except (RuntimeError, NotImplementedError) as error:
        log.warning("towers attend window by window on %s: %s", device, error)
        return False
    expected = attend_window_by_window(
        q.float(), k.float(), v.float(), borders, scale, is_causal=False
    )
    difference = float((out.float() - expected).abs().max())
    if not difference <= TOLERANCE:  # This form also refuses NaN.
        log.warning(
            "towers attend window by window on %s: flash attention differs by %.2g",
            device,
            difference,
        )
        return False
    return True

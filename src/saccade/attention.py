"""The one attention function: causal, tree and recorded, over the caches of several requests.

A forward is a flat list of tokens cut into *segments*, one per request; no request is padded to
another, and none reads another's keys. Knows no model: layers call it with their q, k and v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.cache import Cache

# Above this many queries a grouped call beats folding the group into the query axis.
FOLD_LIMIT = 64
RECORD_CHUNK = 32


@dataclass(frozen=True)
class Record:
    """Which attention to write down: these rows of a segment over these columns of its cache."""

    rows: Int[Tensor, " text"]  # within the segment
    columns: Int[Tensor, " seen"]
    queries: int  # how many text rows there are in all, over every chunk of the prompt
    mass: Float[Tensor, "layer kv_head seen"]  # added to, fp32: the softmax over all keys
    relevance: Float[Tensor, "layer kv_head seen"]  # likewise: the softmax over the columns alone


@dataclass(frozen=True)
class Segment:
    """The tokens of one request in a forward: rows ``start:stop``, keys from ``at`` in its cache.

    Over the last keys a row sees what ``block`` says, and all keys before those; when ``block`` is
    None it sees everything up to itself.
    """

    cache: Cache
    start: int
    stop: int
    at: int
    block: Bool[Tensor, "new last"] | None = None
    record: Record | None = None


class Step:
    """Attention for one forward: writes the new keys, then attends segment by segment.

    Made anew for every forward, and passed to the layers explicitly.
    """

    def __init__(self, segments: list[Segment], groups: int, dtype: torch.dtype) -> None:
        self.segments = segments
        self.groups = groups
        self.calls = 0  # one a layer, where the model's layers ask for their attention here
        self._bias = [_bias(segment, groups, dtype) for segment in segments]
        for segment in segments:
            segment.cache.reserve(segment.at + segment.stop - segment.start)

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "head all head_dim"],
        k: Float[Tensor, "kv_head all head_dim"],
        v: Float[Tensor, "kv_head all head_dim"],
        scale: float,
    ) -> Float[Tensor, "all out"]:
        """Attention of one layer; heads are laid side by side in the result."""
        self.calls += 1
        parts = []
        for segment, bias in zip(self.segments, self._bias, strict=True):
            rows = slice(segment.start, segment.stop)
            segment.cache.write(layer, segment.at, k[:, rows], v[:, rows])
            keys, values = segment.cache.read(layer, segment.at + segment.stop - segment.start)
            if bias is not None and bias.device != keys.device:  # a model over several devices
                bias = bias.to(keys.device)
            parts.append(_attend(q[:, rows], keys, values, bias, scale))
            if segment.record is not None:
                _record(segment, layer, q[:, rows], keys, scale)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _folds(segment: Segment) -> bool:
    return segment.stop - segment.start <= FOLD_LIMIT


def _bias(segment: Segment, groups: int, dtype: torch.dtype) -> Tensor | None:
    """The additive mask of a segment as its kernel wants it; None where none is needed."""
    new = segment.stop - segment.start
    if segment.block is None and (new == 1 or (segment.at == 0 and not _folds(segment))):
        return None
    device = segment.cache.keys[0].device
    block = segment.block
    if block is None:
        block = torch.ones(new, new, dtype=torch.bool, device=device).tril_()
    bias = torch.zeros(new, segment.at + new, dtype=dtype, device=device)
    bias[:, segment.at + new - block.shape[1] :].masked_fill_(~block, float("-inf"))
    return bias.repeat(groups, 1) if _folds(segment) else bias


def _attend(
    q: Float[Tensor, "head new head_dim"],
    k: Float[Tensor, "kv_head seen head_dim"],
    v: Float[Tensor, "kv_head seen head_dim"],
    bias: Tensor | None,
    scale: float,
) -> Float[Tensor, "new out"]:
    heads, new, width = q.shape
    kv_heads = k.shape[0]
    if new > FOLD_LIMIT:
        out = scaled_dot_product_attention(
            q[None], k[None], v[None], bias, is_causal=bias is None, scale=scale, enable_gqa=True
        )[0]
        return out.transpose(0, 1).reshape(new, heads * width)
    # A group's heads share their keys: as further queries they need no copy of them.
    grouped = q.reshape(kv_heads, (heads // kv_heads) * new, width)
    out = scaled_dot_product_attention(grouped[None], k[None], v[None], bias, scale=scale)
    out = out.view(heads, new, width)
    return out.transpose(0, 1).reshape(new, heads * width)


def _record(segment: Segment, layer: int, q: Tensor, keys: Tensor, scale: float) -> None:
    """Adds the softmax mass of the chosen rows on the chosen columns, a few rows at a time."""
    record = segment.record
    assert record is not None
    kv_heads, seen, width = keys.shape
    groups = q.shape[0] // kv_heads
    column = torch.arange(seen, device=keys.device)
    columns = record.columns.to(keys.device)
    for rows in record.rows.to(keys.device).split(RECORD_CHUNK):
        chosen = q[:, rows].reshape(kv_heads, groups, len(rows), width).float()
        logits = torch.einsum("hgrd,hsd->hgrs", chosen, keys.float()) * scale
        future = column[None, :] > (segment.at + rows)[:, None]
        among = logits[..., columns].softmax(-1)  # every chosen row follows the columns
        weights = logits.masked_fill_(future, float("-inf")).softmax(-1)
        share = 1 / (groups * record.queries)
        mass, relevance = weights[..., columns].sum((1, 2)), among.sum((1, 2))
        record.mass[layer] += (mass * share).to(record.mass.device)
        record.relevance[layer] += (relevance * share).to(record.mass.device)

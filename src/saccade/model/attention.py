"""The one attention function: causal and tree, over the caches of several requests.

A forward is a flat list of tokens cut into *segments*, one per request; no request is padded to
another, and none reads another's keys. Knows no model: layers call it with their q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial as bound

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.model import kernels
from saccade.model.cache import Cache, Pages
from saccade.model.kernels import Ways, compiled
from saccade.model.kernels.attended import Note, Queries, RowQueries

Attend = Callable[..., Tensor]
"""What layers call: (layer, q, k, v, scale) -> heads side by side. A ``Step`` is one, which a
prompt's last layer also tells ``last=True``."""
NewKeys = Float[Tensor, "kv_head written head_dim"]
Keys = Float[Tensor, "kv_head seen head_dim"]
Mask = Bool[Tensor, "new seen"]
Mixed = Float[Tensor, "new out"]
"""Heads side by side."""
Way = tuple[Callable[..., Queries], Tensor | None]
"""How to attend, and the mask to do so with."""
Part = tuple[Queries, Float[Tensor, "head new"]]
"""Attention over some of the keys, and the log of the sum its softmax divided by."""

# Above this many queries a grouped call beats folding the group into the query axis.
FOLD_LIMIT = 64
TIMED = 2**28  # products of a prompt's call that is timed, about: of as many heads as that allows
FAR = 2**24  # bytes a row is timed over, at most: keys and values of a model's layers lie no nearer
FUSED = Ways((1,), (("fused", "fused"),), (0,))
# Where no kernel gives the log-sum-exps: queries at once, and logits of theirs, at most.
PLAIN_ROWS, PLAIN_NUMBERS = 256, 2**25


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
    noted: Note | None = None
    asked: RowQueries | None = None
    pages: Pages | None = None  # read into the cache's first rows, for each row by its queries

    @property
    def mask(self) -> Bool[Tensor, "new last"]:
        """``block``, or what it stands for where it is None."""
        new = self.stop - self.start
        if self.block is None:
            return torch.ones(new, new, dtype=torch.bool).tril_()
        return self.block


class Step:
    """Attention for one forward: writes the new keys, then attends segment by segment.

    Made anew for every forward, and passed to the layers explicitly.
    """

    def __init__(
        self, segments: list[Segment], groups: int, dtype: torch.dtype, ways: Ways = FUSED
    ) -> None:
        self.segments = segments
        self.calls = 0  # one a layer, where the model's layers ask for their attention here
        self._choose: Callable[[Segment, int], Way] = bound(_way, groups, dtype, ways)
        self._ways = [self._choose(each, each.stop - each.start) for each in segments]
        for segment in segments:
            segment.cache.reserve(segment.at + segment.stop - segment.start)

    def __call__(
        self, layer: int, q: Queries, k: NewKeys, v: NewKeys, scale: float, *, last: bool = False
    ) -> Float[Tensor, "asked out"]:
        """Attention of one layer, or of a single segment's ``last`` row there; heads are laid side
        by side in the result."""
        self.calls += 1
        parts = []
        for segment, (way, mask) in zip(self.segments, self._ways, strict=True):
            own = q, k, v
            if len(self.segments) > 1:
                its = slice(segment.start, segment.stop)
                own = q[:, its], k[:, its], v[:, its]
            segment.cache.write(layer, segment.at, own[1], own[2])
            keys, values = segment.cache.read(layer, segment.at + segment.stop - segment.start)
            asking, telling = own[0], None
            if segment.asked is not None:
                segment.asked.take(layer, asking, scale)
            if last:
                asking = asking[:, -1 if segment.noted is None else -segment.noted.last :]
            if segment.noted is not None:
                telling = segment.noted.telling(way, layer, asking, scale)
            if telling is not None:
                way, mask = telling, None
            elif last:
                asking = asking[:, -1:]
                way, mask = self._choose(segment, 1)
            if mask is not None and mask.device != keys.device:  # a model over several devices
                mask = mask.to(keys.device)
            if segment.pages is not None:
                way = bound(segment.pages.attend, segment.cache, layer, way)
            out = way(asking, keys, values, mask, scale)
            if last:
                out = out[:, -1:]
            parts.append(out.transpose(0, 1).reshape(out.shape[1], -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def partial(
    q: Queries, k: Keys, v: Keys, scale: float, *, causal: bool = False, visible: Mask | None = None
) -> Part:
    """Attention over some of the keys, and the log of the sum its softmax divided by.

    ``causal`` is for as many keys as queries. Memory is O(new + seen): flash kernels where torch
    has one that gives the sums, else a few queries at a time.
    """
    if q.device.type == "cpu":
        bias = None
        if visible is not None:
            bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], k[None], v[None], is_causal=causal, attn_mask=bias, scale=scale
        )
        return found[0][0], found[1][0].to(torch.float32)
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cuda" and half and visible is None and q.shape[-1] % 8 == 0:
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            q[None], k[None], v[None], is_causal=causal, scale=scale
        )
        return found[0][0], found[1][0]
    return plain_partial(q, k, v, scale, causal=causal, visible=visible)


def plain_partial(
    q: Queries, k: Keys, v: Keys, scale: float, *, causal: bool = False, visible: Mask | None = None
) -> Part:
    """:func:`partial` in torch's own words, for devices and types without such a kernel.

    Keys that are not visible may be NaN.
    """
    heads, new, width = q.shape
    grouped = q.reshape(k.shape[0], -1, new, width)
    seen = torch.arange(k.shape[1], device=q.device)
    outs, sums = [], []
    count = max(1, min(PLAIN_ROWS, PLAIN_NUMBERS // (heads * max(1, len(seen)))))
    for start in range(0, new, count):
        stop = min(start + count, new)
        chosen = grouped[:, :, start:stop].float()
        logits = torch.einsum("hgrd,hsd->hgrs", chosen, k.float()) * scale
        if visible is not None:
            logits.masked_fill_(~visible[start:stop], float("-inf"))
        if causal:
            row = torch.arange(start, stop, device=q.device)[:, None]
            logits.masked_fill_(seen > row, float("-inf"))
        sums.append(logits.logsumexp(-1).reshape(heads, stop - start))
        weights = logits.softmax(-1).to(v.dtype)
        outs.append(torch.einsum("hgrs,hsd->hgrd", weights, v).reshape(heads, -1, width))
    return torch.cat(outs, 1), torch.cat(sums, 1)


def merge(first: Part, second: Part) -> Queries:
    """Attention over the keys of both: exp(lse) is each one's share of the softmax's sum."""
    share = torch.sigmoid(second[1] - first[1])[..., None]
    return torch.lerp(first[0], second[0], share.to(first[0].dtype))


def _way(groups: int, dtype: torch.dtype, ways: Ways, segment: Segment, new: int) -> Way:
    """How ``new`` rows attend, which are all of a segment or its last one, and with which mask."""
    name = ways.at(new, segment.at + segment.stop - segment.start)
    device = segment.cache.keys[0].device
    masked = segment.block is not None or new > 1
    if new <= FOLD_LIMIT and masked and segment.pages is None and device.type != "cpu":
        return _attend_folded, segment.mask.to(device).repeat(groups, 1)
    if new <= FOLD_LIMIT or segment.pages is not None:
        return FEW_ROWS[name], _bias(segment, new, groups, dtype, name)
    if segment.block is None:
        return MANY_ROWS[name], None
    return _attend_long, segment.block


def _bias(segment: Segment, new: int, groups: int, dtype: torch.dtype, name: str) -> Tensor | None:
    """The additive mask of few rows, for torch's fused kernel over all keys, else over the last
    ones alone; None where none is needed."""
    if segment.block is None and new == 1:
        return None
    device, mask = segment.cache.keys[0].device, segment.mask
    last = mask.shape[1]
    seen = segment.at + new if name == "fused" else last
    bias = torch.zeros(new, seen, dtype=dtype, device=device)
    bias[:, seen - last :].masked_fill_(~mask.to(device), float("-inf"))
    return bias if name == "compiled" else bias.repeat(groups, 1)


def _attend(
    q: Queries, k: Keys, v: Keys, bias: Float[Tensor, "rows seen"] | None, scale: float
) -> Queries:
    """A few rows in one call: a group's heads share their keys, so as further queries they need
    no copy of them."""
    grouped = q.reshape(k.shape[0], -1, q.shape[2])
    out = scaled_dot_product_attention(grouped[None], k[None], v[None], bias, scale=scale)
    return out.reshape(q.shape)  # a GPU's flash kernel lays rows before heads


def _spell_out(
    q: Queries, k: Keys, v: Keys, bias: Float[Tensor, "rows last"] | None, scale: float
) -> Queries:
    """:func:`_attend` as plain products, with a mask of the last keys only: the fused kernel adds
    one to every logit. Which is quicker depends on the machine (:func:`ways_of`)."""
    grouped = (q * scale).reshape(k.shape[0], -1, q.shape[2])
    logits = torch.bmm(grouped, k.transpose(1, 2))
    if bias is not None:
        logits[..., -bias.shape[1] :] += bias
    return torch.bmm(torch.softmax(logits, -1, out=logits), v).view(q.shape)


def _attend_long(
    q: Queries, k: Keys, v: Keys, block: Bool[Tensor, "new last"] | None, scale: float
) -> Queries:
    """Many rows: the keys all of them see, then the last ones, with no mask over both together."""
    last = q.shape[1] if block is None else block.shape[1]
    if block is None and last == k.shape[1]:
        return scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
        )[0]
    mine = slice(k.shape[1] - last, None)
    own = partial(q, k[:, mine], v[:, mine], scale, causal=block is None, visible=block)
    if last == k.shape[1]:
        return own[0]
    return merge(partial(q, k[:, :-last], v[:, :-last], scale), own)


def _attend_folded(
    q: Queries, k: Keys, v: Keys, block: Bool[Tensor, "rows last"], scale: float
) -> Queries:
    """A few rows on a GPU: :func:`_attend_long`, with a group's heads as further queries. A mask
    over all keys would be read by each layer, and keeps a GPU from splitting the keys."""
    grouped = q.reshape(k.shape[0], -1, q.shape[2])
    # A GPU's flash kernel lays rows before heads, so this may copy.
    return _attend_long(grouped, k, v, block, scale).reshape(q.shape)


FEW_ROWS: dict[str, Callable[..., Queries]] = {
    "fused": _attend,
    "spelt": _spell_out,
    "compiled": compiled.attend,
}
MANY_ROWS: dict[str, Callable[..., Queries]] = {
    "fused": _attend_long,
    "compiled": compiled.attend,
}


def ways_of(
    heads: int,
    kv_heads: int,
    width: int,
    devices: Sequence[torch.device],
    dtype: torch.dtype,
) -> Ways:
    """How a model of these heads attends the quickest: fused unless all its layers are in fp32 on a
    CPU."""
    plain = dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if not plain or any(device.type != "cpu" for device in devices):
        return FUSED
    groups, names = heads // kv_heads, ["fused", "spelt"]
    if compiled.serves(width):
        names.append("compiled")

    def few(rows: int, keys: int) -> dict[str, Callable[[], object]]:
        some = min(kv_heads, torch.get_num_threads())
        q = torch.randn(some * groups, rows, width)
        most = FAR // rows // (2 * some * keys * width * dtype.itemsize)
        read = torch.ones(max(1, min(most, len(devices))), 2, some, keys, width)
        whole = None if rows == 1 else torch.zeros(rows * groups, keys)
        last = None if whole is None else whole[:, : min(rows, keys)]
        masks = {name: whole if name == "fused" else last for name in names}

        def all_layers(name: str) -> list[Queries]:
            return [FEW_ROWS[name](q, k, v, masks[name], 1.0) for k, v in read]

        return {name: bound(all_layers, name) for name in names}

    def many(rows: int, keys: int) -> dict[str, Callable[[], object]]:
        some = max(1, min(heads, TIMED // (2 * rows * keys * width)))
        group = min(groups, some)
        q = torch.randn(some // group * group, rows, width)
        k, v = torch.randn(2, some // group, keys, width)
        return {
            name: bound(way, q, k, v, None, 1.0) for name, way in MANY_ROWS.items() if name in names
        }

    facts = heads, kv_heads, width, names
    first = kernels.ways((FAR, len(devices), *facts), few)
    last = kernels.ways(("many", *facts), many, kernels.MANY, kernels.LONG)
    return Ways(
        (*first.rows[:-1], FOLD_LIMIT, *last.rows),
        (*first.names, *last.names),
        (*first.turns, *last.turns),
    )
